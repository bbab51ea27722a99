"""The compiled CUDA scan against the golden vectors, the reference in fp64, and itself."""

import functools
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.graphs import assert_replays_eager_bits
from tests.ops import golden
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
    rows_of_uneven_blocks,
    strided_copies,
    worst_error,
)
from vim_mm.ops import selective_scan_fn, selective_scan_grouped_fn, selective_scan_ref
from vim_mm.ops.discretization import METHODS, method_id

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device'),
]
each_method = pytest.mark.parametrize('method', METHODS)
cuda_scan = functools.partial(selective_scan_fn, use_cuda_kernel=True)
# Largest error allowed, relative to the largest entry of what is expected; docs/scan_benchmarks.md
# has what was measured. In half precision it is the rounding of the result, in fp16 of states too;
# in fp32 that of a stiff z.
BOUNDS = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
BOUNDS[torch.float64] = BOUNDS[torch.float32]  # parameters in float64 take part in float32


def on_cuda(inputs):
    """Detached copies on the GPU with the strides of the originals, and as far from aligned."""
    copies = {}
    for name, x in inputs.items():
        shape = x.shape
        shared = [dim for dim, stride in enumerate(x.stride()) if stride == 0]
        for dim in shared:
            x = x.narrow(dim, 0, 1)
        offset = x.storage_offset() % 16
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        memory = torch.empty(offset + max(last, 0) + 1, dtype=x.dtype, device='cuda')
        copy = memory.as_strided(x.shape, x.stride(), offset)
        copies[name] = copy.copy_(x.detach()).expand(shape).requires_grad_()
    return copies


def in_fp64(inputs):
    """The same numbers in double precision, on the GPU."""
    return {
        name: x.detach().to('cuda', torch.complex128 if x.is_complex() else torch.float64)
        for name, x in inputs.items()
    }


def assert_close(results, expected, bounds=BOUNDS):
    for name, value in results.items():
        real = value.dtype.to_real() if value.is_complex() else value.dtype
        assert torch.isfinite(value).all(), name
        error = worst_error(value, expected[name])
        assert error <= bounds[real], f'{name} is off by {error:.1e}'


def compare(inputs, scan=cuda_scan, reference=selective_scan_ref, **options):
    """Outputs and gradients of the CUDA scan against the reference in fp64."""
    results = results_and_gradients(scan, on_cuda(inputs), **options)
    wide = {name: x.requires_grad_() for name, x in in_fp64(inputs).items()}
    assert_close(results, results_and_gradients(reference, wide, **options))
    return results


def test_a_kernel_is_there():
    for name in ('selective_scan_fwd', 'selective_scan_bwd'):
        torch.library.get_kernel(f'vim_mm::{name}', 'CUDA')  # raises where there is none


@pytest.mark.parametrize('case', golden.CASES)
def test_golden_vectors(case):
    def scan(**arguments):
        return_last_state = arguments.pop('return_last_state')
        moved = {k: x.cuda() if torch.is_tensor(x) else x for k, x in arguments.items()}
        out, last_state = cuda_scan(**moved, return_last_state=return_last_state)
        return out.cpu(), last_state.cpu()

    golden.assert_reproduced(scan, case, torch.float32, 1e-5)


@each_method
@pytest.mark.parametrize('is_complex', [False, True], ids=['real', 'complex'])
def test_discretize(method, is_complex):
    """The coefficients themselves, stiff and tiny steps included."""
    dt = torch.logspace(-8, 3, 400, dtype=torch.float32)
    a = torch.linspace(-2.0, 0.0, 400).flip(0)
    a = torch.complex(a, torch.linspace(-3, 3, 400)) if is_complex else a
    wide_a = a.to(torch.complex128 if is_complex else torch.float64)
    expected = torch.ops.vim_mm.discretize(dt.double(), wide_a, method_id(method))
    result = torch.ops.vim_mm.discretize(dt.cuda(), a.cuda(), method_id(method)).cpu()
    scale = expected.abs()
    # Where e^z is negligible beside 1, so is its relative error; the phi functions have none of it.
    error = (result - expected).abs() / scale.clamp_min(1e-3)
    assert error[:2].max() <= 1e-5
    assert torch.isfinite(torch.view_as_real(result) if is_complex else result).all()


