"""Where drawn frames go: a video file, a window."""

import os
import shutil
from pathlib import Path

import cv2
import numpy as np

from vim_mm.errors import UserRuntimeError, UserValueError

# By the ending of a file. OpenCV's wheels bring these encoders along.
CODECS = {'.avi': 'MJPG', '.mkv': 'mp4v', '.mp4': 'mp4v'}
_LOOKS_EVERY = 64  # frames, at the room on the disk
_LEAST_FREE = 1 << 16  # bytes; FFmpeg writes 32 KiB at a time
_WINDOW = 'vim_mm'
_KEYS_TO_STOP = (ord('q'), 27)


def path_while_open(path: Path) -> Path:
    """Where a video is until it is closed; what lies there is overwritten.

    A link stays, and the file that it leads to is written.
    """
    file = Path(os.path.realpath(path)) if path.is_symlink() else path
    return _partial(file) if path.suffix.lower() == '.mp4' else file


def _partial(path: Path) -> Path:
    return path.with_suffix(f'.partial{path.suffix}')


def check_out(path: Path) -> None:
    """Raise ValueError unless a video can be a file of that name."""
    if path.suffix.lower() not in CODECS:
        raise UserValueError(f'--out must end in one of {", ".join(CODECS)}, got {path}.')
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserValueError(f'--out must be a file, got {path}, which is a device or a pipe.')


class VideoFile:
    """A video file of one size, that of its first frame; other frames are fitted into it.

    An .mkv or .avi can be played up to its last frames however the process ends. An .mp4 can be
    played only after it was closed: until then its name ends in ``.partial.mp4``. OpenCV's writer
    reports no failure. Therefore the file is read again when it is closed, without decoding; one
    that lacks frames is called ``.partial`` with its ending, or removed if it holds none.

    Args:
        path (Path): Its ending chooses container and codec, see ``CODECS``.
        rate (float): Frames a second.

    Attributes:
        frames (int): Number of frames that were given to the writer.

    Raises:
        ValueError: Another ending, or a device.
    """

    def __init__(self, path: Path, rate: float):
        check_out(path)
        self.path, self.rate, self.frames = path, rate, 0
        self.path_while_open = path_while_open(path)
        self._writer: cv2.VideoWriter | None = None
        self._size = (0, 0)
        self._full = False
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, picture: np.ndarray) -> bool:
        """Append a frame (H, W, 3), uint8, BGR; True, because there is room for more.

        Raises:
            OSError: The file cannot be written, or the disk is full.
        """
        if self._writer is None:
            self._size = picture.shape[1::-1]
            code = cv2.VideoWriter_fourcc(*CODECS[self.path.suffix.lower()])
            file = str(self.path_while_open)
            if self.path_while_open.is_symlink():  # what it leads to is not ours
                self.path_while_open.unlink()
            writer = cv2.VideoWriter(file, cv2.CAP_FFMPEG, code, self.rate, self._size)
            if not writer.isOpened():
                width, height = self._size
                raise OSError(
                    f'OpenCV cannot write {file}{_why_not(self.path_while_open)} (a video of '
                    f'{width} x {height} pixels).'
                )
            self._writer = writer
        # Hours of prediction may be left: a full disk is found before the file is closed.
        if self.frames % _LOOKS_EVERY == 0 and _free(self.path_while_open) < _LEAST_FREE:
            self._full = True
            raise OSError(f'{self.path} cannot be written: the disk is full.')
        self._writer.write(fit(picture, self._size))
        self.frames += 1
        return True

    def close(self) -> None:
        """Finish the file and give it its name.

        Raises:
            OSError: Not all frames are in the file, as on a full disk; the message says how many.
        """
        if self._writer is None:
            return
        self._writer.release()
        self._writer = None
        kept, whole = _frames_in(self.path_while_open, self.frames)
        if whole and not self._full:
            self.path_while_open.replace(os.path.realpath(self.path))
            return
        partial = _partial(Path(os.path.realpath(self.path)))  # on the disk of the file
        self.path_while_open.replace(partial)
        if kept:
            where = f', which are in {partial}'
        else:
            partial.unlink()
            where = ''
        raise OSError(
            f'{self.path} cannot be written: of {self.frames} frames the disk took {kept}{where}. '
            'It is full, or limits the size of files.'
        )


def _free(path: Path) -> int:
    """Bytes that a user may still write where a file is."""
    return shutil.disk_usage(path.parent).free


def _why_not(path: Path) -> str:
    """The reason why a file cannot be opened for writing, after a colon; empty if it can."""
    there = path.exists()
    try:
        with path.open('ab') as file:
            if not there:
                file.write(b'.')
    except OSError as error:
        return f': {error.strerror}'
    finally:
        if not there:
            path.unlink(missing_ok=True)
    return ''


def _frames_in(path: Path, expected: int) -> tuple[int, bool]:
    """How many frames a closed video holds, and whether these are all, and its index is there."""
    try:
        with path.open('rb') as file:
            os.fsync(file.fileno())  # some file systems refuse bytes no earlier
    except OSError:
        return 0, False
    # Undecoded packets.
    capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG, [cv2.CAP_PROP_FORMAT, -1])
    number = 0
    while capture.grab():
        number += 1
    # Of a file without its end the header tells no number. Matroska's follows from its duration.
    told = capture.get(cv2.CAP_PROP_FRAME_COUNT)
    capture.release()
    return number, number == expected and abs(told - expected) <= 1


class Window:
    """A window of OpenCV; q or Escape in it ends the stream.

    Raises:
        RuntimeError: This OpenCV has no windows.
    """

    def __init__(self):
        lines = cv2.getBuildInformation().splitlines()
        if any(line.split() == ['GUI:', 'NONE'] for line in lines):
            raise UserRuntimeError(
                '--show needs windows, which opencv-python-headless lacks: install opencv-python '
                'in its place, or write a file with --out.'
            )

    def write(self, picture: np.ndarray) -> bool:
        """Show a frame; whether the user wants more."""
        cv2.imshow(_WINDOW, picture)
        return cv2.waitKey(1) & 0xFF not in _KEYS_TO_STOP

    def close(self) -> None:
        """Close it."""
        cv2.destroyAllWindows()


def fit(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The picture, if need be scaled into (width, height) with its aspect kept, on black."""
    height, width = picture.shape[:2]
    if (width, height) == size:
        return picture
    scale = min(size[0] / width, size[1] / height)
    inner = max(1, round(width * scale)), max(1, round(height * scale))
    left, top = (size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2
    fitted = np.zeros((size[1], size[0], 3), np.uint8)
    fitted[top : top + inner[1], left : left + inner[0]] = cv2.resize(picture, inner)
    return fitted
