"""Scenes of garments: photographs of Fashion-MNIST pasted on a noisy ground, with masks.

Garments are 1 to 2.3 times their size, turned, mirrored, shaded, and hide parts of each other.
Scene i of a split depends on the seed, the split, i and the size of the canvas alone. The data set
of ``python -m vim_mm.datasets.fashion`` and ``studies/discretization`` draw the same scenes.
"""

from dataclasses import dataclass

import numpy as np
from scipy import ndimage

from vim_mm.datasets.garments import GARMENTS, SIDE, SPLITS
from vim_mm.datasets.layouts import Scene

SCENE_CLASSES = ('ground', *GARMENTS)

_SCALE = (1.0, 2.3)
_TURN = 45.0  # degrees to either side
_PIXELS_PER_GARMENT = 2048  # of the canvas, at the greatest number of garments
_SILHOUETTE = 8  # grey level from which a pixel belongs to the garment
_GAIN = (0.45, 1.0)  # brightness of a garment
_LIGHT = 0.35  # by how much light falls off across a garment, at most
_GROUND = (40.0, 180.0)  # mean grey level
_NOISE = (4.0, 14.0)  # standard deviation of the noise of the whole picture


@dataclass(frozen=True)
class Garments:
    """Photographs to draw from: images (N, 28, 28) and labels (N,), uint8."""

    images: np.ndarray
    labels: np.ndarray


def draw_scene(rng: np.random.Generator, garments: Garments, size: tuple[int, int]) -> Scene:
    """Draw one random scene.

    Args:
        rng (np.random.Generator): Decides everything.
        garments (Garments): What to paste.
        size (tuple): Height and width of the canvas in pixels.

    Returns:
        Scene: Grey (H, W, 3) image, visible masks from back to front and labels.
    """
    canvas = _ground(rng, size)
    most = max(2, round(size[0] * size[1] / _PIXELS_PER_GARMENT))
    chosen = rng.integers(len(garments.images), size=rng.integers((most + 1) // 2, most + 1))
    masks: list[np.ndarray] = []
    labels: list[int] = []
    for index in chosen:
        mask, levels = _turned(rng, garments.images[index], size)
        canvas = np.where(mask, levels, canvas)
        masks = [*(below & ~mask for below in masks), mask]
        labels.append(int(garments.labels[index]))
    canvas = canvas + rng.uniform(*_NOISE) * rng.standard_normal(size)
    visible = [i for i, mask in enumerate(masks) if mask.any()]
    grey = np.clip(np.rint(canvas), 0, 255).astype(np.uint8)
    return Scene(
        image=np.repeat(grey[..., None], 3, axis=2),
        masks=np.array([masks[i] for i in visible], bool).reshape(-1, *size),
        labels=np.array([labels[i] for i in visible], np.int64),
    )


def scene(seed: int, split: str, index: int, garments: Garments, size: tuple[int, int]) -> Scene:
    """Scene ``index`` of a split; ``garments`` are those of the same split."""
    rng = np.random.default_rng([seed, SPLITS.index(split), index, *size])
    return draw_scene(rng, garments, size)


def _ground(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """(H, W) grey levels: blotches of two random scales and stripes."""
    ground = np.full(size, rng.uniform(*_GROUND))
    for strength in (25.0, 15.0):
        cells = rng.integers(3, 24)
        noise = rng.normal(0, strength, (cells, cells))
        step = np.diag([(cells - 1) / max(side - 1, 1) for side in size])
        ground += ndimage.affine_transform(noise, step, output_shape=size, order=1, mode='nearest')
    angle, period, phase = rng.uniform((0, 3, 0), (np.pi, 20, 2 * np.pi))
    rows, columns = np.mgrid[: size[0], : size[1]]
    along = rows * np.sin(angle) + columns * np.cos(angle)
    return ground + rng.uniform(0, 20) * np.sin(2 * np.pi * along / period + phase)


def _turned(
    rng: np.random.Generator, image: np.ndarray, size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """A garment somewhere on the canvas: its (H, W) bool mask, and grey levels where it is."""
    silhouette = ndimage.binary_fill_holes(image >= _SILHOUETTE).astype(float)
    scale, angle = rng.uniform(*_SCALE), np.deg2rad(rng.uniform(-_TURN, _TURN))
    mirror = rng.choice((-1.0, 1.0))
    centre = rng.uniform((0, 0), size)
    # From the canvas to the photograph.
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    matrix = np.diag((1.0, mirror)) @ turn / scale
    # Only the part of the canvas that it can cover.
    reach = scale * SIDE / np.sqrt(2) + 1
    begin = np.maximum(np.floor(centre - reach), 0).astype(int)
    end = np.minimum(np.ceil(centre + reach) + 1, size).astype(int)
    offset = matrix @ (begin - centre) + (SIDE - 1) / 2
    part = tuple(slice(*ends) for ends in zip(begin, end, strict=True))

    def sample(values: np.ndarray) -> np.ndarray:
        return ndimage.affine_transform(values, matrix, offset, tuple(end - begin), order=1)

    direction = rng.uniform(0, 2 * np.pi)
    rows, columns = np.mgrid[part]
    towards = (rows - centre[0]) * np.sin(direction) + (columns - centre[1]) * np.cos(direction)
    light = rng.uniform(*_GAIN) * (1 + rng.uniform(0, _LIGHT) * towards / (scale * SIDE / 2))
    mask, levels = np.zeros(size, bool), np.zeros(size)
    mask[part] = sample(silhouette) >= 0.5
    levels[part] = 15 + light * sample(image.astype(float))
    return mask, levels
