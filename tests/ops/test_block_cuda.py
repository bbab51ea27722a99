"""The operators of the fast block on CUDA: add + RMSNorm against fp64, and what torch.library asks.

The mixer is held to the plain one in tests/models/test_fast_block.py.
"""

import pytest
import torch
import torch.nn.functional as F

from vim_mm.ops.block import FusedMixer, add_rms_norm, fused_block, fused_mixer
from vim_mm.ops.discretization import method_id
from vim_mm.ops.mixer_parameters import TYPES

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device'),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
each_dtype = pytest.mark.parametrize('dtype', DTYPES, ids=['fp32', 'fp16', 'bf16'])
# Largest error over largest value: in half precision the rounding of the result.
BOUNDS = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
ops = torch.ops.vim_mm


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, device='cuda').to(dtype)


@each_dtype
@pytest.mark.parametrize('channels', [7, 8, 192, 1100])
@pytest.mark.parametrize('stored', [torch.float32, None], ids=['fp32_stream', 'same_stream'])
@pytest.mark.parametrize('with_update', [True, False], ids=['update', 'first'])
@pytest.mark.parametrize('used', ['both', 'normed', 'sum'])
def test_add_rms_norm(dtype, channels, stored, with_update, used):
    stored = stored or dtype
    shape = (3, 700, channels)
    residual, weight = normal(*shape, dtype=stored), normal(channels)
    update = normal(*shape, dtype=dtype) if with_update else None
    grads = [normal(*shape, dtype=dtype), normal(*shape, dtype=stored)]

    def run(function, wide):
        leaves = [t for t in (residual, update, weight) if t is not None]
        leaves = [(t.double() if wide else t.clone()).requires_grad_() for t in leaves]
        given = (leaves[0], leaves[1] if with_update else None, leaves[-1])
        outputs = function(*given, 1e-5, torch.float64 if wide else dtype)
        loss = sum(
            (o * g.to(o.dtype)).sum()
            for o, g, name in zip(outputs, grads, ('normed', 'sum'), strict=True)
            if used in ('both', name)
        )
        unused = torch.autograd.grad(loss, leaves, allow_unused=True)
        return [
            *outputs,
            *(torch.zeros_like(x) if g is None else g for g, x in zip(unused, leaves)),
        ]

    def plain(residual, update, weight, eps, _):
        total = residual if update is None else residual + update
        return F.rms_norm(total, total.shape[-1:], weight, eps), total

    results, truth = run(add_rms_norm, False), run(plain, True)
    # The rounding of the stream goes into everything that follows.
    for value, expected in zip(results, truth, strict=True):
        assert torch.isfinite(value).all()
        bound = max(BOUNDS[value.dtype], BOUNDS[stored], BOUNDS[dtype])
        assert (value - expected).abs().max() <= bound * expected.abs().max()
    assert results[0].dtype == dtype and results[1].dtype == stored
    for value, again in zip(results, run(add_rms_norm, False), strict=True):
        assert torch.equal(value, again)


def test_wrong_arguments_of_the_norm_are_errors():
    x, weight = normal(6, 2, 9), normal(9)
    with pytest.raises(RuntimeError, match='shape of update'):
        add_rms_norm(x, x[:5], weight, 1e-5, torch.float32)
    with pytest.raises(RuntimeError, match='dtype of update'):
        add_rms_norm(x, x, weight, 1e-5, torch.float16)
    with pytest.raises(RuntimeError, match='shape of weight'):
        add_rms_norm(x, x, weight[:8], 1e-5, torch.float32)
    with pytest.raises(RuntimeError, match='dtype of residual'):
        add_rms_norm(x.double(), None, weight, 1e-5, torch.float32)


def mixer_parameters(directions=2, sets=2, bias=False):
    """Those of ``fused_mixer`` in their order: C 8, D 12, N 4, R 3, W 4. Weights keep values of the
    size of x, or float16 would overflow."""

    def weight(*shape):
        return normal(*shape) * shape[-1] ** -0.5

    parameters = {
        'in_proj': weight(24, 8),
        'in_bias': normal(24) if bias else None,
        'out_proj': weight(8, 12),
        'out_bias': normal(8) if bias else None,
    }
    for k in range(sets):
        parameters |= {
            f'conv{k}': weight(12, 1, 4),
            f'conv_bias{k}': weight(12) if bias else None,
            f'x_proj{k}': weight(11, 12),
            f'dt_proj{k}': weight(12, 3),
            f'dt_bias{k}': weight(12),
            f'D{k}': weight(12),
        }
    return parameters | {f'A_log{k}': weight(12, 4) for k in range(directions)}


def test_wrong_arguments_of_the_mixer_are_errors():
    x, parameters, options = normal(2, 70, 8), mixer_parameters(), (method_id('zoh'), [0, 1], 0.5)

    def mixer(x=x, options=options, **replaced):
        return fused_mixer(x, FusedMixer([*(parameters | replaced).values()], *options))

    mixer()
    with pytest.raises(RuntimeError, match='dtype of x'):
        mixer(x.double())
    with pytest.raises(RuntimeError, match='shape of in_proj'):
        mixer(x[..., :7])
    with pytest.raises(RuntimeError, match='W <= 8'):
        mixer(conv0=normal(12, 1, 9))
    with pytest.raises(RuntimeError, match='shape of conv'):
        mixer(conv1=normal(12, 1, 5))
    with pytest.raises(RuntimeError, match='expected D'):
        mixer(D1=None)
    with pytest.raises(RuntimeError, match='dtype of D'):
        mixer(D1=normal(12).to(torch.int32))
    with pytest.raises(RuntimeError, match='shape of x_proj'):
        mixer(x_proj1=normal(10, 12))
    with pytest.raises(RuntimeError, match='contiguous'):
        mixer(out_proj=normal(12, 8).t())
    with pytest.raises(RuntimeError, match='1 or 2 directions'):
        mixer(A_log2=normal(12, 4))
    with pytest.raises(RuntimeError, match='1 or 2 directions'):
        mixer(options=(0, [0, 1, 0], 0.5))
    with pytest.raises(RuntimeError, match='number of parameters'):
        fused_mixer(x, FusedMixer([], *options))
    given = FusedMixer([*parameters.values()], *options)
    with pytest.raises(RuntimeError, match='shape of update'):
        fused_block(x, x[:1], normal(8), 1e-5, x.dtype, given)
    with pytest.raises(RuntimeError, match='dtype of residual'):
        fused_block(x.half(), None, normal(8), 1e-5, torch.bfloat16, given)
    with pytest.raises(RuntimeError, match='update without a norm'):
        ops.mixer_fwd(x, x, None, 0.0, x.dtype, given.parameters, *options, False)


