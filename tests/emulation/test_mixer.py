"""The mixer of a block, and the norm before it, where there is no GPU.

All kernels of the block are emulated as in test_emulation.py; the CPU multiplies matrices.
"""

import contextlib
import ctypes
import functools
import os
import re
import subprocess
import sys

import pytest
import torch

from tests.emulation.test_emulation import pytestmark as of_emulation
from tests.models.plain_operators import norm_and_mix
from tests.native import ROOT
from tests.scripts import load
from vim_mm.ops import METHODS
from vim_mm.ops.block import FusedMixer, fused_block, fused_mixer
from vim_mm.ops.discretization import method_id

pytestmark = of_emulation
B, L, C, H, N, R, W = 2, 70, 16, 24, 16, 3, 4
EPS = 1e-5
# Largest error over the largest value: of float32, and roundings of 16 bits in between.
BOUNDS = {torch.float32: 5e-6, torch.float16: 6e-3, torch.bfloat16: 4e-2}


@contextlib.contextmanager
def emulated_mixer(path, names=('mixer_fwd', 'mixer_bwd')):
    """The operators of the mixer, or these, on CPU tensors are the emulated ones."""
    torch.ops.load_library(path)
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with torch.library._scoped_library('vim_mm', 'IMPL') as library:
        for name in names:
            op = getattr(torch.ops.vim_mm_emulated, name).default
            kernel = functools.partial(op.redispatch, cuda)
            library.impl(name, kernel, 'CPU', allow_override=True)
        yield


@pytest.fixture(scope='module', autouse=True)
def emulated(emulation_library):
    with emulated_mixer(emulation_library):
        yield


@pytest.fixture(autouse=True)
def uninitialized_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def parameters_of(sets, directions, bias, outer=C):
    def weight(*shape):
        return torch.randn(shape) * shape[-1] ** -0.5

    parameters = [weight(2 * H, outer), weight(2 * H), weight(outer, H), weight(outer)]
    for _ in range(sets):
        parameters += [weight(H, 1, W), weight(H), weight(R + 2 * N, H), weight(H, R)]
        parameters += [weight(H), weight(H)]
    optional = {1, 3, *(5 + 6 * k for k in range(sets))}
    parameters = [None if i in optional and not bias else p for i, p in enumerate(parameters)]
    return parameters + [weight(H, N) for _ in range(directions)]


def run_mixer(
    dtype,
    form,
    *,
    bias=True,
    norm='update',
    method='zoh',
    length=L,
    outer=C,
    starts=None,
    fp64=False,
):
    """Output, sum and gradients of the operator, or of plain PyTorch in float64."""
    torch.manual_seed(0)
    directions, sets = form
    parameters = parameters_of(sets, directions, bias, outer)
    x = torch.randn(B, length, outer).to(torch.float32 if norm else dtype)
    update = torch.randn(B, length, outer).to(dtype) if norm == 'update' else None
    weight = torch.randn(outer) if norm else None
    grads = [torch.randn(B, length, outer).to(dtype), torch.randn(B, length, outer)]
    reset = None
    if starts is not None:  # a step later in each row
        reset = torch.zeros(B, length, dtype=torch.bool)
        for b in range(B):
            reset[b, [start + b for start in starts]] = True
    leaves = [x, update, weight, *parameters]
    leaves = [
        t if t is None else t.detach().to(torch.float64 if fp64 else t.dtype).requires_grad_()
        for t in leaves
    ]
    x, update, weight, *parameters = leaves
    options = (method_id(method), [0, 1][:directions], 0.5)
    if fp64:
        total = x if update is None else x + update
        out = norm_and_mix(total, weight, EPS, parameters, *options, reset)
    elif norm:
        mixer = FusedMixer(parameters, *options)
        out, total = fused_block(x, update, weight, EPS, dtype, mixer, reset)
    else:
        out, total = fused_mixer(x, FusedMixer(parameters, *options), reset), None
    loss = (out * grads[0].to(out.dtype)).sum()
    if update is not None:
        loss = loss + (total * grads[1].to(total.dtype)).sum()
    given = [t for t in leaves if t is not None]
    return [out, *([] if update is None else [total]), *torch.autograd.grad(loss, given)]


