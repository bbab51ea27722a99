"""A two-stage detector's training step: MMDetection's heads, the fast ones, and those as a graph.

    python benchmarks/benchmark_detector.py
    python benchmarks/benchmark_detector.py CONFIG --size 1024 1024 --out steps.json

Each step takes a batch as the loader hands it over: random pictures with 8 boxes and their masks.
So it has the preprocessor, forward pass, losses, backward pass and AdamW, under bfloat16 autocast.
Each config is measured in four forms, one after the other on one GPU:

- mmdet: MMDetection's detector as it is;
- fast: ``type='FastDetector'``;
- graph: the same as ``tools/train.py --graph`` runs it;
- compiled: as ``--graph --compile`` does, after the compilation.

Columns, each of one step: wall time (median of blocks of steps), peak memory, time of its kernels
on the GPU, how many kernels ran, launches by the CPU (a graph is one), and waits of the CPU for the
GPU (``cudaStreamSynchronize`` and its kin). Below each table stand the longest kernels, and the
lines of code that made the CPU wait, as PyTorch warns of them. Needs mmcv with CUDA operators.
"""

import json
import warnings
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from _command_line import end, parse_first, positive

CONFIGS = ('det/mask_rcnn_vim_t_zoh.py', 'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py')
FORMS = ('mmdet', 'fast', 'graph', 'compiled')


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('configs', nargs='*', default=CONFIGS, metavar='CONFIG')
    parser.add_argument('--forms', nargs='+', choices=FORMS, default=FORMS)
    parser.add_argument(
        '--size', nargs=2, type=positive, default=(800, 1333), metavar=('HEIGHT', 'WIDTH')
    )
    parser.add_argument('--batch', type=positive, default=2)
    parser.add_argument('--steps', type=positive, default=10, help='of a block')
    parser.add_argument('--blocks', type=positive, default=5)
    parser.add_argument('--rows', type=positive, default=12, help='of the longest kernels')
    parser.add_argument('--fp32', action='store_true', help='without autocast')
    parser.add_argument('--out', type=Path, help='write the figures as JSON to this file')
    return parser.parse_args()


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

import torch
from mmengine.config import Config
from mmengine.optim import OptimWrapper

from benchmarks.measure.configs import find_config
from benchmarks.measure.tables import figures, markdown_table, write_text
from benchmarks.measure.timing import (
    describe,
    environment,
    gpu_events,
    steady_times,
    synchronize,
    warm_up,
)
from benchmarks.measure.whole_models import adapt, build, make_batch, on_device
from vim_mm.engine import BFloat16OptimWrapper, activate
from vim_mm.engine.cli import import_task_library
from vim_mm.engine.optimization.compiled_parts import CompiledParts
from vim_mm.engine.optimization.graphed_step import GraphedStep

GRAPHS = ('graph', 'compiled')
PROFILED = 3
WAITS = ('cudaStreamSynchronize', 'cudaDeviceSynchronize', 'cudaEventSynchronize', 'cudaMemcpy')


def make_step(name: str, form: str, args: Namespace) -> Callable[[], dict]:
    """A training step of a config, in a form, that takes a batch anew at each call."""
    cfg = Config.fromfile(find_config(name))
    import_task_library(cfg)
    size = tuple(args.size)
    adapt(cfg, size, heads='mmdet' if form == 'mmdet' else 'fast')
    cfg.model.data_preprocessor.non_blocking = True
    model = build(cfg, args.device)
    given = make_batch(cfg, size, args.batch)
    wrapper = (OptimWrapper if args.fp32 else BFloat16OptimWrapper)(
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5)
    )
    wrapper.initialize_count_status(model, 0, 10**9)
    train = model.train_step
    if form in GRAPHS:
        if form == 'compiled':
            CompiledParts(model, wrapper)
        train = GraphedStep(model, form == 'compiled')

    def step() -> dict:
        return train(on_device(given, 'cpu'), wrapper)  # where the loader leaves it

    return step


def measure(name: str, form: str, args: Namespace) -> dict[str, Any]:
    """Figures of a form, by name."""
    step = make_step(name, form, args)
    warm_up(step)  # the graph is recorded in the second
    if args.device == 'cuda':
        torch.cuda.reset_peak_memory_stats()
    blocks = steady_times(step, args.steps, args.blocks)
    found = dict(form=form, ms=1e3 * median(blocks), spread=1e3 * (max(blocks) - min(blocks)))
    if args.device == 'cuda':
        found['peak MiB'] = round(torch.cuda.max_memory_allocated() / 2**20)
        found |= profiled(step, args.rows) | dict(waiting=waiting_lines(step))
    found['loss'] = step()['loss'].item()
    return found


def waiting_lines(step: Callable[[], dict]) -> dict[str, int]:
    """Lines that wait for the GPU in a step, and how often."""
    torch.cuda.set_sync_debug_mode('warn')
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            step()
    finally:
        torch.cuda.set_sync_debug_mode('default')
    lines = (
        f'{Path(w.filename).name}:{w.lineno}' for w in caught if 'synchroniz' in str(w.message)
    )
    return dict(Counter(lines).most_common())


def profiled(step: Callable[[], dict], rows: int) -> dict[str, Any]:
    """What the profiler sees of some steps, for one; of kernels the longest ones."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as recorded:
        for _ in range(PROFILED):
            step()
        synchronize()
    seconds, calls = Counter(), Counter()
    for name, of_one in gpu_events(recorded):
        if not name.startswith(('Memcpy', 'Memset')):
            calls['kernels'] += 1
            seconds[name] += 1e3 * of_one / PROFILED
    for event in recorded.events():
        if event.name.startswith(('cudaLaunchKernel', 'cuLaunchKernel', 'cudaGraphLaunch')):
            calls['launches'] += 1
        elif event.name in WAITS:
            calls['waits'] += 1
    calls['waits'] -= 1  # for the last step
    found = {name: calls[name] / PROFILED for name in ('kernels', 'launches', 'waits')}
    longest = dict(seconds.most_common(rows))
    return {'kernel ms': sum(seconds.values()), **found, 'longest': longest}


def report(rows: list[dict[str, Any]]) -> str:
    """A table of the forms, then what each of them spends and waits for."""
    lists = ('longest', 'waiting')
    table = markdown_table(
        [
            {k: v if isinstance(v, str) else figures(v) for k, v in row.items() if k not in lists}
            for row in rows
        ]
    )
    parts = [table]
    for row in rows:
        for name, unit in zip(lists, ('ms', 'times')):
            for entry, value in row.get(name, {}).items():
                parts.append(f'{row["form"]:6} {name} {value:8.3f} {unit}  {entry[:90]}')
    return '\n'.join(parts)


def main(args: Namespace) -> None:
    activate()
    args.device = 'cuda' if torch.cuda.is_available() else 'cpu'
    result: dict[str, Any] = dict(environment=environment(args.device), steps={})
    print(f'{describe(result["environment"])}, batch {args.batch}, {args.size[0]} x {args.size[1]}')
    for name in args.configs:
        rows = result['steps'][name] = []
        for form in args.forms:
            if form in GRAPHS and args.device == 'cpu':
                continue
            rows.append(measure(name, form, args))
            if args.device == 'cuda':
                torch.cuda.empty_cache()
        print(f'\n{name}\n\n{report(rows)}')
        if args.out:
            write_text(args.out, json.dumps(result, indent=2))


if __name__ == '__main__':
    end(main, ARGUMENTS)
