"""Python in a process of its own, in a directory that knows nothing of this repository."""

import os
import subprocess
from pathlib import Path

from tests.forked import forked_python

ROOT = Path(__file__).parents[2]


def run_fresh(program: str, directory: Path, python: str | None = None) -> str:
    """Run the program, which must succeed; its standard output.

    It finds PyTorch and MMEngine imported, but nothing of vim_mm, MMSegmentation or MMDetection.
    Where that is too much, ``python`` is an interpreter that has imported nothing.
    """
    script = directory / 'program.py'
    script.write_text(program)
    done = subprocess.run(
        [python or forked_python(), str(script)],
        cwd=directory,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
