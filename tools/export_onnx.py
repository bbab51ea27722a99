"""Writes a model as ONNX: ``python tools/export_onnx.py CONFIG CHECKPOINT OUT [--dynamic]``."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from _command_line import add_arguments, end

BOUND = 1e-4  # of differences from PyTorch, relative to the greatest value of an output


def parse_args() -> Namespace:
    parser = ArgumentParser(
        description='Write a model as an ONNX file of standard operators, and compare it with '
        'PyTorch in onnxruntime. A difference above 1e-4 is exit code 1.'
    )
    add_arguments(parser, launcher=False)
    parser.add_argument('checkpoint', help='path or URL of the weights')
    parser.add_argument('out', type=Path, help='the file to write')
    parser.add_argument(
        '--part',
        choices=['backbone', 'features', 'segmentor'],
        help='features are those of backbone and neck (default: segmentor of MMSegmentation, '
        'features of MMDetection, backbone of MMPretrain)',
    )
    parser.add_argument(
        '--size',
        type=int,
        nargs=2,
        metavar=('H', 'W'),
        help="of the images, in pixels (default: the backbone's img_size)",
    )
    parser.add_argument(
        '--dynamic', action='store_true', help='leave batch, height and width of the images open'
    )
    parser.add_argument(
        '--int8',
        action='store_true',
        help='also write OUT with .int8 before its suffix: linear layers in 8 bits',
    )
    return parser.parse_args()


def main(args: Namespace) -> int:
    import torch

    from vim_mm.engine.cli import load_model, read_config
    from vim_mm.export import differences, export_onnx, part_of, quantize

    cfg = read_config(args)
    model = load_model(cfg, args.checkpoint)[0].cpu()
    module = part_of(model, cfg.default_scope, args.part).eval()
    embed = model.backbone.patch_embed
    height, width = args.size or (n * embed.stride for n in model.backbone.grid)
    sizes = [(1, height, width)]
    example = sizes[0]
    if args.dynamic:
        # An example of other sizes: what is equal in it might become equal in the graph.
        example = (2, height + 2 * embed.stride, width + 3 * embed.stride)
        sizes += [example, (3, height + embed.stride // 2, 2 * width)]
    images = [torch.randn(b, embed.in_channels, h, w) for b, h, w in sizes]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    export_onnx(module, images[sizes.index(example)], args.out, args.dynamic)
    worst = differences(module, args.out, images)
    for size, error in zip(sizes, worst, strict=True):
        print(f'{args.out}: {" x ".join(map(str, size))}: differs by {error:.1e} of the maximum')
    if args.int8:
        small = args.out.with_suffix(f'.int8{args.out.suffix}')
        quantize(args.out, small)
        for size, error in zip(sizes, differences(module, small, images), strict=True):
            print(f'{small}: {" x ".join(map(str, size))}: differs by {error:.1e} of the maximum')
    return int(not max(worst) <= BOUND)


if __name__ == '__main__':
    end(main, parse_args())
