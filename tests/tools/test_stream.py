"""stream.py as a user runs it: to the end, interrupted, and killed."""

import re
import signal
import subprocess
import sys
import time

import cv2
import numpy as np
import pytest

from tests.stream.conftest import damage, read_video, seg, write_video  # noqa: F401  fixture
from tests.tools.conftest import command, environment, run_tool

# Processes that import PyTorch and MMSegmentation.
pytestmark = pytest.mark.slow


def test_a_damaged_video_to_its_end(seg, tmp_path):  # noqa: F811
    damage(write_video(tmp_path / 'in.mkv', 60, codec='mp4v'))
    log = run_tool(
        'stream.py', seg.config, seg.checkpoint, 'in.mkv', '--out', 'out.mp4', '--amp', cwd=tmp_path
    )
    *_, summary, written = log.splitlines()
    predicted, frames = map(int, re.match(r'(\d+) of (\d+) frames predicted; ', summary).groups())
    assert frames == 60 and 40 <= predicted < 60
    assert summary.endswith(f'; {60 - predicted} unreadable')
    assert written == 'out.mp4: 60 frames, 12 frames/s'
    assert 'frames/s]' not in log  # no progress in a file
    pictures, rate = read_video(tmp_path / 'out.mp4')
    assert len(pictures) == 60 and rate == pytest.approx(12)
    originals, _ = read_video(tmp_path / 'in.mkv')
    assert np.abs(pictures[0].astype(int) - originals[0]).mean() > 5


@pytest.mark.parametrize('how', [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_a_file_that_plays(how, seg, tmp_path):  # noqa: F811
    # Grain, so that frames soon fill the writer's buffers; so many that there is no end to reach.
    grain = np.random.default_rng(0).integers(0, 256, (120, 160, 3), dtype=np.uint8)
    (tmp_path / 'in').mkdir()
    cv2.imwrite(str(tmp_path / 'in' / '0.png'), grain)
    for i in range(1, 3000):
        (tmp_path / 'in' / f'{i}.png').hardlink_to(tmp_path / 'in' / '0.png')
    out = tmp_path / 'out.avi'
    with subprocess.Popen(
        command('stream.py', seg.config, seg.checkpoint, tmp_path / 'in', '--out', out),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        deadline = time.monotonic() + 150
        while not out.exists() or out.stat().st_size < 100_000:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(how)
        log = process.communicate(timeout=60)[0]
    pictures, rate = read_video(out)
    assert len(pictures) > 3 and rate == pytest.approx(25)
    assert {picture.shape for picture in pictures} == {(120, 160, 3)}
    if how == signal.SIGINT:
        assert process.returncode == 130, log
        *_, summary, written, last = log.splitlines()
        predicted = len(pictures)
        assert summary.startswith(f'interrupted: {predicted} of {predicted} frames predicted; ')
        assert written == f'{out}: {predicted} frames, 25 frames/s'
        assert last == 'stream.py: interrupted'


@pytest.mark.parametrize('ending', ['mkv', 'mp4'])
def test_a_disk_that_takes_no_more_is_an_error(ending, seg, tmp_path):  # noqa: F811
    grain = np.random.default_rng(0).integers(0, 256, (30, 120, 160, 3), dtype=np.uint8)
    (tmp_path / 'in').mkdir()
    for i, picture in enumerate(grain):
        cv2.imwrite(str(tmp_path / 'in' / f'{i}.png'), picture)
    out = f'out.{ending}'
    # Limits are those of the process itself, not of a fork of another one.
    call = command(
        'stream.py', seg.config, seg.checkpoint, 'in', '--out', out, python=sys.executable
    )
    with subprocess.Popen(
        ['bash', '-c', 'ulimit -f 50; exec "$@"', '_', *call],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        _, errors = process.communicate(timeout=150)
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith(
        f'stream.py: error: {out} cannot be written: of 30 frames the disk took '
    )
    assert not (tmp_path / out).exists()
