"""The fast block: residual add + RMSNorm, and the mixer, as fused CUDA operators around the scan.

Both functions equal a plain composition (``Block`` and ``Mamba.forward_plain`` of vim_mm.models)
and exist because that takes some thirty launches a layer and as much of Python's time. Their
backward passes are written by hand. Shapes and letters of the operators stand with their schemas
in csrc/ops.cpp.
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
_PIECE_MULTIPLE = 64  # kPieceMultiple of csrc/cuda/mixer.cpp
_ops = torch.ops.vim_mm


def add_rms_norm(
    residual: Tensor, update: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """RMSNorm of ``residual + update``, and that sum, in one launch on CUDA.

    Args:
        residual: (.., C), float32 or ``dtype``.
        update: Like residual, ``dtype``; None for none.
        weight: (C,), float32 or ``dtype``.
        eps: Added to the mean of squares.
        dtype: float32, float16 or bfloat16.

    Returns:
        The normalized sum in ``dtype``, and the sum in residual's dtype.

    Raises:
        RuntimeError: An argument is not as above.
    """
    residual = residual.contiguous()
    update = None if update is None else update.contiguous()
    if torch.is_grad_enabled() and _any_requires_grad(residual, update, weight):
        normed, total = _AddRMSNorm.apply(residual, update, weight, eps, dtype)
    else:
        normed, total, _ = _ops.add_rms_norm_fwd(residual, update, weight, eps, dtype)
    return normed, residual if update is None else total


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual, update, weight, eps, dtype):
        normed, total, rstd = _ops.add_rms_norm_fwd(residual, update, weight, eps, dtype)
        ctx.with_update, ctx.dtype = update is not None, dtype
        ctx.save_for_backward(total if ctx.with_update else residual, rstd, weight)
        ctx.set_materialize_grads(False)
        return normed, total if ctx.with_update else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_normed, grad_total):
        total, rstd, weight = ctx.saved_tensors
        if grad_normed is None:  # only the sum was used
            grad_normed = torch.zeros_like(total, dtype=ctx.dtype)
        grad_total = None if grad_total is None else grad_total.contiguous()
        grad_residual, grad_update, grad_weight = _ops.add_rms_norm_bwd(
            grad_normed.contiguous(), grad_total, total, rstd, weight, ctx.with_update
        )
        return grad_residual, grad_update if ctx.with_update else None, grad_weight, None, None


class MixerParameters(NamedTuple):
    """The parameters of a mixer, by what they do; lists have an entry per direction.

    Lists other than ``A_log`` have one entry if the directions share it. Contiguous, any float.
    Letters: C outer and D inner channels, N states, R rank of the step sizes, W taps.
    """

    in_proj: Tensor  # (2 D, C)
    in_bias: Tensor | None  # (2 D,)
    out_proj: Tensor  # (C, D)
    out_bias: Tensor | None  # (C,)
    conv: Sequence[Tensor]  # (D, 1, W), W up to MAX_TAPS
    conv_bias: Sequence[Tensor]  # (D,), or no entry
    x_proj: Sequence[Tensor]  # (R + 2 N, D)
    dt_proj: Sequence[Tensor]  # (D, R)
    dt_bias: Sequence[Tensor]  # (D,)
    D: Sequence[Tensor]  # (D,)
    A_log: Sequence[Tensor]  # (D, N)


_SINGLE = 4  # parameters that are not lists


def _sort(tensors: Sequence[Tensor | None], counts: tuple[int, ...]) -> MixerParameters:
    """Undo the flattening of parameters, given the lengths of the lists."""
    lists, start = [], _SINGLE
    for count in counts:
        lists.append([*tensors[start : start + count]])
        start += count
    return MixerParameters(*tensors[:_SINGLE], *lists)


def fused_mixer(
    x: Tensor,
    parameters: MixerParameters,
    method: int,
    reverse: Sequence[bool],
    scale: float,
) -> Tensor:
    """The mixer of a block, see :class:`vim_mm.models.Mamba`, on CUDA, in the dtype of ``x``.

    Parameters are converted at every call. Backward computes the convolution and the step sizes
    once more, accumulates gradients of parameters in float32, and has no derivative itself.

    Args:
        x: (B, L, C), float32, float16 or bfloat16.
        parameters: As they are stored.
        method: Number of the discretization.
        reverse: One flag per direction.
        scale: Factor on the sum of directions.

    Returns:
        (B, L, C) in x's dtype.

    Raises:
        RuntimeError: An argument is not as above.
        AttributeError: The compiled kernels are missing.
    """
    options = (method, [*map(int, reverse)], scale)
    x = x.contiguous()
    tensors = (*parameters[:_SINGLE], *chain(*parameters[_SINGLE:]))
    if not (torch.is_grad_enabled() and _any_requires_grad(x, *tensors)):
        return _ops.mixer_fwd(x, *parameters, *options, False)[0]
    return _Mixer.apply(x, options, tuple(map(len, parameters[_SINGLE:])), *tensors)


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


class _Mixer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, options, counts, *tensors):
        out, kept = _ops.mixer_fwd(x, *_sort(tensors, counts), *options, True)
        ctx.options, ctx.counts, ctx.num_kept = options, counts, len(kept)
        ctx.save_for_backward(x, *kept, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out):
        x, *rest = ctx.saved_tensors
        kept, tensors = rest[: ctx.num_kept], rest[ctx.num_kept :]
        grad_x, *grads = _ops.mixer_bwd(
            grad_out.contiguous(), x, kept, *_sort(tensors, ctx.counts), *ctx.options
        )
        grads = (None if t is None else g for g, t in zip(grads, tensors, strict=True))
        return grad_x, None, None, *grads


def _add_rms_norm_fwd_fake(residual, update, weight, eps, dtype):
    total = residual.new_empty(0) if update is None else torch.empty_like(residual)
    rstd = residual.new_empty(residual.shape[:-1], dtype=torch.float32)
    return torch.empty_like(residual, dtype=dtype), total, rstd


def _add_rms_norm_bwd_fake(grad_normed, grad_sum, total, rstd, weight, with_update):
    grad_update = torch.empty_like(grad_normed) if with_update else grad_normed.new_empty(0)
    return torch.empty_like(total), grad_update, torch.empty_like(weight)


def _mixer_fwd_fake(x, *arguments):
    *parameters, method, reverse, _, keep = arguments
    if not keep:
        return torch.empty_like(x), []
    p = MixerParameters(*parameters)
    batch, length, _ = x.shape
    (channels, states), sets, rank = p.A_log[0].shape, len(p.conv), p.dt_proj[0].shape[1]
    rows = rank + 2 * states
    scanned = (batch, len(reverse), channels, length)
    narrow = [
        p.in_proj.shape,
        p.out_proj.shape,
        (sets, rows, channels),
        (sets, rank, channels),
        *(bias.shape for bias in (p.in_bias, p.out_bias) if bias is not None),
    ]
    wide = [
        (len(reverse), channels, states),
        *[(sets, channels)] * 2,
        (sets, *p.conv[0].shape),
        (sets, channels),
    ]

    def buffer(shapes, dtype):
        numel = sum(-(-math.prod(s) // _PIECE_MULTIPLE) * _PIECE_MULTIPLE for s in shapes)
        return x.new_empty(numel, dtype=dtype)

    return torch.empty_like(x), [
        x.new_empty(2 * channels, batch * length),
        x.new_empty(sets, rows, batch * length),
        x.new_empty(math.prod(library.edges_shape(scanned, states, method)), dtype=torch.float32),
        x.new_empty(channels, batch, length),
        buffer(narrow, x.dtype),
        buffer(wide, torch.float32),
    ]


def _mixer_bwd_fake(grad_out, x, kept, *arguments):
    *parameters, _, _, _ = arguments
    flat = (*parameters[:_SINGLE], *chain(*parameters[_SINGLE:]))
    return [
        torch.empty_like(x),
        *(x.new_empty(0) if t is None else torch.empty_like(t) for t in flat),
    ]


if library.MISSING is None:
    torch.library.register_fake('vim_mm::add_rms_norm_fwd')(_add_rms_norm_fwd_fake)
    torch.library.register_fake('vim_mm::add_rms_norm_bwd')(_add_rms_norm_bwd_fake)
    torch.library.register_fake('vim_mm::mixer_fwd')(_mixer_fwd_fake)
    torch.library.register_fake('vim_mm::mixer_bwd')(_mixer_bwd_fake)
