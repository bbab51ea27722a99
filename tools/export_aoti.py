"""Writes a model as a package for C++: ``python tools/export_aoti.py CONFIG CHECKPOINT OUT``."""

import math
from argparse import ArgumentParser, Namespace
from pathlib import Path

from _command_line import add_device, end
from _export import BOUND, add_export_arguments, load_source, report_differences


def parse_args() -> Namespace:
    parser = ArgumentParser(
        description='Compile a model by AOTInductor into a package that C++ runs without Python, '
        'and compare it with PyTorch. A difference above 1e-4 is exit code 1.'
    )
    add_export_arguments(
        parser,
        out='the package to write, a .pt2 file',
        dynamic='leave the batch open, and height and width, which are then multiples of the '
        'distance of patches; with neck or head, of 32 pixels as well',
    )
    add_device(parser, default='cpu')
    parser.add_argument(
        '--repeats',
        type=int,
        default=0,
        metavar='N',
        help='time N calls of PyTorch and of the package as well, and on a GPU of a CUDA graph of '
        'PyTorch (default: none)',
    )
    args = parser.parse_args()
    if args.out.suffix != '.pt2':
        parser.error(f'OUT: a package is a .pt2 file, got {args.out}')
    return args


def main(args: Namespace) -> int:
    import torch

    from vim_mm.export import differences, export_graph, load_package, write_package
    from vim_mm.progress import working

    source = load_source(args, args.device)
    module, embed = source.module, source.model.backbone.patch_embed
    height, width = source.size
    sizes, multiple = [(1, height, width)], None
    if args.dynamic:
        # An exported pooling has no remainder; MMDetection pads to 32 pixels as well.
        multiple = math.lcm(embed.stride, 1 if source.part == 'backbone' else 32)
        if height % multiple or width % multiple:
            raise SystemExit(
                f'--dynamic: height and width of --size must be multiples of {multiple}, got '
                f'{height} x {width}.'
            )
        # An example of other sizes: what is equal in it might become equal in the graph.
        sizes.append((2, height + 2 * multiple, width + 3 * multiple))
    images = [torch.randn(b, embed.in_channels, h, w, device=args.device) for b, h, w in sizes]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with working(f'exporting {args.out}'):
        write_package(export_graph(module, images[-1], multiple), args.out, multiple)
    worst = differences(module, load_package(args.out), images)
    report_differences(args.out, sizes, worst)
    if args.repeats:
        report_times(module, args.out, images[0], args.repeats)
    return int(not all(error <= BOUND for error in worst))


def report_times(module, path: Path, images, repeats: int) -> None:
    """Print how long PyTorch, the package and, on a GPU, a CUDA graph of PyTorch take."""
    from functools import partial
    from statistics import median

    import torch

    from benchmarks.measure.timing import wall_times, warm_up
    from vim_mm import acceleration
    from vim_mm.export import load_package

    calls = {'eager': partial(module, images), 'package': partial(load_package(path), images)}
    shape = ' x '.join(map(str, images.shape))
    with torch.no_grad():
        if images.is_cuda:
            warm_up(calls['eager'])
            graph, _ = acceleration.record(calls['eager'])
            calls['graph'] = graph.replay
        for name, call in calls.items():
            times = wall_times(call, repeats)
            print(f'{name}: {1000 * median(times):.2f} ms of {shape}, median of {len(times)} calls')


if __name__ == '__main__':
    end(main, parse_args())
