"""Start of the demo: draws the shapes data set on disk, which the ``*_shapes.py`` configs read.

One scene holds up to three bright shapes on a dark, textured background. Every shape has a random
size, tilt, colour and texture, so only its outline tells its class, and shapes hide parts of each
other. The same images are written in the layouts of ADE20K and COCO, see ``layouts.py``.

Usage: ``python -m vim_mm.datasets.shapes --out data/shapes``
"""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from vim_mm.datasets.layouts import COCO_SPLITS, Scene, insist_on_least, write_once, write_split
from vim_mm.mistakes import end
from vim_mm.progress import progress

SHAPES = ('circle', 'square', 'triangle', 'star', 'ring', 'cross')
SEG_CLASSES = ('background', *SHAPES)

# Raise when the pictures or the files change, so that older data sets are made anew.
_VERSION = 1
_MAX_SHAPES = 3
_RADIUS = (0.2, 0.36)  # of the circle around a shape, by the longer side of the image
_MAX_TILT = 10.0  # degrees
_EMPTY_SCENES = 0.04
_ATTEMPTS = 6  # to find a place for a shape; it is left out if there is none
_MIN_INSIDE = 0.7  # of a shape's area that lies inside the image
_MIN_VISIBLE = 0.5  # of a shape's area that later shapes must leave uncovered
_MIN_BRIGHTNESS = 130.0  # mean of a shape's RGB
_MIN_SATURATION = 100.0  # greatest less least of a shape's RGB
_MIN_CONTRAST = 80.0  # Euclidean RGB distance of a shape to what lies under it


@dataclass(frozen=True)
class ShapesConfig:
    """Parameters that determine a shapes data set, down to the pixel.

    Attributes:
        train (int): Number of training images.
        val (int): Number of validation images.
        size (int): Longer side of every image in pixels, at least 32.
        seed (int): Seed, at least 0. Scene i of a split depends on the seed, the split, i and the
            size only, so a larger data set extends a smaller one.
    """

    train: int = 3000
    val: int = 100
    size: int = 128
    seed: int = 0

    def __post_init__(self):
        insist_on_least(self, train=1, val=1, size=32, seed=0)


def draw_scene(rng: np.random.Generator, size: int) -> Scene:
    """Draw one random scene whose longer side is ``size`` pixels."""
    import cv2  # in functions, so that a command without OpenCV ends in one sentence

    height, width = _random_shape(rng, size)
    ground = rng.uniform(40, 90) + rng.uniform(-20, 20, 3)  # a dark grey with a cast
    canvas = _texture(rng, height, width, ground, strength=15.0)
    masks, areas, labels = [], [], []
    count = 0 if rng.random() < _EMPTY_SCENES else rng.integers(1, _MAX_SHAPES + 1)
    for label in rng.integers(len(SHAPES), size=count):
        for _ in range(_ATTEMPTS):
            mask, area = _place(rng, SHAPES[label], height, width)
            remaining = [below & ~mask for below in masks]
            if mask.sum() >= _MIN_INSIDE * area and all(
                left.sum() >= _MIN_VISIBLE * whole for left, whole in zip(remaining, areas)
            ):
                colour = _shape_colour(rng, canvas[mask].mean(axis=0))
                canvas[mask] = _texture(rng, height, width, colour, strength=10.0)[mask]
                masks, areas = [*remaining, mask], [*areas, area]
                labels.append(label)
                break
    # Blurring softens the hard outlines, noise added afterwards stays sharp, as in a photograph.
    canvas = cv2.GaussianBlur(canvas, (3, 3), 0.6)
    canvas += rng.uniform(2, 6) * rng.standard_normal(canvas.shape, np.float32)
    return Scene(
        image=np.clip(np.rint(canvas), 0, 255).astype(np.uint8),
        masks=np.array(masks, bool).reshape(-1, height, width),
        labels=np.array(labels, np.int64),
    )


def write_dataset(out: str | Path, config: ShapesConfig) -> bool:
    """Write the data set unless ``out`` holds it, see :func:`.layouts.write_once`."""

    def write(root: Path) -> None:
        for index, split in enumerate(COCO_SPLITS):
            count = config.train if split == 'training' else config.val
            scenes = (
                draw_scene(np.random.default_rng([config.seed, index, i]), config.size)
                for i in progress(range(count), f'{split} pictures')
            )
            write_split(root, split, scenes, SHAPES)

    manifest = {'version': _VERSION, **asdict(config)}
    return write_once(Path(out), manifest, write, 'shapes data set')


