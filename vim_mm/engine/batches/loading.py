"""How many loader workers a machine has room for, and what of a batch is pinned."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from mmengine.structures import BaseDataElement

# Of what is free in shared memory, the part that a loader of all processes of a node may fill. A
# training has two at a time, which are built before either fills any of it: its own and that of
# validation. Half of it is left for others.
_SHARE = 0.25
# Batches that wait per worker: DataLoader's prefetch_factor, and one that is being made.
_BATCHES = 3
# From here on no common loader fills it, and no sample is read to see.
_PLENTY = 16 << 30


def sample_bytes(sample) -> int:
    """Bytes of all tensors and arrays in a sample, about what passes through shared memory."""
    if isinstance(sample, torch.Tensor):
        return sample.numel() * sample.element_size()
    if hasattr(sample, 'all_values'):  # MMEngine's data elements
        return sum(map(sample_bytes, sample.all_values()))
    if isinstance(sample, Mapping):
        return sum(map(sample_bytes, sample.values()))
    if isinstance(sample, list | tuple):
        return sum(map(sample_bytes, sample))
    return getattr(sample, 'nbytes', 0)


def fitting_workers(
    asked: int, batch_bytes: int, cores: int, shared_memory: int, processes: int
) -> int:
    """The number of workers, at most ``asked``, for which there are cores and shared memory.

    Args:
        asked (int): By the config.
        batch_bytes (int): Of a batch.
        cores (int): Of this node that the job may use.
        shared_memory (int): Free bytes of ``/dev/shm``.
        processes (int): On this node, each with a loader like this one.

    Returns:
        int: 0 where not even one worker's batches fit: then the process loads by itself.
    """
    room = int(_SHARE * shared_memory / processes)
    by_memory = room // max(_BATCHES * batch_bytes, 1)
    return max(min(asked, max(cores // processes, 1), by_memory), 0)


def fit_workers(asked: int, batch_size: int, dataset) -> tuple[int, str | None]:
    """:func:`fitting_workers` for a dataset on this machine.

    Args:
        asked (int): By the config.
        batch_size (int): Samples in a batch.
        dataset: Its first sample is read where shared memory is scarce.

    Returns:
        tuple[int, str | None]: The number, and what to say if it is not ``asked``.
    """
    if asked == 0 or len(dataset) == 0:
        return asked, None
    env = os.environ
    processes = int(env.get('LOCAL_WORLD_SIZE') or env.get('SLURM_NTASKS_PER_NODE') or 1)
    cores = len(os.sched_getaffinity(0))
    shared_memory = Path('/dev/shm')
    free = shutil.disk_usage(shared_memory).free if shared_memory.is_dir() else _PLENTY
    batch_bytes = 0 if free >= _PLENTY else batch_size * sample_bytes(dataset[0])
    workers = fitting_workers(asked, batch_bytes, cores, free, processes)
    if workers == asked:
        return asked, None
    said = f'{workers} loader workers instead of {asked}; results do not depend on the number. '
    share = f'shared by {processes} processes' if processes > 1 else 'for this process'
    if workers == max(cores // processes, 1):
        return workers, f'{said}There are {cores} cores {share}.'
    return workers, (
        f'{said}There are {free >> 20} MiB of /dev/shm {share}, and a batch has '
        f'{batch_bytes / 2**20:.1f} MiB; a container gets more by --shm-size.'
    )


def pin_samples() -> None:
    """Let the thread of a loader pin the tensors of samples, as it pins those of images.

    It takes any object that has ``pin_memory``, and MMEngine's data elements have not. Labels were
    copied from pageable memory, for which the host waits until the GPU has done all before.
    """
    if not hasattr(BaseDataElement, 'pin_memory'):
        BaseDataElement.pin_memory = _pinned


def _pinned(element: BaseDataElement) -> BaseDataElement:
    """The element with tensors in pinned memory, in elements inside of it too."""
    pinned = element.new()
    for name, value in element.items():
        if isinstance(value, torch.Tensor | BaseDataElement):
            pinned.set_data({name: value.pin_memory()})
    return pinned
