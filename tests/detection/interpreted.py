"""Tests of the kernels of suppression for Triton's interpreter; test_kernels.py runs them."""

import os

import pytest
import triton.runtime.interpreter as interpreter

from tests.detection.test_parts import test_suppression
from tests.ops.interpreted import patch_tensor, splat

assert os.environ.get('TRITON_INTERPRET') == '1', 'set TRITON_INTERPRET=1'
__all__ = ['test_suppression']


@pytest.fixture(autouse=True)
def patched(monkeypatch):
    monkeypatch.setattr(interpreter.InterpreterBuilder, 'create_splat', splat)
    monkeypatch.setattr(interpreter, '_patch_lang_tensor', patch_tensor)


@pytest.fixture(autouse=True, scope='session')
def seen():
    """The kernels ran, and nothing in their place."""
    from vim_mm.detection import suppression_kernels

    calls, function = [], suppression_kernels.suppress_by_kernels
    suppression_kernels.suppress_by_kernels = lambda *args: calls.append(args) or function(*args)
    yield
    assert calls
