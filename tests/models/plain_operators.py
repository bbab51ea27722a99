"""The operators of the fast block in plain PyTorch, for the CPU.

Where there is no GPU, they run what Python does around the compiled ones.
"""

import contextlib

import torch
import torch.nn.functional as F

from vim_mm.models import Mamba
from vim_mm.ops import METHODS, block, causal_conv1d, selective_scan_fn
from vim_mm.ops.block import MixerParameters

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


def _mix(x, p, method, reverse, scale):
    inner, z = F.linear(x, p.in_proj, p.in_bias).mT.chunk(2, dim=1)
    total = 0
    for k, A_log in enumerate(p.A_log):
        s = min(k, len(p.conv) - 1)
        bias = p.conv_bias[s] if p.conv_bias else None
        u = causal_conv1d(inner, p.conv[s].squeeze(1), bias, bool(reverse[s]), 'silu')
        states = A_log.shape[1]
        dt, B, C = (p.x_proj[s] @ u).split([p.dt_proj[s].shape[1], states, states], dim=1)
        total = total + selective_scan_fn(
            u,
            p.dt_proj[s] @ dt,
            -A_log.exp(),
            B,
            C,
            p.D[s],
            z,
            p.dt_bias[s],
            delta_softplus=True,
            discretization_method=_NAMES[method],
            reverse=bool(reverse[k]),
        )
    return F.linear((scale * total).mT, p.out_proj, p.out_bias)


def mixer_fwd(x, *arguments):
    *parameters, method, reverse, scale, _ = arguments
    _, kept = block._mixer_fwd_fake(x, *arguments)  # as many, of those shapes
    with torch.no_grad():
        return _mix(x, MixerParameters(*parameters), method, reverse, scale), kept


def mixer_bwd(grad_out, x, kept, *arguments):
    *parameters, method, reverse, scale = arguments
    p = MixerParameters(*parameters)
    assert [k.shape for k in kept] == [k.shape for k in mixer_fwd(x, *arguments, True)[1]]
    with torch.enable_grad():

        def leaf(t):
            return None if t is None else t.detach().requires_grad_()

        x, *single = map(leaf, (x, *p[:4]))
        lists = [[leaf(t) for t in tensors] for tensors in p[4:]]
        leaves = [x, *single, *(t for tensors in lists for t in tensors)]
        out = _mix(x, MixerParameters(*single, *lists), method, reverse, scale)
        present = [t for t in leaves if t is not None]
        grads = iter(torch.autograd.grad(out, present, grad_out))
    return [x.new_empty(0) if t is None else next(grads) for t in leaves]


@contextlib.contextmanager
def fast_block_on_cpu(monkeypatch):
    """Registers these operators, and has mixers take the fast block on the CPU."""
    with torch.library._scoped_library('vim_mm', 'IMPL') as library:
        for operator in (add_rms_norm_fwd, add_rms_norm_bwd, mixer_fwd, mixer_bwd):
            library.impl(operator.__name__, operator, 'CPU')
        monkeypatch.setattr(Mamba, 'fused_dtype', lambda self, x: self.in_proj.weight.dtype)
        yield
