"""Runs side by side on every visible GPU; a process takes the next job while time is left."""

import math
import multiprocessing
import queue
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from studies.discretization.results import Job, append
from studies.discretization.tasks import Data, Task, load_splits
from studies.discretization.training import Settings, train
from vim_mm.progress import progress, say

_MARGIN = 1.1  # a run may take this much longer than the longest before


@dataclass(frozen=True)
class Plan:
    """What all workers know.

    Attributes:
        tasks (dict): By name.
        source (Path): Fashion-MNIST's files.
        cache (Path): Drawn scenes.
        out (Path): Folder of the lines.
        settings (dict): Settings by the label of a job.
        steps (int, optional): Instead of the task's, for trials.
        device (str): 'cuda' or 'cpu'.
        deadline (float): By ``time.time``.
        facts (dict): What is noted with every result but the card: commit, versions.
    """

    tasks: dict[str, Task]
    source: Path
    cache: Path
    out: Path
    settings: dict[str, Settings]
    steps: int | None
    device: str
    deadline: float
    facts: dict[str, Any]


def run_all(jobs: list[Job], plan: Plan, workers: int) -> bool:
    """Make the runs in order until all are made or the time is over.

    Args:
        jobs (list): What to run.
        plan (Plan): How.
        workers (int): Runs side by side, on each visible GPU or on the CPU.

    Returns:
        bool: Whether no worker failed.
    """
    for name in dict.fromkeys(job.task for job in jobs):
        load_splits(plan.tasks[name], plan.source, plan.cache)  # scenes are drawn once, not by each
    context = multiprocessing.get_context('spawn')
    waiting, done = context.Queue(), context.Queue()
    for job in jobs:
        waiting.put(job)
    gpus = torch.cuda.device_count() if plan.device == 'cuda' else 1
    processes = [
        context.Process(target=_work, args=(waiting, done, plan, i % gpus))
        for i in range(min(workers * gpus, len(jobs)))
    ]
    for process in processes:
        process.start()
    for _ in progress(range(len(jobs)), 'runs'):
        if not _one_more(done, processes):
            break
    for process in processes:
        process.join()
    waiting.cancel_join_thread()
    return all(process.exitcode == 0 for process in processes)


def _one_more(done: multiprocessing.Queue, processes: list[multiprocessing.Process]) -> bool:
    """Wait for a worker to finish a run and say so; False if none works any more."""
    while True:
        working = any(process.is_alive() for process in processes)
        try:
            say(done.get(timeout=1 if working else 0))
            return True
        except queue.Empty:
            if not working:
                return False


def _work(
    waiting: multiprocessing.Queue, done: multiprocessing.Queue, plan: Plan, gpu: int
) -> None:
    torch.set_num_threads(1)
    if plan.device == 'cuda':
        torch.cuda.set_device(gpu)
    data: dict[str, Data] = {}
    longest: dict[str, float] = {}
    while True:
        try:
            job = waiting.get(timeout=1)
        except queue.Empty:
            return
        remaining = plan.deadline - time.time()
        if remaining < _MARGIN * longest.get(job.task, 0):
            return
        if job.task not in data:
            data.clear()
            task = plan.tasks[job.task]
            splits = load_splits(task, plan.source, plan.cache)
            data[job.task] = Data(task, splits, torch.device(plan.device))
        began = time.time()
        result = train(
            job.arm,
            job.seed,
            data[job.task],
            plan.settings[job.label],
            plan.steps or plan.tasks[job.task].steps,
            math.inf if remaining == math.inf else time.monotonic() + remaining,
        )
        if result is None:
            print(f'given up, the time is over: {job}', flush=True)
            return
        longest[job.task] = max(longest.get(job.task, 0), time.time() - began)
        append(plan.out / f'{job.task}.jsonl', {**result, 'label': job.label, **plan.facts})
        done.put(
            f'{job.task} {job.label} seed {job.seed:2} {job.arm:18} {result["metric"]:7.3f} '
            f'{result["seconds"]:6.1f} s'
        )