@each_method
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16])
def test_coefficients_of_a_scan(method, dtype):
    check_coefficients(cuda_scan, method, dtype, 'cuda')


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_step_sizes_of_16_bits(dtype):
    check_step_sizes(cuda_scan, dtype, 'cuda')


@pytest.mark.parametrize('method', HALF_METHODS)
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_stiff_step_of_16_bits(method, dtype):
    check_stiff_step(cuda_scan, method, dtype, 'cuda')


# Directions are those of test_rows and test_misaligned_rows.
@each_method
@pytest.mark.parametrize('length', [1, 2, 15, 16, 17, 63, 64, 197, 1025])
def test_lengths(method, length):
    inputs = make_inputs(length=length, channels=20, states=16, dtype=torch.float32)
    compare(inputs, delta_softplus=True, discretization_method=method)


@each_method
@pytest.mark.parametrize('states', [1, 2, 5, 16, 17, 33, 64, 65, 256])
@pytest.mark.parametrize('is_complex', [False, True], ids=['real', 'complex'])
def test_states(method, states, is_complex):
    inputs = make_inputs(
        length=37, channels=9, states=states, is_complex=is_complex, dtype=torch.float32
    )
    compare(inputs, delta_softplus=True, discretization_method=method)


# Windows in an even number and not, the last one whole and not, with tiles of states that are and
# are not; by blocks of eight channels and of six.
@each_method
@pytest.mark.parametrize('length', [645, 712, 768])
@pytest.mark.parametrize('states', [13, 16])
@pytest.mark.parametrize('channels', [35, 36])
def test_many_windows(method, length, states, channels):
    inputs = inputs_in(torch.bfloat16, length=length, channels=channels, states=states)
    compare(inputs, delta_softplus=True, discretization_method=method, reverse=True)


# As many rows as choose each of the block shapes; lengths that end within a window and with one.
@each_method
@pytest.mark.parametrize(
    ('batch', 'channels'), [(2, 300), (4, 70), (10, 150), (10, 300), (16, 450)]
)
@pytest.mark.parametrize(
    ('length', 'dtype', 'reverse'),
    [
        pytest.param(35, torch.float32, False, id='35'),
        pytest.param(256, torch.float32, True, id='256-reverse'),
        pytest.param(256, torch.bfloat16, True, id='256-bf16-reverse'),
        pytest.param(300, torch.float16, False, id='300-fp16'),
        pytest.param(196, torch.bfloat16, True, id='196-bf16-reverse'),
        pytest.param(200, torch.float16, True, id='200-fp16-reverse'),
    ],
)
def test_rows(method, batch, channels, length, dtype, reverse):
    inputs = inputs_in(dtype, batch=batch, channels=channels, length=length, states=16)
    compare(inputs, delta_softplus=True, discretization_method=method, reverse=reverse)


def scan_on_cpu(**arguments):
    """The compiled scan of the CPU, which is fast enough for many steps."""
    moved = {name: x.cpu() if torch.is_tensor(x) else x for name, x in arguments.items()}
    return tuple(x.cuda() for x in selective_scan_fn(**moved))


# In float32 A_bar is off by up to 2^-22 (docs/kernels.md), which is what z is off by where it is
# near 0. With steps of about log(2) all of them together are as if A were off by
A_ERROR = 2**-22 / math.log(2)


def compare_many_steps(inputs, scan, reference, **options):
    """Outputs and gradients of a scan against a reference, which is given float64.

    A state that hardly decays sums up thousands of steps, and their rounding. So the last state and
    the gradients of A and of the bias, which are sums over all steps, may be as far from the exact
    ones as those of ``A + A_ERROR`` are, and beyond that by their bounds.
    """
    results = results_and_gradients(scan, inputs, **options)
    wide = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    shifted = {**wide, 'A': (wide['A'].detach() + A_ERROR).requires_grad_()}
    expected, other = (results_and_gradients(reference, x, **options) for x in (wide, shifted))
    for name in ('last_state', 'grad_A', 'grad_delta_bias'):
        exact, reach = expected[name], (other[name] - expected[name]).abs()
        expected[name] = results[name].double().clamp(exact - reach, exact + reach)
    assert_close(results, expected)
    return results


