"""MMEngine's CheckpointHook, which removes a file when what replaces it is on the disk."""

import os
import re
from collections.abc import Mapping
from copy import copy
from pathlib import Path

from mmengine.dist import is_main_process
from mmengine.fileio import LocalBackend
from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from vim_mm.engine.checks.learning import check_found, check_metric
from vim_mm.engine.saving.written import (
    LIST,
    POINTER,
    Written,
    checkpoints_in,
    is_within,
    remove,
    write_pointer,
)
from vim_mm.errors import UserValueError
from vim_mm.whole_file import remove_parts

_LOGS = re.compile(r'\d{8}_\d{6}')  # folders of MMEngine's logs, by time


class _Keeping(LocalBackend):
    """MMEngine removes what it finds by this before the next file is written."""

    def isfile(self, filepath: str | Path) -> bool:
        return False

    isdir = isfile


@HOOKS.register_module()
class DurableCheckpointHook(CheckpointHook):
    """As MMEngine's CheckpointHook, but at every moment the last whole checkpoint is there.

    A save first adds the file to ``checkpoints.json``, then writes it, then lets
    ``last_checkpoint`` name it, and then removes what is outdated. Only files of that list are
    removed, which is what the run in this folder has written: paths in a checkpoint are no reason.
    A disk has to have room for a checkpoint more than are kept.

    With ``cfg.overwrite`` the first save also removes what another run has left in the folder.
    """

    folder: Path
    written: Written
    _asked: tuple[str | None] | None = None  # ``out_dir`` as it was given, once it was replaced
    _replaced: list[Path]

    @property
    def asked_folder(self) -> str | None:
        """``out_dir`` as it was given."""
        return self.out_dir if self._asked is None else self._asked[0]

    def before_train(self, runner: Runner) -> None:
        """As in CheckpointHook; what a checkpoint says of files counts for those of this run.

        Raises:
            ValueError: ``out_dir`` is not local, or ``save_best`` is known to be no metric.
        """
        self._asked = (self.asked_folder,)
        self.folder = checkpoint_folder(runner.work_dir, self.asked_folder)
        self._check_best(runner)
        self._find_written(runner)
        self.out_dir = self.asked_folder
        super().before_train(runner)
        self.out_dir = str(self.folder)
        self.file_backend = _Keeping()

    def _find_written(self, runner: Runner) -> None:
        """Read what this run has written, and leave of the resumed message hub what agrees."""
        work_dir = Path(runner.work_dir)
        before = Written.read(work_dir) if is_main_process() else Written(self.folder)
        loaded = runner._load_from if runner._resume else None
        resumes_own = loaded is not None and is_within(Path(loaded), work_dir, self.folder)
        self.written = Written(self.folder)
        if resumes_own:
            self.last_ckpt = str(loaded)
            if before.folder == self.folder:
                self.written = copy(before)
        info = runner.message_hub.runtime_info
        for key in [key for key in info if key.startswith('best_ckpt')]:
            name = Path(str(info[key])).name
            runner.message_hub.pop_info(key)
            if name in self.written.best and self.written.has(name):
                runner.message_hub.update_info(key, str(self.folder / name))
        runner.message_hub.pop_info('keep_ckpt_ids')
        self._replaced = []
        if not is_main_process():
            return
        remove_parts(work_dir, (POINTER, LIST, 'last_validation'))
        if before.folder == self.folder:  # another one belongs to who writes there
            remove_parts(before.folder, (*before.checkpoints, *before.best))
        if not resumes_own:
            self._find_others(runner)
        # Until it has a checkpoint, a run that replaces another one leaves the folder to that: a
        # job that is queued again would continue what it was to replace.
        own = {**description(runner.cfg), 'seed': runner.seed}
        self.written.run, self._own_run = (before.run if self._replaced else own), own

    def _find_others(self, runner: Runner) -> None:
        """What another run has left here, which stays unless it is to be overwritten."""
        work_dir = Path(runner.work_dir)
        others = checkpoints_in(work_dir, self.folder, template=self.filename_tmpl)
        if others and runner.cfg.get('overwrite'):
            before = Written.read(work_dir).run.get('config')
            logs = [p for p in work_dir.iterdir() if _LOGS.fullmatch(p.name) and p.is_dir()]
            self._replaced = [*others, *(p for p in logs if p.name != runner.timestamp)]
            # The list is a file that anybody may have written, and a run need not have a config.
            name = Path(before).name if isinstance(before, str) else ''
            if name.endswith('.py') and name != Path(runner.cfg.filename or '').name:
                self._replaced.append(work_dir / name)
        elif others:
            runner.logger.warning(
                f'{self.folder} holds {len(others)} checkpoints of another training, the last of '
                f'them {others[-1].name}. They stay, and `last_checkpoint` will name those of this '
                'one.'
            )

    def _check_best(self, runner: Runner) -> None:
        """Refuse a metric that no validation can have."""
        if not self.save_best:
            return
        if runner.val_loop is None:
            raise UserValueError(
                f'checkpoint.save_best={self.save_best} needs a validation: val_dataloader, '
                'val_cfg and val_evaluator'
            )
        for key in self.save_best:
            if key != 'auto':
                check_metric('checkpoint.save_best', key, runner.val_loop.evaluator)

    def _save_checkpoint_with_step(self, runner: Runner, step: int, meta: dict) -> None:
        name = self.filename_tmpl.format(step)
        self.last_ckpt = str(self.folder / name)
        runner.message_hub.update_info('last_ckpt', self.last_ckpt)
        work_dir = Path(runner.work_dir)
        if is_main_process():
            self.written.note(name, step)
            self._note_best()
            self.written.write(work_dir)
            if self.max_keep_ckpts > 0:
                steps = [*self.written.checkpoints.values()][-self.max_keep_ckpts :]
                runner.message_hub.update_info('keep_ckpt_ids', steps)
        runner.save_checkpoint(
            str(self.folder),
            name,
            file_client_args=self.file_client_args,
            save_optimizer=self.save_optimizer,
            save_param_scheduler=self.save_param_scheduler,
            meta=meta,
            by_epoch=self.by_epoch,
            backend_args=self.backend_args,
            **self.args,
        )
        if is_main_process():
            write_pointer(work_dir, self.folder / name)
            self._remove_outdated()
            ours = {self.folder / name for name in (*self.written.checkpoints, *self.written.best)}
            for path in self._replaced:
                if path not in ours:
                    remove(path)
            if self._replaced:
                self._replaced, self.written.run = [], self._own_run
                self.written.write(work_dir)

    def _save_best_checkpoint(self, runner: Runner, metrics: dict) -> None:
        for key in self.save_best or ():
            if key != 'auto':
                check_found('checkpoint.save_best', key, metrics)
        super()._save_best_checkpoint(runner, metrics)
        # Where the last checkpoint was saved again as well, this is done.
        if self.save_best and is_main_process() and self._note_best():
            self.written.write(Path(runner.work_dir))
            self._remove_outdated()

    def _best(self) -> dict[str, str]:
        """Names of the best checkpoints by metric, of those metrics that have one."""
        if not self.save_best:
            return {}
        if len(self.key_indicators) == 1:
            paths = {self.key_indicators[0]: self.best_ckpt_path}
        else:
            paths = self.best_ckpt_path_dict
        return {key: Path(path).name for key, path in paths.items() if path}

    def _note_best(self) -> bool:
        """Add the best checkpoints to the list; whether one is new there."""
        new = {name: key for key, name in self._best().items() if name not in self.written.best}
        self.written.best |= new
        return bool(new)

    def _remove_outdated(self) -> None:
        """Remove those that are beyond the number to keep, and the best ones before the best."""
        names, best = [*self.written.checkpoints], self._best()
        outdated = names[: -self.max_keep_ckpts] if self.max_keep_ckpts > 0 else []
        beaten = [n for n, key in self.written.best.items() if best.get(key, n) != n]
        self.written.remove({*outdated, *beaten} - {*best.values(), *names[-1:]})
        for name in beaten:
            del self.written.best[name]


