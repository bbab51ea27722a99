"""The Triton kernels of suppression: in the interpreter against MMCV, and compiled for GPUs."""

import pytest

from tests.own_process import run_pytest
from vim_mm.ops.triton import OLDEST

triton = pytest.importorskip('triton', minversion='.'.join(map(str, OLDEST)))

from triton.compiler import ASTSource  # noqa: E402

from tests.ops.test_triton_compiles import TARGETS, each_target  # noqa: E402
from vim_mm.detection import suppression_kernels  # noqa: E402

KINDS = dict(
    boxes='*fp32', valid='*i1', removes='*i32', kept='*i1', number='i32', words='i32',
    threshold='fp32',
)  # fmt: skip


@pytest.mark.slow  # in the interpreter
def test_they_keep_what_mmcv_keeps():
    pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
    run_pytest('tests/detection/interpreted.py', TRITON_INTERPRET='1')


@each_target
@pytest.mark.parametrize('name', ['overlap_kernel', 'sweep_kernel'])
def test_they_compile(name, target):
    kernel = getattr(suppression_kernels, name)
    constants = dict(WORDS=64) if 'WORDS' in kernel.arg_names else {}
    signature = {n: 'constexpr' if n in constants else KINDS[n] for n in kernel.arg_names}
    assert triton.compile(ASTSource(kernel, signature, constants, {}), target=TARGETS[target])
