"""Trains a classifier, a segmentor or a detector: ``python tools/train.py CONFIG``."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from _command_line import add_arguments, end, positive


def parse_args(arguments: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(description='Train a classifier, a segmentor or a detector.')
    add_arguments(parser)
    held = parser.add_mutually_exclusive_group()
    held.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='CHECKPOINT',
        help='continue from this checkpoint, or from the last one in the work directory if there '
        'is any',
    )
    held.add_argument(
        '--overwrite',
        action='store_true',
        help='replace the run that the work directory holds: its checkpoints and logs are removed '
        'when the first new checkpoint is written',
    )
    parser.add_argument(
        '--amp',
        action='store_true',
        help='mixed precision in bfloat16, on any device; for float16 with loss scaling on CUDA '
        'give --cfg-options optim_wrapper.type=AmpOptimWrapper',
    )
    parser.add_argument(
        '--graph',
        action='store_true',
        help='replay forward and backward pass of a step as a CUDA graph, which leaves the CPU '
        'little to do; the results stay',
    )
    parser.add_argument(
        '--compile',
        action='store_true',
        help='with --graph: compile backbone, neck and heads and fuse the optimizer; the first '
        'step takes one to two minutes, and results change by rounding',
    )
    parser.add_argument(
        '--record',
        type=Path,
        metavar='FILE',
        help='note in this JSON file which path the scans of the first iteration took, by the '
        "profiler's names, with commit and versions; to continue by another path is refused",
    )
    parser.add_argument(
        '--batch-per-gpu',
        type=positive,
        metavar='N',
        help='images that fit a GPU at once, short for --cfg-options train_dataloader.batch_size=N;'
        ' the gradients of several such batches make the batch of the recipe',
    )
    parser.add_argument(
        '--scale-lr',
        action='store_true',
        help='accumulate nothing: a step has N images of each GPU, and the learning rate is scaled '
        'linearly from the batch of the recipe',
    )
    args = parser.parse_args(arguments)
    if args.compile and not args.graph:
        parser.error('--compile: compiled parts are recorded as a graph: give --graph as well')
    return args


def main(args: Namespace) -> None:
    # After the arguments: --help takes no PyTorch.
    from vim_mm.engine import build_runner
    from vim_mm.engine.batches.batch import plan_batch, scale_learning_rate
    from vim_mm.engine.checks.data import check_data
    from vim_mm.engine.cli import read_config
    from vim_mm.engine.optimization.graphed_step import train_by_graph
    from vim_mm.engine.saving.beginning import begin, place_of
    from vim_mm.mistakes import check_checkpoint

    cfg = read_config(args)
    if args.amp:
        cfg.optim_wrapper.type = 'BFloat16OptimWrapper'
    if args.batch_per_gpu is not None:
        cfg.train_dataloader.batch_size = args.batch_per_gpu
    if args.scale_lr:
        scale_learning_rate(cfg)
    if args.graph:
        train_by_graph(cfg, compile=args.compile)
    check_data(cfg, 'train', 'val')
    # Wrong arguments are told before the folder is asked about.
    plan_batch(cfg.train_dataloader.batch_size, place_of(cfg.launcher)[1], cfg.get('auto_scale_lr'))
    said = begin(cfg, args.resume, args.overwrite)
    if not cfg.get('resume'):  # else it is the checkpoint that begin() has found
        check_checkpoint(cfg.get('load_from'))
    runner = build_runner(cfg)
    for line in said:
        runner.logger.info(line)
    if args.record is None:
        runner.train()
    else:
        record_training(runner, args.record)


def record_training(runner, file: Path) -> None:
    """Train, and note in a record what ran, and whether the loss became NaN or infinite."""
    from vim_mm.engine.watching.nonfinite import NonFiniteLossError
    from vim_mm.engine.watching.run_record import RecordHook, note_divergence

    runner.register_hook(RecordHook(file))
    try:
        runner.train()
    except NonFiniteLossError as error:
        note_divergence(file, error)
        raise


if __name__ == '__main__':
    end(main, parse_args())
