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
_TRIES = 3  # of an arm; when that many of its runs have failed in a row it is left out


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
    dies costs its run alone, which is made once more.

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
        self._longest: dict[tuple[str, str], float] = {}  # seconds, by task and arm
        self._failures: Counter[tuple[str, str]] = Counter()
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
                arm = job.task, job.arm
                seconds = time.time() - worker.began
                self._longest[arm] = max(self._longest.get(arm, 0), seconds)
                self._failures[arm] = 0
            worker.job, worker.began = self.next_job(), time.time()
            with suppress(OSError):  # it has died, which the next recv says
                pipe.send(worker.job)
            if line:
                say(line)
            if job is not None and line:
                return True
        return False

    def next_job(self) -> Job | None:
        """The first run that is likely to end in time; of an arm not seen yet by its task."""
        while self.waiting:
            job = self.waiting.popleft()
            of_task = [took for (task, _), took in self._longest.items() if task == job.task]
            expected = self._longest.get((job.task, job.arm), max(of_task, default=0))
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
        arm = (job.task, job.arm) if job else ('', '')
        self._failures[arm] += 1
        if job is None and self._failures[arm] > _TRIES:
            return  # as the next one would
        if job is not None and self._failures[arm] < _TRIES:
            self.waiting.appendleft(job)
        elif job is not None and self._failures[arm] == _TRIES:
            say(f'{job.arm} of {job.task} is left out from here on: {_TRIES} of its runs failed')
            others = (other for other in self.waiting if (other.task, other.arm) != arm)
            self.waiting = deque(others)
        self.start_process(worker.gpu)


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
