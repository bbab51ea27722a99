"""Draws predictions over pictures: ``python tools/infer.py CONFIG CHECKPOINT INPUT``."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from _command_line import add_arguments, add_speed_arguments, end

if TYPE_CHECKING:  # --help takes no PyTorch
    from mmengine.config import Config
    from mmengine.dataset import Compose
    from mmengine.structures import BaseDataElement
    from mmengine.visualization import Visualizer
    from torch import nn

LEAST_SIDE = 224  # pixels of an overlay that names a class


def parse_args() -> Namespace:
    parser = ArgumentParser(description='Draw predictions over a picture, or all in a folder.')
    add_arguments(parser, launcher=False)
    add_speed_arguments(parser)
    parser.add_argument('checkpoint', help='path or URL of the weights')
    parser.add_argument('input', type=Path, help='a picture, or a folder of pictures')
    parser.add_argument(
        '--out', type=Path, default=Path('work_dirs/infer'), metavar='DIR', help='for the overlays'
    )
    return parser.parse_args()


def build_model(cfg: 'Config', checkpoint: str) -> 'nn.Module':
    """The model with the checkpoint's weights, all of which must fit, ready for prediction."""
    from vim_mm.engine.cli import load_model

    return load_model(cfg, checkpoint)[0]


def build_pipeline(cfg: 'Config') -> 'Compose':
    """The transforms of testing, without those that look for annotations."""
    from mmengine.dataset import Compose

    transforms = cfg.test_dataloader.dataset.pipeline
    return Compose([t for t in transforms if 'LoadAnnotations' not in t.type])


def dataset_meta(cfg: 'Config') -> dict:
    """Names and colours of the test set's classes, as 'classes' and 'palette'."""
    from mmengine.registry import DATASETS

    dataset = cfg.test_dataloader.dataset
    with DATASETS.switch_scope_and_registry(cfg.default_scope) as registry:
        class_names = registry.get(dataset.type).METAINFO
    return {**class_names, **dataset.get('metainfo', {})}


def build_visualizer(cfg: 'Config') -> 'Visualizer':
    """The config's visualizer for the test set's classes."""
    from mmengine.registry import VISUALIZERS

    visualizer = VISUALIZERS.build({**cfg.visualizer, 'vis_backends': []})
    visualizer.dataset_meta = dataset_meta(cfg)
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


def opens(picture: Path) -> bool:
    """Whether OpenCV reads a picture."""
    import cv2

    try:
        return cv2.imread(str(picture)) is not None
    except cv2.error:  # of more pixels than it takes
        return False


@contextmanager
def noting(failed: list[str], picture: Path, *fatal: type[Exception]) -> Iterator[None]:
    """Note what fails with a picture, and go on, except where all others would fail as well.

    Args:
        failed (list[str]): Gets the picture and the reason.
        picture (Path): What the block works on.
        fatal (type[Exception]): These end the tool, and so does a full memory.
    """
    import torch

    from vim_mm.engine.batches.samples import why_unreadable

    try:
        yield
    except (torch.cuda.OutOfMemoryError, *fatal):
        raise
    except Exception as error:  # whatever the libraries make of a picture that they cannot take
        reason = ' '.join(str(error).split()) or type(error).__name__
        if not opens(picture):
            reason = why_unreadable(str(picture)) or reason
        failed.append(f'{picture}: {reason}')


def main(args: Namespace) -> None:
    import torch
    from mmengine.dataset import pseudo_collate

    from vim_mm import accelerate
    from vim_mm.engine.cli import read_config
    from vim_mm.progress import progress, say
    from vim_mm.stream.frames import find_pictures

    cfg = read_config(args)
    pictures = find_pictures(args.input)
    model = build_model(cfg, args.checkpoint)
    accelerate(model, amp=args.amp, graph=args.graph, compile=args.compile)
    pipeline, visualizer = build_pipeline(cfg), build_visualizer(cfg)
    failed: list[str] = []
    for picture in progress(pictures, 'pictures'):
        prediction = None
        with noting(failed, picture):
            data = read_sample(pipeline, picture)
            with torch.no_grad():
                (prediction,) = model.test_step(pseudo_collate([data]))
        if prediction is None:
            continue
        overlay = args.out / f'{picture.name}.png'
        with noting(failed, picture, OSError):  # the overlay cannot be written, nor can others
            draw(visualizer, picture, prediction, overlay)
            say(str(overlay))
    if failed:
        print(*failed, sep='\n', file=sys.stderr)
        raise SystemExit(f'{len(failed)} of {len(pictures)} pictures could not be drawn.')


if __name__ == '__main__':
    end(main, parse_args())
