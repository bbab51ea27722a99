"""The operators of the fast block in plain PyTorch, for the CPU.

Where there is no GPU, they run what Python does around the compiled ones.
"""

import contextlib

import torch
import torch.nn.functional as F

from vim_mm.models import Mamba
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


def _mix(x, parameters, method, reverse, scale):
    (in_proj, in_bias, out_proj, out_bias), each = parameters[:4], parameters[4:]
    inner, z = F.linear(x, in_proj, in_bias).mT.chunk(2, dim=1)
    total = 0
    for k, A_log in enumerate(each[-len(reverse) :]):
        s = min(k, len(each) // 6 - 1)
        conv, conv_bias, x_proj, dt_proj, dt_bias, D = each[6 * s : 6 * s + 6]
        u = causal_conv1d(inner, conv.squeeze(1), conv_bias, bool(reverse[s]), 'silu')
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
        )
    return F.linear((scale * total).mT, out_proj, out_bias)


def mixer_fwd(x, parameters, method, reverse, scale, keep):
    _, kept = block._mixer_fwd_fake(x, parameters, method, reverse, scale, keep)
    if keep:  # the compiled operators too keep the parameters, and much more
        values = torch.cat([p.detach().flatten() for p in parameters if p is not None])
        kept.view(x.dtype)[: len(values)] = values
    with torch.no_grad():
        return _mix(x, parameters, method, reverse, scale), kept


def mixer_bwd(grad_out, x, kept, sizes, types, method, reverse, scale):
    _, *grads = block._mixer_bwd_fake(grad_out, x, kept, sizes, types, method, reverse, scale)
    counts = [grad.numel() for grad in grads]
    values = kept.view(x.dtype)[: sum(counts)].split(counts)
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        parameters = [
            value.view(grad.shape).clone().requires_grad_() if grad.numel() else None
            for value, grad in zip(values, grads, strict=True)
        ]
        present = [x, *(p for p in parameters if p is not None)]
        out = _mix(x, parameters, method, reverse, scale)
        given = iter(torch.autograd.grad(out, present, grad_out))
    return [
        next(given),
        *(grad if p is None else next(given) for p, grad in zip(parameters, grads)),
    ]


@contextlib.contextmanager
def fast_block_on_cpu(monkeypatch):
    """Registers these operators, and has mixers take the fast block on the CPU."""
    with torch.library._scoped_library('vim_mm', 'IMPL') as library:
        for operator in (add_rms_norm_fwd, add_rms_norm_bwd, mixer_fwd, mixer_bwd):
            library.impl(operator.__name__, operator, 'CPU')
        monkeypatch.setattr(Mamba, 'fused_dtype', lambda self, x: self.in_proj.weight.dtype)
        yield
