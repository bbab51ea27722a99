"""The CUDA scan and the projection of step sizes where there is no GPU: their sources
compiled as C++, their threads as fibers.

All but single instructions is the code that runs on a GPU: operators, launches, kernels. Memory
that nobody wrote is NaN; blocks come one after the other in random order, and their threads take
turns in random order. device.h stands for the GPU.
"""

import ctypes
import functools
import hashlib
import os
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from tests.native import ROOT, ask_compiler, build
from tests.ops.coefficients import (
    HALF_METHODS,
    check_coefficients,
    check_step_sizes,
    check_stiff_step,
)
from tests.ops.inputs import (
    grouped_inputs,
    inputs_in,
    make_inputs,
    of_channels,
    results_and_gradients,
    strided_copies,
)
from tests.ops.test_selective_scan_cuda import assert_close
from vim_mm.ops import selective_scan_fn, selective_scan_grouped_fn, selective_scan_ref
from vim_mm.ops.discretization import METHODS
from vim_mm.ops.library import MISSING

# Where CUDA's headers may be: in a toolkit, or in packages beside torch, of which torch itself does
# not bring all.
PLACES = [
    Path(cpp_extension.CUDA_HOME or '.'),
    Path('/usr/local/cuda'),
    *Path(torch.__file__).parents[1].glob('nvidia/cu*'),
]
NEEDED = ['include/cuda_runtime.h', 'include/crt/host_defines.h', 'include/nv/target']
HEADERS = [place / 'include' for place in PLACES if all((place / name).exists() for name in NEEDED)]
SOURCES = [
    *(f'csrc/cuda/methods/{name}.cu' for name in METHODS),
    'csrc/cuda/dispatch/scan.cu',
    'csrc/cuda/ops/selective_scan.cpp',
    'csrc/cuda/ops/small_kernels.cu',
    'csrc/cuda/block/add_rms_norm.cu',
    'csrc/cuda/block/causal_conv1d.cu',
    'csrc/cuda/block/gate.cu',
    'csrc/cuda/block/norm.cpp',
    'csrc/cuda/block/parameters.cu',
    'csrc/cuda/block/step_projection.cu',
    'csrc/cuda/mixer/mixer_backward.cpp',
    'csrc/cuda/mixer/mixer_forward.cpp',
    'csrc/cuda/mixer/mixer_layout.cpp',
    'csrc/ops.cpp',
    'tests/emulation/block.cpp',
    'tests/emulation/device.cpp',
]
# On a GPU it is four times as many: fewer take less time to emulate.
FEW_ROWS = 512
FLAGS = [
    *('-x', 'c++', '-include', 'tests/emulation/device.h', '-DUSE_CUDA'),
    f'-DVIM_MM_FEW_ROWS={FEW_ROWS}',
    '-U_FORTIFY_SOURCE',  # it forbids to jump from stack to stack
    # What a GPU would not load, or would find something else.
    '-fsanitize=alignment',
    '-fsanitize-undefined-trap-on-error',
    '-fno-omit-frame-pointer',  # device.cpp looks by which calls a thread has come to a barrier
]
# Variables that nobody wrote are huge, or NaN; compilers know this from GCC 12 and Clang 8 on.
UNWRITTEN = '-ftrivial-auto-var-init=pattern'

pytestmark = [
    pytest.mark.slowest,  # compiles the kernels anew, for minutes
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.skipif(
        not HEADERS,
        reason="needs CUDA's headers: CUDA_HOME, or packages nvidia-cuda-crt and nvidia-cuda-cccl",
    ),
    # The operators are replaced on purpose.
    pytest.mark.filterwarnings('ignore:Warning only once for all operators:UserWarning'),
]
each_method = pytest.mark.parametrize('method', METHODS)


def build_emulation(
    folder: Path,
    namespace: str = 'vim_mm_emulated',
    sources: list[str] = SOURCES,
    root: Path = ROOT,
) -> Path:
    """The library of the emulated operators, beside those of vim_mm._C."""
    knows = ask_compiler(UNWRITTEN, '-x', 'c++', '-fsyntax-only', '/dev/null').returncode == 0
    flags = [*FLAGS, UNWRITTEN] if knows else FLAGS

    def flags_of(source: str) -> list[str]:
        # Kernels compile for longer than they run, but every thread comes by device.cpp to wait.
        return [*flags, '-O2' if source.endswith('device.cpp') else '-Og']

    # Symbolic: what device.cpp has in torch's place is for this library alone.
    link = ['-Wl,-Bsymbolic,--exclude-libs,ALL']
    include = [str(HEADERS[0])]
    return build(folder, namespace, sources, flags_of, include=include, link=link, root=root)


