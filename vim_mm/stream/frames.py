"""Where frames come from: a video file, a folder of pictures, or a camera.

OpenCV reads them, which MMCV brings along. It decodes into memory that is there, and it opens
cameras. PyAV or torchcodec would be a further requirement, and torchcodec opens no camera.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import cv2
import numpy as np

from vim_mm.errors import UserValueError
from vim_mm.progress import say

PICTURES = {'.bmp', '.jpeg', '.jpg', '.png', '.tif', '.tiff', '.webp'}
# Of a source that does not know its rate, in frames a second.
USUAL_RATE = 25.0
# A source that fails so often in a row has ended; a damaged part of a video fails less often.
_PATIENCE = 64
# Seconds between time stamps that damage or a pause explains; a longer jump is a wrong stamp.
_LONGEST_GAP = 60.0

# Takes (height, width, 3) and returns an array of it to decode into, None if there is none free.
Allocate = Callable[[tuple[int, int, int]], np.ndarray | None]


class Source:
    """Frames in their order.

    Attributes:
        rate (float): Frames a second.
        length (int | None): Number of frames, as the source says; None if it does not.
        live (bool): Whether frames come at their own pace and are lost if nobody takes them.
    """

    rate: float = USUAL_RATE
    length: int | None = None
    live: bool = False

    def frames(self, allocate: Allocate) -> Iterator[np.ndarray | None]:
        """Frames (H, W, 3), uint8, BGR; None stands for one that could not be read.

        A frame may be the array that ``allocate`` returned last.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release what is open."""


def open_source(source: str) -> Source:
    """The source that a user names: a path, or the index of a camera.

    Raises:
        FileNotFoundError: There is nothing of that name.
        ValueError: It cannot be read.
    """
    check_source(source)
    path = Path(source)
    if not path.exists():
        return Camera(int(source))
    if path.is_dir():
        return Folder(path)
    return Folder(path) if path.suffix.lower() in PICTURES else Video(path)


def check_source(source: str) -> None:
    """Raise FileNotFoundError for a path that is not there; nothing is opened."""
    if not source.isdecimal() and not Path(source).exists():
        raise FileNotFoundError(f'There is no {source}.')


def find_pictures(path: Path) -> list[Path]:
    """The picture, or those in the folder, in the natural order of their names.

    What is called like a picture and is a folder, a pipe, a socket or a device is skipped, and a
    line says so: to open a pipe would wait for somebody who writes into it.

    Raises:
        FileNotFoundError: There is none.
    """
    if not path.exists():
        raise FileNotFoundError(f'There is no {path}.')
    candidates = sorted(path.iterdir(), key=_natural) if path.is_dir() else [path]
    pictures = []
    for candidate in candidates:
        if candidate.suffix.lower() not in PICTURES:
            continue
        if candidate.exists() and not candidate.is_file():
            say(f'{candidate} is skipped: it is no file')
        else:  # a link that leads nowhere is a picture that cannot be read
            pictures.append(candidate)
    if not pictures:
        hint = '; subfolders are not searched' if path.is_dir() else ''
        raise FileNotFoundError(f'{path} holds no picture ({", ".join(sorted(PICTURES))}){hint}.')
    return pictures


def _natural(path: Path) -> tuple[list[str | int], str]:
    """Key of an order in which numbers count as numbers: 2.png comes before 10.png."""
    text_and_numbers = re.split(r'(\d+)', path.stem)
    return [int(s) if s.isdecimal() else s for s in text_and_numbers], path.name


class Folder(Source):
    """The pictures of a folder, in the natural order of their names."""

    def __init__(self, path: Path):
        self.paths = find_pictures(path)
        self.length = len(self.paths)

    def frames(self, allocate: Allocate) -> Iterator[np.ndarray | None]:
        """As in :class:`Source`; pictures may differ in size."""
        for path in self.paths:
            try:
                yield cv2.imread(str(path), cv2.IMREAD_COLOR)
            except cv2.error:  # of more pixels than OpenCV takes
                yield None


class _Capture(Source):
    """What OpenCV opens."""

    def __init__(self, source: str | int):
        self._capture = cv2.VideoCapture(source)
        if not self._capture.isOpened():
            raise UserValueError(f'OpenCV cannot open {self._name(source)}.')
        self.rate = self._capture.get(cv2.CAP_PROP_FPS)
        if not 0 < self.rate < 1000:  # NaN too
            self.rate = USUAL_RATE

    @staticmethod
    def _name(source: str | int) -> str:
        return f'camera {source}' if isinstance(source, int) else f'{source} as a video'

    def _retrieve(self, allocate: Allocate) -> np.ndarray | None:
        """The frame that was grabbed, decoded into what ``allocate`` gives."""
        size = (cv2.CAP_PROP_FRAME_HEIGHT, cv2.CAP_PROP_FRAME_WIDTH)
        buffer = allocate((*(int(self._capture.get(side)) for side in size), 3))
        if buffer is None:
            return None
        try:
            ok, picture = self._capture.retrieve(buffer)
        except cv2.error:  # of a size that changes within the video
            return None
        return picture if ok else None

    def close(self) -> None:
        """Release the file or the camera."""
        self._capture.release()


class Video(_Capture):
    """A video file.

    A damaged part shows in the time stamps of its neighbours: each frame that fits into such a gap
    is one that could not be read. A video of variable rate has such gaps as well. What is damaged
    so slightly that the decoder conceals it is a frame; what follows the last readable one is none.
    What is more than a minute ahead is no gap but a wrong stamp: the frame follows at once, and a
    line says so once.
    """

    def __init__(self, path: Path):
        super().__init__(str(path))
        self._path = path
        length = self._capture.get(cv2.CAP_PROP_FRAME_COUNT)
        self.length = int(length) if length > 0 else None

    def frames(self, allocate: Allocate) -> Iterator[np.ndarray | None]:
        """As in :class:`Source`."""
        position, failures, origin, jumped = 0, 0, None, False
        while failures < _PATIENCE:
            if not self._capture.grab():
                failures += 1
                continue
            failures = 0
            time = 1e-3 * self._capture.get(cv2.CAP_PROP_POS_MSEC)
            origin = time if origin is None else origin
            ahead = time - origin - position / self.rate
            if not abs(ahead) <= _LONGEST_GAP:
                if not (jumped or ahead < 0):
                    say(
                        f'{self._path}: a time stamp is {ahead:.0f} s ahead at frame {position}; '
                        f'gaps of more than {_LONGEST_GAP:.0f} s are not filled'
                    )
                    jumped = True
                origin = time - position / self.rate
            else:
                while position < round((time - origin) * self.rate):
                    yield None
                    position += 1
            yield self._retrieve(allocate)
            position += 1


class Camera(_Capture):
    """A camera. Frames that come while all buffers are taken are dropped."""

    live = True

    def frames(self, allocate: Allocate) -> Iterator[np.ndarray | None]:
        """As in :class:`Source`, until the camera is gone."""
        failures = 0
        while failures < _PATIENCE:
            if self._capture.grab():
                failures = 0
                yield self._retrieve(allocate)
            else:
                failures += 1
