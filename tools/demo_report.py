"""End of the demo: pictures of a run, from what training left in its working directory."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from _command_line import add_debug, end, positive

if TYPE_CHECKING:  # --help takes no PyTorch
    from collections.abc import Sequence

    from mmengine.config import Config

    from benchmarks.pictures.plots import Sample

COUNTED = 60  # images in which the objects that a detector finds are counted


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description='Draw curves.png (loss and metrics) and predictions.png (held-out images, '
        'their ground truth and what the last checkpoint predicts; of a classifier mistakes.png) '
        'into a working directory.'
    )
    parser.add_argument('work_dir', type=Path, help='working directory of a finished run')
    parser.add_argument(
        '--images',
        type=positive,
        default=8,
        help='images to draw, four times as many of a classifier (default: %(default)s)',
    )
    add_debug(parser)
    return parser.parse_args()


def draw_mistakes(cfg: 'Config', work_dir: Path, count: int) -> Path:
    """Draw mistakes spread evenly over the test set, and print which are made most often."""
    from benchmarks.runs.labels import confusions, pictures_of, plot_labels, predict_labels
    from benchmarks.runs.work_dir import find_checkpoint

    found, dataset = predict_labels(cfg, find_checkpoint(work_dir))
    classes = dataset.metainfo['classes']
    wrong = [each for each in found if each.wrong]
    often = ', '.join(f'{a} taken for {b} {n}' for a, b, n in confusions(found, classes, 4))
    print(f'{len(wrong)} mistakes in {len(found)} held-out images; most often {often}')
    chosen = wrong[:: max(len(wrong) // count, 1)][:count] or found[:count]
    path = work_dir / 'mistakes.png'
    plot_labels(pictures_of(dataset, chosen), chosen, classes, path)
    return path


def draw_predictions(cfg: 'Config', work_dir: Path, count: int) -> Path:
    """Draw held-out images, their ground truth and the predictions of the last checkpoint.

    Of a detector it prints how many objects were found in more images than are drawn.
    """
    from benchmarks.pictures.plots import plot_predictions
    from benchmarks.runs.work_dir import find_checkpoint, predict_samples

    path = work_dir / 'predictions.png'
    detects = cfg.default_scope == 'mmdet'
    predicted = max(count, COUNTED) if detects else count
    samples, classes, palette = predict_samples(cfg, find_checkpoint(work_dir), predicted)
    if detects:
        found, objects, false = count_found(samples)
        print(
            f'{found} of {objects} objects in {len(samples)} held-out images are found at a score '
            f'of 0.5, with {false} false detections.'
        )
    shown = samples[:: max(len(samples) // count, 1)][:count]
    plot_predictions(shown, classes, palette, path)
    return path


def count_found(samples: 'Sequence[Sample]') -> tuple[int, int, int]:
    """Objects that a detection of their class covers with an IoU of 0.5, objects, and the rest.

    Detections are taken from the highest score on, each for the object that it covers best of those
    that are left.
    """
    import torch
    from torchvision.ops import box_iou

    found = objects = detections = 0
    for sample in samples:
        objects, detections = objects + len(sample.truth), detections + len(sample.prediction)
        left = [*sample.truth]
        for each in sorted(sample.prediction, key=lambda region: -region.score):
            same = [region for region in left if region.label == each.label]
            if not same:
                continue
            boxes = torch.tensor([region.box for region in same])
            overlap, best = box_iou(torch.tensor([each.box]), boxes)[0].max(0)
            if overlap >= 0.5:
                left = [region for region in left if region is not same[best]]
                found += 1
    return found, objects, detections - found


def next_commands(work_dir: Path) -> list[str]:
    """What to try after the demo, as lines that can be copied."""
    from benchmarks.runs.work_dir import find_checkpoint, find_config

    config, checkpoint = find_config(work_dir), find_checkpoint(work_dir)
    if checkpoint.is_relative_to(Path.cwd()):
        checkpoint = checkpoint.relative_to(Path.cwd())
    return [
        'Next, in this environment (. .venv/bin/activate):',
        f'  python tools/infer.py {config} {checkpoint} IMAGE        # your own image',
        f'  python tools/visualize.py features {config} {checkpoint}  # what the layers hold',
        f'  python tools/train.py {config} --discretization-method foh  # another method',
    ]


def main(args: argparse.Namespace) -> None:
    # After the arguments: --help takes no PyTorch.
    from mmengine.config import Config

    from benchmarks.pictures.plots import plot_curves
    from benchmarks.runs.work_dir import find_config, read_history
    from vim_mm.engine.screen import open_screen

    curves = args.work_dir / 'curves.png'
    losses, metrics = read_history(args.work_dir)
    plot_curves(losses, metrics, curves)
    cfg = Config.fromfile(find_config(args.work_dir))
    open_screen(cfg)
    if cfg.default_scope == 'mmpretrain':
        picture = draw_mistakes(cfg, args.work_dir, 4 * args.images)
    else:
        picture = draw_predictions(cfg, args.work_dir, args.images)
    for name, points in metrics.items():
        print(f'{name} on held-out images after {points[-1][0]} iterations: {points[-1][1]:.1f} %')
    print(f'Pictures: {curves} and {picture}')
    print(*next_commands(args.work_dir), sep='\n')


if __name__ == '__main__':
    end(main, parse_args())
