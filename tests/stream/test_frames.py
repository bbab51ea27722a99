"""Videos, folders and what is broken in them: number, order and size of frames."""

import cv2
import numpy as np
import pytest

from tests.stream.conftest import HEIGHT, WIDTH, damage, draw, number_of, write_video
from vim_mm.stream.frames import Camera, Folder, Video, find_pictures, open_source


def read(source):
    """The number that each frame shows, None for those that could not be read."""
    frames = list(source.frames(lambda shape: np.empty(shape, np.uint8)))
    source.close()
    assert all(frame is None or frame.dtype == np.uint8 for frame in frames)
    assert {frame.shape for frame in frames if frame is not None} <= {(HEIGHT, WIDTH, 3)}
    return [None if frame is None else number_of(frame) for frame in frames]


@pytest.mark.parametrize(
    ('ending', 'codec'), [('avi', 'MJPG'), ('mkv', 'mp4v'), ('mp4', 'mp4v'), ('mkv', 'MJPG')]
)
def test_all_frames_in_their_order(ending, codec, tmp_path):
    source = open_source(str(write_video(tmp_path / f'video.{ending}', 40, codec=codec)))
    assert isinstance(source, Video)
    assert (source.length, source.live) == (40, False)
    assert source.rate == pytest.approx(12.0)
    assert read(source) == list(range(40))


@pytest.mark.parametrize('codec', ['mp4v', 'MJPG'])
def test_frames_of_a_damaged_part_are_missed_and_the_others_keep_their_places(codec, tmp_path):
    numbers = read(Video(damage(write_video(tmp_path / 'video.mkv', 60, codec=codec))))
    assert len(numbers) == 60
    missed = [i for i, number in enumerate(numbers) if number is None]
    assert 1 <= len(missed) <= 20 and all(15 < i < 50 for i in missed)
    # The decoder conceals what is left of a frame at the edge of the damage.
    wrong = [i for i, number in enumerate(numbers) if number not in (None, i)]
    assert len(wrong) <= 2


def test_no_frame_of_a_video_of_variable_rate_is_lost(tmp_path):
    path = write_video(tmp_path / 'video.mkv', 40, rate=25.0)
    source, seconds = Video(path), 0.4

    class Late:
        """The same frames, the second half later."""

        def __init__(self, capture):
            self.capture, self.grabbed = capture, 0

        def __getattr__(self, name):
            return getattr(self.capture, name)

        def grab(self):
            self.grabbed += 1
            return self.capture.grab()

        def get(self, prop):
            late = prop == cv2.CAP_PROP_POS_MSEC and self.grabbed > 20
            return self.capture.get(prop) + (1e3 * seconds if late else 0)

    source._capture = Late(source._capture)
    assert read(source) == [*range(20), *[None] * 10, *range(20, 40)]


def test_a_video_that_is_cut_off_ends_early(tmp_path):
    path = write_video(tmp_path / 'video.avi', 40)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    source = Video(path)
    assert source.length == 40
    numbers = read(source)
    assert 10 < len(numbers) < 30 and numbers == list(range(len(numbers)))


def test_a_folder_by_name_with_a_broken_picture(tmp_path):
    for name, number in (('b.png', 1), ('a.jpg', 0), ('d.bmp', 3)):
        cv2.imwrite(str(tmp_path / name), draw(number))
    (tmp_path / 'c.png').write_bytes(b'no picture')
    (tmp_path / 'notes.txt').write_text('no picture either')
    source = open_source(str(tmp_path))
    assert (source.length, source.rate) == (4, 25.0)
    assert read(source) == [0, 1, None, 3]
    assert read(open_source(str(tmp_path / 'b.png'))) == [1]


def test_numbers_in_names_are_numbers(tmp_path):
    names = ['2.png', '10.png', 'a.png', 'a01b2.png', 'a1b3.png', 'a1b20.png', 'a10.png', 'b.png']
    for name in sorted(names):
        (tmp_path / name).touch()
    assert [path.name for path in find_pictures(tmp_path)] == names


def test_what_cannot_be_a_source(tmp_path):
    (tmp_path / 'notes.txt').write_text('no video')
    with pytest.raises(FileNotFoundError, match=r'There is no .*absent\.avi'):
        open_source(str(tmp_path / 'absent.avi'))
    (tmp_path / 'class').mkdir()
    cv2.imwrite(str(tmp_path / 'class' / '0.png'), draw(0))
    with pytest.raises(FileNotFoundError, match=r'no picture .*; subfolders are not searched'):
        Folder(tmp_path)
    with pytest.raises(FileNotFoundError, match=r'notes.txt holds no picture \(.*\)\.$'):
        find_pictures(tmp_path / 'notes.txt')
    with pytest.raises(ValueError, match=r'cannot open .*notes\.txt as a video'):
        open_source(str(tmp_path / 'notes.txt'))
    with pytest.raises(ValueError, match='cannot open camera 77'):
        Camera(77)
