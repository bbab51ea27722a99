"""What tools/dev/kill_and_resume.py proves at length, for a few kills."""

import subprocess
import sys

import pytest

from tests.tools.conftest import TOOLS, environment


@pytest.mark.slow
def test_a_killed_training_ends_in_the_same_bits(tmp_path):
    script = TOOLS / 'dev' / 'kill_and_resume.py'
    done = subprocess.run(
        [sys.executable, str(script), '--kills', '3', '--iterations', '12'],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].endswith('iter_12.pth: the same bits')
    assert done.stdout.count('exit code -9') >= 2
