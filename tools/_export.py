"""What the tools that export a model share: arguments, the exported part, the comparison."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from _command_line import add_arguments, positive

if TYPE_CHECKING:  # --help takes no PyTorch
    from mmengine.config import Config
    from torch import nn

BOUND = 1e-4  # of differences from PyTorch, relative to the greatest value of an output


class Source(NamedTuple):
    """What is exported.

    Attributes:
        cfg: The config.
        model: With the weights of the checkpoint.
        part: The name of the part, see ``vim_mm.export.choose_part``.
        module: That part in evaluation mode.
        size: Height and width of the images.
    """

    cfg: 'Config'
    model: 'nn.Module'
    part: str
    module: 'nn.Module'
    size: tuple[int, int]


def add_export_arguments(parser: ArgumentParser, out: str, dynamic: str) -> None:
    """Config, weights, OUT, and what is exported at which sizes.

    Args:
        parser: Gets them.
        out: The help of OUT.
        dynamic: The help of --dynamic.
    """
    add_arguments(parser, launcher=False)
    parser.add_argument('checkpoint', help='path or URL of the weights')
    parser.add_argument('out', type=Path, help=out)
    parser.add_argument(
        '--part',
        choices=['backbone', 'features', 'segmentor'],
        help='features are those of backbone and neck (default: segmentor of MMSegmentation, '
        'features of MMDetection, backbone of MMPretrain)',
    )
    parser.add_argument(
        '--size',
        type=positive,
        nargs=2,
        metavar=('H', 'W'),
        help="of the images, in pixels (default: the backbone's img_size)",
    )
    parser.add_argument('--dynamic', action='store_true', help=dynamic)


def load_source(args: Namespace, device: str = 'cpu') -> Source:
    """Build the model of the arguments, and choose its part."""
    from vim_mm.engine.cli import load_model, read_config
    from vim_mm.export import choose_part, part_of
    from vim_mm.models import VisionMamba

    cfg = read_config(args)
    model = load_model(cfg, args.checkpoint)[0].to(device)
    backbone = getattr(model, 'backbone', None)
    if not isinstance(backbone, VisionMamba):
        found = 'no backbone' if backbone is None else f'the backbone {type(backbone).__name__}'
        raise SystemExit(f'{args.config} has {found}: only models with VisionMamba are exported.')
    part = choose_part(model, cfg.default_scope, args.part)
    height, width = args.size or (
        n * step for n, step in zip(backbone.grid, backbone.patch_embed.strides)
    )
    return Source(cfg, model, part, part_of(model, part).eval(), (height, width))


def report_differences(file: Path, sizes: Sequence[tuple[int, ...]], worst: list[float]) -> None:
    """Print for each size (B, H, W) how far a file is from PyTorch."""
    for size, error in zip(sizes, worst, strict=True):
        print(f'{file}: {" x ".join(map(str, size))}: differs by {error:.1e} of the maximum')
