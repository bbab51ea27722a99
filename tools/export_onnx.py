"""Writes a model as ONNX: ``python tools/export_onnx.py CONFIG CHECKPOINT OUT [--dynamic]``."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from _command_line import end, positive
from _export import BOUND, add_export_arguments, load_source, report_differences

if TYPE_CHECKING:  # --help takes no PyTorch
    from mmengine.config import Config
    from torch import Tensor, nn


def parse_args() -> Namespace:
    parser = ArgumentParser(
        description='Write a model as an ONNX file of standard operators, and compare it with '
        'PyTorch in onnxruntime. A difference above 1e-4 is exit code 1.'
    )
    add_export_arguments(
        parser,
        out='the file to write',
        dynamic='leave batch, height and width of the images open',
    )
    parser.add_argument(
        '--int8',
        action='store_true',
        help='also write OUT with .int8 before its suffix: linear layers in 8 bits, calibrated on '
        "the config's training data",
    )
    parser.add_argument(
        '--calibration-images',
        type=positive,
        default=64,
        metavar='N',
        help='for --int8 (default: 64)',
    )
    parser.add_argument(
        '--int8-keep',
        nargs='*',
        default=['out_proj'],
        metavar='NAME',
        help='linear layers that --int8 leaves in float32 (default: out_proj)',
    )
    parser.add_argument(
        '--evaluate',
        action='store_true',
        help="print the metrics on the config's test data and the median time of an image, of "
        'PyTorch and of each file',
    )
    parser.add_argument(
        '--threads', type=positive, default=0, help='of the CPU for --evaluate (default: all)'
    )
    return parser.parse_args()


def calibration_batches(
    cfg: 'Config', model: 'nn.Module', count: int, size: tuple[int, int] | None
) -> Iterator['Tensor']:
    """Images of the training data as the model takes them, (1, C, H, W), at random.

    Args:
        cfg: Names the training data.
        model: Its data preprocessor normalizes them.
        count: How many.
        size: (H, W) to crop and pad them to, None for that which each has.
    """
    from torch.nn.functional import pad

    from vim_mm.engine import VimRunner
    from vim_mm.progress import progress

    loader = {**cfg.train_dataloader, 'batch_size': 1, 'num_workers': 0}
    loader.pop('persistent_workers', None)
    batches = islice(VimRunner.build_dataloader(loader, seed=0), count)
    for batch in progress(batches, 'images for calibration', total=count):
        images = model.data_preprocessor(batch, False)['inputs']
        if size is not None:  # a side that is too long is padded by a negative number
            below, right = (n - side for n, side in zip(size, images.shape[-2:], strict=True))
            images = pad(images, (0, right, 0, below))
        yield images


def metrics(cfg: 'Config', model: 'nn.Module') -> dict[str, float]:
    """What the config's evaluator says of the model on the test data."""
    import torch
    from mmengine.evaluator import Evaluator

    from vim_mm.engine import VimRunner
    from vim_mm.progress import progress

    loader = VimRunner.build_dataloader(cfg.test_dataloader)
    evaluator = Evaluator(cfg.test_evaluator)
    evaluator.dataset_meta = loader.dataset.metainfo
    with torch.no_grad():
        for batch in progress(loader, 'batches'):
            evaluator.process(data_samples=model.test_step(batch), data_batch=batch)
    return evaluator.evaluate(len(loader.dataset))


def evaluate(args: Namespace, cfg: 'Config', files: list[Path], part: str, image: 'Tensor') -> None:
    """Print metrics and the time of an image, of PyTorch and of each file in its place."""
    import torch

    from benchmarks.measure.timing import wall_times
    from vim_mm.engine.cli import load_model
    from vim_mm.export import OnnxModule, part_of, put_in_place

    if args.threads:
        torch.set_num_threads(args.threads)
    for name in ('PyTorch', *files):
        model = load_model(cfg, args.checkpoint)[0].cpu()
        module = part_of(model, part)
        if name != 'PyTorch':
            module = OnnxModule(name, args.threads)
            put_in_place(model, part, name, args.threads)
        found = metrics(cfg, model)
        with torch.no_grad():
            times = wall_times(lambda module=module: module(image), trials=30)
        values = ', '.join(f'{key} {value:.2f}' for key, value in found.items())
        print(f'{name}: {values}, {1e3 * median(times):.1f} ms an image')


def main(args: Namespace) -> int:
    for library in ('onnx', 'onnxscript', 'onnxruntime'):
        if find_spec(library) is None:
            raise SystemExit(f"{library} is not installed, pip install '.[export]' does it.")
    import torch

    from vim_mm.export import OnnxModule, differences, export_onnx, quantize
    from vim_mm.progress import working

    source = load_source(args)
    module, embed = source.module, source.model.backbone.patch_embed
    height, width = source.size
    sizes = [(1, height, width)]
    example = sizes[0]
    if args.dynamic:
        # An example of other sizes: what is equal in it might become equal in the graph.
        example = (2, height + 2 * embed.stride, width + 3 * embed.stride)
        sizes += [example, (3, height + embed.stride // 2, 2 * width)]
    images = [torch.randn(b, embed.in_channels, h, w) for b, h, w in sizes]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with working(f'exporting {args.out}'):
        export_onnx(module, images[sizes.index(example)], args.out, args.dynamic)
    files = [args.out]
    if args.int8:
        files.append(args.out.with_suffix(f'.int8{args.out.suffix}'))
        fixed = None if args.dynamic else (height, width)
        batches = calibration_batches(source.cfg, source.model, args.calibration_images, fixed)
        with working(f'quantizing {files[-1]}'):
            quantize(*files, batches, args.int8_keep)
    errors = {file: differences(module, OnnxModule(file), images) for file in files}
    for file, worst in errors.items():
        report_differences(file, sizes, worst)
    if args.evaluate:
        evaluate(args, source.cfg, files, source.part, images[0])
    return int(not all(error <= BOUND for error in errors[args.out]))


if __name__ == '__main__':
    end(main, parse_args())
