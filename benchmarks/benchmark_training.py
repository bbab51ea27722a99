"""Where the time of a training iteration goes: data, host or device, in the loop of a config.

    python benchmarks/benchmark_training.py configs/seg/upernet_vim_t_zoh.py --amp \
        --cfg-options train_dataloader.batch_size=8

Runs the config's own loop (loader, augmentation, transfer, step, optimizer, hooks) for some
iterations, without validation and checkpoints, and prints in milliseconds

- iteration: from the end of one to the end of the next;
- data: the part of it that the loop waits for the loader;
- host: the rest: the step, the hooks and the loop, waiting for the GPU included;
- device: kernels and copies on the GPU, by the profiler, in the last iterations;

then what each transform of the pipeline takes for one picture in one process, and what to change.
--repeat-batch trains on the first batch over and over: the same loop without the loader.

Several processes, of which the first reports, with images per second of all:

    bash tools/torchrun.sh ../benchmarks/benchmark_training.py 2 CONFIG --amp

Where a segmentation config finds no data, pictures of ADE20K's usual size, 683 x 512, are drawn
into a temporary folder: smooth ones with grain as JPEG, labels as PNG.
"""

import json
import math
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from _command_line import add_arguments, end, parse_first, positive

PROFILED = 3  # iterations, the last ones


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument('--amp', action='store_true', help='as in tools/train.py')
    parser.add_argument('--graph', action='store_true', help='as in tools/train.py')
    parser.add_argument('--compile', action='store_true', help='as in tools/train.py')
    parser.add_argument(
        '--repeat-batch', action='store_true', help='train on the first batch: no loader'
    )
    parser.add_argument('--iters', type=positive, default=60)
    parser.add_argument('--warmup', type=int, default=20, help='iterations that do not count')
    parser.add_argument('--pictures', type=positive, default=32, help='to time the transforms with')
    parser.add_argument('--out', type=Path, help='write the figures as JSON to this file')
    args = parser.parse_args()
    if args.iters < args.warmup + PROFILED + 1:
        parser.error(f'--iters must be at least --warmup + {PROFILED + 1}')
    if args.compile and not args.graph:
        parser.error('--compile: compiled parts are recorded as a graph: give --graph as well')
    return args


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

import cv2
import numpy as np
import torch
from mmengine.config import Config
from mmengine.dist import get_world_size, is_main_process
from mmengine.hooks import Hook
from mmengine.registry import LOOPS
from mmengine.runner import IterBasedTrainLoop, Runner

from benchmarks.measure.tables import figures, markdown_table, write_text
from benchmarks.measure.timing import describe, environment, gpu_events
from benchmarks.measure.whole_models import on_device
from vim_mm.config import merge_options
from vim_mm.engine import build_runner
from vim_mm.engine.cli import read_config
from vim_mm.engine.optimization.graphed_step import train_by_graph
from vim_mm.progress import progress

PICTURES, HEIGHT, WIDTH = 64, 512, 683
# A loop that waits for data longer than this part of an iteration is said to wait for it, unless
# the device has work meanwhile.
WAITING = 0.05
# A device that works less than this part of an iteration is said to wait.
BUSY = 0.85


def draw_ade20k(root: Path, classes: int) -> None:
    """Pictures and labels of ADE20K's size in its layout, both smooth at the scale of objects."""
    random = np.random.default_rng(0)
    for split in ('training', 'validation'):
        for kind in ('images', 'annotations'):
            (root / kind / split).mkdir(parents=True)
        for i in progress(range(PICTURES), f'{split} pictures'):
            coarse = random.integers(0, 256, (32, 43, 3), dtype=np.uint8)
            picture = cv2.resize(coarse, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)
            grain = random.normal(0, 6, picture.shape)
            picture = np.clip(picture + grain, 0, 255).astype(np.uint8)
            labels = random.integers(0, classes + 1, (8, 11), dtype=np.uint8)
            labels = cv2.resize(labels, (WIDTH, HEIGHT), interpolation=cv2.INTER_NEAREST)
            cv2.imwrite(str(root / 'images' / split / f'{i:04}.jpg'), picture)
            cv2.imwrite(str(root / 'annotations' / split / f'{i:04}.png'), labels)


