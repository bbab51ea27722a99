"""Checks whether a comparison of the methods by time can be believed, by seven checks.

    python tools/analysis/verify_performance_issues.py
    python tools/analysis/verify_performance_issues.py --skip-checks 1,3 --json
    python tools/analysis/verify_performance_issues.py --work-dirs work_dirs

1 same inputs and preprocessing, 2 GPU synchronization, 3 thread settings, 4 code path, 5 warm-up,
6 micro-benchmark, 7 whole comparison. Each passes, fails or is not applicable, and says what it
saw.
The path is told by the operators and kernels that PyTorch's profiler records. The exit code is 1 if
a check fails. With --work-dirs, checks 1, 3 and 4 look at the runs of run_all_methods.py as well.
"""

import json
import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from _command_line import (
    add_debug,
    add_device,
    add_methods,
    add_sizes,
    choose_device,
    end,
    parse_first,
    parser_of,
)

# Of the GPU as the first notes have it; what a CPU does in the same time.
SIZES = {'cuda': (8, 512, 1024, 16), 'cpu': (1, 64, 128, 16)}
TRIALS = 7
CYCLES = 3e9  # of a GPU in a second, more than any has
CHECKS = frozenset(range(1, 8))  # of fairness.TITLES, which imports PyTorch
SHIPPED = 'seg/upernet_vim_t_{method}.py'
# Entries of a dumped config in which runs of one comparison may differ.
_FREE = ('model.backbone.discretization_method', 'randomness.seed', 'work_dir', 'resume')
_FREE += ('load_from', 'started_from')


def checks_of(text: str) -> set[int]:
    """'1,3' as numbers of checks."""
    try:
        found = {int(part) for part in text.split(',') if part.strip()}
    except ValueError:
        found = {0}
    if not found <= CHECKS:
        raise ArgumentTypeError(f'expected numbers of checks from 1 to 7 such as 1,3, got {text!r}')
    return found


def parse_args() -> Namespace:
    parser = parser_of(__doc__)
    parser.add_argument('--skip-checks', type=checks_of, default=set(), metavar='1,3')
    parser.add_argument('--json', action='store_true', help='print JSON instead of text')
    add_methods(parser)
    add_device(parser)
    add_sizes(parser)
    parser.add_argument(
        '--work-dirs', nargs='+', type=Path, default=[], help='folders of runs, or above them'
    )
    add_debug(parser)
    args = parser.parse_args()
    if args.skip_checks >= CHECKS:
        parser.error('--skip-checks skips every check: nothing would be checked')
    return args


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

import torch
from mmengine.config import Config

from benchmarks.comparison.run_folders import find_runs
from benchmarks.measure import fairness
from benchmarks.measure.latency import distinct_names, own_name
from benchmarks.measure.timing import (
    ScanShape,
    describe,
    device_times,
    environment,
    kernel_seconds,
    make_inputs,
    steady_times,
    wall_times,
    warm_up,
)
from benchmarks.peers.backbones import Workload, vim
from benchmarks.runs.work_dir import find_config
from vim_mm.config import config_names, config_path
from vim_mm.engine.watching.run_record import PYTORCH
from vim_mm.json_lines import read_json
from vim_mm.ops import path_of, selective_scan_fn