def _random_shape(rng, size):
    """Height and width: half of the images are square, the others have a side of 5/8 to 7/8."""
    if rng.random() < 0.5:
        return size, size
    shorter = round(size * rng.uniform(0.625, 0.875))
    return (size, shorter) if rng.random() < 0.5 else (shorter, size)


def _unit_outline(shape):
    """Contours, (P, 2) arrays, of an upright shape in the unit circle; a second one is a hole."""

    def on_circle(points, radius=1.0):
        angle = np.arange(points) * 2 * np.pi / points
        return radius * np.stack([np.sin(angle), -np.cos(angle)], axis=1)

    if shape == 'circle':
        return [on_circle(64)]
    if shape == 'ring':
        return [on_circle(64), on_circle(64, 0.55)]
    if shape == 'square':
        return [np.sqrt(0.5) * np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]])]
    if shape == 'triangle':
        return [on_circle(3)]
    if shape == 'star':
        return [on_circle(10) * np.where(np.arange(10) % 2, 0.45, 1.0)[:, None]]
    arm = 0.32
    reach = np.sqrt(1 - arm**2)
    quarter = np.array([[reach, -arm], [reach, arm], [arm, arm]])
    turn = np.array([[0, 1], [-1, 0]])
    return [np.concatenate([quarter @ np.linalg.matrix_power(turn, k) for k in range(4)])]


def _place(rng, shape, height, width):
    """A shape of random size, tilt and place: its (H, W) mask, and its area if uncut."""
    import cv2

    radius = rng.uniform(*_RADIUS) * max(height, width)
    angle = np.deg2rad(rng.uniform(-_MAX_TILT, _MAX_TILT))
    rotation = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    centre = rng.uniform((0, 0), (width, height))
    contours = [contour @ rotation * radius + centre for contour in _unit_outline(shape)]
    mask = np.zeros((height, width), np.uint8)
    # Coordinates in sixteenths of a pixel; a second contour is a hole.
    cv2.fillPoly(mask, [np.rint(c * 16).astype(np.int32) for c in contours], 1, shift=4)
    areas = [cv2.contourArea(contour.astype(np.float32)) for contour in contours]
    return mask.astype(bool), areas[0] - sum(areas[1:])


def _shape_colour(rng, below):
    """A bright, vivid colour that is visible on the mean colour ``below``, otherwise random."""
    while True:
        colour = rng.uniform(40, 255, 3)
        vivid = np.ptp(colour) >= _MIN_SATURATION and colour.mean() >= _MIN_BRIGHTNESS
        if vivid and np.linalg.norm(colour - below) >= _MIN_CONTRAST:
            return colour


def _texture(rng, height, width, colour, strength):
    """(H, W, 3) float32 around ``colour``: blotches of a random scale plus stripes."""
    import cv2

    cells = int(rng.integers(2, 9))
    blotches = rng.normal(0, 0.5, (cells, cells, 3)).astype(np.float32)
    blotches = cv2.resize(blotches, (width, height), interpolation=cv2.INTER_CUBIC)
    angle, period = rng.uniform(0, np.pi), rng.uniform(4, 24)
    rows, columns = np.mgrid[:height, :width].astype(np.float32)
    phase = (columns * np.cos(angle) + rows * np.sin(angle)) * (2 * np.pi / period)
    stripes = rng.uniform(0, 0.6) * np.sin(phase + rng.uniform(0, 2 * np.pi))
    return (colour + strength * (blotches + stripes[..., None])).astype(np.float32)


def main(argv: list[str] | None = None) -> None:
    """Make the data set that the command line asks for, or say that it is there."""
    parser = argparse.ArgumentParser(description='Make the built-in shapes data set.')
    parser.add_argument('--out', default='data/shapes', help='root of the data set')
    parser.add_argument('--train', type=int, default=ShapesConfig.train, help='training images')
    parser.add_argument('--val', type=int, default=ShapesConfig.val, help='validation images')
    parser.add_argument('--size', type=int, default=ShapesConfig.size, help='longer side, pixels')
    parser.add_argument('--seed', type=int, default=ShapesConfig.seed)
    parser.add_argument('--debug', action='store_true', help='show the traceback of a mistake')
    end(make, parser.parse_args(argv))


def make(args: argparse.Namespace) -> None:
    """Make the data set of the arguments."""
    config = ShapesConfig(args.train, args.val, args.size, args.seed)
    made = write_dataset(args.out, config)
    print(f'{"Made" if made else "Reusing"} the shapes data set in {args.out}: {config}')


if __name__ == '__main__':
    main()