# Few rows of many steps, whose time is split: see csrc/cuda/dispatch/configurations.cuh. Splits of
# one unit of 256 steps and of more; the last one of fewer, and of a few steps. Where there are
# thousands of states, some hardly decay.
@each_method
@pytest.mark.parametrize('reverse', [False, True], ids=['forwards', 'reverse'])
@pytest.mark.parametrize(
    ('dtype', 'batch', 'channels', 'length', 'states'),
    [
        (torch.bfloat16, 1, 384, 16384, 16),
        (torch.float16, 2, 9, 8452, 13),
        (torch.bfloat16, 1, 528, 8196, 16),
    ],
)
def test_splits(method, dtype, batch, channels, length, states, reverse):
    inputs = inputs_in(dtype, batch=batch, channels=channels, length=length, states=states)
    options = {'discretization_method': method, 'reverse': reverse, 'delta_softplus': True}
    results = compare_many_steps(on_cuda(inputs), cuda_scan, scan_on_cpu, **options)
    for name, value in results_and_gradients(cuda_scan, on_cuda(inputs), **options).items():
        assert torch.equal(value, results[name]), name


# So many channels that one to four blocks share those of a chunk, the last of which adds up the
# gradients of B and C: of whole tiles and of parts, in registers or by tiles of states in memory.
@pytest.mark.parametrize('method', ['zoh', 'poly'])
@pytest.mark.parametrize('channels', [64, 70, 130, 200])
@pytest.mark.parametrize('reverse', [False, True], ids=['forwards', 'reverse'])
@pytest.mark.parametrize(
    ('dtype', 'states', 'length'),
    [
        (torch.bfloat16, 16, 128),
        (torch.float16, 5, 131),
        (torch.float32, 16, 128),
        (torch.float32, 16, 70),
        (torch.bfloat16, 37, 70),
    ],
)
def test_blocks_that_share_channels(method, channels, reverse, dtype, states, length):
    inputs = inputs_in(dtype, channels=channels, length=length, states=states)
    compare(inputs, delta_softplus=True, discretization_method=method, reverse=reverse)


# A last chunk of few steps, behind others of as many images as fill a GPU, or alone. Its channels
# come in 32s, of which one, two or four blocks have some.
@each_method
@pytest.mark.parametrize(
    ('dtype', 'reverse'),
    [(torch.bfloat16, True), (torch.float32, False)],
    ids=['reverse-bf16', 'fp32'],
)
@pytest.mark.parametrize(
    ('batch', 'channels', 'length', 'states'),
    [
        (128, 72, 197, 16),
        (133, 40, 68, 5),
        (147, 193, 129, 3),  # by three blocks, and the other chunks by four
        (199, 129, 129, 3),  # by one, and by three
        (3, 40, 5, 16),
        (3, 72, 7, 3),
        (2, 200, 16, 16),
    ],
)
def test_few_steps(method, dtype, reverse, batch, channels, length, states):
    inputs = inputs_in(dtype, batch=batch, channels=channels, length=length, states=states)
    compare(inputs, delta_softplus=True, discretization_method=method, reverse=reverse)


@pytest.mark.parametrize('channels', [70, 130, 200])
@pytest.mark.parametrize('form', ['grouped', 'constant_B_grouped_C', 'interleaved'])
def test_blocks_that_share_channels_of_groups(channels, form):
    inputs = make_inputs(channels=2 * channels, length=70, form=form, dtype=torch.float32)
    compare(inputs, delta_softplus=True)


