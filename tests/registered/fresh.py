"""Python in a process of its own, in a directory that knows nothing of this repository."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_fresh(program: str, directory: Path, *arguments: str) -> str:
    """Run the program, which must succeed; its standard output."""
    done = subprocess.run(
        [sys.executable, '-c', program, *arguments],
        cwd=directory,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
