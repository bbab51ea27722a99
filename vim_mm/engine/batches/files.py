"""What the files of a sample hold, apart from what a pipeline makes of them."""

import glob
from pathlib import Path

import numpy as np
from PIL import Image

# By these a file of its kind ends, apart from what other programs append.
_ENDINGS = {'.jpg': b'\xff\xd9', '.jpeg': b'\xff\xd9', '.png': b'IEND'}
_TAIL = 1024
_PNG = b'\x89PNG\r\n\x1a\n'
_TIFF = (b'II*\0', b'MM\0*')
_ORIENTATION = 0x0112  # EXIF's tag


def why_unreadable(path: str) -> str | None:
    """Why a file is no picture, in words that follow its name; None for one that is."""
    if not Path(path).is_file():
        return None if '://' in path else f'there is no such file{_of_another_suffix(Path(path))}.'
    try:
        with Image.open(path) as picture:
            picture.load()
    except Exception as error:  # Pillow raises of every kind
        return f'not a picture that can be read ({str(error).replace(path, "the file")}).'
    return None


def _of_another_suffix(path: Path) -> str:
    """The end of a sentence on a missing file: one beside it that differs by its suffix."""
    others = sorted(path.parent.glob(f'{glob.escape(path.stem)}.*')) if path.parent.is_dir() else []
    return f'; there is {others[0].name}' if others else ''


def is_cut_off(path: str) -> bool:
    """Whether a JPEG or PNG lacks its end; OpenCV reads such files, and fills in grey."""
    file = Path(path)
    ending = _ENDINGS.get(file.suffix.lower())
    if ending is None or not file.is_file():
        return False
    with file.open('rb') as stream:
        size = stream.seek(0, 2)
        stream.seek(max(size - _TAIL, 0))
        if ending in stream.read():
            return False
        stream.seek(0)  # something long may be appended
        return ending not in stream.read()


def wide_values(path: str) -> np.ndarray | None:
    """The values of a file of more than 8 bits each, (H, W) or (H, W, channels).

    None of other files, of which the first bytes are read alone, and of what cannot be read.
    """
    file = Path(path)
    if not file.is_file():
        return None
    with file.open('rb') as stream:
        head = stream.read(25)
    if not head.startswith(_TIFF) and not (head.startswith(_PNG) and head[24:25] == b'\x10'):
        return None
    import cv2  # Pillow reads colours of 16 bits as 8

    values = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_UNCHANGED)
    return None if values is None or values.dtype == np.uint8 else values


def wrapped_label(path: str) -> str | None:
    """What is wrong with labels that 8 bits do not hold; None if they hold all of a file.

    What becomes 255 is left alone: so do 65535 and -1, and all are of no class.
    """
    values = wide_values(path)
    if values is None:
        return None
    bits = 8 * values.dtype.itemsize
    if values.dtype.kind == 'f':
        parts = values[values != np.round(values)]  # NaN as well
        if parts.size:
            return (
                f'the label {parts[0]:g} of this file of {bits}-bit floats is no whole number, and '
                'labels are kept as such.'
            )
    wrapped = values[((values > 255) | (values < 0)) & (values % 256 != 255)]
    if not wrapped.size:
        return None
    return (
        f'the label {int(wrapped[0])} of this {bits}-bit file is loaded as '
        f'{int(wrapped[0]) % 256}, because labels are kept in 8 bits: number the classes below 255.'
    )


def orientation(path: str) -> int:
    """How a picture is to be turned before it is shown, as EXIF counts it; 1, not at all."""
    try:
        with Image.open(path) as picture:
            way = picture.getexif().get(_ORIENTATION, 1)
            return way if way in range(1, 9) else 1
    except Exception:  # Pillow raises of every kind; whoever loads the file will tell
        return 1


def stored_size(path: str) -> tuple[int, int] | None:
    """(height, width) of the pixels in a file, as they lie; None if it is no picture."""
    try:
        with Image.open(path) as picture:
            return picture.height, picture.width
    except Exception:  # as above
        return None