def copies(batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A batch over and over, in copies that share its tensors, which stay pinned."""
    while True:
        yield on_device(batch, 'cpu')


@LOOPS.register_module(force=True)  # by force: tests run this file more than once in a process
class RepeatedBatchLoop(IterBasedTrainLoop):
    """Trains on the first batch of the loader over and over."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.dataloader_iterator = copies(next(iter(self.dataloader)))


class IterationClock(Hook):
    """Takes the times of iterations; to be the last hook of each kind.

    Args:
        warmup (int): Iterations that are not counted.
        last (int): Number of all iterations.
    """

    priority = 'LOWEST'

    def __init__(self, warmup: int, last: int):
        self.warmup, self.last = warmup, last
        self.rows: list[dict[str, float]] = []
        self.device_seconds: float | None = None
        self.profiler: torch.profiler.profile | None = None
        self.end: float | None = None
        self.waited = 0.0
        self.peak = 0

    def before_train(self, runner: Runner) -> None:
        """Time the loader."""
        loop = runner.train_loop
        loop.dataloader_iterator = self._timed(loop.dataloader_iterator)

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            begin = perf_counter()
            batch = next(batches)
            self.waited = perf_counter() - begin
            yield batch

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch=None) -> None:
        """Start the profiler for the last iterations."""
        if torch.cuda.is_available():  # here, because MMEngine's log resets the peak
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())
        if torch.cuda.is_available() and batch_idx == self.last - PROFILED:
            torch.cuda.synchronize()
            self.profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA]
            )
            self.profiler.start()

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch=None, outputs=None):
        """The step and the other hooks have returned."""
        now = perf_counter()
        # Not those that the profiler slows down.
        if self.end is not None and self.profiler is None and batch_idx >= self.warmup:
            row = {'iteration': now - self.end, 'data': self.waited}
            self.rows.append(row | {'host': now - self.end - self.waited})
        if self.profiler is not None and batch_idx == self.last - 1:
            torch.cuda.synchronize()
            self.profiler.stop()
            seconds = (seconds for _, seconds in gpu_events(self.profiler))
            self.device_seconds = sum(seconds) / PROFILED
        self.end = perf_counter()

    def summary(self) -> dict[str, float]:
        """Seconds: the mean of iterations, because queues even them out; else medians."""
        result = {'iteration': sum(r['iteration'] for r in self.rows) / len(self.rows)}
        result['data'] = sum(r['data'] for r in self.rows) / len(self.rows)
        result['host'] = median(r['host'] for r in self.rows)
        if self.device_seconds is not None:
            result['device'] = self.device_seconds
        return result


def transform_times(dataset: Any, pictures: int) -> dict[str, float]:
    """Seconds that each transform takes for a picture, by its name, in this process."""
    times: dict[str, list[float]] = {}
    for i in progress(range(pictures), 'pictures'):
        data = dataset.get_data_info(i % len(dataset))
        for transform in dataset.pipeline.transforms:
            start = perf_counter()
            data = transform(data)
            name = type(transform).__name__
            times.setdefault(name, []).append(perf_counter() - start)
            if data is None:  # a crop without objects, say: the loader would take another
                break
    return {name: sum(values) / pictures for name, values in times.items()}


def advice(
    times: dict[str, float], per_picture: float, loader: dict[str, Any], graph: bool = False
) -> list[str]:
    """What to change, from the figures."""
    says = []
    batch, workers = loader['batch_size'], loader['num_workers']
    work = max(times['iteration'] - times['data'], times.get('device', 0.0))
    needed = math.ceil(1.2 * batch * per_picture / work)
    busy = times.get('device', 0.0) >= BUSY * times['iteration']
    waiting = not busy and times['data'] > WAITING * times['iteration']
    if waiting:
        share = (
            f'The loop waits for data {100 * times["data"] / times["iteration"]:.0f} % of the time'
        )
        says.append(
            f'{share}: train_dataloader.num_workers={needed} would keep up (now {workers}).'
            if needed > workers
            else f'{share}, although {needed} of {workers} workers would keep up: they lack cores, '
            'or this process is slow to receive what they send.'
        )
    else:
        says.append(
            f'The loop does not wait for data: {min(needed, workers)} of {workers} workers would '
            'keep up.'
        )
    if busy:
        says.append('The device is busy: --amp, a smaller model or another GPU make it faster.')
    elif 'device' in times and not waiting:
        says.append(
            'The device waits for the host: a larger batch'
            + ('.' if graph else ', or --graph where that is possible.')
        )
    infinite = loader['sampler']['type'] == 'InfiniteSampler'  # its epoch never ends
    if not infinite and not loader.get('persistent_workers'):
        says.append('persistent_workers=True saves starting the workers at every epoch.')
    return says


