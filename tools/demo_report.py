"""End of the demo: pictures of a run, from what training left in its working directory."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from _command_line import add_debug, end, positive

if TYPE_CHECKING:  # --help takes no PyTorch
    from mmengine.config import Config


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
        help='images to draw, four times as many of a classifier',
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
    """Draw held-out images, their ground truth and the predictions of the last checkpoint."""
    from benchmarks.pictures.plots import plot_predictions
    from benchmarks.runs.work_dir import find_checkpoint, predict_samples

    path = work_dir / 'predictions.png'
    plot_predictions(*predict_samples(cfg, find_checkpoint(work_dir), count), path)
    return path


def main(args: argparse.Namespace) -> None:
    # After the arguments: --help takes no PyTorch.
    from mmengine.config import Config

    from benchmarks.pictures.plots import plot_curves
    from benchmarks.runs.work_dir import find_config, read_history

    curves = args.work_dir / 'curves.png'
    losses, metrics = read_history(args.work_dir)
    plot_curves(losses, metrics, curves)
    cfg = Config.fromfile(find_config(args.work_dir))
    if cfg.default_scope == 'mmpretrain':
        picture = draw_mistakes(cfg, args.work_dir, 4 * args.images)
    else:
        picture = draw_predictions(cfg, args.work_dir, args.images)
    for name, points in metrics.items():
        print(f'{name} on held-out images after {points[-1][0]} iterations: {points[-1][1]:.1f} %')
    print(f'Pictures: {curves} and {picture}')


if __name__ == '__main__':
    end(main, parse_args())
