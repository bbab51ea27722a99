"""The operators of the fast block in plain PyTorch, for the CPU.

Where there is no GPU, they run what Python does around the compiled ones.
"""

import contextlib

import torch
import torch.nn.functional as F

from vim_mm.models import fused
from vim_mm.ops import METHODS, block, causal_conv1d, selective_scan_fn

_NAMES = {method.id: name for name, method in METHODS.items()}


def add_rms_norm_fwd(residual, update, weight, eps, dtype):
    total = residual if update is None else residual + update
    rstd = (total.square().mean(-1) + eps).rsqrt()
    normed = total * rstd.unsqueeze(-1) * weight
    return normed.to(dtype), residual.new_empty(0) if update is None else total, rstd


def add_rms_norm_bwd(grad_normed, grad_sum, total, rstd, weight, with_update):
    unit = total * rstd.unsqueeze(-1)
    grad_unit = grad_normed * weight
    grad = (grad_unit - unit * (grad_unit * unit).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    if grad_sum is not None:
        grad = grad + grad_sum
    grad_update = grad.to(grad_normed.dtype, copy=True) if with_update else grad.new_empty(0)
    return grad, grad_update, (grad_normed * unit).flatten(0, -2).sum(0)


def _mix(x, parameters, method, reverse, scale, reset=None):
    (in_proj, in_bias, out_proj, out_bias), each = parameters[:4], parameters[4:]
    inner, z = F.linear(x, in_proj, in_bias).mT.chunk(2, dim=1)
    total = 0
    for k, A_log in enumerate(each[-len(reverse) :]):
        s = min(k, len(each) // 6 - 1)
        conv, conv_bias, x_proj, dt_proj, dt_bias, D = each[6 * s : 6 * s + 6]
        u = causal_conv1d(inner, conv.squeeze(1), conv_bias, bool(reverse[s]), 'silu', reset=reset)
        states = A_log.shape[1]
        dt, B, C = (x_proj @ u).split([dt_proj.shape[1], states, states], dim=1)
        total = total + selective_scan_fn(
            u,
            dt_proj @ dt,
            -A_log.exp(),
            B,
            C,
            D,
            z,
            dt_bias,
            delta_softplus=True,
            discretization_method=_NAMES[method],
            reverse=bool(reverse[k]),
            reset=reset,
        )
    return F.linear((scale * total).mT, out_proj, out_bias)


def norm_and_mix(total, norm, eps, *arguments):
    x = total if norm is None else F.rms_norm(total, norm.shape, norm, eps)
    return _mix(x, *arguments)


_EPS = 1e-5  # of every norm here: the compiled backward finds 1 / rms in what forward kept


def mixer_fwd(x, update, norm, eps, dtype, parameters, method, reverse, scale, keep, reset=None):
    options = (method, reverse, scale)
    assert norm is None or eps == _EPS
    _, total, saved = block._mixer_fwd_fake(x, update, norm, eps, dtype, parameters, *options, keep)
    if keep:  # the compiled operators too keep the parameters, and much more
        values = torch.cat([p.detach().flatten() for p in parameters if p is not None])
        saved[0].view(x.dtype)[: len(values)] = values
    with torch.no_grad():
        if update is not None:
            total.copy_(x + update)
        out = norm_and_mix(x if update is None else total, norm, eps, parameters, *options, reset)
    return out, total, saved


def mixer_bwd(
    grad_out,
    grad_sum,
    total,
    norm,
    saved,
    sizes,
    types,
    with_update,
    method,
    reverse,
    scale,
    reset=None,
):
    _, no_update, no_norm, *grads = block._mixer_bwd_fake(
        grad_out, grad_sum, total, norm, saved, sizes, types, with_update, method, reverse, scale
    )
    counts = [grad.numel() for grad in grads]
    values = saved[0].view(total.dtype)[: sum(counts)].split(counts)
    with torch.enable_grad():

        def leaf(t):
            return None if t is None else t.detach().clone().requires_grad_()

        total, norm = leaf(total), leaf(norm)
        parameters = [
            leaf(value.view(grad.shape)) if grad.numel() else None
            for value, grad in zip(values, grads, strict=True)
        ]
        leaves = [total, norm, *parameters]
        out = norm_and_mix(total, norm, _EPS, parameters, method, reverse, scale, reset)
        given = iter(torch.autograd.grad(out, [t for t in leaves if t is not None], grad_out))
    grad = next(given)
    if grad_sum is not None:
        grad = grad + grad_sum
    grad_norm = no_norm if norm is None else next(given)
    pairs = zip(parameters, grads, strict=True)
    return [
        grad,
        grad.clone() if with_update else no_update,
        grad_norm,
        *(none if p is None else next(given) for p, none in pairs),
    ]


@contextlib.contextmanager
def fast_block_on_cpu(monkeypatch):
    """Registers these operators, and has mixers take the fast block on the CPU."""
    with torch.library._scoped_library('vim_mm', 'IMPL') as library:
        for operator in (add_rms_norm_fwd, add_rms_norm_bwd, mixer_fwd, mixer_bwd):
            library.impl(operator.__name__, operator, 'CPU')
        monkeypatch.setattr(fused, 'fused_path', _fused_on_any_device)
        yield


def _fused_on_any_device(mixer, x):
    return (mixer.parameters_dtype(), 'native') if hasattr(mixer, 'may_fuse') else None
