"""Times the selective scan, forward and backward apart, beside its peers and its floors.

    python benchmarks/benchmark_scan.py --batch 2 --dim 384 --seqlen 1024 --dstate 16
    python benchmarks/benchmark_scan.py --device cuda --shapes all linear --markdown scan.md
    python benchmarks/benchmark_scan.py --backends native torch reference --methods zoh foh

``--shapes all`` is the standard run: seven shapes of Vim in bf16 and the seed notes' in fp32.
``linear`` is one of them at L from 1024 to 65536. Inputs are those of a Mamba layer
(``benchmarks.measure.timing.make_inputs``), at two mean step sizes: ``--dt-bias -4``, where dt is
about 0.02 and the phi functions are series, and 0, where dt is about 0.7 and closed forms occur.

On CUDA a time is that of the device alone: several calls inside a CUDA graph, divided by their
number. Peers that are installed (mamba_ssm) are timed alike, after their output has been held to
that of our zoh. The floors are measured on the card: one ex2 per (b, d, l, n), and every input read
and every output written once; below some 60 MB data stay in cache between calls, and the second is
no floor. Memory is the peak of forward and backward together beyond the inputs. Medians; tables in
Markdown go to the terminal, progress to its error output.
"""

import argparse
import math
from functools import partial
from itertools import product
from statistics import geometric_mean
from typing import Any

from _command_line import (
    DTYPES,
    Names,
    add_methods,
    add_run_arguments,
    add_sizes,
    end,
    parse_first,
    parser_of,
)

# (B, D, L) and dtype: Vim's, by size and image side (b: batch), and the shape of the seed notes.
TABLE = {
    't512': (8, 384, 1024, 'bf16'),
    't512b32': (32, 384, 1024, 'bf16'),
    't1024': (2, 384, 4096, 'bf16'),
    's512': (8, 768, 1024, 'bf16'),
    't224': (128, 384, 197, 'bf16'),
    't1248': (4, 384, 6084, 'bf16'),
    'seed': (8, 512, 1024, 'bf16'),
    'seed_fp32': (8, 512, 1024, 'fp32'),
}
LINEAR = {f'L{length}': (8, 384, length, 'bf16') for length in (
    1024, 2048, 4096, 8192, 16384, 32768, 65536
)}  # fmt: skip
SETS = {'all': TABLE, 'linear': LINEAR}


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_sizes(parser, 2, 384, 1024, 16)
    parser.add_argument(
        '--shapes',
        nargs='+',
        choices=[*SETS, *TABLE, *LINEAR],
        help='named (B, D, L) and dtype in place of the above, or sets of them',
    )
    parser.add_argument(
        '--dtype',
        choices=DTYPES,
        help='of u, delta, z, B and C; without it fp32, or that of the named shape',
    )
    parser.add_argument(
        '--dt-bias', nargs='+', type=float, default=[-4.0, 0.0], help='means of delta_bias'
    )
    add_methods(parser)
    parser.add_argument(
        '--backends', nargs='+', type=Names('vim_mm.ops', 'BACKENDS'), default=['native']
    )
    add_run_arguments(parser)
    return parser.parse_args()


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

import torch

from benchmarks.measure.floors import Card
from benchmarks.measure.tables import figures, markdown_table, pivot, publish
from benchmarks.measure.timing import (
    Scan,
    ScanShape,
    describe,
    differentiable_scan,
    environment,
    make_inputs,
    pass_times,
    peak_memory,
)
from benchmarks.peers.scans import Peer, installed_peers, peer_version
from benchmarks.scan.errors import relative_error
from vim_mm.ops import selective_scan_fn
from vim_mm.progress import progress

PASSES = ('forward', 'backward')
# A peer that differs more from our zoh, relative to the largest output, computes something else.
AGREEMENT = {'fp32': 1e-4, 'fp16': 5e-3, 'bf16': 3e-2}

Record = dict[str, Any]


def chosen_shapes(args: argparse.Namespace) -> dict[str, ScanShape]:
    """By name, as the command line asks for them."""
    if not args.shapes:
        shapes = {'given': (args.batch, args.dim, args.seqlen, 'fp32')}
    else:
        shapes = {}
        for name in args.shapes:
            shapes |= SETS[name] if name in SETS else {name: (TABLE | LINEAR)[name]}
    return {
        name: ScanShape(*sizes, args.dstate, args.dtype or dtype)
        for name, (*sizes, dtype) in shapes.items()
    }


def scans(
    args: argparse.Namespace, shape: ScanShape, dt_bias: float, peers: dict[str, Peer]
) -> dict[str, Scan]:
    """What is timed at a shape, by the name of its column: peers, then our methods."""
    inputs = make_inputs(shape, args.device, dt_bias)
    grad_out = torch.randn_like(inputs['u'])

    def ours(method: str, backend: str) -> Scan:
        scan = partial(
            selective_scan_fn,
            **inputs,
            delta_softplus=True,
            discretization_method=method,
            backend=backend,
        )
        return differentiable_scan(scan, inputs.values(), grad_out)

    columns = {}
    for name, peer in peers.items():
        columns[name] = peer(inputs, grad_out)
        outputs = [scan.forward()[0] for scan in (ours('zoh', 'native'), columns[name])]
        hold_to(*outputs, name, shape.dtype)
    for backend, method in product(args.backends, args.methods):
        name = method if backend == 'native' else f'{method} {backend}'
        columns[name] = ours(method, backend)
    return columns


def hold_to(ours: torch.Tensor, theirs: torch.Tensor, name: str, dtype: str) -> None:
    """RuntimeError if a peer's output is not that of our zoh."""
    error = relative_error(theirs.float(), ours.float())
    if not error <= AGREEMENT[dtype]:
        raise RuntimeError(f'{name} differs from zoh by {error:.1e} in {dtype}: not comparable')


