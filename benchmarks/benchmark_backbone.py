"""Times whole backbones: ours by method, beside public Vim and DeiT, over the size of the image.

    python benchmarks/benchmark_backbone.py --device cuda --markdown backbone.md --picture b.png
    python benchmarks/benchmark_backbone.py --images 64x1 --modes infer train --n_trials 3

``--images`` takes SIDExBATCH, or names of sets of them: ``standard``, the sizes of classification,
segmentation and detection; ``sweep``, sides from 224 to 4096 at batch 2, which ``--picture`` draws
and whose crossover points, the sides from which ours are cheaper than timm's, are printed.

Backbones are built for the size of the image, run under autocast and return all tokens after the
last norm; DeiT, on PyTorch's fused attention, and
ConvNeXt are timm's. Public Vim is written anew over the kernels
of mamba_ssm and causal_conv1d (``peers/published_vim.py``), with the class token of its
release in the middle and without; its output in float32 is held to that of our ``zoh`` first. What
cannot run here is left out, and said.

A time is the median of what a caller waits for, in a CUDA graph that of the device. Memory is the
peak of a call, parameters and images included; a training step is forward, backward and the
release of gradients. Tables in Markdown go to the terminal, what is left out to its error output.
A run that is interrupted still writes what it has measured.
"""

import argparse
import gc
import json
import math
import re
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from _command_line import DTYPES, METHODS, Names, add_run_arguments, end, parse_first, parser_of

SETS = {
    'standard': [(224, 64), (512, 8), (1024, 2), (1248, 2)],
    'sweep': [(side, 2) for side in (224, 384, 512, 768, 1024, 1248, 1536, 2048, 3072, 4096)],
}

Size = tuple[int, int]


def image_sizes(word: str) -> list[Size]:
    """What one word of ``--images`` means, as (side, batch)."""
    if word in SETS:
        return SETS[word]
    match = re.fullmatch(r'(\d+)x(\d+)', word)
    if match is None:
        raise argparse.ArgumentTypeError(f'expected SIDExBATCH or one of {[*SETS]}, got {word!r}')
    return [(int(match[1]), int(match[2]))]


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        '--images',
        nargs='+',
        type=image_sizes,
        default=[SETS['standard'], SETS['sweep']],
        metavar='SIDExBATCH',
        help=f'sizes, or names of sets of them: {[*SETS]} (default: all)',
    )
    parser.add_argument('--arch', choices=['tiny', 'small', 'base'], default='tiny')
    parser.add_argument(
        '--methods', nargs='*', type=METHODS, default=['zoh', 'bilinear'], metavar='METHOD'
    )
    peers = Names('benchmarks.peers.backbones', 'PEERS')
    parser.add_argument('--peers', nargs='*', type=peers, default=peers, metavar='PEER')
    parser.add_argument(
        '--modes',
        nargs='+',
        type=Names('benchmarks.peers.backbones', 'MODES'),
        metavar='MODE',
        default=['infer', 'graph', 'train', 'train_cp'],
        help='those of torch.compile take a minute of compilation each and are not in the default',
    )
    parser.add_argument(
        '--dtype', choices=DTYPES, default='bf16', help='of autocast; fp32 is without'
    )
    add_run_arguments(parser)
    parser.add_argument('--seconds', type=float, default=10.0, help='limit on timing one record')
    parser.add_argument('--picture', type=Path, help='draw the sweep into this file')
    args = parser.parse_args()
    args.sizes = [*dict.fromkeys(size for sizes in args.images for size in sizes)]
    if not (args.methods or args.peers):
        parser.error('nothing to measure: no --methods and no --peers')
    return args


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

import torch

from benchmarks.measure.tables import figures, markdown_table, pivot, write_text
from benchmarks.measure.timing import describe, environment
from benchmarks.peers.backbones import (
    GRAPHS,
    MODES,
    PEERS,
    PUBLIC_VIM,
    TIMM_PEERS,
    Contender,
    Workload,
    absence,
    contenders,
    hold_to,
    measure,
    vim,
)
from benchmarks.peers.scans import peer_version
from benchmarks.pictures.plots import Line, plot_lines
from vim_mm.progress import progress

# Field of a record, factor to the unit of the table, and the table's title.
TIME = ('seconds', 1e3, 'Milliseconds')
MEMORY = ('peak_bytes', 2**-20, 'Peak memory in MiB')

Record = dict[str, Any]


def name_of(size: Size) -> str:
    return f'{size[0]} x {size[0]}, batch {size[1]}'


