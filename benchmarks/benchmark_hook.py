"""What a hook costs in an iteration: blocks with and without it, in turn, in one training.

    python benchmarks/benchmark_hook.py configs/seg/upernet_vim_t_zoh.py NonFiniteLossHook --amp \
        --cfg-options train_dataloader.batch_size=8

The training repeats its first batch, as ``benchmark_training.py --repeat-batch`` does. A block ends
when the device has done its work, so the difference of two blocks holds all that the hook costs, on
the host and on the device.
"""

import json
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from statistics import median
from time import perf_counter

from _command_line import add_arguments, end, parse_first, positive


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument('hook', help='the type of a hook that the training has')
    parser.add_argument('--amp', action='store_true', help='as in tools/train.py')
    parser.add_argument('--graph', action='store_true', help='as in tools/train.py')
    parser.add_argument('--pairs', type=positive, default=20, help='of blocks')
    parser.add_argument('--block', type=positive, default=10, help='iterations of a block')
    parser.add_argument('--warmup', type=int, default=20, help='iterations that do not count')
    parser.add_argument('--out', type=Path, help='write the figures as JSON to this file')
    return parser.parse_args()


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner

from benchmarks.benchmark_training import prepare
from benchmarks.measure.tables import figures, markdown_table, write_text
from benchmarks.measure.timing import environment
from vim_mm.engine import build_runner
from vim_mm.engine.cli import read_config


class Switch(Hook):
    """Takes a hook out of a training and puts it back, block by block; the last hook of all.

    Args:
        hook (str): Its type.
        warmup (int): Iterations before the first block.
        block (int): Iterations of a block.

    Attributes:
        blocks (list): Seconds of each block: the first with the hook, the next without, and so on.
    """

    priority = 'LOWEST'

    def __init__(self, hook: str, warmup: int, block: int):
        self.hook, self.warmup, self.block = hook, warmup, block
        self.blocks: list[float] = []
        self.begin: float | None = None
        self.all: list[Hook] = []

    def before_train(self, runner: Runner) -> None:
        self.all = list(runner.hooks)
        names = sorted({type(hook).__name__ for hook in self.all})
        if self.hook not in names:
            raise SystemExit(f'HOOK: expected one of {", ".join(names)}, got {self.hook!r}.')

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch=None, outputs=None):
        """Between two iterations: no hook sees half of one."""
        if (batch_idx + 1 - self.warmup) % self.block or batch_idx + 1 < self.warmup:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = perf_counter()
        if self.begin is not None:
            self.blocks.append(now - self.begin)
        without = len(self.blocks) % 2 == 1
        # Another list: MMEngine goes through the old one at this moment.
        runner._hooks = [h for h in self.all if not (without and type(h).__name__ == self.hook)]
        self.begin = perf_counter()


def measure(args: Namespace) -> dict[str, float | int | str | None]:
    """Train; milliseconds of an iteration, medians over blocks and over pairs of blocks."""
    cfg = read_config(args)
    args.repeat_batch, args.iters = True, args.warmup + 2 * args.pairs * args.block
    with tempfile.TemporaryDirectory() as folder:
        prepare(args, cfg, Path(folder))
        runner = build_runner(cfg)
        switch = Switch(args.hook, args.warmup, args.block)
        runner.register_hook(switch)
        runner.train()
    on, off = ([1e3 * seconds / args.block for seconds in switch.blocks[i::2]] for i in range(2))
    cost = sorted(a - b for a, b in zip(on, off))
    return {
        'hook': args.hook,
        'graph': 'yes' if args.graph else 'no',
        'pairs': len(cost),
        'with, ms': median(on),
        'without, ms': median(off),
        'cost, ms': median(cost),
        'quarter of pairs below, ms': cost[len(cost) // 4],
        'quarter above, ms': cost[-1 - len(cost) // 4],
        'cost, %': 100 * median(cost) / median(off),
    }


def main(args: Namespace) -> None:
    result = measure(args)
    row = {k: figures(v) if isinstance(v, float) else str(v) for k, v in result.items()}
    print(markdown_table([row]))
    if args.out:
        machine = environment('cuda' if torch.cuda.is_available() else 'cpu')
        write_text(args.out, json.dumps({'environment': machine, **result}, indent=2))


if __name__ == '__main__':
    end(main, ARGUMENTS)
