"""Latency, throughput, operations, parameters and memory of whole models, by config.

    python tools/analysis/benchmark_latency_flops.py seg/upernet_vim_t_zoh.py \
        mmseg::swin/swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512.py \
        --heads fast --forms eager graph --out seg.json --markdown seg.md
    python tools/analysis/benchmark_latency_flops.py configs/seg/upernet_vim_t_{method}.py
    python tools/analysis/benchmark_latency_flops.py work_dirs/upernet_vim_t_zoh_seed0

A CONFIG is a file, a config that vim_mm ships, 'mmseg::', 'mmdet::' or 'mmpretrain::' and a config
of that library, or the folder of a run, which is measured with its last weights and bears its own
name. {method} stands for each of --methods; --each-method sets them in a file without it. Other
weights are random, and nothing is downloaded.

Latency is the median of what a caller waits for one call; throughput is that of calls that follow
one another. A call takes normalized pictures that lie on the device: inference gives labels, boxes
or scores, a training step is the loss, backward and AdamW. Forms: eager; compiled, by
torch.compile; graph, replayed as a CUDA graph; tools, as --graph --compile of the tools runs it
(of segmentors; the training step with its preprocessing); of a detector its backbone and neck alone
are compiled or captured. Paths: as the config says; kernel and python, the compiled scan and the
Python reference in the same plain block. Operations are PyTorch's count for one picture, two for
a multiply-add. What fails or does not fit into --budget is left out, and said.
"""

import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _command_line import (
    METHODS,
    ConfigOptions,
    add_debug,
    add_device,
    add_outputs,
    choose_device,
    end,
    parse_first,
    parser_of,
    positive,
)

from benchmarks.measure.configs import find_config, missing_config

FORMS = ('eager', 'graph', 'tools', 'compiled')  # those that take longest come last
PASSES = ('infer', 'train')
# A compiled form is not begun with less of the budget left, in seconds.
COMPILE_SECONDS = 60


@dataclass(frozen=True)
class Case:
    """What one record measures."""

    name: str  # of the file or of the run's folder: runs of one config are several models
    config: str
    checkpoint: str | None
    method: str | None  # set in the config; None leaves the config's
    path: str
    heads: str
    size: tuple[int, int]
    batch: int
    dtype: str
    form: str
    mode: str  # 'infer' or 'train'


def image_size(text: str) -> tuple[int, int]:
    """'512' or '800x1333', height first."""
    try:
        height, x, width = text.partition('x')
        return positive(height), positive(width if x else height)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f'expected SIDE or HEIGHTxWIDTH, got {text!r}: {error}') from None


def parse_args() -> Namespace:
    parser = parser_of(__doc__)
    parser.add_argument('configs', nargs='+', metavar='CONFIG')
    parser.add_argument('--methods', nargs='+', type=METHODS, metavar='METHOD',
                        help='what {method} stands for (default: the six)')  # fmt: skip
    parser.add_argument('--each-method', action='store_true',
                        help='measure a file without {method} with each method')  # fmt: skip
    parser.add_argument('--paths', nargs='+', default=['config'],
                        choices=('config', 'kernel', 'python'))  # fmt: skip
    parser.add_argument('--heads', nargs='+', choices=('config', 'mmseg', 'fast'),
                        default=['config'],
                        help="of segmentors: as it says, MMSegmentation's, or ours")  # fmt: skip
    parser.add_argument('--sizes', nargs='+', type=image_size, default=[(512, 512)],
                        metavar='HxW')  # fmt: skip
    parser.add_argument('--batch', nargs='+', type=positive, default=[8])
    parser.add_argument('--dtypes', nargs='+', choices=('fp32', 'bf16', 'fp16'),
                        help='of autocast (default: bf16 on CUDA, else fp32)')  # fmt: skip
    parser.add_argument('--forms', nargs='+', choices=FORMS, default=['eager'])
    parser.add_argument('--passes', nargs='+', choices=PASSES, default=[*PASSES])
    parser.add_argument('--cfg-options', nargs='+', action=ConfigOptions, default={},
                        metavar='KEY=VALUE', help='override entries of every config')  # fmt: skip
    add_device(parser)
    parser.add_argument('--threads', type=positive, help='of the CPU')
    parser.add_argument('--n_trials', type=positive, default=10, help='calls that are timed')
    parser.add_argument('--seconds', type=float, default=20.0, help='for the calls of one figure')
    parser.add_argument('--budget', type=float, default=1e9,
                        help='seconds after which no record is begun')  # fmt: skip
    add_outputs(parser)
    add_debug(parser)
    args = parser.parse_args()
    missing = missing_config(args.configs)
    return args if missing is None else parser.error(missing)


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

