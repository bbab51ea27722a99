"""Runs side by side on every visible GPU: each process makes one after the other."""

import math
import multiprocessing
import time
from collections import Counter, deque
from collections.abc import Iterable
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

_MARGIN = 1.1  # a run may take this much longer than the longest of its arm before
_FAILURES = 3  # so many different runs of an arm and setting, in a row, leave out its others


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

    A run that is not likely to end in time is passed over for later ones that are. A process that
    dies costs its run alone, which is made once more after all others. Where three different runs
    of an arm and setting fail, and none is made between them, its others are left out.

    Args:
        jobs (list): What to run.
        plan (Plan): How.
        workers (int): Runs side by side, on each visible GPU or on the CPU.

    Returns:
        bool: Whether no process failed.
    """
    for name in dict.fromkeys(job.task for job in jobs):
        load_splits(plan.tasks[name], plan.source, plan.cache)  # scenes are drawn once, not by each
    gpus = torch.cuda.device_count() if plan.device == 'cuda' else 1
    desk = _Desk(jobs, plan)
    for i in range(min(workers * gpus, len(jobs))):
        desk.start_process(i % gpus)
    for _ in progress(iter(desk.one_more, False), 'runs', len(jobs)):
        pass
    return not desk.failed


_Kind = tuple[str, str, str]


def _kind(job: Job) -> _Kind:
    """What runs have in common that take equally long and fail for one reason."""
    return job.task, job.arm, job.label


@dataclass
class _Worker:
    """A process, and what it makes since when."""

    process: BaseProcess
    gpu: int
    job: Job | None = None
    began: float = 0.0


class _Desk:
    """Hands the runs out to processes.

    Attributes:
        failed (bool): Whether a process has.
    """

    def __init__(self, jobs: Iterable[Job], plan: Plan):
        self.waiting, self.plan, self.failed = deque(jobs), plan, False
        self._workers: dict[Connection, _Worker] = {}
        self._longest: dict[_Kind, float] = {}  # seconds
        self._failed: set[Job] = set()
        self._failures: Counter[_Kind] = Counter()  # of different runs, in a row
        self._idle_failures = 0  # of processes before their first run
        self._context = multiprocessing.get_context('spawn')

    def start_process(self, gpu: int) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs, self.plan, gpu))
        process.start()
        theirs.close()  # so that ours ends when the process does
        self._workers[ours] = _Worker(process, gpu)

    def one_more(self) -> bool:
        """Wait for a run to be made and say so; False if no process works any more."""
        while self._workers:
            pipe: Any = wait([*self._workers])[0]
            worker = self._workers[pipe]
            try:
                line = pipe.recv()
            except (EOFError, OSError):
                self._ended(pipe)
                continue
            job = worker.job
            if job is not None and line:
                kind, seconds = _kind(job), time.time() - worker.began
                self._longest[kind] = max(self._longest.get(kind, 0), seconds)
                self._failures[kind] = 0
            worker.job, worker.began = self.next_job(), time.time()
            with suppress(OSError):  # it has died, which the next recv says
                pipe.send(worker.job)
            if line:
                say(line)
            if job is not None and line:
                return True
        return False

    def next_job(self) -> Job | None:
        """The first run that is likely to end in time; of a kind not seen yet by its task."""
        while self.waiting:
            job = self.waiting.popleft()
            of_task = [took for (task, *_), took in self._longest.items() if task == job.task]
            expected = self._longest.get(_kind(job), max(of_task, default=0))
            if self.plan.deadline - time.time() > _MARGIN * expected:
                return job
        return None

    def _ended(self, pipe: Connection) -> None:
        """A process has: because there is nothing to do, or it has died, and another starts."""
        worker = self._workers.pop(pipe)
        pipe.close()
        worker.process.join()
        if worker.process.exitcode == 0:
            return
        self.failed, job = True, worker.job
        say(f'failed, exit code {worker.process.exitcode}: {job or "before its first run"}')
        if job is not None:
            self._run_failed(job)
        else:
            self._idle_failures += 1
            if self._idle_failures > _FAILURES:
                return  # as the next one would
        self.start_process(worker.gpu)

    def _run_failed(self, job: Job) -> None:
        """Put it at the end, once; the last of several in a row leaves out the others."""
        if job in self._failed:
            return
        self._failed.add(job)
        kind = _kind(job)
        self._failures[kind] += 1
        if self._failures[kind] < _FAILURES:
            self.waiting.append(job)
        elif self._failures[kind] == _FAILURES:
            name, arm, _ = job.key
            say(f'{arm} of {name} is left out from here on: {_FAILURES} of its runs failed')
            self.waiting = deque(other for other in self.waiting if _kind(other) != kind)


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
