"""The Triton kernels compile for GPUs that are not there: types, shapes and layouts hold."""

import itertools

import pytest

from vim_mm.ops.triton import OLDEST

triton = pytest.importorskip('triton', minversion='.'.join(map(str, OLDEST)))

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from vim_mm.ops.discretization import METHODS  # noqa: E402
from vim_mm.ops.triton import block_kernels, scan_kernels  # noqa: E402
from vim_mm.ops.triton.scan import backward_tile, forward_tile  # noqa: E402
from vim_mm.ops.triton.scan_backward_kernels import scan_backward_kernel  # noqa: E402

TARGETS = {'cuda': GPUTarget('cuda', 90, 32), 'hip': GPUTarget('hip', 'gfx942', 64)}
# Compilation for HIP takes ten times as long.
MARKS = {'cuda': (), 'hip': pytest.mark.slowest}
each_target = pytest.mark.parametrize(
    'target', [pytest.param(target, marks=marks) for target, marks in MARKS.items()]
)
TIMED = ('u', 'delta', 'B', 'C', 'z', 'out', 'grad_out', 'grad_u', 'grad_delta', 'grad_z')


def compile_kernel(kernel, target, dtype, num_warps, **constants):
    """Compile for a target; what varies in time is of ``dtype``, all else float32."""
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = 'constexpr'
        elif name in scan_kernels.NUMBERS:
            signature[name] = 'i32'
        elif name == 'starts':
            signature[name] = '*u8'
        else:
            signature[name] = f'*{dtype if name in TIMED else "fp32"}'
            attributes[(i,)] = [['tt.divisibility', 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=TARGETS[target], options={'num_warps': num_warps})


def compile_both(
    target, method, dtype='bf16', aligned=True, varies=True, directions=2, part=None, gate=True,
    states=False,
):  # fmt: skip
    if part is None:
        part = 0 if METHODS[method].causal else 2
    shared = dict(
        N=16, METHOD=METHODS[method].id, SOFTPLUS=True, HAS_D=True, HAS_Z=gate, HAS_BIAS=True,
        HAS_INITIAL=states, HAS_RESET=states, B_VARIES=varies, C_VARIES=varies, PART=part,
        DIRECTIONS=directions,
    )  # fmt: skip
    kernels = []
    for kernel, tile, rest in (
        (
            scan_kernels.scan_forward_kernel,
            forward_tile(1024),
            dict(EDGE=backward_tile(1024).chunk),
        ),
        (scan_backward_kernel, backward_tile(1024), dict(HAS_OUT=True, HAS_LAST=True)),
    ):
        cut = dict(CHANNELS=tile.channels, ROWS=tile.rows, LANES=tile.lanes, STEPS=tile.steps)
        cut['VECTOR'] = min(8, tile.steps) if aligned else 1
        kernels.append(compile_kernel(kernel, target, dtype, tile.warps, **shared, **rest, **cut))
    return kernels


@each_target
def test_a_method_compiles(target):
    forward, backward = compile_both(target, 'zoh', directions=0, gate=False)
    if target == 'cuda':
        # Nothing is moved between layouts; shared memory has sums over a program's rows alone.
        assert all('convert_layout' not in kernel.asm['ttgir'] for kernel in (forward, backward))
        assert forward.metadata.shared == 0
        # Of each channel of a thread: two values to compose in five rounds, and one shift; in
        # backward once more, and two turns. More would be per step.
        for kernel, tile, up, idx in (
            (forward, forward_tile(1024), 10, 1), (backward, backward_tile(1024), 20, 4)
        ):  # fmt: skip
            assert kernel.asm['ptx'].count('shfl.sync.up') == up * tile.channels
            assert kernel.asm['ptx'].count('shfl.sync.idx') == idx * tile.channels


# A method sees float32, whatever is loaded. So two meet the other dtypes, one of them not causal.
# For HIP each of the two meets one of these dtypes.
EVERY_METHOD = [(method, 'bf16') for method in METHODS]
OTHER_DTYPES = {
    'cuda': [*itertools.product(('foh', 'poly'), ('fp32', 'fp16'))],
    'hip': [('foh', 'fp32'), ('poly', 'fp16')],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ('target', 'method', 'dtype'),
    [
        pytest.param(target, *case, marks=MARKS[target])
        for target, others in OTHER_DTYPES.items()
        for case in (*EVERY_METHOD, *others)
    ],
)
def test_every_method_and_dtype_compiles(target, method, dtype):
    compile_both(target, method, dtype)


@pytest.mark.slow
@each_target
@pytest.mark.parametrize(
    'form',
    [
        *(dict(method='poly', aligned=False, part=part) for part in (1, 2)),
        dict(method='foh', varies=False),
        dict(method='zoh', states=True),
    ],
    ids=['first scan of poly', 'second scan of poly', 'constant B and C', 'states'],
)
def test_other_forms_compile(target, form):
    compile_both(target, **form)


# Constants of the kernels of the block, and which of their pointers are of 16 bits.
NORM = dict(BLOCK_R=8, BLOCK_C=256)
CONV = dict(W=4, BACKWARDS=False, BLOCK=512)
BLOCK_KERNELS = {
    'add_rms_norm_kernel': (dict(HAS_UPDATE=True, **NORM), ('update', 'normed')),
    'add_rms_norm_backward_kernel': (
        dict(HAS_TOTAL=True, HAS_UPDATE=True, **NORM),
        ('grad_normed', 'grad_update'),
    ),
    'conv_kernel': (dict(SETS=2, **CONV), ('x', 'u')),
    'conv_backward_kernel': (dict(TAPS=4, **CONV), ('x', 'grad_u')),
    'conv_input_backward_kernel': (dict(SETS=2, **CONV), ('grad', 'grad_x')),
    'gate_kernel': (dict(DIRECTIONS=2, KEEP=True, BLOCK=1024), ('y', 'z', 'out', 'total')),
    'gate_backward_kernel': (
        dict(BLOCK=1024),
        ('grad_out', 'total', 'z', 'grad_y', 'grad_z', 'out'),
    ),
}
SIZES = ('rows', 'C', 'H', 'B', 'L', 'count')


def compile_of_block(name, target, **given):
    constants, narrow = BLOCK_KERNELS[name]
    constants = constants | given
    kernel = getattr(block_kernels, name)
    kinds = dict.fromkeys(SIZES, 'i32') | dict.fromkeys(narrow, '*bf16')
    kinds |= {'eps': 'fp32', 'scale': 'fp32'} | dict.fromkeys(constants, 'constexpr')
    signature = {argument: kinds.get(argument, '*fp32') for argument in kernel.arg_names}
    aligned = {
        (i,): [['tt.divisibility', 16]]
        for i, argument in enumerate(kernel.arg_names)
        if argument not in constants
    }
    return triton.compile(ASTSource(kernel, signature, constants, aligned), target=TARGETS[target])


@each_target
@pytest.mark.parametrize('name', BLOCK_KERNELS)
def test_the_block_compiles(target, name):
    compile_of_block(name, target)


def test_shifted_inputs_are_loaded_one_by_one():
    """Where W is odd, pairs of them were taken to be aligned: an error of the GPU."""
    kernel = compile_of_block('conv_backward_kernel', 'cuda', W=3)
    taps, threads = 4, 128
    assert kernel.asm['ptx'].count('ld.global.b16') >= taps * 512 // threads
