"""Pictures of a trained model: ``python tools/visualize.py WHAT CONFIG CHECKPOINT --out DIR``.

WHAT is one of: predictions (beside the ground truth), methods (predictions of all methods side by
side), features (of layers), receptive-field (effective, of layers), directions (what the forward
and the backward scan contribute). Each writes DIR/WHAT.png.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

from _command_line import add_arguments, add_bands, end, parse_first, positive

PICTURES = ('predictions', 'methods', 'features', 'receptive-field', 'directions')


def parse_args() -> Namespace:
    parser = ArgumentParser(description='Pictures of a trained model, as DIR/WHAT.png.')
    parser.add_argument('what', choices=PICTURES, help='what to draw')
    add_arguments(parser, launcher=False)
    add_bands(parser)
    parser.add_argument('checkpoint', help='path or URL of the weights')
    parser.add_argument(
        '--checkpoints',
        nargs='+',
        default=[],
        metavar='METHOD=FILE',
        help='for methods: weights that were trained with a method, in place of CHECKPOINT',
    )
    parser.add_argument(
        '--images',
        type=positive,
        default=4,
        help='number, of the test set, spread evenly (default: %(default)s)',
    )
    parser.add_argument(
        '--layers',
        type=positive,
        default=4,
        help='number, spread evenly, the last among them (default: %(default)s)',
    )
    parser.add_argument(
        '--score',
        type=float,
        default=0.5,
        help='least score of a detection that is drawn (default: %(default)s)',
    )
    parser.add_argument(
        '--out',
        type=Path,
        default=Path('work_dirs/visualize'),
        metavar='DIR',
        help='for the pictures (default: %(default)s)',
    )
    return parser.parse_args()


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import DATASETS
from torch import Tensor, nn

from benchmarks.pictures import panels
from benchmarks.pictures.plots import plot_predictions
from benchmarks.runs import inspect
from benchmarks.runs.labels import pictures_of, plot_labels, predict_labels
from benchmarks.runs.work_dir import predict_samples, spread_evenly
from vim_mm.engine.cli import load_model, read_config
from vim_mm.engine.reader import keep_loaded
from vim_mm.ops import METHODS
from vim_mm.progress import progress


def load_inputs(cfg: Config, args: Namespace) -> tuple[nn.Module, list[int], Tensor, list]:
    """Backbone, layers to draw, images for the model (B, C, H, W), and each unpadded, uint8 RGB."""
    model, _ = load_model(cfg, args.checkpoint)
    backbone = inspect.find_backbone(model)
    dataset = DATASETS.build(cfg.test_dataloader.dataset)
    loaded = keep_loaded(dataset)
    chosen = spread_evenly(len(dataset), args.images)
    preprocess = model.data_preprocessor
    samples, pictures = [], []
    for i in chosen:
        samples.append(dataset[i])
        rows, columns = samples[-1]['data_samples'].img_shape[:2]
        pictures.append(cv2.resize(loaded.displayed(args.bands), (columns, rows)))
    # One by one, because mmseg takes no batch of several sizes; then padded, as in training.
    each = [preprocess(pseudo_collate([s]), False)['inputs'][0] for s in samples]
    height, width = (max(image.shape[k] for image in each) for k in (1, 2))
    inputs = torch.stack([F.pad(t, (0, width - t.shape[2], 0, height - t.shape[1])) for t in each])
    return backbone, choose_layers(backbone, args.layers), inputs, pictures


def without_padding(maps: Tensor, strides: tuple[int, int], pictures: list) -> list[Tensor]:
    """Maps (B, .., h, w) of padded inputs, cut to the patches that lie in their pictures whole.

    A picture that is smaller than a patch keeps one.
    """
    sizes = [[max(n // s, 1) for n, s in zip(p.shape, strides)] for p in pictures]
    return [m[..., :rows, :columns] for m, (rows, columns) in zip(maps, sizes, strict=True)]


def choose_layers(backbone: nn.Module, count: int) -> list[int]:
    depth = len(backbone.layers)
    return sorted({*np.linspace(0, depth, min(count, depth) + 1)[1:].round().astype(int) - 1})


def draw_predictions(cfg: Config, args: Namespace, path: Path) -> None:
    if cfg.default_scope == 'mmpretrain':
        found, dataset = predict_labels(cfg, args.checkpoint, args.images)
        pictures = pictures_of(dataset, found, args.bands)
        plot_labels(pictures, found, dataset.metainfo.get('classes'), path)
        return
    found = predict_samples(cfg, args.checkpoint, args.images, args.score, bands=args.bands)
    plot_predictions(*found, path)


def draw_methods(cfg: Config, args: Namespace, path: Path) -> None:
    if cfg.default_scope == 'mmpretrain':
        raise SystemExit('methods draws maps of labels or boxes, which a classifier has none of.')
    for pair in args.checkpoints:
        if pair.partition('=')[0] not in METHODS or '=' not in pair:
            raise SystemExit(
                f'--checkpoints: expected METHOD=FILE, METHOD in {[*METHODS]}, got {pair!r}.'
            )
    own = dict(pair.split('=', 1) for pair in args.checkpoints)
    if not own:
        print(
            f'Every method runs with the weights of {args.checkpoint}, whichever trained them; '
            '--checkpoints METHOD=FILE gives it its own.'
        )
    columns, images, ignored = {}, [], []
    # Every method with its own weights; without any, all of them with those of one run.
    for method in progress([*own] or [*METHODS], 'methods'):
        cfg.model.backbone.discretization_method = method
        checkpoint = own.get(method, args.checkpoint)
        samples, classes, palette = predict_samples(
            cfg, checkpoint, args.images, args.score, method not in own, args.bands
        )
        images = [sample.image for sample in samples]
        ignored = [sample.ignored for sample in samples]
        columns.setdefault('ground truth', [sample.truth for sample in samples])
        columns[method] = [sample.prediction for sample in samples]
    panels.plot_methods(images, columns, classes, palette, path, ignored)


def draw_features(cfg: Config, args: Namespace, path: Path) -> None:
    backbone, layers, inputs, pictures = load_inputs(cfg, args)
    maps = {}
    for i, features in zip(layers, inspect.feature_maps(backbone, inputs, layers), strict=True):
        features = without_padding(features, backbone.patch_embed.strides, pictures)
        components = inspect.principal_components(features)
        maps[f'layer {i + 1}'] = [c.permute(1, 2, 0).cpu().numpy() for c in components]
    panels.plot_features(pictures, maps, path)


def draw_receptive_field(cfg: Config, args: Namespace, path: Path) -> None:
    backbone, layers, inputs, _ = load_inputs(cfg, args)
    fields = inspect.receptive_fields(backbone, inputs, layers)
    named = {f'layer {i + 1}': f.cpu().numpy() for i, f in zip(layers, fields, strict=True)}
    panels.plot_receptive_fields(named, backbone.patch_embed.strides, path)


def draw_directions(cfg: Config, args: Namespace, path: Path) -> None:
    backbone, layers, inputs, pictures = load_inputs(cfg, args)
    named = {}
    for i, share in zip(layers, inspect.forward_shares(backbone, inputs, layers), strict=True):
        cut = without_padding(share, backbone.patch_embed.strides, pictures)
        named[f'layer {i + 1}'] = [s.cpu().numpy() for s in cut]
    panels.plot_directions(pictures, named, path)


COMMANDS = {
    'predictions': draw_predictions,
    'methods': draw_methods,
    'features': draw_features,
    'receptive-field': draw_receptive_field,
    'directions': draw_directions,
}


def main(args: Namespace) -> None:
    cfg = read_config(args)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f'{args.what}.png'
    torch.manual_seed(0)
    # On a full disk no half picture has the name.
    with TemporaryDirectory(dir=args.out, prefix='.part') as part:
        drawn = Path(part) / path.name
        COMMANDS[args.what](cfg, args, drawn)
        drawn.replace(path)
    print(path)


if __name__ == '__main__':
    end(main, ARGUMENTS)