@pytest.mark.parametrize('channels', [70, 130, 200])
def test_blocks_that_share_channels_of_any_strides_and_dtypes(channels):
    inputs = make_inputs(channels=channels, length=70, states=16, dtype=torch.float32)
    for name, dtype in (('B', torch.float16), ('C', torch.bfloat16)):
        inputs[name] = inputs[name].detach().to(dtype)
    compare(strided_copies(inputs), delta_softplus=True, reverse=True)


@each_method
def test_more_blocks_that_share_channels_than_run_at_once(method):
    """384 chunks of two blocks each: an H200 has 264 blocks at a time."""
    inputs = inputs_in(torch.bfloat16, batch=96, channels=70, length=256, states=16)
    options = {'delta_softplus': True, 'discretization_method': method}
    first = compare(inputs, **options)
    inputs = on_cuda(inputs)
    for _ in range(3):
        for name, value in results_and_gradients(cuda_scan, inputs, **options).items():
            assert torch.equal(value, first[name]), name


@each_method
@pytest.mark.parametrize(
    'form', ['constant', 'shared', 'grouped', 'constant_B_grouped_C', 'interleaved']
)
@pytest.mark.parametrize('states', [3, 40])
def test_every_form_of_B_and_C(method, form, states):
    inputs = make_inputs(channels=6, length=19, states=states, form=form, dtype=torch.float32)
    compare(inputs, discretization_method=method)


@each_method
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=['fp16', 'bf16'])
def test_half_precision(method, dtype):
    inputs = inputs_in(dtype, channels=12, length=300, states=16)
    results = compare(inputs, delta_softplus=True, discretization_method=method)
    assert results['out'].dtype == dtype
    assert results['last_state'].dtype == torch.float32


@pytest.mark.parametrize(
    'mix',
    [
        (torch.bfloat16, torch.float32, torch.float16),
        (torch.float32, torch.float16, torch.bfloat16),
        (torch.float16, torch.bfloat16, torch.float32),
    ],
    ids=lambda mix: '-'.join(str(t)[6:] for t in mix),
)
def test_dtype_mix(mix):
    inputs = make_inputs(dtype=torch.float32, length=40)
    for names, dtype in zip((('u', 'A'), ('delta', 'z', 'D'), ('B', 'C')), mix, strict=True):
        for name in names:
            inputs[name] = inputs[name].detach().to(dtype)
    inputs['delta_bias'] = inputs['delta_bias'].detach().double()
    results = compare(inputs, delta_softplus=True, scan=cuda_scan)
    for name, x in inputs.items():
        assert results[f'grad_{name}'].dtype == x.dtype


@each_method
@pytest.mark.parametrize('kind', ['stiff', 'tiny'])
def test_stiff_and_tiny_steps(method, kind):
    inputs = make_inputs(channels=16, length=400, states=16, dtype=torch.float32)
    x = {name: value.detach() for name, value in inputs.items()}
    if kind == 'stiff':  # z down to -1000
        x['A'] = -torch.logspace(0, 2, 16).repeat(16, 1)
        x['delta'] = 10 * torch.rand_like(x['delta'])
    else:
        x['A'] = -torch.arange(1.0, 17.0).repeat(16, 1)
        x['delta'] = 1e-4 * torch.rand_like(x['delta'])
    x['delta_bias'] = torch.zeros(16)
    compare(x, discretization_method=method)


# By kernels of their own: of 16 bits and aligned, and by the general path; in shared chunks. What
# they do at the ends of sequences, tests/emulation and test_states.py look at.
@each_method
@pytest.mark.parametrize('reverse', [False, True], ids=['forwards', 'reverse'])
@pytest.mark.parametrize(
    ('dtype', 'batch', 'channels', 'length', 'states'),
    [
        (torch.bfloat16, 2, 60, 1024, 16),
        (torch.float16, 40, 64, 196, 13),
        (torch.bfloat16, 2, 200, 1000, 16),
        (torch.bfloat16, 2, 72, 197, 16),
        (torch.float32, 2, 200, 300, 16),
        (torch.float32, 2, 40, 150, 40),
    ],
)
def test_initial_state_and_resets(method, dtype, batch, channels, length, states, reverse):
    inputs = inputs_in(dtype, batch=batch, channels=channels, length=length, states=states)
    if METHODS[method].causal:
        inputs['initial_state'] = torch.randn(batch, channels, states, requires_grad=True)
    reset = torch.rand(batch, length, device='cuda') < 0.02
    compare(inputs, discretization_method=method, reverse=reverse, delta_softplus=True, reset=reset)


