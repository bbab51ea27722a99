"""Holds all methods by all paths to exact values: pass or fail in lines, and in the exit code.

    python tools/analysis/verify_discretization.py
    python tools/analysis/verify_discretization.py --methods foh --batch 1 --dim 64 --seqlen 4097
    python tools/analysis/verify_discretization.py --pictures docs/images --no_checks

Paths: the Python reference, the CPU kernel, and the CUDA kernel where there is a GPU. Four parts:

1. A_bar, beta and their four derivatives against mpmath at 60 digits, at points from z = 0 over
   tiny and moderate to stiff ones; errors are relative to the sum of the sizes of the terms.
2. Small scans, outputs and every gradient, against mpmath: forwards, backwards, stiff, complex.
3. Scans of a size that is worked with (``--batch`` to ``--dstate``), outputs and every gradient,
   against the reference in fp64 on the same rounded inputs, in every dtype.
4. The methods against one another: each pair differs on the same input by every path, or one of
   them is not what it is called.

``--pictures`` also draws what the methods are: the stability regions, errors, responses and
differences of docs/methods.md.

Errors of 2 and 3 are relative to the largest entry of what is expected. Exits with 1 if any line
fails. mpmath, which computes the exact values, comes with PyTorch.
"""

import argparse
import math
import pathlib
from collections.abc import Iterator
from itertools import combinations

from _command_line import add_debug, add_methods, add_sizes, end, parse_first, parser_of


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_methods(parser)
    add_sizes(parser, 2, 16, 1025, 16)  # of part 3
    parser.add_argument(
        '--pictures', type=pathlib.Path, metavar='DIR', help='draw the methods into this folder'
    )
    parser.add_argument('--no_checks', action='store_true', help='the pictures only')
    add_debug(parser)
    args = parser.parse_args()
    if args.no_checks and not args.pictures:
        parser.error('--no_checks leaves nothing to do without --pictures DIR')
    return args


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure.tables import markdown_table
from benchmarks.measure.timing import DTYPES, ScanShape, make_inputs
from benchmarks.pictures.methods import (
    plot_differences,
    plot_errors,
    plot_inputs,
    plot_responses,
    plot_stability,
)
from benchmarks.scan.coefficients import by_kernel, by_python, points
from benchmarks.scan.errors import errors_of, largest, outputs_and_gradients, random_weights
from benchmarks.scan.exact import DIGITS, QUANTITIES, exact_scan, truth
from benchmarks.scan.paths import CPU_KERNEL, CUDA_KERNEL, Path, python_on
from vim_mm.ops import METHODS

PATHS = (python_on('cpu'), CPU_KERNEL, CUDA_KERNEL)
# Largest errors that pass: of coefficients, of scans; a GPU's exponentials are approximate.
COEFFICIENTS = {'fp64': 1e-12, 'fp32': 1e-6}
SCANS = {'fp64': 1e-10, 'fp32': 1e-5, 'fp16': 2e-3, 'bf16': 1e-2}
ON_CUDA = {'fp32': 2e-5}
# Least difference of two methods, relative to the largest output.
APART = 1e-3
# Below this a coefficient may be off by anything: it is subnormal, or its bound would be.
TINY = {'fp64': 1e-300, 'fp32': torch.finfo(torch.float32).tiny}

PICTURED = ScanShape(2, 16, 256, 16, 'fp64')
SMALL = ScanShape(2, 2, 6, 3, 'fp64')
SITUATIONS = {
    'forwards': {},
    'backwards': {'reverse': True},
    'stiff': {'stiff': True},
    'complex': {'is_complex': True},
}


class Report:
    """Prints a line for each comparison and counts those that fail."""

    def __init__(self) -> None:
        self.passed = self.failed = 0

    def line(self, passed: bool, text: str) -> None:
        self.passed += passed
        self.failed += not passed
        print(f'{"pass" if passed else "FAIL"}  {text}', flush=True)

    def error(self, subject: str, errors: dict[str, float], bound: float) -> None:
        """The largest of several errors."""
        name, worst = largest(errors)
        self.line(worst <= bound, f'{subject:44} {worst:8.1e} of {bound:.0e}  ({name})')


