"""Times, memory and errors of every method by every path: single operations, then whole scans.

    python tools/analysis/profile_discretization.py
    python tools/analysis/profile_discretization.py --batch 1 --profile_scan --methods bilinear
    python tools/analysis/profile_discretization.py --batch 1 --profile_scan --parallel_scans

``--profile_ops`` computes A_bar and beta alone (a kernel their derivatives as well), and the bare
exponential and matrix inverse, ``--profile_scan`` the full scan, forward and backward; without
either, both. Paths: the compiled kernel of the device, the CPU kernel, the Python reference, and
for ``bilinear`` two with matrices: the dense inverse of the project's seed notes, diagonal matrices
written out as N x N and inverted, and ``vim_mm.ops.selective_scan_dense_ref``, which solves systems
with any matrices and is given the same. ``--parallel_scans`` adds the five forms of
``benchmarks/scan/parallel.py`` for causal methods. Ends with what the figures say of the
notes' expectation that Python may be faster than a kernel.

Throughput is in thousands of steps per second, where a step is one position of one sequence, all D
channels of it: B L steps a call.

Times are wall clock as a caller sees them, launches included, medians of ``--n_trials`` calls or of
as many as ``--seconds`` allow; for the device's share alone see benchmark_scan.py. Memory is the
peak beyond the inputs: torch.cuda.max_memory_allocated, on the CPU the running sum of allocations
that PyTorch's profiler records. Errors are the largest against the reference in fp64, relative to
the largest entry, on one sample and at most 64 channels. All in fp32. What would not fit into the
free memory, by the peak of a small part scaled up, is refused with a sentence.
"""

import argparse
import json
import math
import pathlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import geometric_mean, median
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
    positive,
)


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_sizes(parser, 8, 512, 1024, 16)
    parser.add_argument(
        '--n_trials', type=positive, default=100, help='calls that are timed, at most'
    )
    parser.add_argument('--seconds', type=float, default=3, help='for the calls of one figure')
    parser.add_argument('--profile_ops', action='store_true', help='the coefficients only')
    parser.add_argument('--profile_scan', action='store_true', help='the scans only')
    parser.add_argument(
        '--parallel_scans', action='store_true', help='the forms of the parallel scan as well'
    )
    add_methods(parser)
    add_device(parser)
    parser.add_argument('--out', type=pathlib.Path, help='write every figure as JSON to this file')
    add_debug(parser)
    return parser.parse_args()


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure.tables import figures, markdown_table, write_text
from benchmarks.measure.timing import (
    Scan,
    ScanShape,
    describe,
    differentiable_scan,
    environment,
    make_inputs,
    peak_memory,
    wall_times,
)
from benchmarks.scan.dense_inverse import BARE, dense_A_scan, dense_coefficients, dense_scan
from benchmarks.scan.errors import largest, relative_error
from benchmarks.scan.parallel import FORMS, selective_scan_by
from benchmarks.scan.paths import CPU_KERNEL, CUDA_KERNEL, Path, python_on
from vim_mm.ops import METHODS
from vim_mm.progress import progress

