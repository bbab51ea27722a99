"""The operators of the fast block in plain PyTorch.

Tests hold the CUDA kernels to them, and in their place they run the fast block on the CPU.
"""

import torch
import torch.nn.functional as F


def wide(t):
    """In float32, or in float64 what is float64."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def add_rms_norm_fwd(residual, update, weight, eps, dtype):
    total = residual if update is None else (residual + update).to(residual.dtype)
    rstd = (wide(total).square().mean(-1) + eps).rsqrt()
    normed = (wide(total) * rstd.unsqueeze(-1) * weight).to(dtype)
    return normed, residual.new_empty(0) if update is None else total, rstd


def add_rms_norm_bwd(grad_normed, grad_sum, total, rstd, weight, update_dtype):
    unit = wide(total) * rstd.unsqueeze(-1)
    grad_unit = wide(grad_normed) * weight
    grad = (grad_unit - unit * (grad_unit * unit).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    if grad_sum is not None:
        grad = grad + grad_sum
    grad_weight = (wide(grad_normed) * unit).flatten(0, -2).sum(0)
    grad_update = total.new_empty(0) if update_dtype is None else grad.to(update_dtype)
    return grad.to(total.dtype), grad_update, grad_weight.to(weight.dtype)


def pack_parameters(in_proj, out_proj, x_proj, dt_proj, A_log, D, dt_bias, dtype):
    return (
        in_proj.to(dtype, copy=True),
        out_proj.to(dtype, copy=True),
        torch.stack(x_proj).to(dtype),
        torch.stack(dt_proj).to(dtype),
        -torch.exp(wide(torch.stack(A_log))),
        wide(torch.stack(D)),
        wide(torch.stack(dt_bias)),
    )


def conv1d_silu_fwd(x, weight, bias, reverse):
    outputs = []
    for k, flag in enumerate(reverse):
        window = wide(x).transpose(0, 1)  # (B, H, L)
        window = F.pad(window.flip(2) if flag else window, (weight[k].shape[2] - 1, 0))
        own_bias = bias[k].to(window) if bias else None
        out = F.silu(F.conv1d(window, weight[k].to(window), own_bias, groups=len(x)))
        outputs.append((out.flip(2) if flag else out).transpose(0, 1))
    return torch.stack(outputs).to(x.dtype)


def conv1d_silu_bwd(grad_u, x, weight, bias, reverse, grad_x):
    with torch.enable_grad():
        leaves = [wide(t.detach()).requires_grad_() for t in (x, *weight, *bias)]
        sets = len(weight)
        u = conv1d_silu_fwd(leaves[0], leaves[1 : 1 + sets], leaves[1 + sets :], reverse)
        grads = torch.autograd.grad(u, leaves, wide(grad_u))
    grad_x.copy_(grads[0])
    grad_weight = torch.stack(grads[1 : 1 + sets]).squeeze(2)
    if not bias:
        return grad_weight, torch.zeros_like(grad_weight[..., 0])
    return grad_weight, torch.stack(grads[1 + sets :])


def _scan_inputs(u, delta, dt_B_C, A, D, dt_bias, method, reverse):
    """The arguments of the scan operator, everything per direction."""
    batch, length = u.shape[2:]
    directions, _, states = A.shape

    def rows(t):
        return t.unflatten(-1, (batch, length)).permute(2, 0, 1, 3).expand(-1, directions, -1, -1)

    _, B, C = dt_B_C.split([dt_B_C.shape[1] - 2 * states, states, states], dim=1)
    D, dt_bias = (t.expand(directions, -1) for t in (D, dt_bias))
    return (
        rows(u.flatten(2)), rows(delta), A, rows(B), rows(C), D, None, dt_bias, True, method,
        [*reverse],
    )  # fmt: skip


def directional_scan_fwd(u, delta, dt_B_C, A, D, dt_bias, method, reverse):
    inputs = _scan_inputs(u, delta, dt_B_C, A, D, dt_bias, method, reverse)
    y, _, edges = torch.ops.vim_mm.selective_scan_fwd(*inputs)
    return y.permute(1, 2, 0, 3).contiguous(), edges


def directional_scan_bwd(
    grad_y, edges, u, delta, dt_B_C, A, D, dt_bias, method, reverse, grad_dt_B_C
):
    inputs = _scan_inputs(u, delta, dt_B_C, A, D, dt_bias, method, reverse)
    grad = grad_y.transpose(0, 1).unsqueeze(1).expand_as(inputs[0])
    grads = torch.ops.vim_mm.selective_scan_bwd(grad, None, edges, *inputs)
    grad_u, grad_delta, grad_A, grad_B, grad_C, grad_D, _, grad_bias = grads

    def rows(t):
        return t.permute(1, 2, 0, 3).flatten(2)

    states = A.shape[2]
    grad_dt_B_C[:, -2 * states :] = torch.cat([rows(grad_B), rows(grad_C)], dim=1)
    grad_u = rows(grad_u).unflatten(2, u.shape[2:]).contiguous()
    return grad_u, rows(grad_delta).contiguous(), grad_A, grad_D, grad_bias


def gate_fwd(y, z, scale, keep_sum):
    total = (wide(y).sum(0) * scale).to(y.dtype)
    out = (F.silu(wide(z)) * total).to(z.dtype)
    return out, total if keep_sum else z.new_empty(0)


def gate_bwd(grad_out, total, z, scale, grad_z):
    grad_out = grad_out.view_as(z)
    s = wide(z).sigmoid()
    grad_z.copy_(wide(grad_out) * wide(total) * s * (1 + wide(z) * (1 - s)))
    silu = wide(z) * s
    return (wide(grad_out) * silu * scale).to(z.dtype), (silu * total).to(z.dtype)


OPERATORS = {
    f.__name__: f
    for f in (
        add_rms_norm_fwd,
        add_rms_norm_bwd,
        pack_parameters,
        conv1d_silu_fwd,
        conv1d_silu_bwd,
        directional_scan_fwd,
        directional_scan_bwd,
        gate_fwd,
        gate_bwd,
    )
}
