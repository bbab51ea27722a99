"""Resizing and pooling against PyTorch's: equal outputs, gradients up to rounding."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vim_mm.ops import resample
from vim_mm.ops.resample import adaptive_average_pool, matrix_gradients, resize

SIZES = [(16, 16), (5, 7), (40, 9), (12, 10), (1, 1), (1, 23)]
OPERATIONS = {
    'bilinear': lambda x, size: F.interpolate(x, size, mode='bilinear', align_corners=False),
    'bilinear_corners': lambda x, size: F.interpolate(x, size, mode='bilinear', align_corners=True),
    'bicubic': lambda x, size: F.interpolate(x, size=size, mode='bicubic'),
    'bicubic_corners': lambda x, size: F.interpolate(x, size, mode='bicubic', align_corners=True),
    'average': lambda x, size: nn.AdaptiveAvgPool2d(size)(x),
}


@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize('kind', OPERATIONS)
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
def test_agrees_with_pytorch(kind, size, dtype):
    x = torch.randn(2, 3, 12, 10, dtype=dtype, requires_grad=True)
    expected = OPERATIONS[kind](x, size)
    with matrix_gradients():
        out = OPERATIONS[kind](x, size)
    assert 'Resample' in type(out.grad_fn).__name__
    assert 'Resample' not in type(expected.grad_fn).__name__
    assert torch.equal(out, expected)
    grad = torch.randn_like(out)
    (expected_grad,) = torch.autograd.grad(expected, x, grad)
    (x_grad,) = torch.autograd.grad(out, x, grad)
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(x_grad, expected_grad, rtol=0, atol=tolerance * grad.numel() ** 0.5)


def test_gradients_of_gradients():
    x = torch.randn(1, 2, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: resize(x, (7, 3)).square(), x)
    assert torch.autograd.gradgradcheck(lambda x: adaptive_average_pool(x, (3, 2)).exp(), x)


def test_gradient_of_16_bits_is_rounded_once():
    x = torch.randn(2, 3, 12, 10, dtype=torch.bfloat16, requires_grad=True)
    out = resize(x, (37, 31))
    assert torch.equal(out, F.interpolate(x, (37, 31), mode='bilinear'))
    grad = torch.randn_like(out)
    (x_grad,) = torch.autograd.grad(out, x, grad)
    wide = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(resize(wide, (37, 31)), wide, grad.double())
    torch.testing.assert_close(x_grad.double(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(
    'call',
    [
        lambda x: F.interpolate(x, scale_factor=2, mode='bilinear'),
        lambda x: F.interpolate(x, (9, 9)),
        lambda x: F.interpolate(x, (9, 9), mode='bilinear', antialias=True),
        lambda x: F.interpolate(x.detach(), (9, 9), mode='bilinear'),
        lambda x: F.adaptive_avg_pool2d(x[0], 3),
    ],
)
def test_everything_else_is_left_to_pytorch(call):
    x = torch.randn(1, 2, 6, 6, requires_grad=True)
    with matrix_gradients():
        out = call(x)
    assert out.grad_fn is None or 'Resample' not in type(out.grad_fn).__name__
    assert torch.equal(out, call(x))


def test_matrix_made_in_inference_mode_serves_a_backward_pass():
    resample._matrices.clear()
    like = torch.zeros((), dtype=torch.float32)
    with torch.inference_mode():
        matrix = resample.resampling_matrix('bilinear', 8, 4, like)
    assert not matrix.is_inference()
    x = torch.randn(1, 1, 4, 4, requires_grad=True)
    torch.autograd.grad(resize(x, (8, 8)).square().sum(), x, create_graph=True)
    assert resample.resampling_matrix('bilinear', 8, 4, like) is matrix


def test_the_first_matrices_are_kept_up_to_the_limit(monkeypatch):
    """A captured CUDA graph may read them: none makes room for another."""
    monkeypatch.setattr(resample, '_MAX_MATRICES', 4)
    monkeypatch.setattr(resample, '_matrices', {})
    like = torch.zeros(())

    def make():
        return [resample.resampling_matrix('average', size, 20, like) for size in range(2, 12)]

    first, again = make(), make()
    assert [a is b for a, b in zip(first, again)] == [True] * 4 + [False] * 6
    assert all(map(torch.equal, first, again)) and len(resample._matrices) == 4


@pytest.mark.slow
def test_one_graph_under_compile():
    x = torch.randn(2, 3, 6, 5, requires_grad=True)

    def function(x):
        with matrix_gradients():
            return F.interpolate(x, (12, 13), mode='bilinear').square().sum()

    (expected,) = torch.autograd.grad(function(x), x)
    compiled = torch.compile(function, fullgraph=True, backend='aot_eager')
    (grad,) = torch.autograd.grad(compiled(x), x)
    torch.testing.assert_close(grad, expected)
