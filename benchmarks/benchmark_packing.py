"""Times a Vim on a batch of images of mixed sizes: padded, one after the other, and packed.

    python benchmarks/benchmark_packing.py --device cuda --markdown packing.md
    python benchmarks/benchmark_packing.py --images 4 --sides 32 64 --modes infer --n_trials 3

Heights and widths are drawn log-uniformly from ``--sides``, always the same. ``padded`` is one
batch of the largest height and width, which gives other features than the images alone; ``alone``
is a call for each image; ``packed R`` is ``forward_packed`` in R rows, which gives the features of
``alone``. The output is the class token of the last layer. A time is the median of what a caller
waits for, in mode ``graph`` that of the device in a CUDA graph; memory is the peak of a call.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

from _command_line import DTYPES, METHODS, add_run_arguments, end, parse_first, parser_of, positive

MODES = ('infer', 'graph', 'train')


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument('--images', type=positive, default=32, help='(default: %(default)s)')
    parser.add_argument(
        '--sides', type=positive, nargs=2, default=[128, 512], metavar=('LEAST', 'GREATEST')
    )
    parser.add_argument('--rows', type=positive, nargs='+', default=[1, 4, 8, 16])
    parser.add_argument('--arch', choices=['tiny', 'small', 'base'], default='tiny')
    parser.add_argument('--method', type=METHODS, help='(default: zoh)')
    parser.add_argument('--modes', nargs='+', choices=MODES, default=[*MODES])
    parser.add_argument('--dtype', choices=DTYPES, default='bf16')
    parser.add_argument('--seconds', type=float, default=5.0, help='limit on timing one record')
    add_run_arguments(parser)
    args = parser.parse_args()
    if args.sides[0] > args.sides[1]:
        parser.error(f'--sides: expected LEAST up to GREATEST, got {args.sides}')
    return args


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure.tables import figures, markdown_table, publish
from benchmarks.measure.timing import DTYPES as DTYPE_OF
from benchmarks.measure.timing import describe, device_times, environment, peak_memory, wall_times
from vim_mm.models import VisionMamba
from vim_mm.progress import progress

Record = dict[str, Any]


def draw_images(args: argparse.Namespace) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    least, greatest = (math.log(side) for side in args.sides)
    sides = torch.rand(args.images, 2, generator=generator) * (greatest - least) + least
    return [
        torch.randn(3, *size, generator=generator).to(args.device)
        for size in sides.exp().round().int().tolist()
    ]


def ways(
    model: VisionMamba, images: list[Tensor], rows: list[int]
) -> dict[str, Callable[[], Tensor]]:
    """By name, what computes the features of all images, (B, C)."""
    height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
    padded = torch.stack(
        [F.pad(x, (0, width - x.shape[2], 0, height - x.shape[1])) for x in images]
    )
    found: dict[str, Callable[[], Tensor]] = {
        'padded': lambda: model(padded)[0],
        'alone': lambda: torch.cat([model(image[None])[0] for image in images]),
    }
    for count in rows:
        found[f'packed {count}'] = lambda count=count: torch.cat(
            [of_image[0] for of_image in model.forward_packed(images, count)]
        )
    return found


def time_way(
    model: VisionMamba, features: Callable[[], Tensor], mode: str, args: argparse.Namespace
) -> dict[str, float]:
    """Median seconds of a call, and unless it is a graph the peak of memory in bytes."""
    model.train(mode == 'train')
    autocast = torch.autocast(
        args.device, DTYPE_OF[args.dtype], enabled=args.dtype != 'fp32', cache_enabled=False
    )

    def run() -> None:
        with autocast, torch.set_grad_enabled(mode == 'train'):
            out = features()
        if mode == 'train':
            out.float().square().sum().backward()
            model.zero_grad(set_to_none=True)

    if mode == 'graph':
        return {'seconds': median(device_times(lambda: run, args.n_trials))}
    seconds = median(wall_times(run, args.n_trials, args.seconds))
    return {'seconds': seconds, 'peak_bytes': peak_memory(run, args.device)}


def records_of(args: argparse.Namespace, model: VisionMamba, images: list[Tensor]) -> Iterator:
    """One record for each mode and way."""
    all_ways = ways(model, images, args.rows)
    for mode in progress(args.modes, 'modes'):
        if mode == 'graph' and args.device != 'cuda':
            print('left out: graph: CUDA graphs need CUDA', file=sys.stderr)
            continue
        for name, features in all_ways.items():
            yield {'mode': mode, 'way': name, **time_way(model, features, mode, args)}


def report(records: list[Record]) -> str:
    """A row for each way, a column for each mode, with the speed beside padding."""
    rows: dict[str, dict[str, str]] = {}
    padded = {r['mode']: r['seconds'] for r in records if r['way'] == 'padded'}
    for r in records:
        row = rows.setdefault(r['way'], {'': r['way']})
        gain = padded[r['mode']] / r['seconds']
        row[f'{r["mode"]}, ms'] = f'{figures(1e3 * r["seconds"])} ({gain:.2f} times as fast)'
        if 'peak_bytes' in r:
            row[f'{r["mode"]}, MiB'] = figures(r['peak_bytes'] / 2**20)
    return markdown_table([*rows.values()])


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads or torch.get_num_threads())
    images = draw_images(args)
    model = VisionMamba(
        arch=args.arch,
        img_size=224,
        cls_token='middle',
        out_type='cls_token',
        out_feature='norm',
        discretization_method=args.method or 'zoh',
    ).to(args.device)
    grids = [model.patch_embed.grid(tuple(image.shape[1:])) for image in images]
    tokens = sum(h * w + 1 for h, w in grids)
    padded = len(images) * (max(h for h, _ in grids) * max(w for _, w in grids) + 1)
    facts = environment(args.device)
    facts |= {'tokens': tokens, 'tokens with padding': padded}
    records = [*records_of(args, model, images)]
    result = {'environment': facts, 'units': 'seconds, bytes', 'records': records}
    publish(args, f'{describe(facts)}\n\n{report(records)}', result)


if __name__ == '__main__':
    end(main, ARGUMENTS)