import json
import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import product
from multiprocessing import active_children, get_context
from statistics import median, quantiles
from time import perf_counter

import torch
from mmengine.config import Config

from benchmarks.measure import timing, whole_models
from benchmarks.measure.latency import distinct_names, measured, own_name, report
from benchmarks.measure.tables import write_text
from benchmarks.runs import work_dir
from vim_mm.checkpoints.provenance import check_switches
from vim_mm.checkpoints.reading import load_whole_model
from vim_mm.config import merge_options
from vim_mm.engine import activate
from vim_mm.engine.cli import import_task_library
from vim_mm.engine.processes import end_with_parent
from vim_mm.engine.watching.run_record import PYTORCH, observe, versions
from vim_mm.models import Mamba
from vim_mm.ops import METHODS as ALL_METHODS
from vim_mm.progress import progress


def resolve(
    name: str, methods: list[str], each_method: bool
) -> list[tuple[str, str, str | None, str | None]]:
    """What a CONFIG stands for: file or folder, its config, checkpoint to load, method to set."""
    if Path(name).is_dir():
        return [(name, str(work_dir.find_config(name)), str(work_dir.find_checkpoint(name)), None)]
    if '{method}' not in name:
        file = str(find_config(name))
        return [(file, file, None, method) for method in (methods if each_method else [None])]
    files = [str(find_config(name.replace('{method}', method))) for method in methods]
    return [(file, file, None, None) for file in files]


def cases(args: Namespace) -> list[Case]:
    """What to measure, in order; a path or heads that a config does not have are left out."""
    sources = [
        found for name in args.configs for found in resolve(name, args.methods, args.each_method)
    ]
    names = distinct_names(
        (source for source, *_ in sources),
        lambda path: own_name(path) if path.is_dir() else path.stem,
    )
    models = [
        (names[source] + (f'_{method}' if method else ''), file, checkpoint, method)
        for source, file, checkpoint, method in sources
    ]
    return [
        Case(*model, path, heads, size, batch, dtype, form, mode)
        for form, model, size, batch, dtype, mode, heads, path in product(
            sorted(args.forms, key=FORMS.index), models, args.sizes, args.batch, args.dtypes,
            args.passes, args.heads, args.paths,
        )
    ]  # fmt: skip


def set_threads(threads: int | None) -> None:
    if threads:
        torch.set_num_threads(threads)


def measure(case: Case, args: Namespace) -> dict[str, Any]:
    """The figures of a case, or why it was left out."""
    set_threads(args.threads)
    timing.begin_peak()  # the model of the case before is gone when this one's is built
    try:
        return figures_of(case, args)
    # Whatever a form meets: one that waits for the device cannot be captured, say.
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return {'left_out': f'{type(error).__name__}: {reason[:160]}'}


def figures_of(case: Case, args: Namespace) -> dict[str, Any]:
    """Parameters, seconds, bytes, operations and path of a case."""
    cuda = args.device == 'cuda'
    passes = prepare(case, args)
    record: dict[str, Any] = {'parameters': sum(p.numel() for p in passes.model.parameters())}
    timing.begin_peak()
    run = passes.form(case.form)
    first = run()
    if case.mode == 'train':
        record['loss'] = float(first)
    del first
    record |= times(run, case, args)
    if cuda and case.form in ('graph', 'tools'):
        # Replays allocate nothing: the peak since the form was begun, of the capture, is theirs.
        record['peak_bytes'] = torch.cuda.max_memory_allocated()
    elif cuda:
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        record['peak_bytes'] = torch.cuda.max_memory_allocated()
    else:
        record['peak_bytes'] = timing.peak_memory(run, 'cpu') + passes.held_bytes()
    del run
    if case.form != 'eager':  # then its model is changed
        del passes
        timing.begin_peak()
        passes = prepare(case, args)
    return record | counts(passes, case)


def prepare(case: Case, args: Namespace) -> whole_models.Passes:
    """The passes of a case, its model as written."""
    cfg = read(case, args.cfg_options)
    model = whole_models.build(cfg, args.device)
    if case.checkpoint:
        loaded = load_whole_model(model, case.checkpoint)
        check_switches(model, loaded, case.checkpoint, allow=False)
    batch = whole_models.make_batch(cfg, case.size, case.batch)
    return whole_models.Passes(model, batch, case.dtype, case.mode == 'train')


