"""Public Vim is our zoh: the same output and gradients, over stand-ins of its kernels."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from benchmarks.peers import published_vim
from benchmarks.peers.published_vim import PublishedVim
from tests.models.small import compute_gradients, images, small_backbone
from vim_mm.ops import causal_conv1d, selective_scan_fn


def gated_scan(u, delta, A, B, C, D, z, bias):
    ungated = selective_scan_fn(
        u, delta, A, B, C, D, delta_bias=bias, delta_softplus=True, use_cuda_kernel=False
    )
    return ungated, ungated * F.silu(z)


def gradients(function, inputs, grad_out):
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(function(*inputs), inputs, grad_out)


def scan_fwd(*args):
    *tensors, softplus = args
    assert softplus
    ungated, out = gated_scan(*tensors)
    return ungated, torch.empty(0), out


def scan_bwd(*args):
    *tensors, grad_out, _, _, grad_z, softplus, again = args
    assert softplus and not again
    found = gradients(lambda *x: gated_scan(*x)[1], tensors, grad_out)
    grad_z.copy_(found[6])
    return [*found[:6], found[7], grad_z]


def conv_fwd(x, weight, bias, sequence, initial, out, final, silu):
    assert silu and sequence is initial is final is None
    with torch.autocast('cpu', enabled=False):  # like the kernel, of any mix of dtypes
        out.copy_(causal_conv1d(x.to(weight.dtype), weight, bias, activation='silu'))


def conv_bwd(x, weight, bias, grad, sequence, initial, final, *out):
    assert sequence is initial is final is None
    grad_x, grad_weight, grad_bias, _, silu = out
    assert silu and not grad_weight.any() and not grad_bias.any()  # the kernel adds to them
    inputs = (x.to(weight.dtype), weight, bias)
    found = gradients(
        lambda *x: causal_conv1d(*x, activation='silu'), inputs, grad.to(weight.dtype)
    )
    for target, value in zip((grad_x, grad_weight, grad_bias), found, strict=True):
        target.copy_(value)


@pytest.fixture
def kernels(monkeypatch):
    scan = SimpleNamespace(fwd=scan_fwd, bwd=scan_bwd)
    conv = SimpleNamespace(causal_conv1d_fwd=conv_fwd, causal_conv1d_bwd=conv_bwd)
    monkeypatch.setitem(sys.modules, 'selective_scan_cuda', scan)
    monkeypatch.setitem(sys.modules, 'causal_conv1d_cuda', conv)


@pytest.mark.parametrize('cls_token', ['none', 'middle'])
def test_output_and_gradients_are_those_of_our_zoh(kernels, cls_token):
    ours = small_backbone(out_type='raw', out_feature='norm', cls_token=cls_token)
    theirs = PublishedVim(ours)
    x = images()
    torch.testing.assert_close(theirs(x), ours(x), rtol=1e-4, atol=1e-4)
    expected = compute_gradients(ours, x)
    found = compute_gradients(theirs, x)
    assert found.keys() == {f'backbone.{name}' for name in expected}
    for name, grad in expected.items():
        error = (found[f'backbone.{name}'] - grad).abs().max() / grad.abs().max()
        assert error < 1e-4, name


def test_runs_under_autocast(kernels):
    model = PublishedVim(small_backbone(out_type='raw', out_feature='norm'))
    with torch.autocast('cpu', torch.bfloat16):
        (out,) = model(images())
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(published_vim, 'find_spec', lambda name: None)
    assert published_vim.missing() == 'not installed: mamba_ssm (its CUDA scan), causal_conv1d'
    monkeypatch.setattr(published_vim, 'find_spec', lambda name: object())
    assert published_vim.missing() is None
