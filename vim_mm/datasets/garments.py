"""Fashion-MNIST (Xiao et al., arXiv 1708.07747, MIT licence): where its files come from.

70,000 grey photographs of garments, 28 x 28 pixels, 10 classes, 60,000 of them for training. The
four IDX files come from a folder, from Debian's and Ubuntu's package, or from torchvision's
downloader, whichever is there first, and are checked after unpacking: Debian compresses them anew,
so the published MD5 sums of the archives do not hold for its package.
"""

import gzip
import hashlib
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vim_mm.errors import UserRuntimeError, UserValueError

GARMENTS = (
    'T-shirt', 'trouser', 'pullover', 'dress', 'coat',
    'sandal', 'shirt', 'sneaker', 'bag', 'ankle boot',
)  # fmt: skip
SIDE = 28  # pixels of a photograph
SPLITS = ('train', 'test')

# SHA-256 of the unpacked files.
CHECKSUMS = {
    'train-images-idx3-ubyte': 'c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888',
    'train-labels-idx1-ubyte': 'bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9',
    't10k-images-idx3-ubyte': '5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b',
    't10k-labels-idx1-ubyte': '0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34',
}
PACKAGE = 'dataset-fashion-mnist'
_PACKAGE_FOLDER = 'usr/share/datasets/fashion-mnist'
_PREFIX = {'train': 'train', 'test': 't10k'}


def load_garments(folder: str | Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """The garments of a split.

    Args:
        folder (str | Path): Holds the IDX files, packed (.gz) or not.
        split (str): 'train' or 'test'.

    Returns:
        tuple: Images (N, 28, 28) and labels (N,), indices into ``GARMENTS``, both uint8.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged, or not the published one.
    """
    if split not in SPLITS:
        raise UserValueError(f'split must be one of {SPLITS}, got {split!r}')
    prefix = _PREFIX[split]
    images = _unpacked(Path(folder), f'{prefix}-images-idx3-ubyte')
    labels = _unpacked(Path(folder), f'{prefix}-labels-idx1-ubyte')
    # Behind a head of four bytes and four for each dimension, which the checksum covers.
    return (
        np.frombuffer(images, np.uint8, offset=16).reshape(-1, SIDE, SIDE),
        np.frombuffer(labels, np.uint8, offset=8),
    )


def _unpacked(folder: Path, name: str) -> bytes:
    """The checked content of a file, packed or not."""
    plain, packed = folder / name, folder / f'{name}.gz'
    if plain.exists():
        content = plain.read_bytes()
    elif packed.exists():
        compressed = packed.read_bytes()
        try:
            content = gzip.decompress(compressed)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserValueError(f'{packed} is damaged: {error}') from None
    else:
        raise FileNotFoundError(f'{folder} holds neither {name} nor {name}.gz')
    if hashlib.sha256(content).hexdigest() != CHECKSUMS[name]:
        raise UserValueError(f'{name} in {folder} is not the published file: its SHA-256 differs')
    return content


def fetch_garments(out: Path, source: Path | None = None) -> str:
    """Put the four IDX files, unpacked and checked, into ``out``.

    Args:
        out (Path): Folder to write, which need not exist. If all four are there and right they are
            kept; else they are written anew.
        source (Path, optional): Folder that holds the files, packed or not. None tries the system's
            package, installed or downloaded by ``apt-get``, then torchvision's downloader.

    Returns:
        str: Where they came from.

    Raises:
        FileNotFoundError: They cannot be had; the message says what to do.
        ValueError: A file of ``source`` is damaged, or not the published one.
    """
    if _complete(out):
        return str(out)
    if source is not None:
        _copy(source, out)
        return str(source)
    reasons = []
    ways: dict[str, Callable[[Path], None]] = {
        f'the installed package {PACKAGE}': lambda out: _copy(Path('/', _PACKAGE_FOLDER), out),
        f'the package {PACKAGE} by apt-get': _from_package,
        'torchvision': _from_torchvision,
    }
    for name, way in ways.items():
        try:
            way(out)
        except (OSError, RuntimeError, ImportError, ValueError) as error:
            reasons.append(f'{name}: {str(error) or type(error).__name__}')
        else:
            return name
    raise FileNotFoundError(
        'Fashion-MNIST could not be had here: copy its four IDX files, packed or not, '
        '(github.com/zalandoresearch/fashion-mnist) to this machine and name their folder with '
        '--source DIR. Tried: ' + '; '.join(reasons)
    )


def _complete(folder: Path) -> bool:
    try:
        for name in CHECKSUMS:
            _unpacked(folder, name)
    except (FileNotFoundError, ValueError):
        return False
    return True


def _copy(source: Path, out: Path) -> None:
    contents = {name: _unpacked(source, name) for name in CHECKSUMS}
    out.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (out / name).write_bytes(content)


def _from_package(out: Path) -> None:
    """Download Debian's package and unpack it, without installing it and so without root."""
    if shutil.which('apt-get') is None or shutil.which('dpkg') is None:
        raise FileNotFoundError('apt-get or dpkg is missing')
    with tempfile.TemporaryDirectory() as folder:
        _run(['apt-get', 'download', PACKAGE], folder)
        (archive,) = Path(folder).glob('*.deb')
        _run(['dpkg', '-x', archive.name, 'unpacked'], folder)
        _copy(Path(folder, 'unpacked', _PACKAGE_FOLDER), out)


def _run(command: list[str], folder: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise UserRuntimeError(f'{" ".join(command)} failed: {done.stderr.strip()}')


def _from_torchvision(out: Path) -> None:
    from torchvision.datasets import FashionMNIST

    with tempfile.TemporaryDirectory() as folder:
        _copy(Path(FashionMNIST(folder, download=True).raw_folder), out)
