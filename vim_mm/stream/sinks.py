"""Where drawn frames go: a video file, a window."""

from pathlib import Path

import cv2
import numpy as np

# By the ending of a file. OpenCV's wheels bring these encoders along.
CODECS = {'.avi': 'MJPG', '.mkv': 'mp4v', '.mp4': 'mp4v'}
_WINDOW = 'vim_mm'
_KEYS_TO_STOP = (ord('q'), 27)


def path_while_open(path: Path) -> Path:
    """Where a video is until it is closed; what lies there is overwritten."""
    whole = path.suffix.lower() == '.mp4'
    return path.with_suffix(f'.partial{path.suffix}') if whole else path


def check_ending(path: Path) -> None:
    """Raise ValueError unless a video can be written into a file of that name."""
    if path.suffix.lower() not in CODECS:
        raise ValueError(f'--out must end in one of {", ".join(CODECS)}, got {path}.')


class VideoFile:
    """A video file of one size, that of its first frame; other frames are fitted into it.

    An .mkv or .avi can be played up to its last frames however the process ends. An .mp4 can be
    played only after it was closed: until then its name ends in ``.partial.mp4``.

    Args:
        path (Path): Its ending chooses container and codec, see ``CODECS``.
        rate (float): Frames a second.

    Attributes:
        frames (int): Number of frames that were written.

    Raises:
        ValueError: Another ending.
    """

    def __init__(self, path: Path, rate: float):
        check_ending(path)
        self.path, self.rate, self.frames = path, rate, 0
        self.path_while_open = path_while_open(path)
        self._writer: cv2.VideoWriter | None = None
        self._size = (0, 0)
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, picture: np.ndarray) -> bool:
        """Append a frame (H, W, 3), uint8, BGR; True, because there is room for more.

        Raises:
            OSError: The file cannot be written.
        """
        if self._writer is None:
            self._size = picture.shape[1::-1]
            code = cv2.VideoWriter_fourcc(*CODECS[self.path.suffix.lower()])
            file = str(self.path_while_open)
            writer = cv2.VideoWriter(file, cv2.CAP_FFMPEG, code, self.rate, self._size)
            if not writer.isOpened():
                raise OSError(f'OpenCV cannot write {file}.')
            self._writer = writer
        self._writer.write(fit(picture, self._size))
        self.frames += 1
        return True

    def close(self) -> None:
        """Finish the file and give it its name."""
        if self._writer is not None:
            self._writer.release()
            self._writer = None
            self.path_while_open.replace(self.path)


class Window:
    """A window of OpenCV; q or Escape in it ends the stream.

    Raises:
        RuntimeError: This OpenCV has no windows.
    """

    def __init__(self):
        lines = cv2.getBuildInformation().splitlines()
        if any(line.split() == ['GUI:', 'NONE'] for line in lines):
            raise RuntimeError(
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
