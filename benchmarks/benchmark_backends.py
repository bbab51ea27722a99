"""Times the backends of the scan side by side, then a whole Vim on each.

    python benchmarks/benchmark_backends.py --device cuda --markdown backends.md
    python benchmarks/benchmark_backends.py --backends torch reference --shapes small --images

Shapes are those of benchmark_scan.py, and ``small`` and ``seed_small`` for a CPU. All ``--shapes``
are timed in ``--method``, and every method at the first of them. A time of a scan is that of
``benchmarks.measure.timing.pass_times``: on CUDA of the device alone. Tables have in brackets the
time over that of the first backend. What cannot run here is left out, and said.
"""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

from _command_line import DTYPES, METHODS, Names, add_run_arguments, end, parse_first, parser_of

BACKENDS = Names('vim_mm.ops', 'BACKENDS')
MODES = ('infer', 'graph', 'train')


def image_sizes(word: str) -> list[tuple[int, int]]:
    """What one word of ``--images`` means, as (side, batch)."""
    return import_module('benchmarks.benchmark_backbone').image_sizes(word)


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        '--backends', nargs='+', type=BACKENDS, default=['native', 'triton', 'torch']
    )
    parser.add_argument('--shapes', nargs='*', metavar='SHAPE', help='(default: benchmark_scan.py)')
    parser.add_argument('--method', type=METHODS, help='(default: zoh)')
    parser.add_argument('--methods', nargs='*', type=METHODS, default=METHODS, metavar='METHOD')
    parser.add_argument(
        '--images', nargs='*', type=image_sizes, default=[[(512, 8)]], metavar='SIDExBATCH'
    )
    parser.add_argument('--arch', choices=['tiny', 'small', 'base'], default='tiny')
    parser.add_argument('--modes', nargs='+', choices=MODES, default=[*MODES])
    parser.add_argument('--dtype', choices=DTYPES, default='bf16')
    parser.add_argument('--seconds', type=float, default=5.0, help='limit on timing one record')
    add_run_arguments(parser)
    args = parser.parse_args()
    args.sizes = [size for sizes in args.images for size in sizes]
    return args


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

import torch

from benchmarks.benchmark_scan import TABLE
from benchmarks.measure.tables import figures, pivot, publish
from benchmarks.measure.timing import DTYPES as DTYPE_OF
from benchmarks.measure.timing import (
    ScanShape,
    describe,
    differentiable_scan,
    environment,
    make_inputs,
    pass_times,
)
from benchmarks.peers.backbones import Workload, measure, vim
from vim_mm.ops import path_of, selective_scan_fn
from vim_mm.progress import progress

SHAPES = {name: ScanShape(*sizes, dtype=dtype) for name, (*sizes, dtype) in TABLE.items()} | {
    'small': ScanShape(2, 384, 1024, dtype='fp32'),
    'seed_small': ScanShape(32, 60, 512, dtype='fp32'),
}
Record = dict[str, Any]


def present(names: list[str], device: str, dtype: str) -> list[str]:
    """Those of the backends that take tensors of that device and dtype; others are said."""
    chosen = []
    for name in names:
        path = path_of(device, DTYPE_OF[dtype], backend=name)
        if path.name == 'error':
            print(f'left out: {name}: {path.reason}', file=sys.stderr)
        else:
            chosen.append(name)
    return chosen


def scan_records(args: argparse.Namespace) -> Iterator[Record]:
    """One record for each shape, method and backend."""
    cases = [(shape, args.method) for shape in args.shapes]
    cases += [(args.shapes[0], m) for m in args.methods if m != args.method]
    for name, method in progress(cases, 'scans'):
        shape = SHAPES[name]
        inputs = make_inputs(shape, args.device)
        grad_out = torch.randn_like(inputs['u'])
        for backend in present(args.backends, args.device, shape.dtype):
            scan = differentiable_scan(
                partial(
                    selective_scan_fn,
                    **inputs,
                    delta_softplus=True,
                    discretization_method=method,
                    backend=backend,
                ),
                inputs.values(),
                grad_out,
            )
            times = pass_times(scan, args.device, args.n_trials)
            yield {'shape': name, 'method': method, 'backend': backend, **vars(shape), **times}


def model_records(args: argparse.Namespace) -> Iterator[Record]:
    """One record for each image, backend and mode of a whole Vim."""
    for side, batch in progress(args.sizes, 'models'):
        images = torch.randn(batch, 3, side, side, device=args.device)
        for backend in present(args.backends, args.device, args.dtype):
            model = vim(args.arch, args.method, side, ssm_cfg=dict(backend=backend))
            model.to(args.device)
            workload = Workload(model, images, args.dtype)
            for mode in args.modes:
                if mode == 'graph' and args.device != 'cuda':
                    continue
                result = measure(workload, mode, args.n_trials, args.seconds)
                image = f'{side} x {side}, batch {batch}'
                yield {'image': image, 'backend': backend, 'mode': mode, **result}


def compare(records: list[Record], case: tuple[str, ...], key: str, scale: float) -> str:
    """A row for each case, a column for each backend, with its time over the first one's."""
    first: dict[tuple, Record] = {}

    def cell(record: Record) -> str:
        base = first.setdefault(tuple(record[name] for name in case), record)
        ratio = '' if base is record else f' ({record[key] / base[key]:.2f})'
        return figures(scale * record[key]) + ratio

    return pivot(records, lambda r: {name: r[name] for name in case}, 'backend', cell)


def report(scans: list[Record], models: list[Record]) -> str:
    """All tables in Markdown."""
    parts = []
    if scans:
        for record in scans:
            sizes = f'({record["batch"]}, {record["dim"]}, {record["seqlen"]})'
            record['(B, D, L)'] = f'{sizes} {record["dtype"]}'
        for key in ('forward', 'backward'):
            table = compare(scans, ('shape', '(B, D, L)', 'method'), key, 1e6)
            parts.append(f'{key.capitalize()}, microseconds:\n\n{table}')
    if models:
        table = compare(models, ('image', 'mode'), 'seconds', 1e3)
        parts.append(f'Vim, milliseconds:\n\n{table}')
        if eager := [r for r in models if 'launches' in r]:
            table = compare(eager, ('image', 'mode'), 'launches', 1)
            parts.append(f'Launches:\n\n{table}')
            table = compare(eager, ('image', 'mode'), 'host_seconds', 1e3)
            parts.append(f'Milliseconds of the host:\n\n{table}')
    return '\n\n'.join(parts)


def main(args: argparse.Namespace) -> None:
    args.method = args.method or 'zoh'
    args.shapes = [*TABLE] if args.shapes is None else args.shapes
    if unknown := {*args.shapes} - {*SHAPES}:
        raise SystemExit(f'--shapes: {sorted(unknown)} are not in {[*SHAPES]}')
    torch.set_num_threads(args.threads or torch.get_num_threads())
    facts = environment(args.device)
    head = describe(facts)
    scans = [*scan_records(args)] if args.shapes else []
    print(f'{head}\n\n{report(scans, [])}', flush=True)
    models = [*model_records(args)]
    result = {'environment': facts, 'units': 'seconds, bytes', 'records': scans + models}
    publish(args, f'{head}\n\n{report(scans, models)}', result)


if __name__ == '__main__':
    end(main, ARGUMENTS)
