"""Pictures for the task of recall: a cue far back along the scan says what class a region has."""

import numpy as np
from scipy.linalg import hadamard

SIDE, PATCH = 64, 4  # pixels; 16 x 16 tokens
CLASSES = 4
UNLABELED = 255
_REGION, _CUE = 4 * PATCH, 2 * PATCH  # sides in pixels
_BAND = 4 * PATCH  # rows of pixels at the top and at the bottom: one has the region, one the cue
_GROUND, _MARK, _CONTRAST, _NOISE = 128, 48, 48, 24  # grey levels
# Rows of a Hadamard matrix: patterns that are orthogonal, and have as much light as dark.
# A token of the cue shows the whole pattern, so that one token tells the class.
PATTERNS = hadamard(PATCH**2)[1 : CLASSES + 1].reshape(CLASSES, PATCH, PATCH)
_SPLITS = ('train', 'test')


def draw_cues(split: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise with a bright square, the region, and a square of one pattern, the cue.

    The region has 4 x 4 tokens, and the cue 2 x 2.

    The cue lies in the first four rows of tokens and the region in the last four, at random
    places. So the row-major scan takes at least 129 steps from the one to the other.

    Args:
        split (str): 'train' or 'test'. They are drawn from different streams of random numbers.
        count (int): Pictures, N. The first of many are the same as of few only where N is equal.

    Returns:
        tuple: Images (N, 64, 64) uint8, and labels (N, 64, 64) uint8: the class of the cue on the
        region's pixels, 255 elsewhere.
    """
    rng = np.random.default_rng([0, _SPLITS.index(split)])
    classes = rng.integers(CLASSES, size=count)
    images = _GROUND + _NOISE * rng.standard_normal((count, SIDE, SIDE))
    labels = np.full((count, SIDE, SIDE), UNLABELED, np.uint8)
    region = _places(rng, count, _REGION, first_row=SIDE - _BAND)
    images[region] += _MARK
    labels[region] = classes[:, None, None]
    cue = _places(rng, count, _CUE, first_row=0)
    images[cue] += _CONTRAST * np.tile(PATTERNS[classes], (1, 2, 2))
    return images.round().clip(0, 255).astype(np.uint8), labels


def _places(
    rng: np.random.Generator, count: int, side: int, first_row: int
) -> tuple[np.ndarray, ...]:
    """Indices of a square of ``side`` pixels at a random patch of the band that begins there."""
    top = first_row + PATCH * rng.integers((_BAND - side) // PATCH + 1, size=count)
    left = PATCH * rng.integers((SIDE - side) // PATCH + 1, size=count)
    pixels = np.arange(side)
    rows = (top[:, None] + pixels)[:, :, None]
    return np.arange(count)[:, None, None], rows, (left[:, None] + pixels)[:, None, :]
