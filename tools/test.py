"""Tests a checkpoint and prints the metrics: ``python tools/test.py CONFIG CHECKPOINT``."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
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
        type=Path,
        metavar='DIR',
        help='save the predictions: a PNG of labels for each image, for detection one file in '
        "COCO's result format for boxes and one for masks, for classification labels.csv",
    )
    parser.add_argument(
        '--tta',
        action='store_true',
        help='test-time augmentation: tta_model merges the predictions of the views of '
        "tta_pipeline; where the config has none, the libraries' defaults",
    )
    return parser.parse_args()


@contextmanager
def saved_predictions(cfg: 'Config', out_dir: Path) -> Iterator[None]:
    """Let metrics of the config write predictions, which get their names when the block ends.

    MMDetection's own metric writes its format; segmentors and classifiers have ours.
    """
    metrics = cfg.test_evaluator
    metrics = metrics if isinstance(metrics, list | tuple) else [metrics]
    out_dir.mkdir(parents=True, exist_ok=True)
    if cfg.default_scope != 'mmdet':
        ours = dict(type='LabelMaps', folder=str(out_dir))
        if cfg.default_scope == 'mmpretrain':
            ours = dict(type='LabelFile', path=str(out_dir / 'labels.csv'))
        cfg.test_evaluator = [*metrics, ours]
        yield
        return
    # It writes its files where they would stay cut off on a full disk.
    with TemporaryDirectory(dir=out_dir, prefix='.part') as part:
        for metric in metrics:
            metric.update(outfile_prefix=f'{part}/predictions')
        yield
        for file in sorted(Path(part).iterdir()):
            file.replace(out_dir / file.name)


def main(args: Namespace) -> None:
    from vim_mm import accelerate
    from vim_mm.checkpoints.provenance import inner_model
    from vim_mm.engine import LabelMaps, VimRunner
    from vim_mm.engine.checks.data import check_data
    from vim_mm.engine.cli import read_config
    from vim_mm.engine.screen import expect_no_loss
    from vim_mm.engine.tta import augment_test, fit_merging
    from vim_mm.progress import slow_at_first

    cfg = read_config(args)
    check_data(cfg, 'test')
    cfg.load_from, cfg.resume = args.checkpoint, False
    lines = augment_test(cfg) if args.tta else []
    if not args.tta and ('tta_model' in cfg or 'tta_pipeline' in cfg):
        lines = ['The config has test-time augmentation, which needs --tta: images have one view.']
    with nullcontext() if args.out is None else saved_predictions(cfg, args.out):
        expect_no_loss()
        runner = VimRunner.from_cfg(cfg)
        for line in lines:
            runner.logger.info(line)
        fit_merging(runner.model)
        model = inner_model(runner.model)
        accelerate(model, amp=args.amp, graph=args.graph, compile=args.compile)
        if args.compile:
            model.test_step = slow_at_first(model.test_step, 'compiling the model')
        for metric in runner.test_loop.evaluator.metrics:
            if isinstance(metric, LabelMaps):
                metric.name(runner.test_loop.dataloader.dataset)
        runner.test()


if __name__ == '__main__':
    end(main, parse_args())
