"""The fast block: residual add + RMSNorm, and the mixer, as fused CUDA operators around the scan.

Both functions equal a plain composition (``Block`` and ``Mamba.forward_plain`` of vim_mm.models)
and exist because that takes some forty launches a layer. Their backward passes are written by
hand. Shapes and letters of the operators stand with their schemas in csrc/ops.cpp.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vim_mm.ops import library

MAX_TAPS = 8  # kMaxTaps of csrc/cuda/block.h
_ops = torch.ops.vim_mm


def add_rms_norm(
    residual: Tensor, update: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """RMSNorm of ``residual + update``, and that sum, in one launch.

    Args:
        residual: (.., C) on CUDA, float32, float16 or bfloat16.
        update: Like residual in any of these dtypes; None for none.
        weight: (C,), any float.
        eps: Added to the mean of squares.
        dtype: float32, float16 or bfloat16, of the normalized sum.

    Returns:
        The normalized sum in ``dtype``, and the sum in the dtype that both of them promote to.

    Raises:
        RuntimeError: An argument is not as above.
    """
    residual = residual.contiguous()
    if update is not None:
        update = update.contiguous()
        residual = residual.to(torch.promote_types(residual.dtype, update.dtype))
    if torch.is_grad_enabled():
        normed, total = _AddRMSNorm.apply(residual, update, weight, eps, dtype)
    else:
        normed, total, _ = _ops.add_rms_norm_fwd(residual, update, weight, eps, dtype)
    return normed, residual if update is None else total


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual, update, weight, eps, dtype):
        normed, total, rstd = _ops.add_rms_norm_fwd(residual, update, weight, eps, dtype)
        ctx.update_dtype = None if update is None else update.dtype
        ctx.save_for_backward(residual if update is None else total, rstd, weight)
        ctx.set_materialize_grads(False)
        return normed, None if update is None else total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_normed, grad_total):
        total, rstd, weight = ctx.saved_tensors
        if grad_normed is None:
            grad_update = grad_total
            if grad_total is not None and ctx.update_dtype is not None:
                grad_update = grad_total.to(ctx.update_dtype)
            return grad_total, grad_update, None, None, None
        grad_total = None if grad_total is None else grad_total.contiguous()
        grad_residual, grad_update, grad_weight = _ops.add_rms_norm_bwd(
            grad_normed.contiguous(), grad_total, total, rstd, weight, ctx.update_dtype
        )
        grad_update = None if ctx.update_dtype is None else grad_update
        return grad_residual, grad_update, grad_weight, None, None


class MixerParameters(NamedTuple):
    """The parameters of a mixer, by what they do; lists have an entry per direction.

    Lists other than ``A_log`` have one entry if the directions share it. Shapes: in_proj (2 D, C),
    out_proj (C, D), conv (D, 1, W) and (D,), x_proj (R + 2 N, D), dt_proj (D, R), dt_bias and D
    (D,), A_log (D, N). Any float.
    """

    in_proj: Tensor
    in_bias: Tensor | None
    out_proj: Tensor
    out_bias: Tensor | None
    conv: Sequence[Tensor]
    conv_bias: Sequence[Tensor]  # empty for none
    x_proj: Sequence[Tensor]
    dt_proj: Sequence[Tensor]
    dt_bias: Sequence[Tensor]
    D: Sequence[Tensor]
    A_log: Sequence[Tensor]


_SINGLE = 4  # parameters that are not lists


def _flatten(p: MixerParameters) -> list[Tensor | None]:
    """One list, as autograd takes it; with the lengths of the lists, :func:`_sort` undoes it."""
    return [*p[:_SINGLE], *chain(*p[_SINGLE:])]


def _sort(tensors: Sequence[Tensor | None], counts: tuple[int, ...]) -> MixerParameters:
    lists, start = [], _SINGLE
    for count in counts:
        lists.append(tensors[start : start + count])
        start += count
    return MixerParameters(*tensors[:_SINGLE], *lists)


def fused_mixer(
    x: Tensor,
    parameters: MixerParameters,
    method: int,
    reverse: Sequence[bool],
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """The mixer of a block, see :class:`vim_mm.models.Mamba`, on CUDA.

    Nine launches forward. Backward recomputes the convolution and the step sizes; gradients of
    parameters are accumulated in float32.

    Args:
        x: (B, L, C).
        parameters: As they are stored; converted to ``dtype`` at every call.
        method: Number of the discretization.
        reverse: One flag per direction.
        scale: Factor on the sum of directions.
        dtype: float32, float16 or bfloat16, of everything but sums and the scan's states.

    Returns:
        (B, L, C) in ``dtype``.

    Raises:
        RuntimeError: An argument is not as above, or the compiled kernels are missing.
    """
    counts = tuple(len(tensors) for tensors in parameters[_SINGLE:])
    options = (method, tuple(map(int, reverse)), scale, dtype, counts)
    tensors = _flatten(parameters)
    if torch.is_grad_enabled():
        return _Mixer.apply(x, options, *tensors)
    return _mix(x, options, tensors, keep=False)[0]


def _mix(x: Tensor, options: tuple, tensors: Sequence[Tensor], keep: bool):
    """The output, and what backward takes of the forward pass."""
    method, reverse, scale, dtype, counts = options
    p = _sort(tensors, counts)
    batch, length, _ = x.shape
    packed = _ops.pack_parameters(
        p.in_proj, p.out_proj, p.x_proj, p.dt_proj, p.A_log, p.D, p.dt_bias, dtype
    )
    in_proj, out_proj, x_proj, dt_proj, A, D, dt_bias = packed

    # Weight times tokens: rows are channels, time is contiguous, and so it stays until out_proj.
    tokens = x.to(dtype).flatten(0, 1)
    xz = torch.mm(in_proj, tokens.t())
    if p.in_bias is not None:
        xz += p.in_bias.to(dtype)[:, None]
    inner, z = xz.view(2, -1, batch, length).unbind(0)
    u = _ops.conv1d_silu_fwd(inner, p.conv, p.conv_bias, reverse[: len(p.conv)])
    dt_B_C = torch.bmm(x_proj, u.flatten(2))
    delta = torch.bmm(dt_proj, dt_B_C[:, : dt_proj.shape[2]])
    y, edges = _ops.directional_scan_fwd(u, delta, dt_B_C, A, D, dt_bias, method, reverse)
    gated, total = _ops.gate_fwd(y, z, scale, keep)
    out = torch.mm(gated.flatten(1).t(), out_proj.t())
    if p.out_bias is not None:
        out += p.out_bias.to(dtype)
    return out.view(batch, length, -1), (tokens, xz, dt_B_C, edges, total, *packed)


def _wide_mm(a: Tensor, b: Tensor) -> Tensor:
    """The product of matrices, or of batches of them, in float32."""
    product = torch.mm if a.dim() == 2 else torch.bmm
    return product(a, b) if a.dtype == torch.float32 else product(a, b, out_dtype=torch.float32)


class _Mixer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, options, *tensors):
        out, kept = _mix(x, options, tensors, keep=True)
        ctx.options = options
        ctx.batch_length = x.shape[:2]
        ctx.input_dtype = x.dtype
        ctx.save_for_backward(*kept, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out):
        method, reverse, scale, _, counts = ctx.options
        tokens, xz, dt_B_C, edges, total, *rest = ctx.saved_tensors
        in_proj, out_proj, x_proj, dt_proj, A, D, dt_bias, *tensors = rest
        p = _sort(tensors, counts)
        shape = (2, -1, *ctx.batch_length)
        sets = len(p.conv)
        conv = (p.conv, p.conv_bias, reverse[:sets])

        grad_out = grad_out.flatten(0, 1)
        grad_gated = torch.mm(out_proj.t(), grad_out.t())
        grad_xz = torch.empty_like(xz)
        inner, z = xz.view(shape).unbind(0)
        grad_inner, grad_z = grad_xz.view(shape).unbind(0)
        grad_y, gated = _ops.gate_bwd(grad_gated, total, z, scale, grad_z)
        grad_out_proj = _wide_mm(grad_out.t(), gated.flatten(1).t())

        u = _ops.conv1d_silu_fwd(inner, *conv)
        rows, rank = u.flatten(2), dt_proj.shape[2]
        dt = dt_B_C[:, :rank]
        delta = torch.bmm(dt_proj, dt)
        grad_dt_B_C = dt_B_C.new_empty(len(reverse), *dt_B_C.shape[1:])
        grad_u, grad_delta, grad_A, grad_D, grad_dt_bias = _ops.directional_scan_bwd(
            grad_y, edges, u, delta, dt_B_C, A, D, dt_bias, method, reverse, grad_dt_B_C
        )
        if sets < len(reverse):
            shared = (grad_u, grad_delta, grad_dt_B_C, grad_D, grad_dt_bias)
            grad_u, grad_delta, grad_dt_B_C, grad_D, grad_dt_bias = (
                g.sum(0, keepdim=True) for g in shared
            )
        # In place, not by out=, which torch.compile does not take where the output is a view.
        grad_dt_B_C[:, :rank].baddbmm_(dt_proj.mT, grad_delta, beta=0)
        grad_dt_proj = _wide_mm(grad_delta, dt.mT)
        grad_x_proj = _wide_mm(grad_dt_B_C, rows.mT)
        grad_u.flatten(2).baddbmm_(x_proj.mT, grad_dt_B_C)
        grad_conv, grad_conv_bias = _ops.conv1d_silu_bwd(grad_u, inner, *conv, grad_inner)
        grad_in_proj = _wide_mm(grad_xz, tokens)
        grad_tokens = torch.mm(grad_xz.t(), in_proj)

        grads = MixerParameters(
            in_proj=grad_in_proj,
            in_bias=None if p.in_bias is None else grad_xz.sum(1, dtype=torch.float32),
            out_proj=grad_out_proj,
            out_bias=None if p.out_bias is None else grad_out.sum(0, dtype=torch.float32),
            conv=grad_conv.unsqueeze(2).unbind(0),
            conv_bias=grad_conv_bias.unbind(0) if p.conv_bias else (),
            x_proj=grad_x_proj.unbind(0),
            dt_proj=grad_dt_proj.unbind(0),
            dt_bias=grad_dt_bias.unbind(0),
            D=grad_D.unbind(0),
            A_log=(grad_A * A).unbind(0),
        )
        flat = (
            None if t is None else g.to(t.dtype)
            for g, t in zip(_flatten(grads), tensors, strict=True)
        )
        grad_x = grad_tokens.view(*ctx.batch_length, -1).to(ctx.input_dtype)
        return grad_x, None, *flat


def _add_rms_norm_fwd_fake(residual, update, weight, eps, dtype):
    total = residual.new_empty(0) if update is None else torch.empty_like(residual)
    rstd = residual.new_empty(residual.shape[:-1], dtype=torch.float32)
    return torch.empty_like(residual, dtype=dtype), total, rstd


def _add_rms_norm_bwd_fake(grad_normed, grad_sum, total, rstd, weight, update_dtype):
    if update_dtype is None:
        grad_update = total.new_empty(0)
    else:
        grad_update = torch.empty_like(total, dtype=update_dtype)
    return torch.empty_like(total), grad_update, torch.empty_like(weight)


def _pack_parameters_fake(in_proj, out_proj, x_proj, dt_proj, A_log, D, dt_bias, dtype):
    def stack(parts, dtype):
        return in_proj.new_empty((len(parts), *parts[0].shape), dtype=dtype)

    return (
        torch.empty_like(in_proj, dtype=dtype),
        torch.empty_like(out_proj, dtype=dtype),
        stack(x_proj, dtype),
        stack(dt_proj, dtype),
        *(stack(parts, torch.float32) for parts in (A_log, D, dt_bias)),
    )


def _conv1d_silu_fwd_fake(x, weight, bias, reverse):
    return x.new_empty(len(weight), *x.shape)


def _conv1d_silu_bwd_fake(grad_u, x, weight, bias, reverse, grad_x):
    shape = (len(weight), x.shape[0])
    grad_weight = x.new_empty(*shape, weight[0].shape[2], dtype=torch.float32)
    return grad_weight, x.new_empty(shape, dtype=torch.float32)


def _directional_scan_fwd_fake(u, delta, dt_B_C, A, D, dt_bias, method, reverse):
    _, channels, batch, length = u.shape
    directions, _, states = A.shape
    edges = math.prod(library.edges_shape((batch, directions, channels, length), states, method))
    return u.new_empty(directions, *u.shape[1:]), u.new_empty(edges, dtype=torch.float32)


def _directional_scan_bwd_fake(
    grad_y, edges, u, delta, dt_B_C, A, D, dt_bias, method, reverse, grad_dt_B_C
):
    def per_direction(t):
        return t.new_empty(A.shape[0], *t.shape[1:])

    return (
        per_direction(u),
        per_direction(delta),
        torch.empty_like(A),
        per_direction(D),
        per_direction(dt_bias),
    )


def _gate_fwd_fake(y, z, scale, keep_sum):
    return torch.empty_like(z), torch.empty_like(z) if keep_sum else z.new_empty(0)


def _gate_bwd_fake(grad_out, total, z, scale, grad_z):
    return torch.empty_like(z), torch.empty_like(z)


if library.MISSING is None:
    for _name, _fake in {
        'add_rms_norm_fwd': _add_rms_norm_fwd_fake,
        'add_rms_norm_bwd': _add_rms_norm_bwd_fake,
        'pack_parameters': _pack_parameters_fake,
        'conv1d_silu_fwd': _conv1d_silu_fwd_fake,
        'conv1d_silu_bwd': _conv1d_silu_bwd_fake,
        'directional_scan_fwd': _directional_scan_fwd_fake,
        'directional_scan_bwd': _directional_scan_bwd_fake,
        'gate_fwd': _gate_fwd_fake,
        'gate_bwd': _gate_bwd_fake,
    }.items():
        torch.library.register_fake(f'vim_mm::{_name}')(_fake)
