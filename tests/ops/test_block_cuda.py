"""The operators of the fast block on CUDA against plain PyTorch in fp64, one by one."""

import pytest
import torch

from tests.ops.plain_block import OPERATORS
from vim_mm.ops import METHODS
from vim_mm.ops.discretization import method_id

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device'),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
each_dtype = pytest.mark.parametrize('dtype', DTYPES, ids=['fp32', 'fp16', 'bf16'])
# Multiples of 8, of 4 and of neither; shorter than the taps; longer than a block.
each_length = pytest.mark.parametrize('length', [1, 5, 8, 36, 197, 1024, 4100])
# Largest error over largest value: in half precision the rounding of the result.
BOUNDS = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
ops = torch.ops.vim_mm


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, device='cuda').to(dtype)


def in_fp64(argument):
    """The same argument, tensors and dtypes in double precision."""
    if isinstance(argument, list):
        return [in_fp64(a) for a in argument]
    if isinstance(argument, torch.dtype):
        return torch.float64
    is_tensor = torch.is_tensor(argument) and argument.is_floating_point()
    return argument.double() if is_tensor else argument


def call(name, *arguments):
    """Outputs of a CUDA operator, held to those of the plain one."""
    outputs = getattr(ops, name)(*arguments)
    expected = OPERATORS[name](*map(in_fp64, arguments))
    outputs, expected = (x if isinstance(x, tuple) else (x,) for x in (outputs, expected))
    for i, (value, truth) in enumerate(zip(outputs, expected, strict=True)):
        assert value.shape == truth.shape
        if value.numel():
            assert_close(value, truth, f'output {i} of {name}')
    return outputs


def assert_close(value, truth, what):
    assert torch.isfinite(value).all(), what
    error = (value - truth).abs().max() / truth.abs().max()
    assert error <= BOUNDS[value.dtype], f'{what} is off by {error:.1e}'


@each_dtype
@pytest.mark.parametrize('channels', [7, 8, 192, 1100])
@pytest.mark.parametrize('residual_dtype', [torch.float32, None], ids=['fp32', 'same'])
@pytest.mark.parametrize('with_update', [True, False], ids=['update', 'first'])
def test_add_rms_norm(dtype, channels, residual_dtype, with_update):
    shape = (3, 700, channels)
    residual = normal(*shape, dtype=residual_dtype or dtype)
    update = normal(*shape, dtype=dtype) if with_update else None
    weight = normal(channels)
    _, total, rstd = call('add_rms_norm_fwd', residual, update, weight, 1e-5, dtype)
    if not with_update:
        total = residual
    grad, grad_total = normal(*shape, dtype=dtype), normal(*shape, dtype=residual.dtype)
    given = (grad, grad_total, total, rstd, weight, dtype if with_update else None)
    first = call('add_rms_norm_bwd', *given)
    call('add_rms_norm_bwd', grad, None, total, rstd, weight, None)
    for value, again in zip(first, ops.add_rms_norm_bwd(*given), strict=True):
        assert torch.equal(value, again)


@each_dtype
def test_pack_parameters(dtype):
    def pair(*shape, stored=torch.float32):
        return [normal(*shape, dtype=stored) for _ in range(2)]

    sizes = (normal(96, 24), normal(24, 48), pair(41, 48), pair(48, 9, stored=torch.bfloat16))
    call('pack_parameters', *sizes, pair(48, 16), pair(48), pair(48), dtype)