def bound(table: dict[str, float], path: Path, dtype: str) -> float:
    """Of a path and dtype."""
    return ON_CUDA.get(dtype, table[dtype]) if path.device == 'cuda' else table[dtype]


def verify_coefficients(report: Report, paths: list[Path], methods: list[str]) -> None:
    """Part 1."""
    for dtype in COEFFICIENTS:
        for method in methods:
            for kind in ('real', 'complex'):
                delta, A = points(method, DTYPES[dtype], is_complex=kind == 'complex')
                expected, scale = truth(method, delta, A)
                for path in paths:
                    if dtype not in path.dtypes():
                        continue
                    limit = bound(COEFFICIENTS, path, dtype)
                    compute = by_kernel if path.compiled else by_python
                    results = compute(delta.to(path.device), A.to(path.device), method)
                    table = torch.stack([*results]).cpu().numpy().T
                    errors = np.abs(table - expected) / (scale + TINY[dtype] / limit)
                    worst = dict(zip(QUANTITIES, errors.max(axis=0).tolist(), strict=True))
                    report.error(f'{method:9} {kind:8} {dtype}  {path.name}', worst, limit)


def small_inputs(stiff: bool = False, is_complex: bool = False) -> dict[str, Tensor]:
    """Of a small scan in fp64, exact in fp32: dt about 0.7, and z to -1e3 where it is stiff."""
    inputs = {name: x.detach() for name, x in make_inputs(SMALL, 'cpu', dt_bias=0.0).items()}
    if stiff:
        inputs['A'] = -torch.tensor([1.0, 40.0, 1000.0]).double().repeat(SMALL.dim, 1)
    if is_complex:
        generator = torch.Generator().manual_seed(1)
        for name in 'ABC':
            imaginary = torch.randn(inputs[name].shape, generator=generator).double()
            inputs[name] = torch.complex(inputs[name], imaginary)
    return inputs


def run(
    path: Path,
    inputs: dict[str, Tensor],
    dtype: str,
    method: str,
    weights: tuple[Tensor, Tensor],
    reverse: bool = False,
) -> dict[str, Tensor]:
    """out, last_state and every gradient, by name, of inputs that are first cast to a dtype."""
    given = {}
    for name, x in inputs.items():
        real = DTYPES[dtype]
        if name in ('A', 'D', 'delta_bias'):
            real = torch.promote_types(real, torch.float32)
        given[name] = x.to(path.device, real.to_complex() if x.is_complex() else real)
    return outputs_and_gradients(path, given, method, weights, reverse)


def verify_small_scans(report: Report, paths: list[Path], methods: list[str]) -> None:
    """Part 2."""
    for situation, options in SITUATIONS.items():
        reverse = options.get('reverse', False)
        inputs = small_inputs(**{k: v for k, v in options.items() if k != 'reverse'})
        weights = random_weights(inputs['u'], inputs['A'])
        for method in methods:
            expected = exact_scan(inputs, method, weights, reverse)
            for path in paths:
                for dtype in ('fp64', 'fp32'):
                    if dtype in path.dtypes():
                        results = run(path, inputs, dtype, method, weights, reverse=reverse)
                        subject = f'{method:9} {situation:9} {dtype}  {path.name}'
                        report.error(
                            subject, errors_of(results, expected), bound(SCANS, path, dtype)
                        )


