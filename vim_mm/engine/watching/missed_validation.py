"""A training that was killed in a validation makes it when it is resumed."""

from pathlib import Path

from mmengine.dist import broadcast_object_list, is_main_process
from mmengine.hooks import Hook
from mmengine.runner import BaseLoop, EpochBasedTrainLoop, IterBasedTrainLoop, Runner

from vim_mm.whole_file import whole_file

_DIGITS = 20  # no training makes as many steps


class MissedValidationHook(Hook):
    """Makes the validation in which a training was killed, before it goes on.

    A checkpoint is saved before its step is validated, and MMEngine goes on behind both: the log
    would lack this metric, and of a run that has all its iterations the last one. The file
    ``last_validation`` in the working directory holds the step of the last validation that ended.
    Where there is no such file, as in a new directory, nothing is made up for.
    """

    # Behind the hooks that log a validation, and those that prepare the model for training.
    priority = 'LOWEST'

    def __init__(self) -> None:
        self.training = False

    def before_train(self, runner: Runner) -> None:
        """Validate the checkpoint's step if that is due and was not done."""
        self.training = True
        step = _step(runner.train_loop)
        # What lies behind the checkpoint is trained again.
        done = [min(self._read(runner, step), step)]
        broadcast_object_list(done)  # the other processes may see no files of the first
        self._write(runner, done[0])
        if step > done[0] and runner.val_loop is not None and _is_validated(runner.train_loop):
            runner.logger.info(f'Step {step} has no finished validation: it is made now.')
            runner.val_loop.run()

    def after_val_epoch(self, runner: Runner, metrics: dict | None = None) -> None:
        """Note that the validation of this step is done."""
        if self.training:
            self._write(runner, _step(runner.train_loop))

    def after_train(self, runner: Runner) -> None:
        """A validation by itself is none of the training."""
        self.training = False

    @staticmethod
    def _file(runner: Runner) -> Path:
        return Path(runner.work_dir) / 'last_validation'

    def _read(self, runner: Runner, step: int) -> int:
        """What the file notes, ``step`` where that is not known."""
        file = self._file(runner)
        if not is_main_process() or not file.exists():
            return step
        text = file.read_bytes()[: _DIGITS + 1].strip()
        if text.isdigit() and len(text) < _DIGITS:
            return int(text)
        runner.logger.warning(
            f'{file} holds no number, so whether step {step} was validated is not known.'
        )
        return step

    def _write(self, runner: Runner, step: int) -> None:
        if is_main_process():
            with whole_file(self._file(runner), follow_links=False) as part:
                part.write_text(f'{step}\n')


def _step(loop: BaseLoop) -> int:
    """What a loop has done: epochs, or iterations if it does not know epochs."""
    return loop.epoch if isinstance(loop, EpochBasedTrainLoop) else loop.iter


def _is_validated(loop: BaseLoop) -> bool:
    """Whether MMEngine's loops validate the step at which this one is."""
    if not isinstance(loop, EpochBasedTrainLoop | IterBasedTrainLoop):
        return False
    loop._decide_current_val_interval()
    step = _step(loop)
    last = loop.max_epochs if isinstance(loop, EpochBasedTrainLoop) else loop.max_iters
    return step >= loop.val_begin and (step % loop.val_interval == 0 or step == last)
