"""What the operators of CUDA refuse, and which kernels a scan gets, where there is no GPU."""

import argparse

import pytest
import torch

from tests.emulation.test_emulation import emulated, pytestmark  # noqa: F401  a fixture and marks
from tests.ops.raw import (
    HUGE,
    assert_refused,
    assert_too_large,
    each_wrong_call,
    legal_call,
    scan,
)
from tests.scripts import load


@each_wrong_call
def test_a_wrong_argument(name, value, message):
    assert_refused(name, value, message)


@pytest.mark.parametrize('sizes', HUGE)
def test_sizes_that_overflow(sizes):
    assert_too_large(sizes)


@pytest.mark.parametrize('change', [dict(dtype=torch.float16), dict(size=(1, 2, 2, 3, 1, 5))])
def test_wrong_edges(change):
    """Of forward, which the CPU's backward takes nothing of."""
    edges = torch.zeros(change.pop('size', (1, 2, 2, 3, 1, 4)), **change)
    with pytest.raises(RuntimeError, match='expected the edges that forward gave'):
        scan(legal_call() | {'edges': edges}, backward=True)


def kernels_of(method='zoh', **changes) -> list[str]:
    """The kernels of 16 rows in bfloat16, or of what changes of that, as the tool has them."""
    sizes = dict(batch=2, groups=1, dim=8, seqlen=128, dstate=16, dtype='bf16')
    forms = dict.fromkeys(('complex', 'constant', 'strided', 'initial_state', 'reset'), False)
    tool = load('dev/which_kernels.py')
    args = argparse.Namespace(**sizes | dict(fp32=()) | forms | changes)
    call = tool['make_call'](args, method, 'cpu')
    op = torch.ops.vim_mm_emulated.selective_scan_kernels.default
    return op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *call).splitlines()


def test_which_kernels():
    """Rows of the table csrc/cuda/dispatch/configurations.cuh."""
    forward, sweep, chunks = kernels_of()
    assert forward.startswith('forward: fewer rows; 2 blocks of 256 threads; measured: t1024')
    assert 'by segments; 8 blocks of 128 threads' in sweep
    assert chunks.startswith('backward, chunks shared by 1: aligned rows; 4 blocks of 128 threads')
    assert 'channels in sixes' in kernels_of(dim=12)[0]
    assert '4096 rows' in kernels_of(batch=100, dim=12)[0]
    assert '2048 rows' in kernels_of(batch=100, dim=12, method='poly')[0]
    assert 'not aligned' in kernels_of(seqlen=127)[2]
    assert 'shared by 4' in kernels_of(dim=256)[2]
    assert 'at most 16 steps' in kernels_of(seqlen=10)[-1]


@pytest.mark.parametrize(
    ('change', 'reason'),
    [
        (dict(complex=True), 'A is complex'),
        (dict(constant=True), 'B or C is constant in time'),
        (dict(dstate=17), 'there are more than 16 states'),
        (dict(strided=True), 'a tensor is missing or not contiguous in time'),
        *((dict(fp32=[name]), 'dtypes differ') for name in ('u', 'delta', 'z', 'B', 'C')),
    ],
)
def test_why_a_scan_takes_the_general_path(change, reason):
    why, forward, *_ = kernels_of(**change)
    assert why == f'the general path, because {reason}'
    assert forward.startswith('forward: the general path')


@pytest.mark.parametrize('given', [dict(initial_state=True), dict(reset=True)])
def test_which_kernels_know_states(given):
    assert all(': an initial state or resets; ' in kernel for kernel in kernels_of(**given))
    changes = [dict(dtype='fp32'), dict(seqlen=127), *([dict(method='poly')] * ('reset' in given))]
    for change in changes:
        why, *kernels = kernels_of(**given | change)
        assert 'resets' in why
        assert all(': the general path; ' in kernel for kernel in kernels)
