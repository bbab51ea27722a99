"""What kill_and_resume.py proves at length, for a few kills."""

import subprocess
import sys

import pytest

from tests.tools.conftest import environment


@pytest.mark.slowest
def test_a_killed_training_ends_in_the_same_bits(tmp_path):
    program = [sys.executable, '-m', 'tests.tools.kill_and_resume', '--kills=3', '--iterations=12']
    done = subprocess.run(
        program, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    assert printed.splitlines()[-1].endswith('iter_12.pth: the same bits')
    # A training that ends before its moment leaves the turn to a full disk.
    assert printed.count('exit code -9') + printed.count('exit code 28') == 3