@each_method
@pytest.mark.parametrize('absent', ['D', 'z', 'delta_bias'])
def test_optional_inputs(method, absent):
    inputs = make_inputs(dtype=torch.float32, length=70, states=16)
    del inputs[absent]
    compare(inputs, discretization_method=method)


@each_method
def test_groups_in_one_call(method):
    inputs = grouped_inputs(groups=3, shared=('u', 'z', 'D'), length=40, dtype=torch.float32)
    compare(
        inputs,
        scan=functools.partial(selective_scan_grouped_fn, use_cuda_kernel=True),
        reference=functools.partial(selective_scan_grouped_fn, use_cuda_kernel=False),
        reverse=(False, True, True),
        delta_softplus=True,
        discretization_method=method,
    )


def test_any_strides():
    """(B, L, D) layouts and slices give the same results, and keep their layout."""
    plain = on_cuda(make_inputs(channels=40, length=50, states=16, dtype=torch.float32))
    strided = strided_copies(plain)
    results = results_and_gradients(cuda_scan, strided)
    expected = results_and_gradients(cuda_scan, plain)
    for name, value in results.items():
        # Contiguous tensors have kernels of their own, which add up in another order.
        assert worst_error(value, expected[name]) <= 2 * BOUNDS[torch.float32], name
    assert results['out'].stride() == strided['u'].stride()
    assert results['grad_u'].stride() == strided['u'].stride()


@pytest.mark.parametrize('reverse', [False, True], ids=['forwards', 'backwards'])
@pytest.mark.parametrize('row', [256, 257], ids=['even', 'odd'])
@each_method
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_misaligned_rows(dtype, method, row, reverse):
    """Contiguous in time, but rows begin at odd entries: all of them, or every other one.

    Of every other tensor they begin one entry later.
    """
    inputs = make_inputs(channels=40, length=row - 4, states=16, dtype=torch.float32)
    for i, name in enumerate(('u', 'delta', 'z', 'B', 'C')):
        x = inputs[name].detach()
        memory = x.new_empty(*x.shape[:-1], row, dtype=dtype)
        inputs[name] = memory[..., 1 + i % 2 :][..., : row - 4].copy_(x)
    compare(inputs, delta_softplus=True, discretization_method=method, reverse=reverse)


# As many rows as choose each of the block shapes. Eight entries are moved at once where all rows
# begin at 16 bytes, else four, and that by blocks of eight channels where it would be six.
@each_method
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(('batch', 'channels'), [(1, 40), (1, 42), (14, 42), (60, 40), (110, 40)])
@pytest.mark.parametrize(('row', 'first'), [(260, 0), (264, 4)], ids=['apart', 'begin'])
def test_the_same_bits_by_four_and_by_eight(method, dtype, batch, channels, row, first):
    inputs = inputs_in(dtype, batch=batch, channels=channels, length=256, states=16)
    inputs = on_cuda(inputs)
    options = {'delta_softplus': True, 'discretization_method': method}
    expected = results_and_gradients(cuda_scan, inputs, **options)
    names = ['u', 'delta', 'z', 'B', 'C']
    for changed in ([name] for name in names) if batch == 1 else [names]:
        others = dict(inputs)
        for name in changed:
            memory = inputs[name].new_empty(*inputs[name].shape[:-1], row)
            entries = memory[..., first : first + 256].copy_(inputs[name].detach())
            others[name] = entries.requires_grad_()
        for name, value in results_and_gradients(cuda_scan, others, **options).items():
            assert torch.equal(value, expected[name]), (changed, name)


