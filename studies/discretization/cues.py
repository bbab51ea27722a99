"""Pictures for the task of recall: a cue far back along the scan says what class a region has."""

import numpy as np
from scipy.linalg import hadamard

SIDE, PATCH = 64, 4  # pixels; 16 x 16 tokens
CLASSES = PATCH**2 - 1
UNLABELED = 255
_CUE = 2 * PATCH  # side in pixels
_BAND = 4 * PATCH  # rows of pixels: the cue lies in the first, the region is the last
_GROUND, _MARK, _CONTRAST, _NOISE = 128, 48, 48, 24  # grey levels
# Rows of a Hadamard matrix: patterns that are orthogonal, and have as much light as dark.
# A token of the cue shows the whole pattern, so that one token tells the class.
PATTERNS = hadamard(PATCH**2)[1:].reshape(CLASSES, PATCH, PATCH)
_SPLITS = ('train', 'test')


def draw_cues(split: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise with a square of one pattern, the cue, and a bright region, whose class it tells.

    The cue has 2 x 2 tokens at a random place of the first four rows of tokens, and the region is
    the last four rows. So the row-major scan takes at least 129 steps from the one to the other.

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
    images[:, -_BAND:] += _MARK
    labels[:, -_BAND:] = classes[:, None, None]
    top = PATCH * rng.integers((_BAND - _CUE) // PATCH + 1, size=count)
    left = PATCH * rng.integers((SIDE - _CUE) // PATCH + 1, size=count)
    pixels = np.arange(_CUE)
    rows, columns = (top[:, None] + pixels)[:, :, None], (left[:, None] + pixels)[:, None, :]
    cue = np.arange(count)[:, None, None], rows, columns
    images[cue] += _CONTRAST * np.tile(PATTERNS[classes], (1, 2, 2))
    return images.round().clip(0, 255).astype(np.uint8), labels
