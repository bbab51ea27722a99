"""The batch of a recipe on any number of processes, by gradient accumulation.

A step of the optimizer has the images that the recipe names. They are divided into micro-batches,
each of which one process takes through the model at once. An iteration of a training is a step:
learning rates, intervals and the names of checkpoints count steps, whatever a step is made of.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from mmengine.config import Config
from mmengine.dist import get_rank, get_world_size
from mmengine.hooks import Hook
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from vim_mm.engine.batches.randomness import seed_iteration
from vim_mm.errors import UserValueError


@dataclass(frozen=True)
class Batch:
    """How the processes of a training make the batch of a step.

    Attributes:
        total (int): Images of a step of the optimizer.
        processes (int): Of the training.
        size (int): Images of a micro-batch.
        recipe (int, optional): Images of a step by the recipe, if it names them.
        scaled (bool): Whether the learning rate is scaled to ``total``, linearly from ``recipe``.
    """

    total: int
    processes: int
    size: int
    recipe: int | None = None
    scaled: bool = False

    @property
    def counts(self) -> int:
        """Micro-batches of each process in a step."""
        return self.total // (self.processes * self.size)

    def __str__(self) -> str:
        made = f'{self.processes} processes x {self.size}' if self.processes > 1 else f'{self.size}'
        step = f'Batch: {self.total} images a step = {made}'
        if self.counts > 1:
            step += f' x {self.counts} micro-batches, whose gradients are accumulated'
        if self.recipe is None:
            return f'{step}; the config names no batch (auto_scale_lr.base_batch_size).'
        if self.scaled:
            return f'{step}; the learning rate is multiplied by {self.total} / {self.recipe}.'
        return f'{step}; the batch and the learning rate are those of the recipe.'


def check_pooled_norms(model: nn.Module, batch: Batch) -> None:
    """Look whether batch norm of maps of one pixel gets more than one value.

    UPerNet and PSPNet pool maps to such a size (MMSegmentation's ``pool_scales``).

    Raises:
        ValueError: It gets one value, of the only image that is computed at once.
    """
    pooled = (m for m in model.modules() if 1 in (getattr(m, 'pool_scales', None) or ()))
    for norm in (norm for module in pooled for norm in module.modules()):
        shared = batch.processes if isinstance(norm, nn.SyncBatchNorm) else 1
        if isinstance(norm, _BatchNorm) and batch.size * shared == 1:
            raise UserValueError(
                'batch norm after pooling to one pixel needs 2 images or more at once: '
                '--batch-per-gpu 2; --amp or --cfg-options model.backbone.with_cp=True saves memory'
            )


def plan_batch(size: int, processes: int, auto_scale_lr: Mapping | None) -> Batch:
    """Reach the batch of the recipe, or scale the learning rate where the config asks for it.

    Args:
        size (int): Images that a process can take at once, ``train_dataloader.batch_size``.
        processes (int): Of the training.
        auto_scale_lr (Mapping, optional): MMEngine's setting. ``base_batch_size`` is the batch of
            the recipe; with ``enable`` the learning rate is scaled, and nothing is accumulated.

    Returns:
        Batch: Its micro-batches have ``size`` images, or else the largest number below with which
        every process has whole ones.

    Raises:
        ValueError: ``size`` is not positive, or the processes cannot share the images evenly.
    """
    if size < 1:
        raise UserValueError(f'the batch per GPU must be positive, got {size}')
    options = auto_scale_lr or {}
    recipe = options.get('base_batch_size')
    if recipe is None or options.get('enable', False):
        return Batch(size * processes, processes, size, recipe, scaled=recipe is not None)
    share, rest = divmod(recipe, processes)
    if rest:
        raise UserValueError(
            f'{processes} processes cannot share the {recipe} images of a step evenly: take a '
            f'number of processes that divides {recipe}, or give --scale-lr'
        )
    size = next(n for n in range(min(size, share), 0, -1) if share % n == 0)
    return Batch(recipe, processes, size, recipe)


def scale_learning_rate(cfg: Config) -> None:
    """Ask for a scaled learning rate in place of accumulated gradients.

    Raises:
        ValueError: The config names no batch of the recipe.
    """
    if not cfg.get('auto_scale_lr', {}).get('base_batch_size'):
        raise UserValueError(
            '--scale-lr: the config must name the batch of its learning rate, '
            'auto_scale_lr.base_batch_size'
        )
    cfg.auto_scale_lr.enable = True


class MicroBatches(tuple):
    """What a loader yields for a step of several micro-batches."""


class Steps:
    """A loader, seen step by step: each has ``counts`` batches of the loader.

    All other attributes are the loader's. Batches at its end that make no whole step are dropped.
    """

    def __init__(self, loader: DataLoader, counts: int):
        self.loader = loader
        self.counts = counts

    def __getattr__(self, name: str):
        if name == 'loader':
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def batch_size(self) -> int | None:
        """Images of this process in a step, by which MMEngine finds the place to resume at."""
        size = self.loader.batch_size
        return None if size is None else size * self.counts

    def __len__(self) -> int:
        return len(self.loader) // self.counts

    def __iter__(self) -> Iterator[MicroBatches]:
        batches = iter(self.loader)
        return map(MicroBatches, zip(*[batches] * self.counts))


def micro_batch_number(index: int) -> int:
    """The number of this process' micro-batch ``index`` among those of all in a step.

    Which images are in a micro-batch of that number, and which random numbers it draws, does not
    depend on the number of processes; see
    :class:`vim_mm.engine.batches.randomness.NumberedSampler`.
    """
    return index * get_world_size() + get_rank()


class AccumulationHook(Hook):
    """Makes ``train_step`` take all micro-batches of a step.

    MMEngine's optimizer wrapper accumulates: it divides the loss by the number of micro-batches,
    and lets the processes exchange gradients, clips them and steps at the last one only. What is
    logged is the mean over this process' micro-batches.
    """

    def __init__(self):
        self.train_step = None

    def before_train(self, runner) -> None:
        """Put the loop over micro-batches around the model's own step."""
        if runner.batch.counts == 1:
            return
        self.train_step = runner.model.train_step
        runner.model.train_step = partial(_train_step, runner, self.train_step)

    def after_train(self, runner) -> None:
        """Give the model its own step back."""
        if self.train_step is not None:
            runner.model.train_step, self.train_step = self.train_step, None


def _train_step(runner, step: Callable[..., dict], data: MicroBatches, optim_wrapper) -> dict:
    logs: list[dict[str, Any]] = []
    for index, batch in enumerate(data):
        seed_iteration(runner.seed, runner.iter, micro_batch_number(index))
        logs.append(step(batch, optim_wrapper=optim_wrapper))
    return {key: torch.stack([torch.as_tensor(log[key]) for log in logs]).mean() for key in logs[0]}