DENSE = 'dense inverse'
DENSE_A = 'dense A'
_USABLE = 0.9  # of the free memory: the estimate is rough, and others need some
Record = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A method by a path: its scan of ``make_inputs``, its coefficients of (steps, A) if any.

    ``levels`` says whether the scan keeps a copy of everything for each doubling of L.
    """

    method: str
    path: str
    device: str
    scan: Callable[[dict[str, Tensor]], Tensor]
    coefficients: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    levels: bool = False


def subject_by(path: Path, method: str) -> Subject:
    return Subject(
        method,
        path.name,
        path.device,
        lambda inputs: path.scan(inputs, method, delta_softplus=True),
        partial(path.coefficients, method=method),
    )


def by_form(form: str, method: str, device: str) -> Subject:
    """A method by a form of the parallel scan."""
    return Subject(
        method,
        f'{form} form',
        device,
        lambda inputs: selective_scan_by(
            form, **inputs, delta_softplus=True, discretization_method=method
        ),
        levels=form == 'Hillis-Steele',
    )


def subjects(device: str, methods: list[str], parallel_scans: bool = False) -> list[Subject]:
    """Every method by every path there is, on the device; the CPU kernel on the CPU."""
    kernels = [CUDA_KERNEL, CPU_KERNEL] if device == 'cuda' else [CPU_KERNEL]
    paths = []
    for path in (*kernels, python_on(device)):
        if missing := path.missing():
            print(f'Not measured: {path.name}, because {missing}')
        else:
            paths.append(path)
    chosen = []
    for method in methods:
        chosen += [subject_by(path, method) for path in paths]
        if method == 'bilinear':
            chosen.append(Subject(method, DENSE, device, dense_scan, dense_coefficients))
            chosen.append(Subject(method, DENSE_A, device, dense_A_scan))
        if parallel_scans and METHODS[method].causal:
            chosen += [by_form(form, method, device) for form in FORMS]
    return chosen


def scan_of(subject: Subject, shape: ScanShape) -> Scan:
    inputs = make_inputs(shape, subject.device)
    grad_out = torch.randn_like(inputs['u'])
    return differentiable_scan(partial(subject.scan, inputs), inputs.values(), grad_out)


def operation_of(function: Callable, device: str, shape: ScanShape) -> Callable[[], Any]:
    steps, A = steps_and_rates(shape, device)
    return lambda: function(steps, A)


def steps_and_rates(shape: ScanShape, device: str) -> tuple[Tensor, Tensor]:
    """dt (B, D, L, 1) after softplus, and a (D, 1, N)."""
    inputs = {name: x.detach() for name, x in make_inputs(shape, device).items()}
    steps = F.softplus(inputs['delta'] + inputs['delta_bias'][:, None])
    return steps[..., None], inputs['A'][:, None]


def free_memory(device: str) -> int:
    """Bytes that can still be allocated."""
    if device == 'cuda':
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]
    lines = pathlib.Path('/proc/meminfo').read_text().splitlines()
    (available,) = (line.split()[1] for line in lines if line.startswith('MemAvailable:'))
    return 1024 * int(available)


def refusal(
    make: Callable[[ScanShape], Callable], shape: ScanShape, device: str, levels: bool = False
) -> str | None:
    """Why ``make(shape)`` cannot be called in the free memory, or None.

    Everything here allocates in proportion to B D L, with ``levels`` to B D L log L, so the peak of
    a part tells that of the whole.
    """
    part = replace(shape, batch=1, dim=min(shape.dim, 8), seqlen=min(shape.seqlen, 64))
    needed = peak_memory(make(part), device) * shape.size / part.size
    if levels:
        needed *= math.log(shape.seqlen + 1) / math.log(part.seqlen + 1)
    free = free_memory(device)
    if needed <= _USABLE * free:
        return None
    return f'needs about {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free'


def part_for_errors(shape: ScanShape) -> ScanShape:
    return replace(shape, batch=1, dim=min(shape.dim, 64))


def operation_errors(subject: Subject, shape: ScanShape) -> dict[str, float]:
    steps, A = steps_and_rates(part_for_errors(shape), subject.device)
    exact = python_on(subject.device).coefficients(steps.double(), A.double(), subject.method)
    pairs = zip(('A_bar', 'beta'), subject.coefficients(steps, A), exact, strict=True)
    return {f'{name}_error': relative_error(value, truth) for name, value, truth in pairs}


def scan_errors(subject: Subject, shape: ScanShape) -> dict[str, float]:
    inputs = make_inputs(part_for_errors(shape), subject.device)
    wide = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    reference = subject_by(python_on(subject.device), subject.method)
    grad_out = torch.randn_like(inputs['u'])
    (out, *grads), (exact, *exact_grads) = (
        (y, *torch.autograd.grad(y, list(given.values()), grad_out.to(y.dtype)))
        for y, given in ((subject.scan(inputs), inputs), (reference.scan(wide), wide))
    )
    pairs = zip(inputs, grads, exact_grads, strict=True)
    _, worst = largest({name: relative_error(g, e) for name, g, e in pairs})
    return {'out_error': relative_error(out, exact), 'gradient_error': worst}


@torch.no_grad()
def cost_of_operation(
    function: Callable, device: str, shape: ScanShape, args: argparse.Namespace
) -> Record:
    """Median seconds and peak bytes of a function of (steps, A); or why it was refused."""
    make = partial(operation_of, function, device)
    if reason := refusal(make, shape, device):
        return {'refused': reason}
    operation = make(shape)
    times = wall_times(operation, args.n_trials, args.seconds)
    cost = {'seconds': median(times), 'trials': len(times)}
    return cost | {'peak_bytes': peak_memory(operation, device)}


def profile_operation(subject: Subject, shape: ScanShape, args: argparse.Namespace) -> Record:
    """Cost and errors of the coefficients; or why they were refused."""
    record = {'method': subject.method, 'path': subject.path}
    record |= cost_of_operation(subject.coefficients, subject.device, shape, args)
    return record if 'refused' in record else record | operation_errors(subject, shape)


def profile_bare(shape: ScanShape, device: str, args: argparse.Namespace) -> list[Record]:
    """Cost and errors of ``BARE``; or why they were refused."""
    steps, A = steps_and_rates(part_for_errors(shape), device)
    records = []
    for (method, path), function in BARE.items():
        record = {'method': method, 'path': path}
        record |= cost_of_operation(function, device, shape, args)
        if 'refused' not in record:
            exact = function(steps.double(), A.double())
            record['value_error'] = relative_error(function(steps, A), exact)
        records.append(record)
    return records


def compare_bare(records: list[Record]) -> str:
    """What the figures of ``BARE`` say."""
    if any('refused' in record for record in records):
        return 'No comparison of the exponential with the inverse: not both fit.'
    exp, inverse = records
    ratio = inverse['seconds'] / exp['seconds']
    return (
        f'The matrix inverse takes {ratio:.1f} times as long as the exponential and '
        f'{inverse["peak_bytes"] / exp["peak_bytes"]:.1f} times its memory.'
    )


def pass_records(scan: Scan, trials: int, seconds: float) -> Record:
    """Median seconds and number of calls of either pass."""
    result = scan.forward()
    record: Record = {}
    passes = {'forward': scan.forward, 'backward': lambda: scan.backward(result)}
    for name, function in passes.items():
        times = wall_times(function, trials, seconds)
        record |= {name: median(times), f'{name}_trials': len(times)}
    return record


def profile_scan(subject: Subject, shape: ScanShape, args: argparse.Namespace) -> Record:
    """Median seconds of either pass, peak bytes of both, and errors; or why they were refused."""
    record = {'method': subject.method, 'path': subject.path}
    make = partial(scan_of, subject)
    if reason := refusal(lambda s: make(s).both, shape, subject.device, subject.levels):
        return record | {'refused': reason}
    scan = make(shape)
    record |= pass_records(scan, args.n_trials, args.seconds)
    steps = shape.batch * shape.seqlen
    record['forward_steps_per_second'] = steps / record['forward']
    record['both_steps_per_second'] = steps / (record['forward'] + record['backward'])
    record['peak_bytes'] = peak_memory(scan.both, subject.device)
    return record | scan_errors(subject, shape)


def table(records: list[Record]) -> str:
    """The records that were not refused, a row each, and the sentences of the others."""
    rows = []
    for record in records:
        if 'refused' not in record:
            row = {name: record[name] for name in ('method', 'path')}
            for name in ('seconds', 'forward', 'backward'):
                if name in record:
                    row['time, ms' if name == 'seconds' else f'{name}, ms'] = figures(
                        1e3 * record[name]
                    )
            for name in ('forward', 'both'):
                if rate := record.get(f'{name}_steps_per_second'):
                    row[f'{name}, ksteps/s'] = figures(1e-3 * rate)
            row['peak, MiB'] = figures(record['peak_bytes'] / 2**20)
            errors = {name: value for name, value in record.items() if name.endswith('_error')}
            row |= {n.replace('_error', ' error'): f'{e:.1e}' for n, e in errors.items()}
            rows.append(row)
    parts = [markdown_table(rows)] if rows else []
    parts += [
        f'Refused: {r["method"]} by {r["path"]} {r["refused"]}; take a smaller --batch or --seqlen'
        for r in records
        if 'refused' in r
    ]
    return '\n\n'.join(parts)


def verdict(records: list[Record], device: str) -> str:
    """What the measured times say of "the Python path can be faster than the kernel"."""
    kernel = (CUDA_KERNEL if device == 'cuda' else CPU_KERNEL).name
    by = {(r['method'], r['path']): r for r in records if 'refused' not in r}
    methods = [m for m in METHODS if {(m, kernel), (m, 'Python')} <= by.keys()]
    if not methods:
        return f'No verdict: needs both the {kernel} and Python for at least one method.'
    lines = ['The seed notes expect Python to be faster for bilinear, and maybe for the others.']
    for key in ('forward', 'backward'):
        slower = {m: by[m, 'Python'][key] / by[m, kernel][key] for m in methods}
        faster = [m for m, ratio in slower.items() if ratio < 1]
        lines.append(
            f'{key.capitalize()}: Python is faster than the {kernel} for {len(faster)} of '
            f'{len(methods)} methods{" (" + ", ".join(faster) + ")" if faster else ""}; it takes '
            f'{min(slower.values()):.1f} to {max(slower.values()):.1f} times as long, '
            f'{geometric_mean(slower.values()):.1f} in geometric mean.'
        )
    if ('bilinear', DENSE) in by and 'bilinear' in methods:
        dense, fused, plain = (by['bilinear', path] for path in (DENSE, kernel, 'Python'))
        ratio = {key: dense[key] / fused[key] for key in ('forward', 'backward', 'peak_bytes')}
        lines.append(
            f'Bilinear by dense inverses takes {ratio["forward"]:.1f} times as long as its kernel '
            f'forward, {ratio["backward"]:.1f} times backward and {ratio["peak_bytes"]:.1f} times '
            f'the memory, and {dense["forward"] / plain["forward"]:.1f} times as long forward as '
            'Python without matrices.'
        )
    total = {key: r['forward'] + r['backward'] for key, r in by.items()}
    wins = [
        f'{method} by {path}'
        for method, path in by
        if method in methods
        and path in ('Python', DENSE)
        and total[method, path] < total[method, kernel]
    ]
    holds = f'for {", ".join(wins)}' if wins else 'for no method here'
    lines.append(f'Forward and backward together, the expectation holds {holds}.')
    return '\n'.join(lines)


def main(args: argparse.Namespace) -> None:
    args.device = choose_device(args.device)
    shape = ScanShape(args.batch, args.dim, args.seqlen, args.dstate)
    facts = environment(args.device)
    print(describe(facts))
    print(f'(B, D, L) = {shape}, N = {shape.dstate}, fp32, on {args.device}')
    both = args.profile_ops == args.profile_scan
    parts = {
        'operations': (args.profile_ops or both, profile_operation, 'A_bar and beta alone'),
        'scans': (args.profile_scan or both, profile_scan, 'Scans'),
    }
    result: Record = {'environment': facts, 'shape': vars(shape)}
    chosen = subjects(args.device, args.methods, args.parallel_scans)
    if parts['operations'][0]:
        result['bare'] = profile_bare(shape, args.device, args)
        print(
            f'\n## The bare operations\n\n{table(result["bare"])}\n\n{compare_bare(result["bare"])}'
        )
    for name, (wanted, profile, title) in parts.items():
        if not wanted:
            continue
        result[name] = []
        wanted_subjects = [
            subject
            for subject in chosen
            if name != 'operations' or subject.coefficients is not None
        ]
        for subject in progress(wanted_subjects, name):
            result[name].append(profile(subject, shape, args))
        print(f'\n## {title}\n\n{table(result[name])}')
    if 'scans' in result:
        result['verdict'] = verdict(result['scans'], args.device)
        print(f'\n## Is Python faster?\n\n{result["verdict"]}')
    if args.out:
        write_text(args.out, json.dumps(result, indent=2))


if __name__ == '__main__':
    end(main, ARGUMENTS)
