"""Where the GPU's time goes in a training step of a config, by kernel and by module.

    python benchmarks/profile_training.py configs/det/mask_rcnn_vim_t_zoh.py --size 800 1333
    python benchmarks/profile_training.py configs/det/mask_rcnn_vim_t_zoh.py --size 1024 1024
    python benchmarks/profile_training.py configs/seg/upernet_vim_t_zoh.py --size 512 512

The config's model trains on random pictures of one size, with random labels or boxes with masks,
under bfloat16 autocast as ``--amp`` makes it. The table of kernels is the profiler's, of some
steps, and its sum over the wall time of the same steps without the profiler says how busy the GPU
is. A module's forward time is between events on the device around its call, so that it includes
what the device waits for the host. Modules are those called in the step, down to ``--depth``.
Detection needs mmcv with its CUDA operators.
"""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from statistics import median
from typing import Any

from _command_line import add_arguments, end, parse_first, positive


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, launcher=False)
    parser.add_argument(
        '--size', nargs=2, type=positive, required=True, metavar=('HEIGHT', 'WIDTH')
    )
    parser.add_argument('--batch', type=positive, default=2)
    parser.add_argument('--steps', type=positive, default=5)
    parser.add_argument('--depth', type=positive, default=2, help='of the modules that are timed')
    parser.add_argument('--rows', type=positive, default=25, help='of a table')
    parser.add_argument('--out', type=Path, help='write the figures as JSON to this file')
    parser.add_argument('--markdown', type=Path, help='write the tables to this file as well')
    return parser.parse_args()


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

import torch
from mmengine.config import Config
from mmengine.model import BaseModel

from benchmarks.measure.tables import figures, markdown_table, write_text
from benchmarks.measure.timing import describe, environment, kernel_table, steady_times
from benchmarks.measure.whole_models import adapt, build, make_batch
from vim_mm.engine import BFloat16OptimWrapper
from vim_mm.engine.cli import read_config

MIB = 2**20


class ModuleClock:
    """Device time of the forward calls of modules, by events around each call.

    Args:
        model (BaseModel): Gets hooks on its modules down to a depth.
        depth (int): 1 is the parts of the model.
    """

    def __init__(self, model: BaseModel, depth: int):
        self.calls: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}
        self.handles = []
        for name, module in model.named_modules():
            if name and len(name.split('.')) <= depth:
                self._watch(name, module)

    def _watch(self, name: str, module: torch.nn.Module) -> None:
        stack = []

        def before(module, inputs):
            stack.append(torch.cuda.Event(enable_timing=True))
            stack[-1].record()

        def after(module, inputs, outputs):
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self.calls.setdefault(name, []).append((stack.pop(), end))

        self.handles += [
            module.register_forward_pre_hook(before),
            module.register_forward_hook(after),
        ]

    def close(self, steps: int) -> dict[str, float]:
        """Seconds a step by module; the hooks are gone afterwards."""
        torch.cuda.synchronize()
        for handle in self.handles:
            handle.remove()
        return {
            name: 1e-3 * sum(start.elapsed_time(end) for start, end in calls) / steps
            for name, calls in self.calls.items()
        }


def profile(args: Namespace, cfg: Config, device: str) -> dict[str, Any]:
    """All figures of a config."""
    size = tuple(args.size)
    adapt(cfg, size)
    model = build(cfg, device)
    batch = make_batch(cfg, size, args.batch)
    wrapper = BFloat16OptimWrapper(torch.optim.AdamW(model.parameters(), lr=1e-5))
    wrapper.initialize_count_status(model, 0, 10**9)

    def step() -> None:
        model.train_step(dict(batch), wrapper)

    result: dict[str, Any] = {'seconds': median(steady_times(step, args.steps))}
    if device != 'cuda':
        return result
    torch.cuda.reset_peak_memory_stats()
    step()
    result['peak_bytes'] = torch.cuda.max_memory_allocated()
    result['kernels'] = kernel_table(step, args.steps)
    result['kernel_seconds'] = sum(seconds for seconds, _ in result['kernels'].values())
    clock = ModuleClock(model, args.depth)
    for _ in range(args.steps):
        step()
    result['modules'] = clock.close(args.steps)
    return result


def report(result: dict[str, Any], args: Namespace) -> str:
    """Tables of a profile."""
    ms = 1e3 * result['seconds']
    parts = [f'step {figures(ms)} ms, {figures(1e3 * args.batch / ms)} images/s']
    if 'kernels' in result:
        busy = result['kernel_seconds'] / result['seconds']
        parts[0] += f', GPU busy {100 * busy:.0f} %, peak {result["peak_bytes"] / MIB:.0f} MiB'
        share = result['kernel_seconds']
        rows = [
            {
                'kernel': name[:90].replace('|', ' '),
                'ms': figures(1e3 * seconds),
                'calls': str(calls),
                'share': f'{100 * seconds / share:.1f} %',
            }
            for name, (seconds, calls) in [*result['kernels'].items()][: args.rows]
        ]
        parts.append(markdown_table(rows))
        rows = [
            {'module, forward': name, 'ms': figures(1e3 * seconds)}
            for name, seconds in sorted(result['modules'].items(), key=lambda item: -item[1])
        ]
        parts.append(markdown_table(rows[: args.rows]))
    return '\n\n'.join(parts)


def main(args: Namespace) -> None:
    cfg = read_config(args)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    torch.backends.cudnn.benchmark = cfg.env_cfg.get('cudnn_benchmark', False)
    host = environment(device)
    result = profile(args, cfg, device)
    head = f'{describe(host)}, {args.config}, {args.size}, batch {args.batch}'
    text = f'{head}\n\n{report(result, args)}'
    print(text)
    if args.markdown:
        write_text(args.markdown, text)
    if args.out:
        write_text(args.out, json.dumps({'environment': host} | result, indent=2))


if __name__ == '__main__':
    end(main, ARGUMENTS)
