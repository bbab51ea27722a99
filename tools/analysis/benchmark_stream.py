"""Where the time of a frame goes, from a video to the drawn prediction.

    python tools/analysis/benchmark_stream.py configs/seg/upernet_vim_t_zoh.py --amp \
        --sizes 1920x1080 --forms eager graph --out stream.json --markdown stream.md
    python tools/analysis/benchmark_stream.py --amp \
        mmseg::segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512.py

Batch 1, random weights, frames at their own size (``--native`` of tools/stream.py). First one frame
after the other: decode, upload, preprocess, backbone, head, postprocess, download, overlay, each in
milliseconds, those of a GPU by its events. `mask` is the wall time from the decoded frame in host
memory to the prediction in host memory; `sum / wall` compares all stages with the wall clock.
Then all frames as tools/stream.py takes them, stages side by side, without encoding: frames/s, and
the time between predictions. Shares are those of frames beyond 16.67 ms.

Forms: ``eager``; ``graph``, CUDA graphs; ``compile``, torch.compile; ``tools``, both, as
``tools/stream.py --compile`` runs on a GPU. What fails is left out, and said. Without ``--video`` a
video of moving discs is written for each size (MPEG-4 part 2, which OpenCV's wheels can write).

The postprocess of a detector has little to do where random weights find nothing:
``--cfg-options model.test_cfg.rcnn.score_thr=0`` lets it draw 100 instances on each frame.
"""

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from _command_line import (
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

FORMS = ('eager', 'graph', 'compile', 'tools')
GRAPHS = ('graph', 'tools')


def size(text: str) -> tuple[int, int]:
    width, _, height = text.partition('x')
    return int(width), int(height)


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        'configs', nargs='+', help='paths, configs that vim_mm ships, or mmseg::... and mmdet::...'
    )
    sizes = [(512, 512), (1024, 1024), (1920, 1080)]
    parser.add_argument('--sizes', nargs='+', type=size, default=sizes, metavar='WIDTHxHEIGHT')
    parser.add_argument('--forms', nargs='+', choices=FORMS, default=[*FORMS])
    parser.add_argument('--amp', action='store_true', help='in bfloat16')
    parser.add_argument('--frames', type=positive, default=300, help='that are measured, each way')
    parser.add_argument('--video', type=Path, help='in place of those that are made')
    add_device(parser)
    parser.add_argument('--cfg-options', nargs='+', action=ConfigOptions, default={}, metavar='K=V')
    add_outputs(parser)
    add_debug(parser)
    args = parser.parse_args()
    missing = missing_config(args.configs)
    return args if missing is None else parser.error(missing)


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

import cv2
import numpy as np
import torch
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, init_default_scope

from benchmarks.measure.tables import figures, markdown_table, publish
from benchmarks.measure.timing import begin_peak, describe, environment
from vim_mm.engine.cli import read_config
from vim_mm.engine.reader import class_meta, prediction_pipeline
from vim_mm.progress import progress
from vim_mm.stream.frames import Video
from vim_mm.stream.models import for_stream
from vim_mm.stream.overlay import Overlay
from vim_mm.stream.predictor import Predictor
from vim_mm.stream.running import Stream

STAGES = (
    'decode',
    'upload',
    'preprocess',
    'backbone',
    'head',
    'postprocess',
    'download',
    'overlay',
)
PERCENTILES = (50, 90, 99)
# Of sixty frames a second.
PERIOD = 1 / 60
WARM_UP = 10  # frames
# By this part the sum of the stages and the wall clock may differ.
TOLERANCE = 0.1
VIDEO_FRAMES = 60
MIB = 2**20


