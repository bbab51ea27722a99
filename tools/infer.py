"""Draws predictions over images: ``python tools/infer.py CONFIG CHECKPOINT INPUT``."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from _command_line import add_arguments, add_bands, add_speed_arguments, end

if TYPE_CHECKING:  # --help takes no PyTorch
    import numpy as np
    from mmengine.config import Config

MOST_NAMED = 5  # pictures that failed, in the last line


def parse_args() -> Namespace:
    parser = ArgumentParser(description='Draw predictions over an image, or all in a folder.')
    add_arguments(parser, launcher=False)
    add_speed_arguments(parser)
    add_bands(parser)
    parser.add_argument('checkpoint', help='path or URL of the weights')
    parser.add_argument('input', type=Path, help='an image, or a folder of images')
    parser.add_argument(
        '--out',
        type=Path,
        default=Path('work_dirs/infer'),
        metavar='DIR',
        help='for the overlays, NAME.png of each image (default: %(default)s)',
    )
    return parser.parse_args()


class Reader:
    """Pictures as the model takes them, and as they can be drawn over.

    Args:
        cfg: Its test pipeline reads and transforms pictures.
        bands: Of those that have other than three, see ``vim_mm.engine.reader.displayed``.
    """

    def __init__(self, cfg: 'Config', bands: list[int] | None):
        from vim_mm.engine.reader import Loaded, prediction_pipeline

        self.pipeline, self.bands, self.loaded = prediction_pipeline(cfg), bands, Loaded()
        self.loaded.put_into(self.pipeline)

    def __call__(self, picture: Path) -> dict:
        """The sample of a picture.

        Raises:
            ValueError: The pipeline leaves no pixels of it.
        """
        import cv2
        import mmcv

        sample = dict(img_path=str(picture), img_id=0)
        if self.pipeline.transforms[0] is self.loaded:  # of a data set that is in memory
            sample['img'] = mmcv.imread(picture, channel_order='rgb')
        self.loaded.image = None
        try:
            return self.pipeline(sample)
        except cv2.error as error:
            image = self.loaded.image
            if image is None or 'inv_scale' not in str(error):
                raise
            height, width = image.shape[:2]
            raise ValueError(
                f'an image of {height} x {width} pixels cannot be resized by the test pipeline, '
                'which keeps its aspect: a side of it would have no pixels'
            ) from error

    def displayed(self) -> 'np.ndarray':
        """The last picture, (H, W, 3), uint8, RGB."""
        return self.loaded.displayed(self.bands)


def write(image: 'np.ndarray', overlay: Path) -> None:
    """Write a picture (H, W, 3), uint8, RGB, as PNG."""
    import cv2

    from vim_mm.whole_file import whole_file

    ok, content = cv2.imencode('.png', image[..., ::-1])
    if not ok:
        raise ValueError(f'OpenCV makes no PNG of {image.shape} pixels')
    overlay.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(overlay) as part:
        part.write_bytes(content.tobytes())


def overlays_of(pictures: list[Path], folder: Path) -> list[Path]:
    """Files for the overlays: 0.png for 0.jpg, but 0.jpg.png where two pictures are called 0."""
    names = [picture.stem for picture in pictures]
    if len({*names}) < len(names):
        names = [picture.name for picture in pictures]
    return [folder / f'{name}.png' for name in names]


def opens(picture: Path) -> bool:
    """Whether OpenCV reads a picture."""
    import cv2

    try:
        return cv2.imread(str(picture)) is not None
    except cv2.error:  # of more pixels than it takes
        return False


@contextmanager
def noting(failed: list[str], picture: Path, *fatal: type[Exception]) -> Iterator[None]:
    """Note what fails with a picture, and go on, except where all others would fail as well.

    Args:
        failed (list[str]): Gets the picture and the reason.
        picture (Path): What the block works on.
        fatal (type[Exception]): These end the tool, and so does a full memory.
    """
    import torch

    from vim_mm.engine.batches.samples import why_unreadable

    try:
        yield
    except (torch.cuda.OutOfMemoryError, *fatal):
        raise
    except Exception as error:  # whatever the libraries make of a picture that they cannot take
        reason = ' '.join(str(error).split()) or type(error).__name__
        if not opens(picture):
            reason = why_unreadable(str(picture)) or reason
        failed.append(f'{picture}: {reason}')


def main(args: Namespace) -> None:
    import torch
    from mmengine.dataset import pseudo_collate

    from vim_mm import accelerate
    from vim_mm.engine.checks.first_samples import lost_depth, of_depth
    from vim_mm.engine.cli import load_model, read_config
    from vim_mm.engine.reader import class_meta
    from vim_mm.outputs import check_outputs
    from vim_mm.progress import progress, say, slow_at_first
    from vim_mm.stream.frames import find_pictures
    from vim_mm.stream.overlay import build_visualizer, draw_sample

    cfg = read_config(args)
    pictures = find_pictures(args.input)
    overlays = overlays_of(pictures, args.out)
    check_outputs(overlays, [('a picture of the input', picture) for picture in pictures])
    model, checkpoint = load_model(cfg, args.checkpoint)
    accelerate(model, amp=args.amp, graph=args.graph, compile=args.compile)
    if args.compile:
        model.test_step = slow_at_first(model.test_step, 'compiling the model')
    reader, visualizer = Reader(cfg, args.bands), build_visualizer(cfg, class_meta(cfg, checkpoint))
    failed: list[str] = []
    crushed: list[tuple[str, int, int]] = []
    for picture, overlay in progress([*zip(pictures, overlays, strict=True)], 'pictures'):
        prediction = None
        with noting(failed, picture):
            data = reader(picture)
            image = reader.displayed()
            if (depth := lost_depth(str(picture), reader.loaded.image)) is not None:
                crushed.append(depth)
            with torch.no_grad():
                (prediction,) = model.test_step(pseudo_collate([data]))
        if prediction is None:
            continue
        with noting(failed, picture, OSError):  # the overlay cannot be written, nor can others
            write(draw_sample(visualizer, image, prediction), overlay)
            say(str(overlay))
    for line in of_depth(crushed, str(args.input), learns=False):
        print(line)
    if failed:
        print(*failed, sep='\n', file=sys.stderr)
        named = ', '.join(line.partition(': ')[0] for line in failed[:MOST_NAMED])
        more = f' and {len(failed) - MOST_NAMED} more' if len(failed) > MOST_NAMED else ''
        raise SystemExit(
            f'{len(failed)} of {len(pictures)} pictures could not be drawn: {named}{more}.'
        )


if __name__ == '__main__':
    end(main, parse_args())