@each_method
def test_a_gradient_of_any_layout(method):
    """What a transposing next layer sends back gives the bits of its contiguous copy."""
    inputs = on_cuda(make_inputs(channels=40, length=128, states=16, dtype=torch.float32))
    out = cuda_scan(**inputs, delta_softplus=True, discretization_method=method)
    grad = torch.randn_like(out.transpose(1, 2).contiguous()).transpose(1, 2)
    for strided in (grad, grad[:1, :1, :1].expand_as(grad)):
        given, plain = (
            torch.autograd.grad(out, list(inputs.values()), g, retain_graph=True)
            for g in (strided, strided.contiguous())
        )
        for value, truth in zip(given, plain, strict=True):
            assert torch.equal(value, truth)


@each_method
def test_no_steps_of_a_longer_tensor(method):
    """L = 0 with the strides of a tensor that has steps."""
    inputs = on_cuda(make_inputs(channels=8, length=128, states=16, dtype=torch.float32))
    for name in ('u', 'delta', 'z', 'B', 'C'):
        inputs[name] = inputs[name].detach()[..., :0].requires_grad_()
    results = results_and_gradients(cuda_scan, inputs, discretization_method=method)
    torch.cuda.synchronize()
    assert not results['last_state'].any()


@each_method
@pytest.mark.parametrize(
    ('batch', 'length'), [pytest.param(0, 5, id='B0'), pytest.param(2, 0, id='L0')]
)
def test_empty(method, batch, length):
    inputs = on_cuda(make_inputs(batch=batch, length=length, dtype=torch.float32))
    results = results_and_gradients(cuda_scan, inputs, discretization_method=method)
    assert results['out'].shape == (batch, 4, length)
    assert not results['last_state'].any()
    for name, x in inputs.items():
        assert results[f'grad_{name}'].shape == x.shape
        assert not results[f'grad_{name}'].any()


@each_method
@pytest.mark.parametrize('states', [16, 40])
def test_same_bits_every_time(method, states):
    inputs = on_cuda(
        make_inputs(batch=8, channels=200, length=300, states=states, dtype=torch.float32)
    )
    options = {'delta_softplus': True, 'discretization_method': method}
    first = results_and_gradients(cuda_scan, inputs, **options)
    for _ in range(3):
        for name, value in results_and_gradients(cuda_scan, inputs, **options).items():
            assert torch.equal(value, first[name]), name


@each_method
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('length', [2101, 2104])
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(method, dtype, length):
    channels = rows_of_uneven_blocks() + 3
    inputs = inputs_in(dtype, batch=1, channels=channels, length=length, states=16)
    inputs = on_cuda(inputs)
    scan = functools.partial(
        cuda_scan, delta_softplus=True, return_last_state=True, discretization_method=method
    )
    results = scan(**inputs)
    half = channels // 16 * 8
    for part in (slice(None, half), slice(half, None)):
        alone = scan(**of_channels(inputs, part))
        for result, expected in zip(results, alone, strict=True):
            assert torch.equal(result[:, part], expected)


@pytest.mark.usefixtures('nondeterministic')  # what fills memory would come between the launches
@pytest.mark.parametrize('method', ['zoh', 'poly'])
@pytest.mark.parametrize(
    ('batch', 'channels', 'states', 'length'),
    [
        (2, 384, 16, 2048),
        (2, 380, 16, 2048),
        (4, 384, 16, 2048),
        (8, 384, 16, 2048),
        (12, 384, 16, 2048),
        (2, 384, 20, 2048),
        (1, 384, 16, 8192),
    ],
    ids=['fewest', 'fewest-of-eight', 'uneven', 'few', 'many', 'any', 'splits'],
)
def test_launches_that_begin_early(method, batch, channels, states, length):
    """Each scan has what the last one gave, forward and backward, and waits for it.

    Behind a pause, so that launches queue up and come one right behind the other; each against the
    direction of the one before, so that it begins with what that one writes last; and of other
    inputs each time, so that what was left in memory is wrong.
    """
    sizes = {'batch': batch, 'channels': channels, 'length': length, 'states': states}
    options = {'delta_softplus': True, 'discretization_method': method}

    def chain(inputs, pause):
        results = [inputs['u']]
        for i in range(4):
            out = cuda_scan(**{**inputs, 'u': results[-1]}, reverse=i % 2 == 1, **options)
            out.register_hook(lambda _: pause())
            pause()
            results.append(out)
        torch.cuda._sleep(20_000_000)
        return [*results, *torch.autograd.grad(out.sum(), list(inputs.values()))]

    for _ in range(3):
        inputs = on_cuda(inputs_in(torch.bfloat16, **sizes))
        torch.cuda._sleep(20_000_000)
        results = chain(inputs, lambda: None)
        expected = chain(inputs, torch.cuda.synchronize)
        assert all(x.isfinite().all() for x in expected)
        for value, truth in zip(results, expected, strict=True):
            assert torch.equal(value, truth)