def flatten(value: Any, name: str = '') -> dict[str, str]:
    """Entries of nested dicts and lists as text by dotted name."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple) and any(isinstance(v, dict | list) for v in value):
        items = enumerate(value)
    else:
        return {name: repr(value)}
    flat: dict[str, str] = {}
    for key, item in items:
        flat |= flatten(item, f'{name}.{key}' if name else str(key))
    return flat


def entries(file: str | Path) -> dict[str, str]:
    """What a config says, but for what may differ."""
    flat = flatten(Config.fromfile(file).to_dict())
    return {name: value for name, value in flat.items() if name not in _FREE}


class Subjects:
    """What the checks look at on this machine.

    Args:
        args (Namespace): As :func:`parse_args` gives them, all set.
    """

    def __init__(self, args: Namespace):
        self.device, self.methods = args.device, args.methods
        self.shape = ScanShape(args.batch, args.dim, args.seqlen, args.dstate)
        names = distinct_names(find_runs(args.work_dirs), own_name)
        self.runs = {
            name: read_json(folder / 'run.json') | {'folder': folder}
            for folder, name in names.items()
        }
        if args.work_dirs and not self.runs:
            raise SystemExit(f'no run with a run.json in {", ".join(map(str, args.work_dirs))}')
        self.runs = {name: run for name, run in self.runs.items() if 'ran' in run}
        self.given = {method: self.inputs(args.seqlen) for method in self.methods}

    def inputs(self, length: int) -> dict[str, Any]:
        return make_inputs(replace(self.shape, seqlen=length), self.device)

    def scan(self, method: str, given: dict[str, Any], kernel: bool | None = None) -> Callable:
        """A scan, forward and backward, that chooses its path as a model does."""

        def call() -> None:
            out = selective_scan_fn(
                **given, delta_softplus=True, discretization_method=method, use_cuda_kernel=kernel
            )
            torch.autograd.grad(out.sum(), list(given.values()))

        return call

    @property
    def scans(self) -> dict[str, Callable]:
        return {method: self.scan(method, given) for method, given in self.given.items()}

    def steps(self) -> tuple[dict[str, Callable], int]:
        """A training step of a backbone by method, and its number of layers."""
        arch, batch, side, dtype = 'tiny', 8, 224, 'bf16'
        if self.device == 'cpu':
            arch, batch, side, dtype = dict(embed_dims=32, num_layers=2), 1, 64, 'fp32'
        images = torch.randn(batch, 3, side, side, device=self.device)
        models = {method: vim(arch, method, side).to(self.device) for method in self.methods}
        calls = {method: Workload(model, images, dtype).train for method, model in models.items()}
        return calls, len(models[self.methods[0]].layers)

    def expected_path(self) -> str:
        """That of the backend which the environment asks for, or of the best there is."""
        kernels = {'native': f'{self.device.upper()} kernel', 'triton': 'Triton kernel'}
        return kernels.get(path_of(self.device).name, PYTORCH)

    def configs(self) -> dict[str, dict[str, str]]:
        """What the shipped configs of the methods say."""
        names = {method: SHIPPED.format(method=method) for method in self.methods}
        shipped = [*config_names()]
        return {m: entries(config_path(name)) for m, name in names.items() if name in shipped}

    def dumped(self) -> dict[str, dict[str, dict[str, str]]]:
        """What the dumped configs of the runs say, by task and run."""
        found: dict[str, dict[str, dict[str, str]]] = {}
        for name, run in self.runs.items():
            # A record of train.py alone has no task.
            task = run.get('task', 'trained alone')
            found.setdefault(task, {})[name] = entries(find_config(run['folder']))
        return found

    def recorded(self, name: str) -> dict[str, Any]:
        return {run: record['ran'][name] for run, record in self.runs.items()}


def clocks(device: str) -> dict[str, Callable]:
    """The clocks of our own benchmarks."""
    found = {
        'wall_times': lambda call: wall_times(call, TRIALS),
        'steady_times': lambda call: steady_times(call, 1, TRIALS),
    }
    if device == 'cuda':
        found['device_times'] = lambda call: device_times(lambda: call, TRIALS)
    return found


def busy_gpu(seconds: float) -> None:
    """Let the GPU work at least so long, also inside a CUDA graph, for check 5."""
    torch.cuda._sleep(int(CYCLES * seconds))


class Gpu:
    """Work of some milliseconds on the GPU, for check 2."""

    def __init__(self):
        self.matrix = torch.randn(4096, 4096, device='cuda')

    def run(self) -> None:
        for _ in range(4):
            self.matrix @ self.matrix

    def busy_seconds(self) -> float:
        """By the profiler: the time of the kernels."""
        warm_up(self.run)
        return kernel_seconds(self.run)


def perform(number: int, on: Subjects) -> Any:
    """One check."""

    def clock(call: Callable) -> list[float]:
        return wall_times(call, TRIALS, seconds=2.0)

    ours = clocks(on.device)
    if number == 1:
        return fairness.check_inputs(on.scans, on.given, on.configs(), on.dumped())
    if number == 2:
        if on.device == 'cpu':
            return fairness.not_applicable(2, 'without a GPU a call returns when it has finished')
        return fairness.check_synchronization(ours, Gpu())
    if number == 3:
        recorded = {run: {'threads': n} for run, n in on.recorded('threads').items()}
        return fairness.check_threads(on.scans, recorded)
    if number == 4:
        steps, layers = on.steps()
        models = {f'{method}, a model of {layers} layers': call for method, call in steps.items()}
        counts = dict.fromkeys(models, layers)
        calls = on.scans | models
        return fairness.check_paths(calls, on.expected_path(), counts, on.recorded('path'))
    if number == 5:
        work = busy_gpu if on.device == 'cuda' else time.sleep
        return fairness.check_warm_up(ours, on.scans, work)
    if number == 6:
        if not on.expected_path().endswith('kernel'):
            name, reason = path_of(on.device)
            return fairness.not_applicable(
                6, f'the scan {name!r} is made of PyTorch operators itself ({reason})'
            )
        lengths = on.shape.seqlen, 2 * on.shape.seqlen
        by_length = {length: on.inputs(length) for length in lengths}
        mine = {m: lambda n, m=m: on.scan(m, by_length[n]) for m in on.methods}
        python = {m: lambda n, m=m: on.scan(m, by_length[n], kernel=False) for m in on.methods}
        return fairness.check_operations(mine, lengths, clock, python)
    # What the host takes to launch a step is noise, and the same for every method.
    return fairness.check_comparison(on.steps()[0], ours.get('device_times', clock))


def show(result: Any) -> None:
    print(f'{result.number} {result.title}: {result.status}')
    for line in result.evidence:
        print(f'    {line}')


def complete(args: Namespace) -> None:
    """Fill in the defaults that depend on the machine."""
    args.device = choose_device(args.device)
    for name, value in zip(('batch', 'dim', 'seqlen', 'dstate'), SIZES[args.device], strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)


def main(args: Namespace) -> None:
    complete(args)
    facts = environment(args.device)
    on = Subjects(args)
    results = []
    if not args.json:
        print(describe(facts))
    for number in sorted(CHECKS - args.skip_checks):
        results.append(perform(number, on))
        if not args.json:
            show(results[-1])
    failed = [result.number for result in results if result.status == fairness.FAILED]
    if args.json:
        checks = [vars(result) | {'title': result.title} for result in results]
        print(json.dumps({'environment': facts, 'checks': checks}, indent=2))
    else:
        print(f'{len(failed)} of {len(results)} checks failed{": " if failed else "."}'
              + ', '.join(map(str, failed)))  # fmt: skip
    sys.exit(1 if failed else 0)


if __name__ == '__main__':
    end(main, ARGUMENTS)