def counts(passes: whole_models.Passes, case: Case) -> dict[str, Any]:
    """Operations of an eager pass, and the path and kernels that ran.

    To be called after all times are taken: once CUDA's profiler has run in a process, each launch
    of a graph takes its CPU longer (0.19 ms instead of 0.03 with an H100).
    """
    record: dict[str, Any] = {'operations': whole_models.count_operations(passes) / case.batch}
    mixers = sum(isinstance(module, Mamba) for module in passes.model.modules())
    if mixers:
        with observe() as seen:
            passes.eager()
        record['ran'] = seen.path(mixers)
        if case.path == 'kernel' and record['ran'] in (PYTORCH, 'mixed'):
            raise ValueError(f'the compiled scan did not run, but: {record["ran"]}')
        record['kernels'] = seen.our_kernels
    return record


def times(run: Any, case: Case, args: Namespace) -> dict[str, Any]:
    """Seconds of a call that is waited for and of one among others, and the clocks meanwhile."""
    alone = timing.wall_times(run, args.n_trials, args.seconds)
    calls = max(1, min(args.n_trials, int(args.seconds / 3 / median(alone))))
    steady = median(timing.steady_times(run, calls))
    record = {
        'latency': median(alone),
        'latency_deciles': quantiles(alone, n=10)[::8] if len(alone) > 1 else alone * 2,
        'seconds': steady,
        'images_per_second': case.batch / steady,
        'clocks': timing.clock_rates(args.device),
    }
    if args.device == 'cuda':
        record['kernel_seconds'] = timing.kernel_seconds(run, 3)
    return record


def read(case: Case, options: dict[str, Any]) -> Any:
    """The config of a case, ready to be built; its library is imported."""
    activate()
    cfg = Config.fromfile(case.config)
    merge_options(cfg, options)
    import_task_library(cfg)
    whole_models.adapt(cfg, case.size, case.path, case.heads, case.method)
    return cfg


class Worker:
    """A process for the forms that may spoil one: a new one after a failure or a compilation."""

    def __init__(self):
        self.pool: Any = None

    def measure(self, case: Case, args: Namespace) -> dict[str, Any]:
        self.pool = self.pool or ProcessPoolExecutor(
            1, get_context('spawn'), initializer=end_with_parent
        )
        try:
            record = self.pool.submit(measure, case, args).result()
        except BrokenProcessPool:  # by a crash, or by the kernel when memory is short
            record = {'left_out': 'the process that measured it was killed'}
        if 'left_out' in record or case.form in ('compiled', 'tools'):
            self.close()
        return record

    def close(self) -> None:
        if self.pool is not None:
            for child in active_children():  # it may still compile
                child.terminate()
            self.pool.shutdown()
        self.pool = None


def run(args: Namespace) -> Iterator[dict[str, Any]]:
    """Measure case by case; what cannot be measured is a record with its reason."""
    start, worker = perf_counter(), Worker()
    try:
        for case in progress([*cases(args)], 'cases'):
            record = asdict(case)
            left = args.budget - (perf_counter() - start)
            if left < (COMPILE_SECONDS if case.form in ('compiled', 'tools') else 0):
                yield record | {'left_out': 'the budget is spent'}
            elif case.form in ('graph', 'tools') and args.device == 'cpu':
                yield record | {'left_out': 'CUDA graphs need CUDA'}
            elif case.form == 'eager' and args.device == 'cpu':
                yield record | measure(case, args)
            else:
                record |= worker.measure(case, args)
                if args.device == 'cuda':  # its profiler slows down the next case
                    worker.close()
                yield record
    finally:
        worker.close()


def facts(args: Namespace) -> dict[str, Any]:
    """What the figures depend on: machine, commit, versions, clocks."""
    return timing.environment(args.device) | {
        'versions': versions(),
        'clocks': timing.clock_rates(args.device),
        'clock': 'time.perf_counter; the GPU is waited for after each call (latency) or round',
    }


def complete(args: Namespace) -> None:
    """Fill in the defaults that depend on the machine."""
    args.device = choose_device(args.device)
    args.dtypes = args.dtypes or ['bf16' if args.device == 'cuda' else 'fp32']
    args.methods = args.methods or [m for m in ALL_METHODS if not ALL_METHODS[m].control]


def main(args: Namespace) -> None:
    complete(args)
    set_threads(args.threads)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit keeps the tables
    result: dict[str, Any] = {'environment': facts(args), 'units': 'seconds, bytes', 'records': []}
    try:
        for record in run(args):
            result['records'].append(record)
            print(json.dumps(record), file=sys.stderr, flush=True)
            if args.out:  # each time: a run may be killed
                result['environment'] = facts(args)
                write_text(args.out, json.dumps(result, indent=2))
    finally:
        if result['records']:
            text = report(result)
            print(text)
            if args.markdown:
                write_text(args.markdown, text)
    if not measured(result['records']):
        raise SystemExit('nothing was measured: every case was left out')


if __name__ == '__main__':
    end(main, ARGUMENTS)