@pytest.fixture(scope='module', autouse=True)
def emulated(emulation_library):
    """The operators on CPU tensors are the emulated ones, to the end of this file."""
    torch.ops.load_library(emulation_library)
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with torch.library._scoped_library('vim_mm', 'IMPL') as library:
        for name in ('selective_scan_fwd', 'selective_scan_bwd'):
            op = getattr(torch.ops.vim_mm_emulated, name).default
            kernel = functools.partial(op.redispatch, cuda)
            library.impl(name, kernel, 'CPU', allow_override=True)
        yield ctypes.CDLL(str(emulation_library))


@pytest.fixture
def many_multiprocessors(emulated):
    emulated.set_multiprocessors(128)
    yield
    emulated.set_multiprocessors(4)


@pytest.fixture(autouse=True)
def uninitialized_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


def compare(inputs, scan=selective_scan_fn, reference=selective_scan_ref, **options):
    """Outputs and gradients of the emulated scan against the reference in fp64."""
    wide = {
        name: x.detach().to(torch.complex128 if x.is_complex() else torch.float64).requires_grad_()
        for name, x in inputs.items()
    }
    results = results_and_gradients(scan, inputs, delta_softplus=True, **options)
    expected = results_and_gradients(reference, wide, delta_softplus=True, **options)
    assert_close(results, expected)
    note_digest(results)
    return results


def note_digest(results):
    """A line for the running test in the file that VIM_MM_DIGESTS names, if it names one.

    Those of before and after a change of the kernels' form are the same, or it changed their bits.
    """
    if path := os.environ.get('VIM_MM_DIGESTS'):
        digest = hashlib.sha256()
        for name, x in sorted(results.items()):
            digest.update(name.encode())
            digest.update(x.detach().reshape(-1).view(torch.uint8).numpy())
        with Path(path).open('a') as file:
            test = os.environ['PYTEST_CURRENT_TEST'].rpartition('::')[2].partition(' ')[0]
            file.write(f'{digest.hexdigest()[:16]} {test}\n')


def test_the_emulated_kernels_run():
    """The edges of chunks are CUDA's alone."""
    tensors = [torch.rand(1, 1, 3, 65), torch.rand(1, 1, 3, 65), -torch.rand(1, 3, 2)]
    matrices = [torch.rand(1, 1, 2, 65), torch.rand(1, 1, 2, 65)]
    edges = torch.ops.vim_mm.selective_scan_fwd(*tensors, *matrices, *(None,) * 5, True, 0, [0])[2]
    assert edges.shape == (1, 1, 1, 3, 2, 2)


def test_a_block_meets_at_one_place():
    """Each role with a __syncthreads of its own would go well, but CUDA does not promise it."""
    x = torch.zeros(2)
    torch.ops.vim_mm_emulated.two_warps(x, False)
    assert x.tolist() == [1, 1]
    with pytest.raises(RuntimeError, match='wait for it at different places'):
        torch.ops.vim_mm_emulated.two_warps(x, True)


@each_method
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(('length', 'reverse'), [(1, False), (70, True), (132, False), (132, True)])
def test_lengths(method, dtype, length, reverse):
    inputs = inputs_in(dtype, channels=9, length=length, states=16)
    compare(inputs, discretization_method=method, reverse=reverse)


half_precision = pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])


