import pytest
import torch
import torch.nn.functional as F

from vim_mm.ops.causal_conv1d import causal_conv1d


def inputs(length=9, width=4, channels=3):
    x = torch.randn(2, channels, length, dtype=torch.double)
    return x, torch.randn(channels, width, dtype=torch.double), torch.randn(channels).double()


@pytest.mark.parametrize('length', [1, 2, 9])
@pytest.mark.parametrize('width', [1, 3, 4])
def test_it_is_the_causal_sum(length, width):
    x, weight, bias = inputs(length, width)
    expected = bias[:, None].expand_as(x).clone()
    for t in range(length):
        for w in range(width):
            if t - (width - 1) + w >= 0:
                expected[..., t] += weight[:, w] * x[..., t - (width - 1) + w]
    torch.testing.assert_close(causal_conv1d(x, weight, bias), expected)


@pytest.mark.parametrize('length', [1, 2, 9])
@pytest.mark.parametrize('activation', [None, 'silu'])
def test_reverse_equals_flip_convolve_flip(length, activation):
    x, weight, bias = inputs(length)
    flipped = causal_conv1d(x.flip(-1), weight, bias, activation=activation).flip(-1)
    out = causal_conv1d(x, weight, bias, reverse=True, activation=activation)
    torch.testing.assert_close(out, flipped)


@pytest.mark.parametrize('reverse', [False, True])
def test_strided_input_and_gradients(reverse):
    x, weight, bias = inputs()
    x = x.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    assert not x.is_contiguous()
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    assert torch.autograd.gradcheck(lambda *t: causal_conv1d(*t, reverse, 'silu'), leaves)


def test_silu_is_applied_after_the_bias():
    x, weight, bias = inputs()
    torch.testing.assert_close(
        causal_conv1d(x, weight, bias, activation='silu'), F.silu(causal_conv1d(x, weight, bias))
    )


def test_autocast_dtype():
    x, weight, bias = (t.float() for t in inputs())
    with torch.autocast('cpu', torch.bfloat16):
        out = causal_conv1d(x, weight, bias, activation='silu')
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out.float(), causal_conv1d(x, weight, bias, activation='silu'), rtol=0.05, atol=0.05
    )


@pytest.mark.parametrize(
    'change, message',
    [
        pytest.param(dict(x=torch.zeros(3, 9)), r'x must be .* got shape \(3, 9\)', id='x'),
        pytest.param(dict(weight=torch.zeros(4, 4)), r'weight must be \(3, W\)', id='weight'),
        pytest.param(dict(x=torch.zeros(2, 0, 9)), 'x must be .*, D from 1', id='no-channels'),
        pytest.param(dict(weight=torch.zeros(3, 0)), r'weight .*, W from 1, got .*0', id='no-taps'),
        pytest.param(dict(x=torch.zeros(2, 3, 9).int()), 'x must be floating .*int32', id='int'),
        pytest.param(dict(weight=torch.zeros(3, 4).int()), 'weight must be .*int32', id='int-taps'),
        pytest.param(
            dict(weight=torch.zeros(3, 4).half()), 'weight must be .*float32.*float16', id='half'
        ),
        pytest.param(dict(bias=torch.zeros(3).double()), 'bias must be .*float64', id='double'),
        pytest.param(dict(bias=torch.zeros(3).cfloat()), 'bias must be .*complex64', id='complex'),
        pytest.param(dict(x=torch.zeros(2, 3, 9).to_sparse()), 'x: .*sparse_coo', id='sparse'),
        pytest.param(dict(weight=[1.0]), 'weight: expected a tensor, got list', id='list'),
        pytest.param(
            dict(weight=torch.zeros(3, 4, device='meta')), 'weight: .* got meta', id='device'
        ),
        pytest.param(dict(bias=torch.zeros(2)), r'bias must be \(3,\).* \(2,\)', id='bias'),
        pytest.param(dict(activation='relu'), "activation must be .* 'relu'", id='activation'),
    ],
)
def test_bad_arguments(change, message):
    arguments = dict(x=torch.zeros(2, 3, 9), weight=torch.zeros(3, 4), bias=torch.zeros(3))
    with pytest.raises((TypeError, ValueError), match=message):
        causal_conv1d(**(arguments | change))


@pytest.mark.parametrize('autocast', [False, True])
@pytest.mark.parametrize('width', [1, 4])
@pytest.mark.parametrize('shape', [(2, 3, 0), (0, 3, 9), (0, 3, 0)])
def test_convolutions_of_nothing(shape, width, autocast):
    leaves = [torch.randn(size, requires_grad=True) for size in (shape, (3, width), (3,))]
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        out = causal_conv1d(*leaves, reverse=True, activation='silu')
    assert out.shape == shape and out.dtype == (torch.bfloat16 if autocast else torch.float32)
    for leaf, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert grad.shape == leaf.shape and not grad.any()
