"""Learning rates of a training that is resumed under another schedule, such as a longer one."""

import warnings
from collections.abc import Sequence

from mmengine.optim import _ParamScheduler

# What a scheduler's state holds besides its arguments.
_PROGRESS = {'last_step', '_global_step', '_last_value', 'base_values', 'verbose'}


def same_schedule(schedulers: Sequence[_ParamScheduler], states: Sequence[dict]) -> bool:
    """Whether states of a checkpoint are of schedulers with the same arguments.

    Args:
        schedulers (Sequence[_ParamScheduler]): As the config builds them.
        states (Sequence[dict]): As a checkpoint holds them.
    """

    def arguments(state: dict) -> dict:
        # A Counter of milestones equals a dict, a method (OneCycleLR's annealing) only itself.
        return {k: v for k, v in state.items() if k not in _PROGRESS and not callable(v)}

    return len(schedulers) == len(states) and all(
        arguments(scheduler.state_dict()) == arguments(state)
        for scheduler, state in zip(schedulers, states)
    )


def fast_forward(
    schedulers: Sequence[_ParamScheduler], iters: int, epochs: int, epoch_length: int
) -> None:
    """Step freshly built schedulers through the past of a training.

    The values of the optimizer are then, to the bit, those of a run that had these schedulers from
    its start: MMEngine's schedulers compute each value from the one before.

    Args:
        schedulers (Sequence[_ParamScheduler]): Of one optimizer, none of which has been stepped;
            the optimizer's values are those that they start from.
        iters (int): Iterations that are over.
        epochs (int): Epochs that are over.
        epoch_length (int): Iterations of an epoch.

    Raises:
        ValueError: A scheduler goes by validation results, which are not known any more.
    """
    for scheduler in schedulers:
        if getattr(scheduler, 'need_val_args', False):
            raise ValueError(
                f'The schedule differs from that of the checkpoint, and {type(scheduler).__name__} '
                'cannot be resumed under another: it goes by the results of past validations.'
            )
    every_iter = [s for s in schedulers if not s.by_epoch]
    every_epoch = [s for s in schedulers if s.by_epoch]
    with warnings.catch_warnings():
        # The optimizer took these steps before it was interrupted.
        warnings.filterwarnings('ignore', message='Detected call of `scheduler.step')
        for done in range(1, iters + 1):
            for scheduler in every_iter:
                scheduler.step()
            if done % epoch_length == 0 and done // epoch_length <= epochs:
                for scheduler in every_epoch:
                    scheduler.step()


def reset_values(schedulers: Sequence[_ParamScheduler]) -> None:
    """Give an optimizer the values from which schedulers start, as before they were built."""
    for scheduler in schedulers:
        name = scheduler.param_name
        for group in scheduler.optimizer.param_groups:
            group[name] = group.get(f'initial_{name}', group[name])
