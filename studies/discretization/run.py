"""Makes the runs of protocol.md, in one command that goes on where it stopped.

    python studies/discretization/run.py train --data data/fashion/idx --out work_dirs/study
    python studies/discretization/run.py train --plan second --jobs 3 --data data/fashion/idx \
        --out work_dirs/study
    python studies/discretization/run.py cost --data data/fashion/idx --out work_dirs/study
    python studies/discretization/run.py import work_dirs/study
    python studies/discretization/report.py

``train`` makes the runs that are neither in the study's ``runs`` nor in OUT, by task, then seed,
then method. With ``--plan second`` it makes those of the protocol's second part, in its order.
``import`` leaves out trials: seeds and numbers of steps that are not the study's.
"""

import argparse
import math
import platform
import time
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import Any

from _command_line import (
    Names,
    add_debug,
    add_device,
    choose_device,
    end,
    has_gpu,
    numbers,
    parse_first,
    positive,
)

from studies.discretization.results import RUNS, Job, append, finished, take


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest='command', required=True)
    tasks, arms = (
        Names('studies.discretization.tasks', name) for name in ('TASKS', 'ARMS_AND_PEERS')
    )
    shared = argparse.ArgumentParser(add_help=False)
    add_debug(shared)
    shared.add_argument('--data', type=Path, required=True, help="Fashion-MNIST's IDX files")
    shared.add_argument('--out', type=Path, required=True, help='folder of <task>.jsonl')
    shared.add_argument('--cache', type=Path, default=Path('work_dirs/study_scenes'))
    shared.add_argument('--tasks', nargs='+', type=tasks, default=tasks, metavar='TASK')
    shared.add_argument('--arms', nargs='+', type=arms, default=arms, metavar='ARM')
    shared.add_argument('--commit', help='what runs, where there is no git checkout')

    runs = commands.add_parser('train', parents=[shared], help='make the runs that are missing')
    plans_there = Names('studies.discretization.plans', 'PLANS')
    runs.add_argument(
        '--plan',
        type=plans_there,
        metavar='PLAN',
        help='the runs of this part of the protocol alone',
    )
    runs.add_argument('--dry-run', action='store_true', help='print what would run')
    runs.add_argument('--seeds', type=numbers, help="'0..11' or '0,3' (default: those planned)")
    add_device(runs)
    runs.add_argument('--minutes', type=float, help='stop before this time is over')
    runs.add_argument('--jobs', type=positive, default=1, help='runs side by side on each GPU')
    runs.add_argument('--label', default='', help="of settings; '' is the primary one")
    runs.add_argument('--steps', type=positive, help="instead of the task's, for trials")
    runs.add_argument('--results', type=Path, default=RUNS, help='folder of finished runs')

    alone = commands.add_parser('cost', parents=[shared], help='time and memory of a step, alone')

    taking = commands.add_parser('import', help="append the lines of OUT to the study's files")
    add_debug(taking)
    taking.add_argument('out', type=Path)
    taking.add_argument('--results', type=Path, default=RUNS)
    args = parser.parse_args()
    if args.command == 'train' and args.device is None:
        args.device = choose_device(None)
        if args.device == 'cpu' and not args.dry_run:
            runs.error('there is no GPU, and a CPU takes hours for a run; --device cpu makes it')
    if args.command == 'cost' and not has_gpu():
        alone.error('it needs a GPU, and PyTorch finds none')  # a step is a CUDA graph
    return args


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

import torch

import vim_mm
from studies.discretization.plans import PLANS, gpu_seconds
from studies.discretization.pool import Plan, run_all
from studies.discretization.tasks import TASKS, Data, load_splits
from studies.discretization.training import Settings, measure_step
from vim_mm.progress import progress, say
from vim_mm.version import commit

GRID = {
    f'lr{lr:g}_dt{dt_range[1]:g}': Settings(lr=lr, dt_range=dt_range)
    for lr, dt_range in product((1e-3, 2e-3, 4e-3), ((1e-3, 0.1), (1e-2, 1.0)))
}
SETTINGS = {
    '': Settings(),
    'dt0.01': Settings(dt_range=(1e-4, 1e-2)),
    'dt1': Settings(dt_range=(1e-2, 1.0)),
    **GRID,
}


