"""The Triton kernels on a CPU, under Triton's interpreter.

It is chosen when Triton is imported, so these tests are run by a process of their own
(tests/ops/interpreted.py), and stand here by what it prints.
"""

import subprocess
import sys

import pytest

from tests.own_process import ROOT, run_pytest
from vim_mm.ops import triton

pytestmark = pytest.mark.skipif(triton.MISSING is not None, reason=str(triton.MISSING))


def test_a_scan_and_upsampled_labels():
    """In one process: to start one takes as long as to interpret a method."""
    files = ('tests/ops/interpreted.py', 'tests/ops/upsampled_kernels.py')
    fast = 'test_two_chunks or test_labels_of_equal'
    run_pytest('-k', fast, *files, TRITON_INTERPRET='1', CUDA_VISIBLE_DEVICES='')


@pytest.mark.slow
def test_every_method_and_the_block():
    run_pytest('-m', 'slow', 'tests/ops/interpreted.py', TRITON_INTERPRET='1')


@pytest.mark.parametrize(
    'release, reason',
    [('3.2.0', 'Triton is 3.2.0, older than 3.3'), ('3.3.0', None), ('3.10.0+rocm', None)],
)
def test_the_oldest_release(monkeypatch, release, reason):
    monkeypatch.setattr('importlib.metadata.version', lambda distribution: release)
    assert triton._missing() == reason


@pytest.mark.slow  # imports PyTorch anew
def test_importing_the_package_needs_no_triton():
    """PyTorch may import it; not everyone has it."""
    code = "import sys; sys.modules['triton'] = None; import vim_mm.ops.triton"
    subprocess.run([sys.executable, '-c', code], cwd=ROOT, check=True)
