"""What tools/dev/kill_and_resume.py proves at length, for a few kills."""

import pytest

from tests.tools.conftest import run_tool


@pytest.mark.slowest
def test_a_killed_training_ends_in_the_same_bits(tmp_path):
    printed = run_tool('dev/kill_and_resume.py', '--kills', 3, '--iterations', 12, cwd=tmp_path)
    assert printed.splitlines()[-1].endswith('iter_12.pth: the same bits')
    # A training that ends before its moment leaves the turn to a full disk.
    assert printed.count('exit code -9') + printed.count('exit code 28') == 3
