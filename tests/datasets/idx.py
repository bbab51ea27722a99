"""Tiny files of Fashion-MNIST's format, drawn here: no network."""

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest

from vim_mm.datasets.garments import CHECKSUMS

COUNTS = {'train': 40, 't10k': 20}


def encode_idx(array: np.ndarray) -> bytes:
    """An IDX file of unsigned bytes."""
    head = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, '>u4').tobytes()
    return head + array.astype(np.uint8).tobytes()


def draw_garment(label: int, level: int) -> np.ndarray:
    """A bright upright box whose height tells its class."""
    image = np.zeros((28, 28), np.uint8)
    image[4 : 14 + label, 6:22] = level
    return image


def write_idx_files(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """The four files, half of them packed, and checksums that fit them while ``patch`` holds.

    Garments of the training split are of level 200 and 100, those of the test split 50.
    """
    folder.mkdir()
    for prefix, count in COUNTS.items():
        labels = np.arange(count) % 10
        levels = np.where(np.arange(count) % 2, 100, 200) if prefix == 'train' else [50] * count
        images = np.stack([draw_garment(*pair) for pair in zip(labels, levels)])
        for kind, array in (('images-idx3-ubyte', images), ('labels-idx1-ubyte', labels)):
            content, name = encode_idx(array), f'{prefix}-{kind}'
            patch.setitem(CHECKSUMS, name, hashlib.sha256(content).hexdigest())
            if array.ndim == 1:
                (folder / name).write_bytes(content)
            else:
                (folder / f'{name}.gz').write_bytes(gzip.compress(content))
