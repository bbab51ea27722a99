"""Tests a checkpoint and prints the metrics: ``python tools/test.py CONFIG CHECKPOINT``."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from _command_line import add_arguments, add_speed_arguments, end

if TYPE_CHECKING:  # --help takes no PyTorch
    from mmengine.config import Config


def parse_args() -> Namespace:
    parser = ArgumentParser(description='Test a checkpoint of any task.')
    add_arguments(parser)
    add_speed_arguments(parser)
    parser.add_argument('checkpoint', help='path or URL of the weights')
    parser.add_argument(
        '--out',
        metavar='DIR',
        help='save the predictions: a PNG of labels for each image, for detection one file in '
        "COCO's result format for boxes and one for masks, for classification labels.csv",
    )
    return parser.parse_args()


def save_predictions(cfg: 'Config', out_dir: str) -> None:
    """Let the metric, which formats predictions anyway, write them; classes have a table."""
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    metrics = cfg.test_evaluator
    metrics = metrics if isinstance(metrics, list) else [metrics]
    if cfg.default_scope == 'mmpretrain':
        cfg.test_evaluator = [*metrics, dict(type='LabelFile', path=f'{out_dir}/labels.csv')]
        return
    if cfg.default_scope == 'mmdet':
        option = dict(outfile_prefix=str(Path(out_dir) / 'predictions'))
    else:
        option = dict(output_dir=out_dir)
    for metric in metrics:
        metric.update(option)


def main(args: Namespace) -> None:
    from vim_mm import accelerate
    from vim_mm.engine import VimRunner
    from vim_mm.engine.checks.data import check_data
    from vim_mm.engine.cli import read_config

    cfg = read_config(args)
    check_data(cfg, 'test')
    cfg.load_from, cfg.resume = args.checkpoint, False
    if args.out is not None:
        save_predictions(cfg, args.out)
    runner = VimRunner.from_cfg(cfg)
    accelerate(runner.model, amp=args.amp, graph=args.graph, compile=args.compile)
    runner.test()


if __name__ == '__main__':
    end(main, parse_args())
