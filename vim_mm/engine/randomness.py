"""Random numbers that depend on where a training is, and not on how it got there.

Every iteration and every sample starts from a seed of its own, made of the run's seed, the process
and a number. So a training that was killed and resumed draws what an uninterrupted one does, with
any number of loader workers; nothing of a generator's state has to be saved; and one iteration can
be repeated.
"""

import random
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import DATA_SAMPLERS, HOOKS
from torch.utils.data import Dataset, Sampler

# What a number counts, so that iteration 5 and sample 5 draw different numbers.
_ITERATION, _SAMPLE = 0, 1


def _seeds(*key: int) -> tuple[int, int, int]:
    return tuple(map(int, np.random.SeedSequence(key).generate_state(3)))


def seed_iteration(seed: int, iteration: int) -> None:
    """Seed Python, NumPy and PyTorch on all devices for one iteration of this process."""
    for_python, for_numpy, for_torch = _seeds(seed, get_rank(), _ITERATION, iteration)
    random.seed(for_python)
    np.random.seed(for_numpy)
    torch.manual_seed(for_torch)


def seed_sample(seed: int, rank: int, number: int) -> None:
    """Seed Python, NumPy and PyTorch on the CPU for the sample with that number."""
    for_python, for_numpy, for_torch = _seeds(seed, rank, _SAMPLE, number)
    random.seed(for_python)
    np.random.seed(for_numpy)
    # Without a GPU's generators, which loader workers must not touch.
    torch.default_generator.manual_seed(for_torch)


class NumberedIndex(int):
    """The index of a sample, which also knows how many samples its process drew before."""

    number: int

    def __new__(cls, index: int, number: int) -> 'NumberedIndex':
        self = super().__new__(cls, index)
        self.number = number
        return self

    def __reduce__(self):
        return NumberedIndex, (int(self), self.number)


@DATA_SAMPLERS.register_module()
class NumberedSampler(Sampler):
    """Another sampler, whose indices are numbered over all epochs.

    Args:
        dataset (Dataset): To draw from.
        sampler (Mapping): Config of the other sampler. Its ``skip`` and ``set_epoch``, by which
            MMEngine resumes, are passed on where it has them.
        seed (int, optional): Of the run, the same in all processes.
    """

    def __init__(self, dataset: Dataset, sampler: Mapping, seed: int | None = None):
        self.sampler = DATA_SAMPLERS.build(sampler, default_args=dict(dataset=dataset, seed=seed))
        self.start = 0
        if hasattr(self.sampler, 'skip'):
            self.skip = self._skip

    def __iter__(self) -> Iterator[NumberedIndex]:
        for number, index in enumerate(self.sampler, self.start):
            yield NumberedIndex(index, number)

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str):
        if name == 'sampler':  # not there yet while this is unpickled
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def _skip(self, num_samples: int) -> None:
        self.sampler.skip(num_samples)
        self.start = num_samples

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        if hasattr(self.sampler, 'set_epoch'):
            self.sampler.set_epoch(epoch)
        if not hasattr(self, 'skip'):  # such samplers have one endless epoch
            self.start = epoch * len(self.sampler)

    def reseed(self, seed: int) -> None:
        """Give the sampler another seed, before it has drawn anything."""
        self.sampler.seed = seed


@HOOKS.register_module()
class SeedIterationHook(Hook):
    """Seeds every iteration by its number, see :func:`seed_iteration`."""

    priority = 'VERY_HIGH'

    def before_train_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        """Seed what the model draws; the batch is drawn already."""
        seed_iteration(runner.seed, runner.iter)
