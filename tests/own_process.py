"""Tests that need a process of their own, which stand in the suite by what it prints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest.__main__

ROOT = Path(__file__).parents[1]


def run_pytest(*arguments: str, python: str = sys.executable, **variables: str) -> None:
    """Run these tests; what they print is shown if they fail."""
    variables |= {'OMP_NUM_THREADS': '1', 'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [python, pytest.__main__.__file__, '-q', '-p', 'no:cacheprovider', *arguments],
        cwd=ROOT, env={**os.environ, **variables},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert ' passed' in done.stdout
