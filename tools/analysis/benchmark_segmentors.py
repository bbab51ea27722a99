"""Times the training step of whole segmentors, with MMSegmentation's heads and with the fast ones.

    python tools/analysis/benchmark_segmentors.py --device cuda --out seg.json --markdown seg.md
    python tools/analysis/benchmark_segmentors.py --models vim_t --forms eager --size 64 --batch 2

A step is the loss under bfloat16 autocast as ``--amp`` makes it (on the CPU in float32), backward
and AdamW, on random pictures and labels of 150 classes; BN stands for SyncBN. Forms: eager;
``graph``, the whole step in a CUDA graph; ``compile``, the loss through torch.compile. Milliseconds
are those of steps that follow one another without waiting for the device, the median of some
rounds. GPU busy is the time of the kernels of a step, as the profiler records them, over that.
MiB are the peak of a step, parameters, gradients and the optimizer's state included.

Vim is this package's ``seg/upernet_vim_*_zoh.py``; Swin-T and ConvNeXt-T are MMSegmentation's
configs; DeiT-T is its VisionTransformer under the neck and the heads of Vim-T. ConvNeXt is
mmpretrain's where that is installed, else timm's. What fails or does not fit into ``--budget`` is
left out, and said. Needs torch, timm, mmengine, mmcv (without operators) and mmsegmentation.
"""

import argparse
import gc
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/, for _command_line
from _command_line import add_run_arguments, end, parse_first

TITLES = {
    'vim_t': 'UPerNet Vim-T',
    'vim_s': 'UPerNet Vim-S',
    'swin_t': 'UPerNet Swin-T',
    'convnext_t': 'UPerNet ConvNeXt-T',
    'deit_t': 'UPerNet DeiT-T',
}
HEADS = ('mmseg', 'fast')
FORMS = ('eager', 'graph', 'compile')


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--models', nargs='+', choices=TITLES, default=[*TITLES])
    parser.add_argument('--heads', nargs='+', choices=HEADS, default=[*HEADS])
    parser.add_argument('--forms', nargs='+', choices=FORMS, default=[*FORMS])
    parser.add_argument('--size', type=int, default=512, help='side of the pictures')
    parser.add_argument('--batch', type=int, default=8)
    parser.add_argument('--rounds', type=int, default=3, help='of --n_trials steps each')
    parser.add_argument(
        '--budget', type=float, default=230.0, help='seconds after which no record is begun'
    )
    add_run_arguments(parser)
    parser.set_defaults(n_trials=6)
    return parser.parse_args()


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

import mmseg.models  # registers
import timm
import torch
from mmengine.config import Config
from mmengine.model import BaseModel, revert_sync_batchnorm
from mmengine.registry import MODELS, init_default_scope
from torch import Tensor, nn

from vim_mm.analysis.tables import figures, markdown_table, write_text
from vim_mm.analysis.timing import environment
from vim_mm.config import config_path
from vim_mm.engine import BFloat16OptimWrapper
from vim_mm.progress import progress

# A compiled form is not begun with less of the budget left, in seconds.
COMPILE_SECONDS = 75
MIB = 2**20