def prepare(args: Namespace, cfg: Config, folder: Path) -> None:
    """Shorten the run, and give it pictures where it has none."""
    if not Path(cfg.data_root).exists():
        if cfg.default_scope != 'mmseg':
            raise SystemExit(f'There is no {cfg.data_root}; pictures are drawn for mmseg only.')
        print(f'{cfg.data_root} is not there: drawing pictures')
        draw_ade20k(folder / 'data', cfg.model.decode_head.num_classes)
        merge_options(cfg, {'data_root': str(folder / 'data')})
    cfg.work_dir = str(folder / 'work')
    loop = 'RepeatedBatchLoop' if args.repeat_batch else 'IterBasedTrainLoop'
    cfg.train_cfg = dict(type=loop, max_iters=args.iters, val_interval=10**9)
    for name in ('val_cfg', 'val_dataloader', 'val_evaluator'):
        cfg[name] = None
    for name in ('test_cfg', 'test_dataloader', 'test_evaluator'):
        cfg[name] = None
    cfg.default_hooks.checkpoint = None
    cfg.auto_scale_lr = None  # an iteration is one batch of the loader
    if args.amp:
        cfg.optim_wrapper.type = 'BFloat16OptimWrapper'
    if args.graph:
        train_by_graph(cfg, compile=args.compile)


def report(result: dict[str, Any]) -> str:
    """Tables and advice."""
    times, transforms = result['seconds'], result['transforms']
    row = {'': 'ms'} | {name: figures(1e3 * value) for name, value in times.items()}
    row |= {'images/s': figures(result['images_per_second'])}
    if 'peak_mib' in result:
        row |= {'peak MiB': str(result['peak_mib'])}
    rows = [{'transform': name, 'ms': figures(1e3 * t)} for name, t in transforms.items()]
    rows.append({'transform': 'all, one picture', 'ms': figures(1e3 * sum(transforms.values()))})
    head = describe(result['environment'])
    head += f', processes {result["processes"]}, batch {result["batch_size"]} each'
    tables = [markdown_table([row]), *([markdown_table(rows)] if transforms else [])]
    return '\n\n'.join([head, *tables, *result['advice']])


def measure(args: Namespace, cfg: Config) -> dict[str, Any]:
    """Train, and return the figures of this process; images per second are those of all."""
    loader = cfg.train_dataloader.to_dict()
    clock = IterationClock(args.warmup, args.iters)
    runner = build_runner(cfg)
    runner.register_hook(clock)
    runner.train()
    # As many as there is room for, which may be fewer than the config has.
    loader['num_workers'] = runner.train_loop.dataloader.num_workers
    times = clock.summary()
    result = {
        'environment': environment('cuda' if torch.cuda.is_available() else 'cpu'),
        'config': args.config,
        'processes': get_world_size(),
        'batch_size': loader['batch_size'],
        'num_workers': loader['num_workers'],
        'repeated_batch': args.repeat_batch,
        'graph': args.graph,
        'compile': args.compile,
        'seconds': times,
        'images_per_second': get_world_size() * loader['batch_size'] / times['iteration'],
        'transforms': {},
        'advice': [],
    }
    if torch.cuda.is_available():
        result['peak_mib'] = round(clock.peak / 2**20)
    if is_main_process() and not args.repeat_batch:
        transforms = transform_times(runner.train_loop.dataloader.dataset, args.pictures)
        result['transforms'] = transforms
        result['advice'] = advice(times, sum(transforms.values()), loader, args.graph)
    return result


def main(args: Namespace) -> None:
    cfg = read_config(args)
    with tempfile.TemporaryDirectory() as folder:
        prepare(args, cfg, Path(folder))
        result = measure(args, cfg)
    if not is_main_process():
        return
    print(report(result))
    if args.out:
        write_text(args.out, json.dumps(result, indent=2))


if __name__ == '__main__':
    end(main, ARGUMENTS)
