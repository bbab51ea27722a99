"""Trains a classifier, a segmentor or a detector: ``python tools/train.py CONFIG``."""

from argparse import ArgumentParser, Namespace

from _command_line import add_arguments, end


def parse_args() -> Namespace:
    parser = ArgumentParser(description='Train a classifier, a segmentor or a detector.')
    add_arguments(parser)
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='CHECKPOINT',
        help='continue from this checkpoint, or from the last one in the work directory if there '
        'is any',
    )
    parser.add_argument(
        '--amp',
        action='store_true',
        help='mixed precision in bfloat16, on any device; for float16 with loss scaling on CUDA '
        'give --cfg-options optim_wrapper.type=AmpOptimWrapper',
    )
    parser.add_argument(
        '--batch-per-gpu',
        type=int,
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
    return parser.parse_args()


def main(args: Namespace) -> None:
    # After the arguments: --help takes no PyTorch.
    from vim_mm.engine import build_runner
    from vim_mm.engine.batch import scale_learning_rate
    from vim_mm.engine.checkpoint import last_checkpoint
    from vim_mm.engine.cli import read_config

    cfg = read_config(args)
    if args.amp:
        cfg.optim_wrapper.type = 'BFloat16OptimWrapper'
    if args.batch_per_gpu is not None:
        cfg.train_dataloader.batch_size = args.batch_per_gpu
    if args.scale_lr:
        scale_learning_rate(cfg)
    checkpoint = last_checkpoint(cfg.work_dir) if args.resume == 'auto' else args.resume
    if checkpoint is not None:
        cfg.load_from, cfg.resume = str(checkpoint), True
    build_runner(cfg).train()


if __name__ == '__main__':
    end(main, parse_args())
