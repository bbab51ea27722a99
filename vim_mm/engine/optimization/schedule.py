"""Learning rates: DeiT's schedule, and those of a training that is resumed under another one."""

import math
import warnings
from collections.abc import Sequence

from mmengine.optim import _ParamScheduler
from mmengine.optim.scheduler.lr_scheduler import LRSchedulerMixin
from mmengine.registry import PARAM_SCHEDULERS

from vim_mm.errors import UserValueError

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
            raise UserValueError(
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


@PARAM_SCHEDULERS.register_module()
class DeiTCosineLR(LRSchedulerMixin, _ParamScheduler):
    """timm's cosine schedule as DeiT's training script, and so Vim's, steps it.

    The rate changes once an epoch, by the number of the epoch before: the first two epochs have
    the rate of epoch 0. In the warmup it grows linearly from ``warmup_lr``; then it is that of a
    half cosine over ``epochs`` epochs, of which the warmup is a part, down to ``eta_min``.

    Args:
        optimizer (Optimizer | OptimWrapper): Whose learning rates are set.
        iters_per_epoch (int): Iterations of an epoch.
        epochs (int): Length of the half cosine.
        warmup_epochs (int): The cosine sets in after these.
        warmup_lr (float): Rate of epoch 0, whatever that of the optimizer.
        eta_min (float): Rate at the end of the cosine.
        by_epoch (bool): Must be False, so that MMEngine steps it in every iteration.
        kwargs: ``begin``, ``end``, ``last_step`` and ``verbose``, as in MMEngine.

    Raises:
        ValueError: ``by_epoch`` is not False.
    """

    def __init__(
        self,
        optimizer,
        iters_per_epoch: int,
        epochs: int,
        warmup_epochs: int,
        warmup_lr: float,
        eta_min: float,
        by_epoch: bool = True,
        **kwargs,
    ):
        if by_epoch:
            raise UserValueError('DeiTCosineLR counts iterations: give by_epoch=False')
        self.iters_per_epoch, self.epochs, self.warmup_epochs = (
            iters_per_epoch,
            epochs,
            warmup_epochs,
        )
        self.warmup_lr, self.eta_min = warmup_lr, eta_min
        super().__init__(optimizer, by_epoch=False, **kwargs)

    def _get_value(self) -> list[float]:
        epoch = max(self.last_step // self.iters_per_epoch - 1, 0)
        if epoch < self.warmup_epochs:
            grown = epoch / self.warmup_epochs
            return [self.warmup_lr + grown * (lr - self.warmup_lr) for lr in self.base_values]
        share = (1 + math.cos(math.pi * min(epoch / self.epochs, 1))) / 2
        return [self.eta_min + share * (lr - self.eta_min) for lr in self.base_values]