def rounded(inputs: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """What casting to a dtype makes of the inputs, in fp64."""
    names = ('u', 'delta', 'z', 'B', 'C')
    return {n: x.to(DTYPES[dtype]).double() if n in names else x for n, x in inputs.items()}


def verify_scans(report: Report, paths: list[Path], methods: list[str], shape: ScanShape) -> None:
    """Part 3."""
    inputs = {name: x.detach() for name, x in make_inputs(shape, 'cpu').items()}
    weights = random_weights(inputs['u'], inputs['A'])
    for dtype in SCANS:
        given = rounded(inputs, dtype)
        for method in methods:
            expected = run(PATHS[0], given, 'fp64', method, weights)
            for path in paths:
                # The reference in fp64 is the truth here; part 2 has held it to mpmath.
                if dtype in path.dtypes() and (dtype, path) != ('fp64', PATHS[0]):
                    results = run(path, given, dtype, method, weights)
                    subject = f'{method:9} {dtype}  {path.name}'
                    report.error(subject, errors_of(results, expected), bound(SCANS, path, dtype))


def differences(outputs: dict[str, Tensor]) -> Iterator[tuple[str, str, float, float]]:
    """Of every pair: the largest difference, and the same relative to the larger output."""
    for one, other in combinations(outputs, 2):
        difference = (outputs[one] - outputs[other]).abs().max().item()
        scale = max(outputs[name].abs().max().item() for name in (one, other))
        yield one, other, difference, difference / scale


def verify_pairs(report: Report, paths: list[Path], methods: list[str]) -> None:
    """Part 4."""
    inputs = small_inputs()
    for path in paths:
        given = {name: x.float().to(path.device) for name, x in inputs.items()}
        outputs = {m: path.scan(given, m, delta_softplus=True).double().cpu() for m in methods}
        pairs = [*differences(outputs)]
        if path == paths[0]:
            cells = {m: {'method': m, **dict.fromkeys(methods, '-')} for m in methods}
            for one, other, absolute, relative in pairs:
                cells[one][other], cells[other][one] = f'{absolute:.1e}', f'{relative:.1e}'
            print(markdown_table([*cells.values()]))
            print('above the diagonal max |difference|, below it relative to the larger output\n')
        # A NaN is the least of all.
        one, other, _, least = min(pairs, key=lambda pair: (not math.isnan(pair[3]), pair[3]))
        text = (
            f'{path.name + ": every pair differs":44} {least:8.1e} of {APART:.0e}  ({one}, {other})'
        )
        report.line(least >= APART, text)


def draw(folder: pathlib.Path) -> None:
    """The pictures of docs/methods.md, of all methods."""
    folder.mkdir(parents=True, exist_ok=True)
    names, relative = [*METHODS], {}
    for dt, bias in (('0.02', -4.0), ('0.7', 0.0)):
        inputs = {n: x.detach() for n, x in make_inputs(PICTURED, 'cpu', dt_bias=bias).items()}
        outputs = {m: PATHS[0].scan(inputs, m, delta_softplus=True) for m in names}
        table = np.zeros((len(names), len(names)))
        for one, other, _, difference in differences(outputs):
            row, column = names.index(one), names.index(other)
            table[row, column] = table[column, row] = difference
        relative[f'dt about {dt}'] = table
    plot_differences(relative, names, folder / 'methods_differences.png')
    for name, plot in (
        ('inputs', plot_inputs),
        ('stability', plot_stability),
        ('errors', plot_errors),
        ('responses', plot_responses),
    ):
        plot(folder / f'methods_{name}.png')
    print(f'Pictures: {folder}')


def main(args: argparse.Namespace) -> int:
    if args.pictures:
        draw(args.pictures)
    if args.no_checks:
        return 0
    paths = [path for path in PATHS if path.missing() is None]
    print(f'Paths: {", ".join(path.name for path in paths)}')
    for path in PATHS:
        if path not in paths:
            print(f'Not checked: {path.name}, because {path.missing()}')
    print(
        f'CUDA kernel in fp32, every part: {ON_CUDA["fp32"]:.0e}; other bounds stand in the lines'
    )
    report = Report()
    print(f'\n1. Coefficients and derivatives, against mpmath at {DIGITS} digits')
    verify_coefficients(report, paths, args.methods)
    print(f'\n2. Small scans {SMALL}, N = {SMALL.dstate}, against mpmath at {DIGITS} digits')
    verify_small_scans(report, paths, args.methods)
    shape = ScanShape(args.batch, args.dim, args.seqlen, args.dstate, 'fp64')
    print(f'\n3. Scans {shape}, N = {shape.dstate}, against the reference in fp64')
    verify_scans(report, paths, args.methods, shape)
    if len(args.methods) > 1:
        print('\n4. The methods against one another, dt about 0.7, fp32')
        verify_pairs(report, paths, args.methods)
    print(f'\n{report.passed} passed, {report.failed} failed')
    return 1 if report.failed else 0


if __name__ == '__main__':
    end(main, ARGUMENTS)