def test_wrong_arguments_of_backward_are_errors():
    x, parameters, options = normal(2, 70, 8), mixer_parameters(), (method_id('zoh'), [0, 1], 0.5)
    out, _, saved = ops.mixer_fwd(
        x, None, None, 0.0, x.dtype, [*parameters.values()], *options, True
    )
    right = dict(
        grad_out=out,
        grad_sum=None,
        x=x,
        norm=None,
        saved=saved,
        sizes=[12, 4, 3, 4],
        types=[-1 if p is None else 0 for p in parameters.values()],
        with_update=False,
    )

    def backward(**replaced):
        return ops.mixer_bwd(*(right | replaced).values(), *options)

    backward()
    with pytest.raises(RuntimeError, match='what the mixer'):
        backward(saved=[saved[0][:-256]])
    with pytest.raises(RuntimeError, match='what the mixer'):
        backward(saved=[torch.cat([saved[0][:256], saved[0]])[256:]])
    with pytest.raises(RuntimeError, match='what the mixer'):
        backward(saved=[])
    with pytest.raises(RuntimeError, match='dtype of in_proj'):
        backward(types=[-1, *right['types'][1:]])
    with pytest.raises(RuntimeError, match='dtype of D'):
        backward(
            types=[7 if name == 'D1' else type for name, type in zip(parameters, right['types'])]
        )
    with pytest.raises(RuntimeError, match='H, N, R and W'):
        backward(sizes=[12, 4, 3])
    with pytest.raises(RuntimeError, match='update without a norm'):
        backward(with_update=True)
    with pytest.raises(RuntimeError, match='dtype of grad_out'):
        backward(grad_out=out.half())


class TestOpcheck:
    """What torch.library asks of operators. Deterministic mode fills memory that nobody wrote."""

    pytestmark = pytest.mark.usefixtures('nondeterministic')

    @pytest.mark.parametrize('with_update', [True, False], ids=['update', 'first'])
    def test_add_rms_norm(self, with_update):
        x, weight, dtype = normal(2, 9, 24), normal(24), torch.bfloat16
        forward = (x, x.to(dtype) if with_update else None, weight, 1e-5, dtype)
        torch.library.opcheck(ops.add_rms_norm_fwd, forward)
        rstd = ops.add_rms_norm_fwd(*forward)[2]
        backward = (x.to(dtype), x, x, rstd, weight, with_update)
        torch.library.opcheck(ops.add_rms_norm_bwd, backward)

    @each_dtype
    @pytest.mark.parametrize(
        'method, stored, normed, packed',
        [
            ('zoh', torch.float32, None, False),
            ('poly', torch.bfloat16, None, False),
            ('bilinear', torch.float64, None, False),
            ('zoh', torch.float32, 'update', False),
            ('zoh', torch.float32, 'first', False),
            ('zoh', torch.float32, 'update', True),
            ('poly', torch.float32, None, True),
        ],
    )
    @pytest.mark.parametrize('form', [(1, 1), (2, 1), (2, 2)], ids=['none', 'v1', 'v2'])
    @pytest.mark.parametrize('bias', [True, False], ids=['bias', 'no_bias'])
    def test_mixer(self, method, stored, form, bias, dtype, normed, packed):
        """What a fake kernel knows of a method is whether it is causal, and whether A_bar = e^z."""
        parameters = [
            None if p is None else p.to(stored) for p in mixer_parameters(*form, bias).values()
        ]
        options = (method_id(method), [0, 1][: form[0]], 0.5)
        x = normal(2, 70, 8, dtype=torch.float32 if normed else dtype)
        update = normal(2, 70, 8, dtype=dtype) if normed == 'update' else None
        norm = normal(8) if normed else None
        resets = (normal(2, 70) > 1,) if packed else ()
        given = (x, update, norm, 1e-5, dtype, parameters, *options)
        torch.library.opcheck(ops.mixer_fwd, (*given, False, *resets))
        # What is saved has gaps that nobody writes or reads: they differ from call to call.
        keeping = ('test_schema', 'test_faketensor')
        torch.library.opcheck(ops.mixer_fwd, (*given, True, *resets), test_utils=keeping)
        out, total, saved = ops.mixer_fwd(*given, True, *resets)
        assert torch.isfinite(out).all()
        types = [-1 if p is None else TYPES[stored] for p in parameters]
        sizes = (12, 4, 3, 4)
        # Small, or gradients exceed float16.
        given = (out / 16, x if normed else None, total if update is not None else x, norm, saved)
        given = (*given, sizes, types, update is not None, *options, *resets)
        torch.library.opcheck(ops.mixer_bwd, given)