def skip_reason(contender: Contender, mode: str, device: str) -> str | None:
    """Why a backbone is not measured in a mode, or None."""
    if mode not in contender.modes:
        return f'it has no such mode ({MODES[mode]})'
    if mode in GRAPHS and device != 'cuda':
        return 'CUDA graphs need CUDA'
    return None


def present(args: argparse.Namespace) -> dict[str, Contender]:
    """What to measure; what is absent is said and left out, and a peer is held to our zoh."""
    chosen = {}
    for name, contender in contenders(args.arch, args.methods, args.peers).items():
        if (reason := absence(name, args.device)) is not None:
            print(f'left out: {name}, {reason}', file=sys.stderr)
            continue
        if name in PUBLIC_VIM:
            images = torch.randn(2, 3, 96, 96, device=args.device)
            ours = vim(args.arch, 'zoh', 96, cls_token=PUBLIC_VIM[name])
            pair = ours, contender.build(96, False)
            error = hold_to(*(model.to(args.device) for model in pair), images)
            print(f'{name} differs from our zoh by {error:.1e} in float32', file=sys.stderr)
        chosen[name] = contender
    return chosen


def run(args: argparse.Namespace) -> Iterator[Record]:
    """One record for each size, backbone and mode."""
    said = set()
    chosen = present(args)
    cases = [*product(args.sizes, chosen.items(), args.modes)]
    for (side, batch), (name, contender), mode in progress(cases, 'records'):
        images = torch.randn(batch, 3, side, side, device=args.device)
        reason = skip_reason(contender, mode, args.device)
        if reason is not None:
            if (name, mode) not in said:
                print(f'left out: {name}, {mode}: {reason}', file=sys.stderr)
            said.add((name, mode))
            continue
        model = contender.build(side, mode == 'train_cp').to(args.device)
        workload = Workload(model, images, args.dtype)
        given = {'side': side, 'batch': batch, 'model': name, 'mode': mode}
        try:
            result = measure(workload, mode, args.n_trials, args.seconds)
            yield given | {'layers': contender.layers} | result
        except torch.OutOfMemoryError:
            print('left out: out of memory', file=sys.stderr)
        del model, workload
        gc.collect()  # a compiled model holds itself in cycles


def size_of(record: Record) -> Size:
    return record['side'], record['batch']


def image(record: Record) -> dict[str, str]:
    """The cell that names the case of a record."""
    return {'image': name_of(size_of(record))}


def by_model(records: list[Record], key: str, scale: float) -> str:
    """A table of ``scale`` times a field: a row for each size, a column for each backbone."""
    return pivot(records, image, 'model', lambda r: figures(scale * r[key]))


def ratios(records: list[Record], key: str, peer: str) -> str:
    """That of the peer over that of each other: above 1 where the peer is slower or larger."""
    theirs = {size_of(r): r[key] for r in records if r['model'] == peer}
    ours = [r for r in records if r['model'] not in PEERS and size_of(r) in theirs]
    return pivot(ours, image, 'model', lambda r: f'{theirs[size_of(r)] / r[key]:.2f}')


def host_table(records: list[Record]) -> str:
    """Launches a layer, and microseconds of the host a layer until a call returns."""
    return markdown_table(
        [
            image(r)
            | {
                'model': r['model'],
                'launches a layer': f'{r["launches"] / r["layers"]:.1f}',
                'host us a layer': f'{1e6 * r["host_seconds"] / r["layers"]:.0f}',
            }
            for r in records
        ]
    )


def crossover(sides: list[int], ours: list[float], theirs: list[float]) -> float | None:
    """The side from which ours cost less, up to the largest; None if they cost more there.

    Between two sides costs are taken for powers of the side. The smallest side stands for itself
    and all below.
    """
    gains = [math.log(b / a) for a, b in zip(ours, theirs, strict=True)]
    if gains[-1] <= 0:
        return None
    last = max((i for i, gain in enumerate(gains) if gain <= 0), default=None)
    if last is None:
        return float(sides[0])
    low, high = (math.log(side) for side in sides[last : last + 2])
    share = -gains[last] / (gains[last + 1] - gains[last])
    return math.exp(low + share * (high - low))


def sweeps(records: list[Record]) -> list[Record]:
    """Records at the one batch that has the most sides, by side."""
    batches = {batch: {r['side'] for r in records if r['batch'] == batch} for batch in
               dict.fromkeys(r['batch'] for r in records)}  # fmt: skip
    batch = max(batches, key=lambda b: len(batches[b]))
    return sorted((r for r in records if r['batch'] == batch), key=lambda r: r['side'])