def running_commit(given: str | None) -> str:
    """What runs: as --commit says, else of the checkout."""
    found = given or commit(7)
    if found is None:
        raise SystemExit('This is no git checkout: say by --commit what runs.')
    return found


def facts(args: argparse.Namespace) -> dict[str, Any]:
    """What is noted with every result besides its figures and the card."""
    return {
        'commit': running_commit(args.commit),
        'versions': {
            'vim_mm': vim_mm.__version__,
            'torch': torch.__version__,
            'python': platform.python_version(),
        },
        'jobs': getattr(args, 'jobs', 1),
        'date': datetime.now(timezone.utc).strftime('%Y-%m-%d'),
    }


def train(args: argparse.Namespace) -> int:
    if args.label not in SETTINGS:
        raise SystemExit(f'--label: expected one of {[*SETTINGS]}, got {args.label!r}.')
    deadline = math.inf if args.minutes is None else time.time() + 60 * args.minutes
    steps = {name: args.steps or task.steps for name, task in TASKS.items()}
    done = finished(args.out, None if args.steps else args.results, steps)  # a trial is none
    jobs = [job for job in wanted(args) if job.key not in done]
    print(f'{len(jobs)} runs to make, {len(done)} results are there', flush=True)
    if args.dry_run:
        for task, label, arm in dict.fromkeys((job.task, job.label, job.arm) for job in jobs):
            some = [job for job in jobs if (job.task, job.label, job.arm) == (task, label, arm)]
            print(f'{task:8} {label:8} {arm:20} {len(some):3} runs')
        if args.plan:
            minutes = sum(map(gpu_seconds, jobs)) / 60
            print(f'about {minutes:.0f} minutes of one H100, three runs side by side')
    if args.dry_run or not jobs:
        return 0
    plan = Plan(
        TASKS,
        args.data,
        args.cache,
        args.out,
        SETTINGS,
        args.steps,
        args.device,
        deadline,
        facts(args),
        # Trials and CPUs take other times than the plan's runs on a GPU.
        {job: args.jobs * gpu_seconds(job) for job in jobs}
        if args.plan and args.device == 'cuda' and not args.steps
        else {},
    )
    return 0 if run_all(jobs, plan, args.jobs) else 1


def wanted(args: argparse.Namespace) -> list[Job]:
    """The runs that the arguments ask for, made or not."""
    if args.plan:
        return [
            job
            for part in PLANS[args.plan]
            for job in part.jobs()
            if job.task in args.tasks and job.arm in args.arms
            if args.seeds is None or job.seed in args.seeds
        ]
    seeds = {name: TASKS[name].planned_seeds for name in args.tasks}
    every = sorted(
        {seed for name in args.tasks for a in TASKS[name].arms for seed in seeds[name](a)}
    )
    return [
        Job(task, arm, seed, args.label)
        for task, seed, arm in product(
            args.tasks, every if args.seeds is None else args.seeds, args.arms
        )
        if arm in TASKS[task].arms
        if args.seeds is not None or seed in seeds[task](arm)
    ]


def cost(args: argparse.Namespace) -> int:
    noted = facts(args)
    for name in args.tasks:
        task = TASKS[name]
        splits = load_splits(task, args.data, args.cache)
        data = Data(task, splits, torch.device('cuda'))
        for arm in progress([arm for arm in args.arms if arm in task.arms], name):
            figures = measure_step(arm, data, Settings())
            append(args.out / f'{name}.jsonl', {**figures, **noted})
            say(str(figures))
    return 0


def import_lines(args: argparse.Namespace) -> int:
    taken, kept, left_out = take(args.out, args.results, TASKS, SETTINGS)
    print(*left_out, sep='\n', end='\n' if left_out else '')
    print(f'{taken} results appended in {args.results}, {kept} were there')
    return 0


COMMANDS = {'train': train, 'cost': cost, 'import': import_lines}


def main(args: argparse.Namespace) -> int:
    return COMMANDS[args.command](args)


if __name__ == '__main__':
    end(main, ARGUMENTS)