@MODELS.register_module()
class TimmBackbone(nn.Module):
    """A backbone of timm as MMSegmentation takes one: pictures to a tuple of maps."""

    def __init__(self, name: str, **options):
        super().__init__()
        self.model = timm.create_model(name, features_only=True, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B, 3, H, W) to its maps, finest first."""
        return tuple(self.model(x))


def _mmseg_model(name: str) -> Config:
    """The model of a base config of MMSegmentation, without weights to download."""
    folder = Path(mmseg.models.__file__).parents[1] / '.mim/configs/_base_/models'
    # Its custom imports are mmpretrain.
    model = Config.fromfile(folder / name, import_custom_modules=False).model
    model.pretrained = None
    model.decode_head.num_classes = model.auxiliary_head.num_classes = 150
    return model


def vim(arch: str) -> Callable[[int], Config]:
    def config(size: int) -> Config:
        model = Config.fromfile(config_path(f'seg/upernet_vim_{arch}_zoh.py')).model
        model.backbone.img_size = size
        return model

    return config


def swin_t(size: int) -> Config:
    return _mmseg_model('upernet_swin.py')


def convnext_t(size: int) -> Config:
    model = _mmseg_model('upernet_convnext.py')
    if find_spec('mmpretrain') is not None:
        import mmpretrain.models  # noqa: F401, registers

        model.backbone.update(arch='tiny', init_cfg=None)
    else:
        model.backbone = dict(type='TimmBackbone', name='convnext_tiny', drop_path_rate=0.4)
    model.decode_head.in_channels = [96, 192, 384, 768]
    model.auxiliary_head.in_channels = 384
    return model


def deit_t(size: int) -> Config:
    model = vim('t')(size)
    model.backbone = dict(
        type='VisionTransformer',
        img_size=(size, size),
        patch_size=16,
        embed_dims=192,
        num_layers=12,
        num_heads=3,
        out_indices=(2, 5, 8, 11),
        drop_path_rate=0.1,
    )
    return model


BACKBONES = {
    'vim_t': vim('t'),
    'vim_s': vim('s'),
    'swin_t': swin_t,
    'convnext_t': convnext_t,
    'deit_t': deit_t,
}


def build(name: str, heads: str, size: int, device: str) -> BaseModel:
    """A segmentor in training mode with one kind of heads."""
    cfg = BACKBONES[name](size)
    for head in (cfg.decode_head, cfg.auxiliary_head):
        plain = head.type.removeprefix('Fast')
        head.type = plain if heads == 'mmseg' else f'Fast{plain}'
    torch.manual_seed(0)
    init_default_scope('mmseg')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # avg_non_ignore is False
        model = revert_sync_batchnorm(MODELS.build(cfg))
    return model.to(device).train()


def total_loss(model: BaseModel, images: Tensor, labels: Tensor) -> Tensor:
    """The sum of a segmentor's losses for pictures (B, 3, H, W) and labels (B, 1, H, W)."""
    samples = [SimpleNamespace(gt_sem_seg=SimpleNamespace(data=label)) for label in labels]
    losses = model.loss(images, samples)
    return sum(value.mean() for name, value in losses.items() if 'loss' in name)


