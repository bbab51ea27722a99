"""The tests of vim_mm.jax, in a process of their own: tests/jax/conftest.py says why."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    'tier', [pytest.param('not slow', id='fast'), pytest.param('slow', marks=pytest.mark.slow)]
)
def test_jax(tier):
    if importlib.util.find_spec('jax') is None:
        pytest.skip('JAX is not installed (the extra jax)')
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '-m', tier, 'tests/jax'],
        cwd=ROOT, env={**os.environ, 'OMP_NUM_THREADS': '1'}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert ' passed' in done.stdout