def checkpoint_folder(work_dir: str | Path, out_dir: str | Path | None) -> Path:
    """Where MMEngine's CheckpointHook saves: in ``out_dir``, under the name of the work directory.

    Raises:
        ValueError: It is the address of another place than the disk.
    """
    work_dir = _absolute(work_dir)  # a link keeps its name, as in MMEngine
    if out_dir is None or str(out_dir) == str(work_dir):
        return work_dir
    if '://' in str(out_dir):
        raise UserValueError(f'checkpoint.out_dir must be a local folder, got {out_dir}')
    return _absolute(out_dir) / work_dir.name


def _absolute(path: str | Path) -> Path:
    return Path(os.path.normpath(Path(path).expanduser().absolute()))


def description(cfg: Mapping) -> dict:
    """What a list of written files says of a run: its config, discretizations and Slurm job."""
    return dict(
        config=Path(getattr(cfg, 'filename', None) or '').name,
        methods=sorted(_methods(cfg.get('model'))),
        job=os.environ.get('SLURM_JOB_ID'),
    )


def _methods(part: object) -> set[str]:
    if isinstance(part, Mapping):
        own = part.get('discretization_method')
        below = set().union(*map(_methods, part.values()))
        return below | {own} if isinstance(own, str) else below
    return set().union(*map(_methods, part)) if isinstance(part, list | tuple) else set()


def durable(hook: Hook | dict) -> Hook | dict:
    """MMEngine's CheckpointHook, an object or a config of one, as a :class:`DurableCheckpointHook`.

    Any other hook is what it was, a class that a user has derived among them.
    """
    if type(hook) is CheckpointHook:
        hook.__class__ = DurableCheckpointHook
    elif isinstance(hook, dict):
        kind = hook.get('type')
        if (HOOKS.get(kind) if isinstance(kind, str) else kind) is CheckpointHook:
            return {**hook, 'type': DurableCheckpointHook}
    return hook
