"""Random numbers that depend on where a training is, and not on how it got there.

Every micro-batch and every sample starts from a seed of its own, made of the run's seed and of its
number over all processes. So a training that was killed and resumed draws what an uninterrupted one
does, with any number of loader workers and of processes; nothing of a generator's state has to be
saved; and one iteration can be repeated.
"""

import random
from collections.abc import Iterator, Mapping
from itertools import islice

import numpy as np
import torch
from mmengine.dist import get_dist_info, get_rank
from mmengine.hooks import Hook
from mmengine.registry import DATA_SAMPLERS, HOOKS
from torch.utils.data import Dataset, Sampler

# What a number counts, so that iteration 5 and sample 5 draw different numbers.
_ITERATION, _SAMPLE = 0, 1


def _seeds(*key: int) -> tuple[int, int, int]:
    return tuple(map(int, np.random.SeedSequence(key).generate_state(3)))


def seed_iteration(seed: int, iteration: int, micro_batch: int) -> None:
    """Seed Python, NumPy and PyTorch on all devices for a micro-batch, by its number in a step."""
    for_python, for_numpy, for_torch = _seeds(seed, micro_batch, _ITERATION, iteration)
    random.seed(for_python)
    np.random.seed(for_numpy)
    torch.manual_seed(for_torch)


def seed_sample(seed: int, epoch: int, number: int) -> None:
    """Seed Python, NumPy and PyTorch on the CPU for the sample with that number in its epoch."""
    for_python, for_numpy, for_torch = _seeds(seed, epoch, _SAMPLE, number)
    random.seed(for_python)
    np.random.seed(for_numpy)
    # Without a GPU's generators, which loader workers must not touch.
    torch.default_generator.manual_seed(for_torch)


class NumberedIndex(int):
    """The index of a sample, which also knows its place in the order of all processes' samples."""

    number: int
    epoch: int

    def __new__(cls, index: int, number: int, epoch: int = 0) -> 'NumberedIndex':
        self = super().__new__(cls, index)
        self.number = number
        self.epoch = epoch
        return self

    def __reduce__(self):
        return NumberedIndex, (int(self), self.number, self.epoch)


@DATA_SAMPLERS.register_module()
class NumberedSampler(Sampler):
    """Another sampler, whose indices are numbered over all processes.

    MMEngine's samplers deal one order of samples to the processes in turn, so process r of w has
    the numbers r, r + w, r + 2 w and so on. Where a step has m micro-batches in all, those numbers
    that are equal modulo m are a micro-batch. It is made of the same samples with any number of
    processes.

    Args:
        dataset (Dataset): To draw from.
        sampler (Mapping): Config of the other sampler. Its ``skip`` and ``set_epoch``, by which
            MMEngine resumes, are passed on where it has them. One that has an ``epoch`` learns to
            skip as well.
        seed (int, optional): Of the run, the same in all processes.
        batch_size (int): Samples of a micro-batch.
        counts (int): Micro-batches of this process in a step.
        drop_last (bool): Whether the loader drops the incomplete step at the end of an epoch.
    """

    def __init__(
        self,
        dataset: Dataset,
        sampler: Mapping,
        seed: int | None = None,
        batch_size: int = 1,
        counts: int = 1,
        drop_last: bool = False,
    ):
        self.sampler = DATA_SAMPLERS.build(sampler, default_args=dict(dataset=dataset, seed=seed))
        self.start = self.epoch = self.first_epoch = 0
        self.batch_size, self.counts = batch_size, counts
        self.drop_last = drop_last
        self.by_epoch = hasattr(self.sampler, 'epoch')
        if self.by_epoch or hasattr(self.sampler, 'skip'):
            self.skip = self._skip

    def __iter__(self) -> Iterator[NumberedIndex]:
        rank, processes = get_dist_info()
        # Endless ones have skipped by themselves.
        following = islice(self.sampler, self.start, None) if self.by_epoch else self.sampler
        indices = (
            NumberedIndex(index, number * processes + rank, self.epoch)
            for number, index in enumerate(following, self.start)
        )
        while step := list(islice(indices, self.batch_size * self.counts)):
            for index in range(self.counts):
                yield from step[index :: self.counts]

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str):
        if name == 'sampler':  # not there yet while this is unpickled
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def _skip(self, num_samples: int) -> None:
        if not self.by_epoch:
            self.sampler.skip(num_samples)
            self.start = num_samples
            return
        share = self.batch_size * self.counts
        steps = len(self) // share if self.drop_last else -(-len(self) // share)
        self.first_epoch, start = divmod(num_samples, steps * share)
        self.set_epoch(0)
        self.start = start

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, counted from the one that was skipped to."""
        if hasattr(self.sampler, 'set_epoch'):
            self.sampler.set_epoch(self.first_epoch + epoch)
        if self.by_epoch:
            self.start, self.epoch = 0, self.first_epoch + epoch

    def reseed(self, seed: int) -> None:
        """Give the sampler another seed, before it has drawn anything."""
        self.sampler.seed = seed


@HOOKS.register_module()
class SeedIterationHook(Hook):
    """Seeds every iteration, and so its first micro-batch, see :func:`seed_iteration`."""

    priority = 'VERY_HIGH'

    def before_train_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        """Seed what the model draws; the batch is drawn already."""
        seed_iteration(runner.seed, runner.iter, get_rank())
