"""Predicts a video: ``python tools/stream.py CONFIG CHECKPOINT SOURCE --out FILE``."""

import gc
import signal
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from _command_line import add_arguments, end, positive, same_file

if TYPE_CHECKING:  # --help takes no PyTorch
    from mmengine.config import Config
    from torch import nn

    from vim_mm.stream.running import Summary


def parse_args() -> Namespace:
    parser = ArgumentParser(
        description='Predict a video, a folder of images or a camera, frame by frame.'
    )
    add_arguments(parser, launcher=False)
    parser.add_argument('checkpoint', help='path or URL of the weights')
    parser.add_argument('source', help='a video file, a folder of images, or index of a camera')
    parser.add_argument(
        '--out', type=Path, metavar='FILE', help='the video with the predictions: .mkv, .avi, .mp4'
    )
    parser.add_argument('--show', action='store_true', help='in a window; q ends the stream')
    parser.add_argument('--max-frames', type=positive, metavar='N', help='end after so many')
    parser.add_argument(
        '--native',
        action='store_true',
        help='predict frames at their own size and as a whole, without the resizing and the '
        "windows of the config's test",
    )
    parser.add_argument(
        '--score',
        type=float,
        default=0.3,
        help='least one of instances that are drawn (default: %(default)s)',
    )
    parser.add_argument('--amp', action='store_true', help='predict in bfloat16')
    parser.add_argument('--compile', action='store_true', help='predict through torch.compile')
    parser.add_argument(
        '--no-graph', action='store_true', help='on a GPU, without CUDA graphs; slower'
    )
    args = parser.parse_args()
    if args.out is not None and same_file(args.source, args.out):
        parser.error(f'--out must be another file than the source, got {args.out}')
    return args


def stream(args: Namespace, cfg: 'Config', model: 'nn.Module', checkpoint: dict) -> 'Summary':
    """Run the stream that the arguments describe."""
    import torch

    from vim_mm.engine.reader import class_meta, prediction_pipeline
    from vim_mm.stream.frames import open_source
    from vim_mm.stream.overlay import Overlay
    from vim_mm.stream.predictor import Predictor
    from vim_mm.stream.running import Stream
    from vim_mm.stream.sinks import VideoFile, Window

    predictor = Predictor(
        model,
        prediction_pipeline(cfg).transforms,
        amp=args.amp,
        graph=torch.cuda.is_available() and not args.no_graph,
        compile=args.compile,
        score=args.score,
    )
    meta = class_meta(cfg, checkpoint)
    source = open_source(args.source)
    sinks = [Window()] if args.show else []
    if args.out is not None:
        video = VideoFile(args.out, source.rate)
        sinks.append(video)
        if video.path_while_open != video.path:
            print(f'{video.path_while_open} plays only when it is done, and is then {video.path}.')
    gc.freeze()  # a collection that looks at all modules takes as long as several frames
    overlay = Overlay(meta['classes'], meta['palette'])
    summary = Stream(source, predictor, overlay, sinks, limit=args.max_frames).run()
    print(summary)
    if args.out is not None:
        print(f'{video.path}: {video.frames} frames, {source.rate:g} frames/s')
    return summary


def main(args: Namespace) -> None:
    from vim_mm.engine.cli import load_model, read_config
    from vim_mm.engine.reader import prediction_pipeline
    from vim_mm.stream.frames import check_source
    from vim_mm.stream.models import for_stream
    from vim_mm.stream.pixels import check_transforms
    from vim_mm.stream.sinks import check_out, path_while_open

    if args.out is not None and same_file(args.source, path_while_open(args.out)):
        raise SystemExit(
            f'--out must be another file than the source: {args.out} is {args.source} until it is '
            'closed.'
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    # Before the weights, which may take long to read.
    check_source(args.source)
    if args.out is not None:
        check_out(args.out)
    cfg = read_config(args)
    for_stream(cfg, native=args.native)
    check_transforms(prediction_pipeline(cfg).transforms)
    summary = stream(args, cfg, *load_model(cfg, args.checkpoint))
    if summary.interrupted:
        raise KeyboardInterrupt
    if not summary.predicted:
        raise SystemExit(f'No frame of {args.source} could be read.')


if __name__ == '__main__':
    end(main, parse_args())