CASES = [
    dict(form=(1, 1), bias=False, norm=None),
    dict(form=(2, 1), bias=True, norm='first'),
    dict(form=(2, 2), bias=True, norm='update'),
    dict(form=(2, 2), bias=False, norm=None, method='poly', length=9),
    dict(form=(2, 1), bias=True, norm='update', method='foh', length=1),
    dict(form=(2, 2), bias=True, norm='update', length=64, outer=200),
    dict(form=(2, 2), norm='update', starts=(0, 5, 6, 7, 40, 64)),
    dict(form=(2, 1), norm=None, starts=(3, 12, 60), length=64),
    dict(form=(1, 1), norm='first', starts=(1, 2, 33, 65), method='foh', length=67),
    dict(form=(2, 2), norm=None, starts=(1, 30), method='poly'),
]


@pytest.mark.parametrize('dtype', [*BOUNDS])
@pytest.mark.parametrize('case', CASES, ids=lambda case: '-'.join(map(str, case.values())))
def test_mixer(dtype, case):
    results = run_mixer(dtype, **case)
    for value, expected in zip(results, run_mixer(dtype, **case, fp64=True), strict=True):
        assert torch.isfinite(value).all()
        assert (value - expected).abs().max() <= BOUNDS[dtype] * expected.abs().max()


def save_results(library, path):
    """For another process: all cases in bfloat16."""
    torch.use_deterministic_algorithms(True)
    with emulated_mixer(library):
        torch.save([run_mixer(torch.bfloat16, **case) for case in CASES], path)


def test_separate_buffers_give_the_same_bits(emulation_library, tmp_path):
    library, path = str(emulation_library), str(tmp_path / 'results.pt')
    code = f'from {__name__} import save_results; save_results({library!r}, {path!r})'
    environment = {**os.environ, 'VIM_MM_SEPARATE_BUFFERS': '1'}
    subprocess.run([sys.executable, '-c', code], check=True, env=environment, cwd=ROOT)
    for case, separate in zip(CASES, torch.load(path), strict=True):
        for value, expected in zip(separate, run_mixer(torch.bfloat16, **case), strict=True):
            assert torch.equal(value, expected)


def kernels_of_block(library):
    """Of each kernel of the block that is compiled, by its name: its address in the library."""
    files = [*(ROOT / 'csrc/cuda/block').glob('*.cu'), ROOT / 'csrc/cuda/ops/small_kernels.cu']
    source = ' '.join(file.read_text() for file in files)
    kernels = {*re.findall(r'__global__\s[^;{]*?(\w+_kernel)\(', source)}
    symbols = subprocess.run(['nm', '-C', library], capture_output=True, text=True, check=True)
    found = re.findall(r'(?m)^(\w+) [tTwW] (.*)$', symbols.stdout)
    (origin,) = (int(address, 16) for address, name in found if name == 'was_launched')
    return {
        name: int(address, 16) - origin
        for address, name in found
        if (function := re.match(r'(?:void )?(?:[\w ()]+::)+(\w+)[<(]', name))
        and function[1] in kernels
        and '{lambda' not in name
    }


def test_every_kernel_is_in_a_case_of_the_tool(emulation_library):
    """Of tools/dev/every_kernel.py, which sanitizers watch on a GPU, in float32 and bfloat16."""
    library = ctypes.CDLL(str(emulation_library))
    library.was_launched.argtypes, library.was_launched.restype = [ctypes.c_int64], ctypes.c_bool
    kernels = {k: at for k, at in kernels_of_block(emulation_library).items() if '__half' not in k}
    assert len(kernels) > 80
    library.forget_launches()
    of_norm = ('add_rms_norm_fwd', 'add_rms_norm_bwd')
    with emulated_mixer(emulation_library, (*of_norm, 'discretize')):
        for _, run in load('dev/every_kernel.py')['block_cases'](METHODS, 'cpu'):
            run()
    missing = {kernel for kernel, at in kernels.items() if not library.was_launched(at)}
    # That which sums 2^30 floats and more.
    assert {kernel for kernel in missing if 'sum_kernel<unsigned long>' not in kernel} == set()
