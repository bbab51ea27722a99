"""The Triton kernels compile for GPUs that are not there: types, shapes and layouts hold."""

import itertools

import pytest

from vim_mm.ops.triton import OLDEST

triton = pytest.importorskip('triton', minversion='.'.join(map(str, OLDEST)))

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from vim_mm.ops.discretization import METHODS  # noqa: E402
from vim_mm.ops.triton import block_kernels, scan_backward_kernels, scan_kernels  # noqa: E402
from vim_mm.ops.triton.scan import tile_of  # noqa: E402

TARGETS = {'cuda': GPUTarget('cuda', 90, 32), 'hip': GPUTarget('hip', 'gfx942', 64)}
each_target = pytest.mark.parametrize('target', TARGETS)
TIMED = ('u', 'delta', 'B', 'C', 'z', 'out', 'grad_out', 'grad_u', 'grad_delta', 'grad_z')
# Arguments of the kernels that are no pointers.
INTEGERS = ('H', 'L', 'G', 'items', 'chunks', 'reverse_bits')


def compile_kernel(kernel, target, dtype, aligned=True, **constants):
    """Compile for a target; what varies in time is of ``dtype``, all else float32."""
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = 'constexpr'
            continue
        is_size = name in INTEGERS or name[-2:] in ('_b', '_g', '_h', '_n')
        signature[name] = 'i32' if is_size else f'*{dtype if name in TIMED else "fp32"}'
        if aligned or not is_size:
            attributes[(i,)] = [['tt.divisibility', 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(
        source, target=TARGETS[target], options={'num_warps': tile_of(1024).warps}
    )


def constants_of(method, varies=True, directions=2, part=None):
    """Of both kernels."""
    tile = tile_of(1024)
    if part is None:
        part = 0 if METHODS[method].causal else 2
    return dict(
        N=16, METHOD=METHODS[method].id, SOFTPLUS=True, HAS_D=True, HAS_Z=True, HAS_BIAS=True,
        B_VARIES=varies, C_VARIES=varies, PART=part, DIRECTIONS=directions, SEGMENT=tile.segment,
        BLOCK_H=tile.channels, BLOCK_T=tile.steps,
    )  # fmt: skip


def compile_both(target, method, dtype='bf16', aligned=True, **options):
    constants = constants_of(method, **options)
    forward = compile_kernel(scan_kernels.scan_forward_kernel, target, dtype, aligned, **constants)
    backward = compile_kernel(
        scan_backward_kernels.scan_backward_kernel, target, dtype, aligned,
        **constants, HAS_OUT=True, HAS_LAST=True,
    )  # fmt: skip
    return forward, backward


@each_target
def test_a_method_compiles(target):
    forward, backward = compile_both(target, 'zoh', directions=0)
    assert all(kernel.asm['ttgir'] for kernel in (forward, backward))
    if target == 'cuda':
        # Of each of the four values that a thread turns over or shifts, one from each of as many
        # threads: more steps of a thread, or a row of several warps, would take thousands.
        assert backward.asm['ptx'].count('shfl.sync.idx') == 4 * 4 * 4


# A method sees float32, whatever is loaded. So two meet the other dtypes, one of them not causal.
@pytest.mark.slow
@each_target
@pytest.mark.parametrize(
    ('method', 'dtype'),
    [
        *((method, 'bf16') for method in METHODS),
        *itertools.product(('foh', 'poly'), ('fp32', 'fp16')),
    ],
)
def test_every_method_and_dtype_compiles(target, method, dtype):
    compile_both(target, method, dtype)


@pytest.mark.slow
@each_target
@pytest.mark.parametrize('part', [1, 2])
def test_other_forms_compile(target, part):
    compile_both(target, 'poly', aligned=False, part=part)
    compile_both(target, 'foh', varies=False)


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
