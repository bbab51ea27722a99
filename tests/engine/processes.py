"""Trainings in several processes of this machine, forked, on the CPU."""

import os
import socket
from collections.abc import Callable
from multiprocessing import get_context

import pytest
import torch

needs_forks = pytest.mark.skipif(
    torch.cuda.is_available(), reason='forks, which CUDA does not survive'
)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return str(probe.getsockname()[1])


def torchrun_environment(rank: int, processes: int, port: str) -> dict[str, str]:
    """What torchrun sets, on this machine and without its GPUs."""
    numbers = {'RANK': rank, 'LOCAL_RANK': rank, 'WORLD_SIZE': processes}
    address = dict(MASTER_ADDR='127.0.0.1', MASTER_PORT=port, CUDA_VISIBLE_DEVICES='')
    return {name: str(number) for name, number in numbers.items()} | address


def run_processes(work: Callable, processes: int, *arguments) -> None:
    """Call ``work(rank, *arguments)`` in each process, with the environment of torchrun."""
    port = free_port()
    context = get_context('fork')
    workers = [
        context.Process(target=_begin, args=(work, rank, processes, port, *arguments))
        for rank in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0


def _begin(work: Callable, rank: int, processes: int, port: str, *arguments) -> None:
    torch.set_num_threads(1)
    os.environ.update(torchrun_environment(rank, processes, port))
    work(rank, *arguments)
