"""Where the GPU's time goes in a training step of a config, by kernel and by module.

    python tools/analysis/profile_training.py configs/det/mask_rcnn_vim_t_zoh.py --size 800 1333
    python tools/analysis/profile_training.py configs/det/mask_rcnn_vim_t_zoh.py --size 1024 1024
    python tools/analysis/profile_training.py configs/seg/upernet_vim_t_zoh.py --size 512 512

The config's model trains on random pictures of one size, with random labels or boxes with masks,
under bfloat16 autocast as ``--amp`` makes it. The table of kernels is the profiler's, of some
steps, and its sum over the wall time of the same steps without the profiler says how busy the GPU
is. A module's forward time is between events on the device around its call, so that it includes
what the device waits for the host. Modules are those called in the step, down to ``--depth``.
Detection needs mmcv with its CUDA operators.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/, for _command_line
from _command_line import add_arguments, end, parse_first


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, launcher=False)
    parser.add_argument('--size', nargs=2, type=int, required=True, metavar=('HEIGHT', 'WIDTH'))
    parser.add_argument('--batch', type=int, default=2)
    parser.add_argument('--steps', type=int, default=5)
    parser.add_argument('--depth', type=int, default=2, help='of the modules that are timed')
    parser.add_argument('--rows', type=int, default=25, help='of a table')
    parser.add_argument('--out', type=Path, help='write the figures as JSON to this file')
    parser.add_argument('--markdown', type=Path, help='write the tables to this file as well')
    return parser.parse_args()


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

import numpy as np
import torch
from mmengine.config import Config
from mmengine.model import BaseModel, revert_sync_batchnorm
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import InstanceData, PixelData

from vim_mm.analysis.tables import figures, markdown_table, write_text
from vim_mm.analysis.timing import environment
from vim_mm.engine import BFloat16OptimWrapper
from vim_mm.engine.cli import read_config

OBJECTS = 8  # in a picture, boxes of 1/16 to 1/2 of its sides
MIB = 2**20


def _segmentation_sample(height: int, width: int, classes: int) -> Any:
    from mmseg.structures import SegDataSample

    labels = torch.randint(0, classes, (1, height, width))
    meta = dict(img_shape=(height, width), ori_shape=(height, width))
    return SegDataSample(gt_sem_seg=PixelData(data=labels), metainfo=meta)


def _detection_sample(height: int, width: int, classes: int) -> Any:
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks

    size = torch.tensor([width, height])
    extent = (torch.rand(OBJECTS, 2) * 7 / 16 + 1 / 16) * size
    corner = torch.rand(OBJECTS, 2) * (size - extent)
    boxes = torch.cat([corner, corner + extent], dim=1)
    masks = np.zeros((OBJECTS, height, width), np.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
        mask[top:bottom, left:right] = 1
    instances = InstanceData(
        bboxes=boxes,
        labels=torch.randint(0, classes, (OBJECTS,)),
        masks=BitmapMasks(masks, height, width),
    )
    meta = dict(
        img_shape=(height, width),
        ori_shape=(height, width),
        pad_shape=(height, width),
        batch_input_shape=(height, width),
        scale_factor=(1.0, 1.0),
    )
    sample = DetDataSample(gt_instances=instances, metainfo=meta)
    sample.ignored_instances = InstanceData(bboxes=torch.zeros(0, 4), labels=torch.zeros(0).long())
    return sample


def make_batch(cfg: Config, size: tuple[int, int], batch: int) -> dict[str, list]:
    """Random pictures and their labels, as a loader hands them over."""
    if cfg.default_scope == 'mmseg':
        make, classes = _segmentation_sample, cfg.model.decode_head.num_classes
    else:
        heads = cfg.model.roi_head.bbox_head
        make = _detection_sample
        classes = (heads[0] if isinstance(heads, list) else heads).num_classes
    pictures = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for _ in range(batch)]
    pinned = torch.cuda.is_available()  # as the runner's loader does it
    return dict(
        inputs=[picture.pin_memory() if pinned else picture for picture in pictures],
        data_samples=[make(*size, classes) for _ in range(batch)],
    )


def build(cfg: Config, size: tuple[int, int], device: str) -> BaseModel:
    init_default_scope(cfg.default_scope)
    if 'size' in cfg.model.data_preprocessor:
        cfg.model.data_preprocessor.size = size
    cfg.model.data_preprocessor.pop('batch_augments', None)  # they change the size
    torch.manual_seed(0)
    return revert_sync_batchnorm(MODELS.build(cfg.model)).to(device).train()


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
            if 0 < len(name.split('.')) <= depth and name:
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


def wall_seconds(step: Any, steps: int) -> float:
    """Median of three rounds of steps that follow one another."""
    cuda = torch.cuda.is_available()
    times = []
    for _ in range(3):
        start = perf_counter()
        for _ in range(steps):
            step()
        if cuda:
            torch.cuda.synchronize()
        times.append((perf_counter() - start) / steps)
    return median(times)


def kernel_table(step: Any, steps: int) -> dict[str, tuple[float, int]]:
    """Seconds and calls of a step by the name of the kernel, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.setdefault(event.name, []).append(1e-6 * event.time_range.elapsed_us())
    table = {name: (sum(t) / steps, round(len(t) / steps)) for name, t in found.items()}
    return dict(sorted(table.items(), key=lambda item: -item[1][0]))


def profile(args: Namespace, cfg: Config, device: str) -> dict[str, Any]:
    """All figures of a config."""
    size = tuple(args.size)
    model = build(cfg, size, device)
    batch = make_batch(cfg, size, args.batch)
    wrapper = BFloat16OptimWrapper(torch.optim.AdamW(model.parameters(), lr=1e-5))
    wrapper.initialize_count_status(model, 0, 10**9)

    def step() -> None:
        model.train_step(dict(batch), wrapper)

    for _ in range(3):
        step()
    result: dict[str, Any] = {'seconds': wall_seconds(step, args.steps)}
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
    head = ', '.join(f'{k} {v}' for k, v in host.items() if v)
    text = f'{head}, {args.config}, {args.size}, batch {args.batch}\n\n{report(result, args)}'
    print(text)
    if args.markdown:
        write_text(args.markdown, text)
    if args.out:
        write_text(args.out, json.dumps({'environment': host} | result, indent=2))


if __name__ == '__main__':
    end(main, ARGUMENTS)
