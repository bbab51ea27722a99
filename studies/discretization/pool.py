"""Runs side by side on every visible GPU: each process makes one after the other."""

import math
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from studies.discretization.results import Job, append
from studies.discretization.tasks import Data, Task, load_splits
from studies.discretization.training import Settings, train
from vim_mm.progress import progress, say


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
        expected (dict): About the seconds of some runs, as long as none of their kind is made.
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
    expected: dict[Job, float]


def run_all(jobs: list[Job], plan: Plan, workers: int) -> bool:
    """Make the runs in order until all are made or the time is over.

    A run that is not likely to end in time is passed over for later ones that are. One that fails,
    or whose process dies, is named and costs nothing else; the same command makes it once more.

    Args:
        jobs (list): What to run.
        plan (Plan): How.
        workers (int): Runs side by side, on each visible GPU or on the CPU.

    Returns:
        bool: Whether no process failed.
    """
    for name in dict.fromkeys(job.task for job in jobs):
        load_splits(plan.tasks[name], plan.source, plan.cache)  # scenes are drawn once, not by each
    return all([*progress(_outcomes(jobs, plan, workers), 'runs', len(jobs))])


@dataclass
class _Worker:
    """A process, and what it makes since when."""

    process: BaseProcess
    gpu: int
    job: Job | None = None
    began: float = 0.0


def _kind(job: Job) -> tuple:
    """What runs have in common that take equally long."""
    return job.task, job.arm, job.label


def _outcomes(jobs: list[Job], plan: Plan, workers: int) -> Iterator[bool]:
    """Whether each run was made, and False for each process that died before its first one."""
    context = multiprocessing.get_context('spawn')
    waiting, busy = [*jobs], {}
    longest: dict[tuple, float] = {}  # seconds of a run, by task, arm and settings

    def start(gpu: int) -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, plan, gpu))
        process.start()
        theirs.close()  # so that ours ends when the process does
        busy[ours] = _Worker(process, gpu)

    gpus = torch.cuda.device_count() if plan.device == 'cuda' else 1
    for i in range(min(workers * gpus, len(jobs))):
        start(i % gpus)
    while busy:
        pipe: Any = wait([*busy])[0]
        worker = busy[pipe]
        try:
            line = pipe.recv()
        except (EOFError, OSError):  # it has nothing more to do, or has died
            del busy[pipe]
            pipe.close()
            worker.process.join()
            if worker.process.exitcode != 0:
                job = worker.job or 'before its first run'
                say(f'failed, exit code {worker.process.exitcode}: {job}')
                if worker.job is not None:
                    start(worker.gpu)
                yield False
            continue
        now = time.time()
        if line:
            kind = _kind(worker.job)
            longest[kind] = max(longest.get(kind, 0.0), now - worker.began)
        in_time = (
            job
            for job in waiting
            if now + (longest.get(_kind(job)) or plan.expected.get(job, 0.0)) < plan.deadline
        )
        worker.job, worker.began = next(in_time, None), now
        if worker.job is not None:
            waiting.remove(worker.job)
        with suppress(OSError):  # it has died, which the next recv says
            pipe.send(worker.job)
        if line:
            say(line)
            yield True
    if waiting:
        say(f'{len(waiting)} runs would not have ended in time')


def _work(pipe: Connection, plan: Plan, gpu: int) -> None:
    """Make the runs that come through the pipe; answer each with a line, '' if it is given up."""
    torch.set_num_threads(1)
    if plan.device == 'cuda':
        torch.cuda.set_device(gpu)
    data: dict[str, Data] = {}
    pipe.send('')  # ready
    while True:
        try:
            job = pipe.recv()
        except EOFError:  # who hands them out has died
            return
        if job is None:
            return
        if job.task not in data:
            data.clear()
            task = plan.tasks[job.task]
            splits = load_splits(task, plan.source, plan.cache)
            data[job.task] = Data(task, splits, torch.device(plan.device))
        remaining = plan.deadline - time.time()
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
            pipe.send('')
            continue
        append(plan.out / f'{job.task}.jsonl', {**result, 'label': job.label, **plan.facts})
        pipe.send(
            f'{job.task} {job.label} seed {job.seed:2} {job.arm:18} {result["metric"]:7.3f} '
            f'{result["seconds"]:6.1f} s'
        )
