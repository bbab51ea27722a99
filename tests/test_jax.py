"""The tests of vim_mm.jax, in a process of their own: tests/jax/conftest.py says why."""

import importlib.util

import pytest

from tests.forked import forked_python
from tests.own_process import run_pytest


@pytest.mark.parametrize(
    'tier', [pytest.param('not slow', id='fast'), pytest.param('slow', marks=pytest.mark.slow)]
)
def test_jax(tier):
    if importlib.util.find_spec('jax') is None:
        pytest.skip('JAX is not installed (the extra jax)')
    run_pytest('-m', tier, 'tests/jax', python=forked_python())
