"""End of the demo: pictures of a run, from what training left in its working directory."""

import argparse
from pathlib import Path

from _command_line import add_debug, end


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description='Draw curves.png (loss and metrics) and predictions.png (held-out images, '
        'their ground truth and what the last checkpoint predicts) into a working directory.'
    )
    parser.add_argument('work_dir', type=Path, help='working directory of a finished run')
    parser.add_argument('--images', type=int, default=8, help='number of images to predict')
    add_debug(parser)
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    # After the arguments: --help takes no PyTorch.
    from mmengine.config import Config

    from vim_mm.analysis.plots import plot_curves, plot_predictions
    from vim_mm.analysis.runs import find_checkpoint, find_config, predict_samples, read_history

    curves, predictions = args.work_dir / 'curves.png', args.work_dir / 'predictions.png'
    losses, metrics = read_history(args.work_dir)
    plot_curves(losses, metrics, curves)
    cfg = Config.fromfile(find_config(args.work_dir))
    plot_predictions(
        *predict_samples(cfg, find_checkpoint(args.work_dir), args.images), predictions
    )
    for name, points in metrics.items():
        print(f'{name} on held-out images after {points[-1][0]} iterations: {points[-1][1]:.1f} %')
    print(f'Pictures: {curves} and {predictions}')


if __name__ == '__main__':
    end(main, parse_args())