def write_video(path: Path, width: int, height: int) -> None:
    """Discs that move over a picture that is smooth at the scale of objects, with grain."""
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (9, 16, 3), dtype=np.uint8)
    ground = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    grain = random.integers(-8, 9, ground.shape, dtype=np.int16)
    ground = np.clip(ground + grain, 0, 255).astype(np.uint8)
    places = random.uniform(0, 1, (8, 2))
    speeds = random.uniform(-0.01, 0.01, (8, 2))
    colours = random.integers(0, 256, (8, 3)).tolist()
    fourcc = cv2.VideoWriter_fourcc(*'mp4v')
    writer = cv2.VideoWriter(str(path), cv2.CAP_FFMPEG, fourcc, 60.0, (width, height))
    for i in range(VIDEO_FRAMES):
        frame = ground.copy()
        for place, speed, colour in zip(places, speeds, colours, strict=True):
            centre = ((place + i * speed) % 1 * (width, height)).astype(int).tolist()
            cv2.circle(frame, centre, height // 10, colour, cv2.FILLED)
        writer.write(frame)
    writer.release()


class Repeated(Video):
    """A video that starts anew at its end, until it has given so many frames."""

    def __init__(self, path: Path, frames: int):
        super().__init__(path)
        self.path, self.length = path, frames

    def frames(self, allocate) -> Iterator[np.ndarray | None]:
        """As in Video."""
        given = 0
        while given < self.length:
            video = Video(self.path)
            for frame in video.frames(allocate):
                yield frame
                given += 1
                if given == self.length:
                    break
            video.close()


class Nowhere:
    """A sink, so that frames are drawn."""

    def write(self, picture: np.ndarray) -> bool:
        """Forget it."""
        return True

    def close(self) -> None:
        """Nothing is open."""


def one_by_one(source: Video, predictor: Predictor, overlay: Overlay) -> dict[str, list[float]]:
    """Seconds of each frame by stage; and 'mask' and 'wall', see above."""
    times: dict[str, list[float]] = {}
    slot = predictor.slot()
    begin = perf_counter()
    for i, picture in enumerate(source.frames(slot.buffer)):
        slot.put(picture)
        decoded = perf_counter()
        predictor.submit(slot)
        prediction = predictor.result(slot)
        predicted = perf_counter()
        overlay(slot.picture, prediction)
        drawn = perf_counter()
        row = {'decode': decoded - begin, **slot.seconds, 'overlay': drawn - predicted}
        row |= {'mask': predicted - decoded, 'wall': drawn - begin}
        if i >= WARM_UP:
            for name, value in row.items():
                times.setdefault(name, []).append(value)
        begin = perf_counter()
    return times


def side_by_side(source: Video, predictor: Predictor, overlay: Overlay) -> dict[str, Any]:
    """Frames a second, the times between predictions and from a frame to its prediction."""
    ends: list[float] = []
    stream = Stream(
        source,
        predictor,
        overlay,
        [Nowhere()],
        on_result=lambda number, slot, prediction: ends.append(perf_counter()),
    )
    summary = stream.run()
    if summary.interrupted:  # no measurement of all frames
        raise KeyboardInterrupt
    ends = ends[WARM_UP:]
    return {
        'rate': (len(ends) - 1) / (ends[-1] - ends[0]),
        'intervals': np.diff(ends).tolist(),
        'latencies': summary.latencies[WARM_UP:],
    }


def percentiles(values: list[float]) -> dict[str, float]:
    return {f'p{p}': float(np.percentile(values, p)) for p in PERCENTILES}


def share_beyond(values: list[float]) -> float:
    return sum(value > PERIOD for value in values) / len(values)


def measure(args: argparse.Namespace, cfg: Config, form: str, video: Path) -> dict[str, Any]:
    """Figures of a model in one form on a video."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = revert_sync_batchnorm(MODELS.build(cfg.model)).to(args.device).eval()
    predictor = Predictor(
        model,
        prediction_pipeline(cfg).transforms,
        amp=args.amp,
        graph=form in GRAPHS,
        compile=form in ('compile', 'tools'),
        timed=True,
    )
    meta = class_meta(cfg)
    overlay = Overlay(meta['classes'], meta['palette'])
    first = Video(video)
    size = next(first.frames(lambda shape: np.empty(shape, np.uint8))).shape[:2]
    first.close()
    begin = perf_counter()
    predictor.prepare(size)
    record: dict[str, Any] = {'height': size[0], 'width': size[1]}
    record['prepare'] = perf_counter() - begin
    gc.freeze()  # as tools/stream.py
    times = one_by_one(Repeated(video, args.frames + WARM_UP), predictor, overlay)
    stages = [name for name in STAGES if name in times]
    record['stages'] = {name: percentiles(times[name]) for name in stages}
    record['mask'] = percentiles(times['mask'])
    record['mask_beyond'] = share_beyond(times['mask'])
    record['sum_of_wall'] = sum(sum(times[name]) for name in stages) / sum(times['wall'])
    predictor.timed = False
    overlapped = side_by_side(Repeated(video, args.frames + WARM_UP), predictor, overlay)
    record['rate'] = overlapped['rate']
    record['interval'] = percentiles(overlapped['intervals'])
    record['interval_beyond'] = share_beyond(overlapped['intervals'])
    record['latency'] = percentiles(overlapped['latencies'])
    if args.device == 'cuda':
        record['peak_bytes'] = torch.cuda.max_memory_allocated()
    return record


def run(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Measure case by case; what cannot be measured is a record with its reason."""
    videos = {} if args.video is None else {'': args.video}
    for width, height in [] if args.video is not None else args.sizes:
        videos[f'{width}x{height}'] = folder / f'{width}x{height}.mp4'
        write_video(videos[f'{width}x{height}'], width, height)
    for name in progress(args.configs, 'models'):
        options = argparse.Namespace(config=str(find_config(name)), cfg_options=args.cfg_options)
        cfg = read_config(options)
        for_stream(cfg, native=True)
        init_default_scope(cfg.default_scope)
        for form in args.forms:
            for size, video in videos.items():
                record: dict[str, Any] = dict(model=Path(name).stem, size=size, form=form)
                if form in GRAPHS and args.device != 'cuda':
                    yield record | {'left_out': 'CUDA graphs need CUDA'}
                else:
                    yield record | attempt(args, cfg, form, video)


def attempt(args: argparse.Namespace, cfg: Config, form: str, video: Path) -> dict[str, Any]:
    """:func:`measure`, or why it failed."""
    gc.unfreeze()
    begin_peak()
    try:
        return measure(args, cfg, form, video)
    except Exception as error:  # whatever a form meets
        if args.debug:
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return {'left_out': f'{type(error).__name__}: {reason[:200]}'}


def ms(seconds: float) -> str:
    return figures(1e3 * seconds)


def tables(records: list[dict[str, Any]]) -> str:
    """The table of all cases, one of the stages, and what was left out."""
    measured = [r for r in records if 'left_out' not in r]
    whole, stages = [], []
    for r in measured:
        case = {'model': r['model'], 'size': f'{r["width"]} x {r["height"]}', 'form': r['form']}
        row = case | {f'mask {p}, ms': ms(value) for p, value in r['mask'].items()}
        row |= {
            '> 16.67 ms': f'{100 * r["mask_beyond"]:.1f} %',
            'frames/s': figures(r['rate']),
            'interval p99, ms': ms(r['interval']['p99']),
            'intervals > 16.67 ms': f'{100 * r["interval_beyond"]:.1f} %',
            'sum / wall': figures(r['sum_of_wall']),
        }
        if 'peak_bytes' in r:
            row['peak MiB'] = f'{r["peak_bytes"] / MIB:.0f}'
        whole.append(row)
        cells = {
            stage: ' / '.join(ms(t) for t in r['stages'][stage].values())
            if stage in r['stages']
            else ''
            for stage in STAGES
        }
        stages.append(case | cells)
    parts = []
    if measured:
        parts = [markdown_table(whole), 'Stages, ms: p50 / p90 / p99', markdown_table(stages)]
    unequal = [r for r in measured if abs(r['sum_of_wall'] - 1) > TOLERANCE]
    parts += [
        f'{r["model"]}, {r["size"]}, {r["form"]}: the stages do not add up to the wall clock'
        for r in unequal
    ]
    left_out = [r for r in records if 'left_out' in r]
    lines = [f'left out: {r["model"]}, {r["size"]}, {r["form"]}: {r["left_out"]}' for r in left_out]
    return '\n\n'.join([*parts, *lines])


def main(args: argparse.Namespace) -> None:
    args.device = choose_device(args.device)
    torch.backends.cudnn.benchmark = True  # sizes do not change
    host = environment(args.device) | {'opencv': cv2.__version__, 'autocast': args.amp}
    host |= {'cores': cv2.getNumberOfCPUs(), 'frames': args.frames}
    records: list[dict[str, Any]] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for record in run(args, Path(folder)):
                records.append(record)
                print(json.dumps(record), file=sys.stderr, flush=True)
    finally:  # also of what was measured before Ctrl-C
        result = {'environment': host, 'records': records}
        publish(args, f'{describe(host)}\n\n{tables(records)}', result)


if __name__ == '__main__':
    end(main, ARGUMENTS)