def scan_in_parts(**arguments):
    """The scan of so few channels at a time that blocks have the shapes for few rows."""
    inputs = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    options = {name: x for name, x in arguments.items() if name not in inputs}
    firsts = range(0, inputs['u'].shape[1], 3 * FEW_ROWS // 4)
    parts = [slice(first, first + firsts.step) for first in firsts]
    results = [selective_scan_fn(**of_channels(inputs, part), **options) for part in parts]
    return tuple(torch.cat(result, dim=1) for result in zip(*results, strict=True))


# Methods compute in one way for both dtypes of 16 bits, whose conversions test_lengths compares.
@each_method
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_coefficients_of_a_scan(method, dtype):
    check_coefficients(scan_in_parts, method, dtype, 'cpu')


@half_precision
def test_step_sizes_of_16_bits(dtype):
    check_step_sizes(scan_in_parts, dtype, 'cpu')


@pytest.mark.parametrize('method', HALF_METHODS)
@half_precision
def test_stiff_step_of_16_bits(method, dtype):
    check_stiff_step(selective_scan_fn, method, dtype, 'cpu')


# As many rows as choose each of the block shapes: see csrc/cuda/dispatch/configurations.cuh.
@pytest.mark.parametrize(
    ('method', 'rows', 'dtype'),
    [
        ('poly', 280, torch.bfloat16),
        ('poly', 280, torch.float32),
        ('zoh', 525, torch.float32),
        ('bilinear', 525, torch.bfloat16),
        ('highorder', 525, torch.float16),
        ('poly', 525, torch.bfloat16),
        ('poly', 1050, torch.bfloat16),
        ('poly', 1050, torch.float32),
        ('zoh', 1050, torch.bfloat16),
        ('foh', 1050, torch.float16),
        ('zoh_exact', 525, torch.float16),
        ('zoh_exact', 1050, torch.bfloat16),
        ('zoh_exact', 1050, torch.float32),
    ],
)
def test_rows(method, rows, dtype):
    inputs = inputs_in(dtype, batch=rows // 35, channels=35, length=64, states=16)
    compare(inputs, discretization_method=method)


each_way = pytest.mark.parametrize('method', ['zoh', 'poly'])


# So many windows that each stage of a pipeline is used more than once, of few rows and of many;
# by slots and entry by entry, with tiles that are whole and not; windows in an even number and not.
@each_way
@pytest.mark.parametrize(
    ('batch', 'length', 'states'),
    [
        (1, 648, 13),
        (1, 645, 13),
        (1, 712, 16),
        (1, 768, 16),
        (1, 768, 13),
        (15, 196, 16),
        (15, 200, 16),
        (30, 136, 13),
        (30, 197, 13),
    ],
)
def test_windows(method, batch, length, states):
    inputs = inputs_in(torch.bfloat16, batch=batch, channels=35, length=length, states=states)
    compare(inputs, reverse=True, discretization_method=method)


# No more blocks of six channels than multiprocessors: fewer windows than groups of producer warps,
# and more than stages; rows enough for the sweep for edges to be sequential, too. Where rows are
# not aligned it is eight channels.
@pytest.mark.usefixtures('many_multiprocessors')
@pytest.mark.parametrize('method', ['zoh', 'bilinear', 'rk4', 'poly'])
@pytest.mark.parametrize('reverse', [False, True])
@pytest.mark.parametrize(
    ('dtype', 'batch', 'channels', 'length', 'states'),
    [
        (torch.bfloat16, 2, 12, 712, 16),
        (torch.float16, 1, 24, 448, 13),
        (torch.bfloat16, 1, 6, 136, 16),
        (torch.float16, 4, 6, 8, 3),
        (torch.float16, 2, 66, 136, 13),
        (torch.bfloat16, 1, 132, 256, 16),
    ],
)
def test_six_channels(emulated, method, dtype, batch, channels, length, states, reverse):
    inputs = inputs_in(dtype, batch=batch, channels=channels, length=length, states=states)
    options = {'discretization_method': method, 'reverse': reverse}
    launches = emulated.count_launches(384)
    of_six = compare(inputs, **options)
    sequential_sweep = method == 'poly' or batch * channels >= FEW_ROWS // 4
    launches += 1 + sequential_sweep
    assert emulated.count_launches(384) == launches
    memory = inputs['u'].new_empty(batch, channels, length + 1)
    apart = memory[..., :length].copy_(inputs['u'].detach()).requires_grad_()
    of_eight = compare({**inputs, 'u': apart}, **options)
    assert emulated.count_launches(384) == launches
    for name, value in of_six.items():
        assert torch.equal(value, of_eight[name]), name


# So many channels that two, three and four blocks share them in backward, of whole tiles and of
# parts; all in registers, or by tiles of states in memory.
@pytest.mark.parametrize('channels', [70, 130, 200])
@pytest.mark.parametrize('reverse', [False, True])
@pytest.mark.parametrize(
    ('dtype', 'states', 'length'),
    [
        (torch.bfloat16, 16, 64),
        (torch.float16, 5, 70),
        (torch.float32, 16, 70),
        (torch.bfloat16, 37, 70),
    ],
)
def test_many_channels(channels, dtype, states, length, reverse):
    compare(inputs_in(dtype, channels=channels, length=length, states=states), reverse=reverse)


# A last chunk of few steps, behind others or alone, has a launch of its own in backward.
@each_way
@pytest.mark.parametrize('reverse', [False, True])
@pytest.mark.parametrize(
    ('dtype', 'batch', 'channels', 'length', 'states'),
    [
        (torch.bfloat16, 2, 40, 5, 16),
        (torch.float16, 1, 72, 7, 3),
        (torch.float32, 1, 200, 16, 16),
    ],
)
def test_few_steps(method, dtype, batch, channels, length, states, reverse):
    inputs = inputs_in(dtype, batch=batch, channels=channels, length=length, states=states)
    compare(inputs, discretization_method=method, reverse=reverse)


# Channels of two sets in the blocks of such a chunk.
@pytest.mark.parametrize(('method', 'reverse'), [('zoh', False), ('poly', True)])
def test_few_steps_behind_others(emulated, method, reverse):
    def launches(length: int) -> int:
        before = emulated.count_launches(128)
        inputs = inputs_in(torch.bfloat16, batch=133, channels=33, length=length, states=5)
        compare(inputs, discretization_method=method, reverse=reverse)
        return emulated.count_launches(128) - before

    assert launches(68) == launches(64) + 1


@pytest.mark.parametrize('form', ['constant_B_grouped_C', 'interleaved'])
def test_many_channels_in_groups(form):
    compare(make_inputs(channels=140, length=70, form=form, batch=1, dtype=torch.float32))


def test_many_channels_of_any_strides_and_dtypes():
    inputs = make_inputs(channels=130, length=70, states=16, dtype=torch.float32)
    for name, dtype in (('B', torch.float16), ('C', torch.bfloat16)):
        inputs[name] = inputs[name].detach().to(dtype)
    compare(strided_copies(inputs), reverse=True)


@each_method
@pytest.mark.parametrize('states', [5, 37])
@pytest.mark.parametrize('form', ['shared', 'constant_B_grouped_C', 'interleaved'])
def test_forms_and_states(method, states, form):
    inputs = make_inputs(
        channels=34, length=70, states=states, form=form, batch=1, dtype=torch.float32
    )
    compare(inputs, discretization_method=method)


@each_method
def test_groups_of_different_directions(method):
    inputs = grouped_inputs(
        groups=2, shared=('u',), channels=9, length=70, states=16, dtype=torch.float32
    )
    compare(
        inputs,
        selective_scan_grouped_fn,
        functools.partial(selective_scan_grouped_fn, use_cuda_kernel=False),
        reverse=(False, True),
        discretization_method=method,
    )


@each_way
@pytest.mark.parametrize('absent', ['D', 'z', 'delta_bias'])
def test_optional_inputs(method, absent):
    inputs = make_inputs(channels=9, length=70, states=16, dtype=torch.float32)
    del inputs[absent]
    compare(inputs, discretization_method=method)


@each_way
def test_any_strides(method):
    inputs = make_inputs(channels=9, length=70, states=16, dtype=torch.float32)
    compare(strided_copies(inputs), discretization_method=method)


# Two and four blocks share a chunk, and any of them may be the last one.
@each_way
@pytest.mark.parametrize('channels', [70, 200])
def test_bits_do_not_depend_on_the_order_of_threads_and_blocks(method, channels):
    inputs = make_inputs(channels=channels, length=132, states=16, dtype=torch.float32)
    scan = functools.partial(results_and_gradients, selective_scan_fn, inputs, delta_softplus=True)
    once, again = (scan(discretization_method=method) for _ in range(2))
    for name, value in once.items():
        assert torch.equal(value, again[name]), name


# By tensor cores in each number of instructions, with parts of tiles at all ends; and what is not
# for them: too many rows, neighbours that are not eight, not even four, and float32.
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ('sets', 'channels', 'tokens', 'rank'),
    [
        *[(2, 72, 328, rank) for rank in (1, 12, 16, 17, 48, 64, 65)],
        (1, 136, 64, 24),
        (2, 12, 36, 5),
        (2, 7, 36, 3),
        (1, 24, 197, 12),
    ],
)
def test_step_projection(dtype, sets, channels, tokens, rank):
    parameter = torch.randn(sets, channels, rank)
    rows = torch.randn(sets, rank + 3, tokens).to(dtype)
    rows[:, rank:] = torch.nan  # B and C, which are not meant
    delta = torch.ops.vim_mm_emulated.step_projection(parameter, rows)
    weight, dt = parameter.to(dtype).double(), rows[:, :rank].double()
    expected, info = weight @ dt, torch.finfo(dtype)
    # Its rounding, and that of sums in float32.
    bound = info.eps / 2 * expected.abs().clamp(min=info.tiny) + 1e-6 * (weight.abs() @ dt.abs())
    assert delta.dtype == dtype
    assert ((delta - expected).abs() <= bound).all()
