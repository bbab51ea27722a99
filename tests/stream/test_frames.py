"""Videos, folders and what is broken in them: number, order and size of frames."""

import os
import socket
import struct
import zlib

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


class Late:
    """A capture of OpenCV, whose frames from one on have other time stamps."""

    def __init__(self, capture, seconds, first, last=10**9):
        self.capture, self.seconds, self.first, self.last = capture, seconds, first, last
        self.grabbed = 0

    def __getattr__(self, name):
        return getattr(self.capture, name)

    def grab(self):
        self.grabbed += 1
        return self.capture.grab()

    def get(self, prop):
        late = prop == cv2.CAP_PROP_POS_MSEC and self.first <= self.grabbed - 1 <= self.last
        return self.capture.get(prop) + (1e3 * self.seconds if late else 0)


def test_no_frame_of_a_video_of_variable_rate_is_lost(tmp_path):
    source = Video(write_video(tmp_path / 'video.mkv', 40, rate=25.0))
    source._capture = Late(source._capture, 0.4, first=20)
    assert read(source) == [*range(20), *[None] * 10, *range(20, 40)]


DAYS = 86_400.0


@pytest.mark.parametrize('seconds', [46 * DAYS, 61.0, float('inf'), float('nan')])
@pytest.mark.parametrize('last', [20, 25, 10**9])
def test_a_wrong_time_stamp_is_no_gap_and_said_once(seconds, last, tmp_path, capfd):
    source = Video(write_video(tmp_path / 'video.mkv', 40, rate=25.0))
    source._capture = Late(source._capture, seconds, 20, last)
    assert read(source) == [*range(40)]
    assert capfd.readouterr().out.count('ahead at frame 20; gaps of more than 60 s') == 1


def test_a_gap_after_a_wrong_time_stamp_is_still_found(tmp_path):
    source = Video(write_video(tmp_path / 'video.mkv', 40, rate=25.0))
    source._capture = Late(Late(source._capture, 46 * DAYS, 10, 10), 0.4, first=20)
    assert read(source) == [*range(20), *[None] * 10, *range(20, 40)]


def test_a_minute_without_frames_is_filled(tmp_path):
    source = Video(write_video(tmp_path / 'video.mkv', 20, rate=25.0))
    source._capture = Late(source._capture, 59.0, first=10)
    assert read(source) == [*range(10), *[None] * (59 * 25), *range(10, 20)]


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


def write_huge_header(path, side=40_000):
    """A PNG of more pixels than OpenCV takes, by its header."""
    header = b'IHDR' + struct.pack('>IIBBBBB', side, side, 1, 0, 0, 0, 0)
    chunks = (
        struct.pack('>I', len(part) - 4) + part + struct.pack('>I', zlib.crc32(part))
        for part in (header, b'IDAT' + zlib.compress(bytes(100)))
    )
    path.write_bytes(b'\x89PNG\r\n\x1a\n' + b''.join(chunks))


def test_a_picture_of_too_many_pixels_is_unreadable(tmp_path):
    for name, number in (('a.png', 0), ('c.png', 2)):
        cv2.imwrite(str(tmp_path / name), draw(number))
    write_huge_header(tmp_path / 'b.png')
    assert read(open_source(str(tmp_path))) == [0, None, 2]


@pytest.mark.parametrize('kind', ['pipe', 'socket', 'device', 'folder'])
def test_what_is_no_file_is_skipped_and_said(kind, tmp_path, capfd):
    cv2.imwrite(str(tmp_path / 'a.png'), draw(0))
    other = tmp_path / 'b.png'
    if kind == 'pipe':
        os.mkfifo(other)
    elif kind == 'socket':
        socket.socket(socket.AF_UNIX).bind(str(other))
    elif kind == 'device':
        other.symlink_to('/dev/zero')
    else:
        other.mkdir()
    assert read(open_source(str(tmp_path))) == [0]
    assert f'{other} is skipped: it is no file' in capfd.readouterr().out
    with pytest.raises(FileNotFoundError, match=r'holds no picture'):
        find_pictures(other)


def test_a_link_that_leads_nowhere_is_unreadable(tmp_path):
    (tmp_path / 'a.png').symlink_to(tmp_path / 'absent')
    cv2.imwrite(str(tmp_path / 'b.png'), draw(1))
    assert read(open_source(str(tmp_path))) == [None, 1]


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
