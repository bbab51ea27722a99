"""Videos on a disk that takes no more, which OpenCV's writer does not report."""

import resource
import shutil

import cv2
import numpy as np
import pytest

from tests.stream.conftest import read_video
from vim_mm.stream import sinks
from vim_mm.stream.sinks import VideoFile

FRAMES = 40


def write(path, frames=FRAMES, limit=None, after=0):
    """Frames of grain; after some of them files may not be larger than a number of bytes."""
    grain = np.random.default_rng(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    video = VideoFile(path, 25.0)
    try:
        for number in range(frames):
            if number == after and limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            video.write(grain.integers(0, 256, (120, 160, 3), dtype=np.uint8))
        video.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return video


@pytest.mark.parametrize('after', [0, 20])
@pytest.mark.parametrize('ending', ['avi', 'mkv', 'mp4'])
def test_a_disk_that_takes_a_part_is_an_error_and_leaves_no_name(ending, after, tmp_path):
    out = tmp_path / f'out.{ending}'
    with pytest.raises(OSError, match=rf'{out} cannot be written: of {FRAMES} frames') as caught:
        write(out, limit=100_000, after=after)
    assert not out.exists()
    kept = int(str(caught.value).split('took ')[1].split(',')[0].split('.')[0])
    if ending == 'mp4':  # its index is at the end
        assert kept == 0 and not [*tmp_path.iterdir()]
    else:
        assert 0 < kept < FRAMES
        assert len(read_video(tmp_path / f'out.partial.{ending}')[0]) == kept


@pytest.mark.parametrize('ending', ['avi', 'mkv', 'mp4'])
@pytest.mark.parametrize('missing', [200, 1000])
def test_the_index_at_the_end_is_a_part_of_the_file(ending, missing, tmp_path):
    size = write(tmp_path / f'whole.{ending}').path.stat().st_size
    with pytest.raises(OSError, match='cannot be written'):
        write(tmp_path / f'out.{ending}', limit=size - missing)
    assert not (tmp_path / f'out.{ending}').exists()


@pytest.mark.parametrize('ending', ['avi', 'mkv', 'mp4'])
def test_a_disk_that_takes_nothing_leaves_nothing(ending, tmp_path):
    out = tmp_path / f'out.{ending}'
    with pytest.raises(OSError, match=r'out.*\.(avi|mkv|mp4)'):
        write(out, limit=0)
    assert not [*tmp_path.iterdir()]


def test_a_disk_that_fills_midway_ends_the_stream_early(tmp_path, monkeypatch):
    free = iter([1 << 30, 1 << 30, 0])
    monkeypatch.setattr(
        sinks.shutil, 'disk_usage', lambda path: shutil._ntuple_diskusage(0, 0, next(free))
    )
    video = VideoFile(tmp_path / 'out.mkv', 25.0)
    with pytest.raises(OSError, match='the disk is full'):
        for _ in range(1000):
            video.write(np.zeros((48, 64, 3), np.uint8))
    assert video.frames < 200
    with pytest.raises(OSError, match=f'of {video.frames} frames the disk took {video.frames}'):
        video.close()
    assert [path.name for path in tmp_path.iterdir()] == ['out.partial.mkv']


@pytest.mark.parametrize('device', ['/dev/full', '/dev/null'])
def test_a_device_is_no_video(device, tmp_path):
    (tmp_path / 'out.mkv').symlink_to(device)
    with pytest.raises(ValueError, match=r'--out must be a file, got .*out\.mkv'):
        VideoFile(tmp_path / 'out.mkv', 25.0)


@pytest.mark.parametrize('ending', ['mkv', 'mp4'])
def test_a_link_stays_and_its_file_is_written(ending, tmp_path):
    (tmp_path / 'elsewhere').mkdir()
    link, file = tmp_path / f'out.{ending}', tmp_path / 'elsewhere' / f'file.{ending}'
    link.symlink_to(file)
    write(link)
    assert link.is_symlink() and len(read_video(file)[0]) == FRAMES


def test_what_the_name_of_an_open_video_leads_to_stays(tmp_path):
    (tmp_path / 'mine').write_text('mine')
    (tmp_path / 'out.partial.mp4').symlink_to('mine')
    write(tmp_path / 'out.mp4')
    assert (tmp_path / 'mine').read_text() == 'mine'
    assert not (tmp_path / 'out.mp4').is_symlink()


@pytest.mark.parametrize('rate', [29.97, 0.5, 240.0])
@pytest.mark.parametrize('ending', ['avi', 'mkv', 'mp4'])
@pytest.mark.parametrize('frames', [1, 3, FRAMES])
def test_whole_files_of_all_rates_get_their_name(ending, rate, frames, tmp_path):
    video = VideoFile(tmp_path / f'out.{ending}', rate)
    for number in range(frames):
        video.write(np.full((48, 64, 3), number, np.uint8))
    video.close()
    assert len(read_video(video.path)[0]) == frames
    assert cv2.VideoCapture(str(video.path)).get(cv2.CAP_PROP_FPS) == pytest.approx(rate, rel=0.01)