def measure(args: argparse.Namespace, card: Card | None, peers: dict[str, Peer]) -> list[Record]:
    """One record for each shape, step size and column."""
    records = []
    cases = [*product(chosen_shapes(args).items(), args.dt_bias)]
    for (name, shape), dt_bias in progress(cases, 'shapes'):
        given = {'shape': name, **vars(shape), 'dt_bias': dt_bias}
        if card is not None:
            for label in PASSES:
                given[f'{label}_ex2_floor'] = card.ex2_seconds(shape)
                given[f'{label}_memory_floor'] = card.memory_seconds(shape, label == 'backward')
        for column, scan in scans(args, shape, dt_bias, peers).items():
            times = pass_times(scan, args.device, args.n_trials)
            memory = peak_memory(scan.both, args.device)
            records.append({**given, 'scan': column, **times, 'peak_bytes': memory})
    return records


def by_scan(records: list[Record], key: str, scale: float, per: str | None = None) -> str:
    """A table of ``scale`` times a field, divided by the field ``per``.

    A row for each shape; a column for each scan, after the floors of that field where it has any.
    """

    def scaled(record: Record, name: str) -> str:
        return figures(scale * record[name] / (record[per] if per else 1))

    def head(record: Record) -> dict[str, str]:
        sizes = f'({record["batch"]}, {record["dim"]}, {record["seqlen"]}) {record["dtype"]}'
        cells = {'shape': record['shape'], '(B, D, L)': sizes}
        for limit in ('ex2', 'memory'):
            if (floor := f'{key}_{limit}_floor') in record:
                cells[f'{limit} floor'] = scaled(record, floor)
        return cells

    return pivot(records, head, 'scan', lambda record: scaled(record, key))


def ratios(records: list[Record], key: str, base: str, over_base: bool) -> str:
    """A time of the scan ``base`` over every other's, or the inverse, and a summary below."""
    times = {(r['shape'], r['scan']): r[key] for r in records}
    shapes = [*dict.fromkeys(r['shape'] for r in records)]
    values: dict[str, list[float]] = {}
    for name in dict.fromkeys(r['scan'] for r in records if r['scan'] != base):
        gains = [times[shape, base] / times[shape, name] for shape in shapes]
        values[name] = [1 / gain for gain in gains] if over_base else gains
    table = {shape: {name: v[i] for name, v in values.items()} for i, shape in enumerate(shapes)}
    if len(shapes) > 1:
        for title, summary in (('least', min), ('greatest', max), ('mean', geometric_mean)):
            table[title] = {name: summary(v) for name, v in values.items()}
    return markdown_table(
        [
            {'shape': shape, **{name: f'{value:.2f}' for name, value in row.items()}}
            for shape, row in table.items()
        ]
    )


def report(records: list[Record], peers: list[str]) -> str:
    """All tables in Markdown, those of each step size under its own heading."""
    parts = []
    for dt_bias in dict.fromkeys(r['dt_bias'] for r in records):
        part = [r for r in records if r['dt_bias'] == dt_bias]
        step = math.log1p(math.exp(dt_bias))
        parts.append(f'## dt about {figures(step, 1)} (bias {dt_bias:g}), N = {part[0]["dstate"]}')
        for key in PASSES:
            parts.append(f'{key.capitalize()}, microseconds:\n\n{by_scan(part, key, 1e6)}')
        memory = by_scan(part, 'peak_bytes', 2**-20)
        parts.append(f'Peak memory of forward and backward, MiB:\n\n{memory}')
        columns = {r['scan'] for r in part}
        for base, key in product([*peers, 'zoh'], PASSES):
            if base not in columns or len(columns) < 2:
                continue
            names = (base, 'the column') if base in peers else ('the column', base)
            title = f'{key.capitalize()}, time of {names[0]} over time of {names[1]}'
            table = ratios(part, key, base, over_base=base not in peers)
            parts.append(f'{title} (mean: geometric):\n\n{table}')
    return '\n\n'.join(parts)


def report_linear(records: list[Record]) -> str:
    """Cost of a step over the length: constant where the cost is linear."""
    parts = ['## Cost over the length']
    for dt_bias, key in product(dict.fromkeys(r['dt_bias'] for r in records), PASSES):
        part = [r for r in records if r['dt_bias'] == dt_bias]
        title = f'{key.capitalize()}, nanoseconds per step of the sequence, bias {dt_bias:g}'
        parts.append(f'{title}:\n\n{by_scan(part, key, 1e9, per="seqlen")}')
    return '\n\n'.join(parts)


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads or torch.get_num_threads())
    card = Card.measure() if args.device == 'cuda' else None
    peers = installed_peers() if args.device == 'cuda' else {}
    facts = environment(args.device) | {name: peer_version(name) for name in peers}
    lines = [describe(facts)]
    if card is not None:
        lines.append(
            f'Floors: {card.ex2 / 1e12:.2f} T ex2/s ({card.ex2_source}), '
            f'{card.bandwidth / 1e12:.2f} TB/s (copy of 2 GiB, read and written)'
        )
    records = measure(args, card, peers)
    linear = [r for r in records if r['shape'] in LINEAR]
    others = [r for r in records if r['shape'] not in LINEAR]
    if others:
        lines.append(report(others, [*peers]))
    if linear:
        lines.append(report_linear(linear))
    floors = {} if card is None else vars(card)
    result = {'environment': facts, 'n_trials': args.n_trials, 'units': 'seconds, bytes'}
    publish(args, '\n\n'.join(lines), result | {'card': floors, 'records': records})


if __name__ == '__main__':
    end(main, ARGUMENTS)