def curves(records: list[Record], mode: str, key: str) -> dict[str, dict[int, float]]:
    """By backbone and side, a field in one mode."""
    found: dict[str, dict[int, float]] = {}
    for r in records:
        if r['mode'] == mode and key in r:
            found.setdefault(r['model'], {})[r['side']] = r[key]
    return found


def crossovers(records: list[Record]) -> str:
    """From which side ours are cheaper than timm's, by mode; empty with one side."""
    part, lines = sweeps(records), []
    fields = [(mode, TIME) for mode in MODES] + [('infer', MEMORY), ('train', MEMORY)]
    for (mode, (key, _, unit)), peer in product(fields, TIMM_PEERS):
        found = curves(part, mode, key)
        theirs = found.get(peer, {})
        for name, ours in found.items():
            sides = [side for side in ours if side in theirs]
            if name in PEERS or len(sides) < 2:
                continue
            side = crossover(sides, [ours[s] for s in sides], [theirs[s] for s in sides])
            text = f'not up to {sides[-1]}' if side is None else f'from {side:.0f} on'
            if side == sides[0]:
                text = f'at every side from {sides[0]} on'
            what = f'{MODES[mode]}: {unit}'
            lines.append({'what': what, 'ours': name, 'peer': peer, 'ours are below': text})
    return markdown_table(lines)


def report(records: list[Record]) -> str:
    """All tables in Markdown."""
    parts = []
    for mode in MODES:
        part = [r for r in records if r['mode'] == mode]
        if not part:
            continue
        parts.append(f'## {MODES[mode][0].upper() + MODES[mode][1:]}')
        for key, scale, unit in (TIME, MEMORY):
            if not all(key in r for r in part):
                continue
            parts.append(f'{unit}:\n\n{by_model(part, key, scale)}')
            for peer in PEERS:
                if table := ratios(part, key, peer):
                    parts.append(f'{unit}, {peer} over the column:\n\n{table}')
        if all('launches' in r for r in part):
            parts.append(f'Host:\n\n{host_table(part)}')
    if table := crossovers(records):
        parts.append(f'## Where ours cost less\n\n{table}')
    return '\n\n'.join(parts)


def draw(records: list[Record], path: Path) -> None:
    """Latency and memory over the side of the image."""
    part = sweeps(records)
    inference = next((m for m in (*GRAPHS[::-1], 'infer') if curves(part, m, TIME[0])), 'infer')
    panels = {}
    for mode, (key, scale, unit) in (
        (inference, TIME), ('train', TIME), ('train', MEMORY),
    ):  # fmt: skip
        found = curves(part, mode, key)
        if found:
            lines = [Line(n, [*of], [scale * v for v in of.values()]) for n, of in found.items()]
            panels[f'{MODES[mode]}: {unit}'] = lines
    path.parent.mkdir(parents=True, exist_ok=True)
    plot_lines(panels, f'side of the image in pixels, batch {part[0]["batch"]}', path)


def facts_of(host: dict, records: list[Record]) -> dict:
    """What the figures depend on: the host and the peers that took part."""
    if not any(r['model'] in PUBLIC_VIM for r in records):
        return host
    return host | {name: peer_version(name) for name in ('mamba_ssm', 'causal_conv1d')}


def save(args: argparse.Namespace, host: dict, records: list[Record]) -> None:
    given = {'arch': args.arch, 'dtype': args.dtype, 'n_trials': args.n_trials}
    result = {'environment': facts_of(host, records), **given, 'units': 'seconds, bytes'}
    write_text(args.out, json.dumps(result | {'records': records}, indent=2))


def show(args: argparse.Namespace, host: dict, records: list[Record]) -> None:
    """The tables to the terminal, and what else was asked for."""
    head = describe(facts_of(host, records))
    tables = f'{head}, {args.arch}, {args.dtype}\n\n{report(records)}'
    print(tables)
    if args.markdown:
        write_text(args.markdown, tables)
    if args.picture:
        draw(records, args.picture)


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads or torch.get_num_threads())
    host = environment(args.device)
    records = []
    try:
        for record in run(args):
            records.append(record)
            if args.out:
                save(args, host, records)  # each time: a run may be killed
    finally:
        if records:
            show(args, host, records)


if __name__ == '__main__':
    end(main, ARGUMENTS)