@dataclass
class Step:
    """A training step that can be called again and again.

    Args:
        model (BaseModel): A segmentor.
        size (int): Side of its random pictures.
        batch (int): Their number.
        form (str): One of ``FORMS``.
    """

    model: BaseModel
    size: int
    batch: int
    form: str

    def __post_init__(self) -> None:
        device = next(self.model.parameters()).device
        self.images = torch.randn(self.batch, 3, self.size, self.size, device=device)
        classes = self.model.num_classes
        shape = (self.batch, 1, self.size, self.size)
        self.labels = torch.randint(0, classes, shape, device=device)
        self.labels[torch.rand(shape, device=device) < 0.05] = 255
        cuda = device.type == 'cuda'
        optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=6e-5, weight_decay=0.01, capturable=cuda
        )
        self.wrapper = BFloat16OptimWrapper(optimizer)
        self.wrapper.initialize_count_status(self.model, 0, 10**9)
        self.loss = total_loss
        if self.form == 'compile':
            torch.compiler.reset()
            self.loss = torch.compile(total_loss)
        self.run = self._capture() if self.form == 'graph' else self._eager

    def _eager(self) -> Tensor:
        with self._autocast():
            loss = self.loss(self.model, self.images, self.labels)
        loss.backward()
        self.wrapper.step()
        self.wrapper.zero_grad()
        return loss.detach()

    def _autocast(self) -> AbstractContextManager:
        return self.wrapper.optim_context(self.model) if self.images.is_cuda else nullcontext()

    def _capture(self) -> Callable[[], Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._eager()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._eager()

        def replay() -> Tensor:
            graph.replay()
            return loss

        return replay


def seconds_per_step(step: Step, steps: int, rounds: int) -> float:
    """Of steps that follow one another; the device is waited for after each round."""
    cuda = step.images.is_cuda

    def one_round() -> float:
        start = perf_counter()
        for _ in range(steps):
            step.run()
        if cuda:
            torch.cuda.synchronize()
        return (perf_counter() - start) / steps

    if cuda:
        torch.cuda.synchronize()
    return median(one_round() for _ in range(rounds))


def kernel_times(step: Step, steps: int = 3) -> dict[str, float]:
    """Seconds of a step by the name of the kernel, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            step.run()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            seconds = 1e-6 * event.time_range.elapsed_us() / steps
            times[event.name] = times.get(event.name, 0.0) + seconds
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def measure(step: Step, trials: int, rounds: int) -> dict[str, Any]:
    """Figures of a step: seconds, bytes, loss, and on CUDA the kernels."""
    cuda = step.images.is_cuda
    # Of the first step (of a graph, the first replay): AdamW soon makes rounding visible.
    loss = float(step.run())
    for _ in range(2):
        step.run()  # warms up, allocates the optimizer's state
    # Replays allocate nothing: the peak of the capture, with what the model holds, is theirs.
    if cuda and step.form != 'graph':
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    record = {'seconds': seconds_per_step(step, trials, rounds), 'loss': loss}
    if cuda:
        record['peak_bytes'] = torch.cuda.max_memory_allocated()
        times = kernel_times(step)
        record['kernel_seconds'] = sum(times.values())
        record['busy'] = record['kernel_seconds'] / record['seconds']
        record['kernels'] = dict([*times.items()][:10])
    return record


def cases(args: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Form, model and heads of each record; the forms that take longest come last."""
    for form in FORMS:
        for name in args.models:
            for heads in reversed(args.heads):
                if form in args.forms:
                    yield form, name, heads


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure case by case; what cannot be measured is a record with its reason."""
    start = perf_counter()
    for form, name, heads in progress([*cases(args)], 'records'):
        record: dict[str, Any] = dict(model=name, heads=heads, form=form)
        left = args.budget - (perf_counter() - start)
        if left < (COMPILE_SECONDS if form == 'compile' else 0):
            yield record | {'left_out': 'the budget is spent'}
            continue
        if form == 'graph' and args.device != 'cuda':
            yield record | {'left_out': 'CUDA graphs need CUDA'}
            continue
        if form == 'eager':
            yield record | measure_case(args, name, heads, form)
        else:  # a capture that fails leaves the process' generator of random numbers unusable
            with get_context('spawn').Pool(1) as pool:
                yield record | pool.apply(measure_case, (args, name, heads, form))


def measure_case(args: argparse.Namespace, name: str, heads: str, form: str) -> dict[str, Any]:
    """Parameters and figures of one case, or why it was left out."""
    prepare(args)
    gc.collect()
    if args.device == 'cuda':
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = step = None
    try:
        model = build(name, heads, args.size, args.device)
        parameters = sum(p.numel() for p in model.parameters())
        step = Step(model, args.size, args.batch, form)
        return {'parameters': parameters} | measure(step, args.n_trials, args.rounds)
    # Whatever a form meets: one that waits for the device cannot be captured, say.
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return {'left_out': f'{type(error).__name__}: {reason[:160]}'}
    finally:
        del model, step


def prepare(args: argparse.Namespace) -> None:
    """Settings of a process that measures."""
    torch.set_num_threads(args.threads or torch.get_num_threads())
    torch.backends.cudnn.benchmark = True  # as the shipped segmentation configs


def table(records: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """What was measured as a table, and below it what was left out."""
    by_case = {(r['model'], r['heads'], r['form']): r for r in records}
    rows = []
    for r in records:
        if 'left_out' in r:
            continue
        other = by_case.get((r['model'], 'mmseg', 'eager'), {})
        row = {
            'model': TITLES[r['model']],
            'heads': r['heads'],
            'form': r['form'],
            'M parameters': figures(r['parameters'] / 1e6),
            'ms': figures(1e3 * r['seconds']),
            'images/s': figures(args.batch / r['seconds']),
            'of mmseg eager': figures(r['seconds'] / other['seconds'])
            if 'seconds' in other
            else '',
        }
        if 'peak_bytes' in r:
            row |= {
                'peak MiB': f'{r["peak_bytes"] / MIB:.0f}',
                'of its peak': figures(r['peak_bytes'] / other['peak_bytes']) if other else '',
                'kernel ms': figures(1e3 * r['kernel_seconds']),
                'GPU busy': f'{100 * r["busy"]:.0f} %',
            }
        row['loss'] = f'{r["loss"]:.4f}'
        rows.append(row)
    parts = [markdown_table(rows)] if rows else []
    left_out = [r for r in records if 'left_out' in r]
    parts += [
        f'left out: {r["model"]}, {r["heads"]}, {r["form"]}: {r["left_out"]}' for r in left_out
    ]
    return '\n\n'.join(parts)


def main(args: argparse.Namespace) -> None:
    prepare(args)
    host = environment(args.device) | {'timm': timm.__version__, 'mmseg': mmseg.__version__}
    given = {
        'size': args.size,
        'batch': args.batch,
        'autocast': 'bf16' if args.device == 'cuda' else None,
    }
    head = ', '.join(f'{name} {value}' for name, value in (host | given).items() if value)
    records = []
    try:
        for record in run(args):
            records.append(record)
            shown = {k: v for k, v in record.items() if k != 'kernels'}
            print(json.dumps(shown), file=sys.stderr, flush=True)
            if args.out:  # each time: a run may be killed
                result = {'environment': host, **given, 'units': 'seconds, bytes'}
                write_text(args.out, json.dumps(result | {'records': records}, indent=2))
    finally:
        text = f'{head}\n\n{table(records, args)}'
        print(text)
        if args.markdown:
            write_text(args.markdown, text)


if __name__ == '__main__':
    end(main, ARGUMENTS)
