"""Tests that need a process of their own, which stand in the suite by what it prints."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_pytest(*arguments: str, **variables: str) -> None:
    """Run these tests; what they print is shown if they fail."""
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', *arguments],
        cwd=ROOT, env={**os.environ, 'OMP_NUM_THREADS': '1', **variables},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert ' passed' in done.stdout