@each_dtype
@each_length
@pytest.mark.parametrize('taps', [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize('reverse', [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize('with_bias', [True, False], ids=['bias', 'no_bias'])
def test_conv1d_silu(dtype, length, taps, reverse, with_bias):
    channels, batch = 33, 3
    rows = normal(2 * channels, batch * length, dtype=dtype)
    x = rows.view(2, channels, batch, length)[1]
    weight = [normal(channels, 1, taps) for _ in reverse]
    bias = [normal(channels, dtype=torch.bfloat16) for _ in reverse] if with_bias else []
    call('conv1d_silu_fwd', x, weight, bias, reverse)

    grad_u = normal(len(reverse), channels, batch, length, dtype=dtype)
    halves = torch.full_like(rows, torch.nan).view(2, channels, batch, length)
    expected = torch.empty_like(x, dtype=torch.float64)
    given = (grad_u, x, weight, bias, reverse)
    grads = ops.conv1d_silu_bwd(*given, halves[1])
    truth = OPERATORS['conv1d_silu_bwd'](*map(in_fp64, given), expected)
    assert_close(halves[1], expected, 'grad_x')
    assert_close(grads[0], truth[0], 'grad_weight')
    if with_bias:
        assert_close(grads[1], truth[1], 'grad_bias')
    assert halves[0].isnan().all()
    again = torch.empty_like(halves)
    for value, same in zip(grads, ops.conv1d_silu_bwd(*given, again[1]), strict=True):
        assert torch.equal(value, same)
    assert torch.equal(halves[1], again[1])


@each_dtype
@each_length
@pytest.mark.parametrize('directions', [1, 2])
def test_gate(dtype, length, directions):
    channels, batch = 7, 3
    y = normal(directions, channels, batch, length, dtype=dtype)
    halves = normal(2 * channels, batch * length, dtype=dtype).view(2, channels, batch, length)
    z = halves[1]
    out, total = call('gate_fwd', y, z, 0.5, True)
    assert torch.equal(ops.gate_fwd(y, z, 0.5, False)[0], out)
    grad_out, grad_z = torch.randn_like(z), torch.empty_like(halves)[1]
    grad_y, again = ops.gate_bwd(grad_out, total, z, 0.5, grad_z)
    expected_z = torch.empty_like(z, dtype=torch.float64)
    given = (in_fp64(t) for t in (grad_out, total, z))
    expected_y, _ = OPERATORS['gate_bwd'](*given, 0.5, expected_z)
    assert_close(grad_y, expected_y, 'grad_y')
    assert_close(grad_z, expected_z, 'grad_z')
    assert torch.equal(again, out)


def scan_arguments(dtype, batch, length, sets=2, channels=40, states=16, rank=5):
    def rows(*shape):
        return normal(*shape, batch * length, dtype=dtype)

    return [
        rows(sets, channels).unflatten(2, (batch, length)),
        rows(sets, channels),
        rows(sets, rank + 2 * states),
        -4 * torch.rand(2, channels, states, device='cuda'),
        normal(sets, channels),
        normal(sets, channels),
    ]


@each_dtype
@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('length', [1, 64, 197, 1000])
@pytest.mark.parametrize('sets', [1, 2], ids=['shared', 'separate'])
def test_directional_scan_is_the_scan(dtype, method, length, sets):
    """The bits of the scan operator, whose own tests are elsewhere."""
    arguments = [*scan_arguments(dtype, 3, length, sets), method_id(method), [0, 1]]
    y, edges = ops.directional_scan_fwd(*arguments)
    expected_y, expected_edges = OPERATORS['directional_scan_fwd'](*arguments)
    assert torch.equal(y, expected_y) and torch.equal(edges, expected_edges.flatten())

    grad_y = torch.randn_like(y[0])
    given = torch.full_like(arguments[2], torch.nan)[:1].expand(2, -1, -1).clone()
    expected = given.clone()
    grads = ops.directional_scan_bwd(grad_y, edges, *arguments, given)
    truth = OPERATORS['directional_scan_bwd'](grad_y, expected_edges, *arguments, expected)
    for value, same in zip(grads, truth, strict=True):
        assert torch.equal(value, same)
    assert torch.equal(given[:, 5:], expected[:, 5:])
    assert given[:, :5].isnan().all()


def test_wrong_arguments_are_errors():
    x, weight = normal(6, 2, 9), normal(6, 1, 9)
    with pytest.raises(RuntimeError, match='W <= 8'):
        ops.conv1d_silu_fwd(x, [weight], [], [0])
    with pytest.raises(RuntimeError, match='shape of weight'):
        ops.conv1d_silu_fwd(x, [normal(5, 1, 4)], [], [0])
    with pytest.raises(RuntimeError, match='contiguous rows'):
        ops.conv1d_silu_fwd(x.mT, [normal(6, 1, 4)], [], [0])
    with pytest.raises(RuntimeError, match='float32, float16 or bfloat16'):
        ops.conv1d_silu_fwd(x.double(), [normal(6, 1, 4)], [], [0])
    with pytest.raises(RuntimeError, match='dtype of y'):
        ops.gate_fwd(normal(2, 6, 2, 9, dtype=torch.float16), x, 1.0, False)
    with pytest.raises(RuntimeError, match='shape of update'):
        ops.add_rms_norm_fwd(x, x[:5], normal(9), 1e-5, torch.float32)
    arguments = scan_arguments(torch.float32, 2, 9)
    with pytest.raises(RuntimeError, match='shape of delta'):
        ops.directional_scan_fwd(arguments[0], arguments[1][:1], *arguments[2:], 0, [0, 1])
    with pytest.raises(RuntimeError, match='flag per group'):
        ops.directional_scan_fwd(*arguments, 0, [0])


class TestOpcheck:
    """What torch.library asks of operators. Its tests compare memory that nobody wrote."""

    pytestmark = pytest.mark.usefixtures('nondeterministic')

    @pytest.fixture
    def nondeterministic(self, uninitialized_memory_is_nan):
        torch.use_deterministic_algorithms(False)

    @pytest.mark.parametrize('with_update', [True, False], ids=['update', 'first'])
    def test_add_rms_norm(self, with_update):
        x, weight, dtype = normal(2, 9, 24), normal(24), torch.bfloat16
        update = x.to(dtype) if with_update else None
        forward = (x, update, weight, 1e-5, dtype)
        torch.library.opcheck(ops.add_rms_norm_fwd, forward)
        rstd = ops.add_rms_norm_fwd(*forward)[2]
        torch.library.opcheck(
            ops.add_rms_norm_bwd,
            (x.to(dtype), x, x, rstd, weight, dtype if with_update else None),
        )

    def test_conv1d_silu(self):
        x, weight, bias = normal(6, 2, 9), [normal(6, 1, 4)] * 2, [normal(6)] * 2
        torch.library.opcheck(ops.conv1d_silu_fwd, (x, weight, bias, [0, 1]))
        backward = (normal(2, 6, 2, 9), x, weight, bias, [0, 1], torch.zeros_like(x))
        torch.library.opcheck(ops.conv1d_silu_bwd, backward)

    def test_gate(self):
        y, z = normal(2, 6, 2, 9), normal(6, 2, 9)
        for keep_sum in (False, True):
            torch.library.opcheck(ops.gate_fwd, (y, z, 0.5, keep_sum))
        torch.library.opcheck(ops.gate_bwd, (z, z, z, 0.5, torch.zeros_like(z)))

    def test_pack_parameters(self):
        given = (normal(96, 24), normal(24, 48), [normal(41, 48)], [normal(48, 9)])
        rest = ([normal(48, 16), normal(48, 16)], [normal(48)], [normal(48)])
        torch.library.opcheck(ops.pack_parameters, (*given, *rest, torch.float16))

    @pytest.mark.parametrize('method', ['zoh', 'poly'])
    @pytest.mark.parametrize('sets', [1, 2], ids=['shared', 'separate'])
    def test_directional_scan(self, method, sets):
        arguments = [*scan_arguments(torch.float32, 2, 70, sets), method_id(method), [0, 1]]
        torch.library.opcheck(ops.directional_scan_fwd, arguments)
        y, edges = ops.directional_scan_fwd(*arguments)
        grad = torch.zeros(2, *arguments[2].shape[1:], device='cuda')
        torch.library.opcheck(ops.directional_scan_bwd, (y[0], edges, *arguments, grad))
