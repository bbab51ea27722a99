"""Draws predictions over pictures: ``python tools/infer.py CONFIG CHECKPOINT INPUT``."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from _command_line import add_arguments, end

if TYPE_CHECKING:  # --help takes no PyTorch
    from mmengine.config import Config
    from mmengine.dataset import Compose
    from mmengine.structures import BaseDataElement
    from mmengine.visualization import Visualizer
    from torch import nn

LEAST_SIDE = 224  # pixels of an overlay that names a class
PICTURES = {'.bmp', '.jpeg', '.jpg', '.png', '.tif', '.tiff', '.webp'}


def parse_args() -> Namespace:
    parser = ArgumentParser(description='Draw predictions over a picture, or all in a folder.')
    add_arguments(parser, launcher=False)
    parser.add_argument('checkpoint', help='path or URL of the weights')
    parser.add_argument('input', type=Path, help='a picture, or a folder of pictures')
    parser.add_argument(
        '--out', type=Path, default=Path('work_dirs/infer'), metavar='DIR', help='for the overlays'
    )
    return parser.parse_args()


def find_pictures(path: Path) -> list[Path]:
    """The picture, or those in the folder, sorted by name."""
    if not path.exists():
        raise SystemExit(f'There is no {path}.')
    candidates = sorted(path.iterdir()) if path.is_dir() else [path]
    pictures = [p for p in candidates if p.suffix.lower() in PICTURES]
    if not pictures:
        raise SystemExit(f'{path} holds no picture ({", ".join(sorted(PICTURES))}).')
    return pictures


def build_model(cfg: 'Config', checkpoint: str) -> 'nn.Module':
    """The model with the checkpoint's weights, all of which must fit, ready for prediction."""
    from vim_mm.engine.cli import load_model
    from vim_mm.engine.provenance import check_switches

    model, loaded = load_model(cfg, checkpoint)
    for line in check_switches(model, loaded, checkpoint, cfg.allow_mismatch):
        print(line)
    return model


def build_pipeline(cfg: 'Config') -> 'Compose':
    """The transforms of testing, without those that look for annotations."""
    from mmengine.dataset import Compose

    transforms = cfg.test_dataloader.dataset.pipeline
    return Compose([t for t in transforms if 'LoadAnnotations' not in t.type])


def build_visualizer(cfg: 'Config') -> 'Visualizer':
    """The config's visualizer, with names and colours of the test set's classes."""
    from mmengine.registry import DATASETS, VISUALIZERS

    dataset = cfg.test_dataloader.dataset
    with DATASETS.switch_scope_and_registry(cfg.default_scope) as registry:
        class_names = registry.get(dataset.type).METAINFO
    visualizer = VISUALIZERS.build({**cfg.visualizer, 'vis_backends': []})
    visualizer.dataset_meta = {**class_names, **dataset.get('metainfo', {})}
    return visualizer


def read_sample(pipeline: 'Compose', picture: Path) -> dict:
    """The picture as the model takes it; data sets without files have no transform that reads."""
    import mmcv

    sample = dict(img_path=str(picture), img_id=0)
    if 'LoadImageFromFile' not in str(pipeline):
        sample['img'] = mmcv.imread(picture, channel_order='rgb')
    return pipeline(sample)


def draw(
    visualizer: 'Visualizer', picture: Path, prediction: 'BaseDataElement', overlay: Path
) -> None:
    """Write the picture with the prediction over it."""
    import mmcv

    image = mmcv.imread(picture, channel_order='rgb')
    if 'pred_label' in prediction:
        size = max(LEAST_SIDE, *image.shape[:2])
        visualizer.visualize_cls(
            image, prediction, draw_gt=False, resize=size, out_file=str(overlay)
        )
        return
    visualizer.add_datasample(picture.name, image, prediction, draw_gt=False, out_file=str(overlay))


def main(args: Namespace) -> None:
    import torch
    from mmengine.dataset import pseudo_collate
    from tqdm import tqdm

    from vim_mm.engine.cli import read_config

    cfg = read_config(args)
    pictures = find_pictures(args.input)
    model = build_model(cfg, args.checkpoint)
    pipeline, visualizer = build_pipeline(cfg), build_visualizer(cfg)
    failed = []
    for picture in tqdm(pictures, desc='pictures', disable=None):  # on a terminal alone
        try:
            data = read_sample(pipeline, picture)
        except Exception as error:  # whatever a transform makes of a file that is no picture
            reason = ' '.join(str(error).split()) or type(error).__name__
            failed.append(f'{picture}: {reason}')
            continue
        with torch.no_grad():
            (prediction,) = model.test_step(pseudo_collate([data]))
        overlay = args.out / f'{picture.name}.png'
        draw(visualizer, picture, prediction, overlay)
        tqdm.write(str(overlay))
    if failed:
        print(*failed, sep='\n', file=sys.stderr)
        raise SystemExit(f'{len(failed)} of {len(pictures)} pictures could not be read.')


if __name__ == '__main__':
    end(main, parse_args())