@each_method
def test_only_the_last_state_is_used(method):
    inputs = make_inputs(dtype=torch.float32, length=40)
    options = {'discretization_method': method, 'return_last_state': True}
    weight = torch.randn(2, 4, 3, device='cuda')
    grads = [
        torch.autograd.grad((scan(**x, **options)[1] * weight).sum(), x['u'])[0]
        for scan, x in (
            (cuda_scan, on_cuda(inputs)),
            (selective_scan_ref, {k: x.requires_grad_() for k, x in in_fp64(inputs).items()}),
        )
    ]
    assert worst_error(*grads) <= BOUNDS[torch.float32]


def test_memory_is_linear_in_the_length():
    """Nothing of size (B, D, L, N): at N = 256 that would be 512 MiB here."""
    inputs = on_cuda(
        make_inputs(batch=2, channels=64, length=4096, states=256, dtype=torch.float32)
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cuda_scan(**inputs).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 400 * 2**20


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 100e9,
    reason='needs 100 GB on the device',
)
def test_more_elements_than_32_bits_count():
    """B D L > 2^31: the last channel is what it is alone."""
    channels, length, states = 2112, 2**20, 4
    generator = torch.Generator('cuda').manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device='cuda', dtype=torch.bfloat16)

    inputs = {
        'u': normal(1, channels, length),
        'delta': normal(1, channels, length),
        'A': -torch.rand(channels, states, generator=generator, device='cuda'),
        'B': normal(1, states, length),
        'C': normal(1, states, length),
    }
    per_channel = ('u', 'delta', 'A')
    last = {name: inputs[name].narrow(-2, channels - 1, 1) for name in per_channel}
    alone = inputs | last
    results = []
    for x in (inputs, alone):
        x = {name: value.clone().requires_grad_() for name, value in x.items()}
        out = cuda_scan(**x, delta_softplus=True)
        grads = torch.autograd.grad(out, [x[name] for name in per_channel], torch.ones_like(out))
        results.append([value.narrow(-2, -1, 1).clone() for value in (out.detach(), *grads)])
        del x, out, grads
    for value, truth in zip(*results, strict=True):
        assert worst_error(value, truth.double()) <= BOUNDS[torch.bfloat16]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason='needs two CUDA devices')
@each_method
def test_on_another_device_than_the_current_one(method):
    inputs = make_inputs(dtype=torch.float32, length=40)
    options = {'delta_softplus': True, 'discretization_method': method}
    expected = results_and_gradients(cuda_scan, on_cuda(inputs), **options)
    with torch.cuda.device(1):
        there = {name: x.detach().to('cuda:1') for name, x in on_cuda(inputs).items()}
    there = {name: x.requires_grad_() for name, x in there.items()}
    assert torch.cuda.current_device() == 0
    for name, value in results_and_gradients(cuda_scan, there, **options).items():
        assert value.device == torch.device('cuda:1')
        assert torch.equal(value.cpu(), expected[name].cpu()), name


def test_float64_is_the_reference_or_an_error():
    inputs = on_cuda(make_inputs())
    with pytest.raises(RuntimeError, match='no float64'):
        cuda_scan(**inputs)
    torch.testing.assert_close(selective_scan_fn(**inputs), selective_scan_ref(**inputs))


class TestUnderTorch:
    """What PyTorch does to operators. Deterministic mode fills memory in ways capture forbids."""

    pytestmark = pytest.mark.usefixtures('nondeterministic')

    @each_method
    def test_compile_in_one_graph(self, method):
        torch.compiler.reset()
        scan = functools.partial(cuda_scan, delta_softplus=True, discretization_method=method)
        compiled = torch.compile(scan, fullgraph=True, backend='aot_eager')
        inputs = on_cuda(make_inputs(dtype=torch.float32, length=33))
        results = [
            torch.autograd.grad(form(**inputs).square().sum(), list(inputs.values()))
            for form in (compiled, scan)
        ]
        for value, truth in zip(*results, strict=True):
            assert torch.equal(value, truth)

    @each_method
    def test_graph_capture_and_replay(self, method):
        """A captured forward and backward gives the eager bits, for new inputs too."""
        inputs = on_cuda(make_inputs(dtype=torch.float32, length=50, channels=40, states=16))
        options = {'delta_softplus': True, 'discretization_method': method}

        def run():
            out = cuda_scan(**inputs, **options)
            return (out.detach(), *torch.autograd.grad(out.square().sum(), list(inputs.values())))

        assert_replays_eager_bits(run, inputs['u'])

    def test_current_stream(self):
        """Enqueued behind slow work of the same stream, not beside it."""
        inputs = on_cuda(make_inputs(dtype=torch.float32, length=50))
        expected = cuda_scan(**inputs)
        late = {k: torch.full_like(x, float('nan')) for k, x in inputs.items()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            for name, x in inputs.items():
                late[name].copy_(x.detach())
            out = cuda_scan(**late)
        stream.synchronize()
        assert torch.equal(out, expected)

    def test_autocast(self):
        inputs = on_cuda(make_inputs(dtype=torch.float32))
        inputs['u'] = inputs['u'].detach().bfloat16()
        with torch.autocast('cuda', dtype=torch.bfloat16):
            inside = cuda_scan(**inputs, return_last_state=True)
        outside = cuda_scan(**inputs, return_last_state=True)
        assert inside[0].dtype == torch.bfloat16
        for value, truth in zip(inside, outside, strict=True):
            assert torch.equal(value, truth)

    def test_activation_checkpointing(self):
        inputs = on_cuda(make_inputs(dtype=torch.float32))

        def checkpointed(**kwargs):
            return checkpoint(cuda_scan, use_reentrant=False, **kwargs)

        results = results_and_gradients(checkpointed, inputs)
        for name, expected in results_and_gradients(cuda_scan, inputs).items():
            assert torch.equal(results[name], expected), name

    @each_method
    def test_opcheck(self, method):
        inputs = on_cuda(make_inputs(form='grouped', dtype=torch.float32, length=150))
        split = {
            name: x if x.dim() == 4 else x.unflatten(1 if x.dim() == 3 else 0, (2, -1))
            for name, x in inputs.items()
        }
        tensors = (x.detach().requires_grad_() for x in split.values())
        arguments = (*tensors, None, None, True)
        op = torch.ops.vim_mm.selective_scan_fwd.default
        torch.library.opcheck(op, (*arguments, method_id(method), [0, 1]))

    def test_opcheck_of_a_strided_state(self):
        """The fake kernel of backward has the strides of the gradients."""
        inputs = on_cuda(make_inputs(form='shared', dtype=torch.float32, length=70))
        x = {name: t.detach().unsqueeze(0 if t.dim() < 3 else 1) for name, t in inputs.items()}
        state = torch.randn(2, 1, x['A'].shape[2], x['A'].shape[1], device='cuda').mT
        reset = torch.rand(70, 2, device='cuda').mT < 0.1
        arguments = (*x.values(), state, reset, True, method_id('zoh'), [1])
        *results, edges = torch.ops.vim_mm.selective_scan_fwd(*arguments)
        op = torch.ops.vim_mm.selective_scan_bwd.default
        torch.library.opcheck(op, (*results, edges, *arguments))
