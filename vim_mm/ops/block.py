"""The fast block: residual add + RMSNorm, and the mixer, as fused CUDA operators around the scan.

Both functions equal a plain composition (``Block`` and ``Mamba.forward_plain`` of vim_mm.models)
and exist because that takes some thirty launches a layer and as much of Python's time. Their
backward passes are written by hand. Shapes and letters of the operators stand with their schemas
in csrc/ops.cpp.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vim_mm.ops import library

MAX_TAPS = 8  # kMaxTaps of csrc/cuda/block.h
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


def fused_mixer(
    x: Tensor,
    parameters: list[Tensor | None],
    method: int,
    reverse: Sequence[bool],
    scale: float,
) -> Tensor:
    """The mixer of a block, see :class:`vim_mm.models.Mamba`, on CUDA, in the dtype of ``x``.

    Parameters are converted at every call. Backward computes the convolution and the step sizes
    once more, accumulates gradients of parameters in float32, and has no derivative itself.

    Args:
        x: (B, L, C), float32, float16 or bfloat16.
        parameters: As they are stored, contiguous, any float: in_proj (2 D, C) and its bias,
            out_proj (C, D) and its bias; then conv (D, 1, W), W up to MAX_TAPS, its bias, x_proj
            (R + 2 N, D), dt_proj (D, R), its bias, and D, once or for each direction; then A_log
            (D, N) for each direction. Biases but dt_proj's may be None.
        method: Number of the discretization.
        reverse: One flag per direction, of which there are one or two.
        scale: Factor on the sum of directions.

    Returns:
        (B, L, C) in x's dtype.

    Raises:
        RuntimeError: An argument is not as above.
        AttributeError: The compiled kernels are missing.
    """
    options = (method, [*map(int, reverse)], scale)
    x = x.contiguous()
    if torch.is_grad_enabled() and _any_requires_grad(x, *parameters):
        return _Mixer.apply(x, options, *parameters)
    return _ops.mixer_fwd(x, parameters, *options, False)[0]


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


# Parameters: where those that there are for each set begin, and how many; see fused_mixer.
_SINGLE, _EACH = 4, 6
_CONV, _DT_PROJ = _SINGLE, _SINGLE + 3
_TYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float64: 3,
}  # Storage of csrc/cuda/kernels.h
_ALIGNMENT = 256  # Plan::kAlignment of csrc/cuda/tensors.h


def _sizes(parameters: Sequence[Tensor | None]) -> list[int]:
    """D, N, R and W."""
    return [
        *parameters[-1].shape,
        parameters[_DT_PROJ].shape[1],
        parameters[_CONV].shape[2],
    ]


class _Mixer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, options, *parameters):
        out, kept = _ops.mixer_fwd(x, parameters, *options, True)
        # Backward takes the parameters as forward converted them, and of themselves no more than
        # this: to save and restore each takes longer than to launch a kernel.
        ctx.sizes = _sizes(parameters)
        ctx.types = [-1 if p is None else _TYPES[p.dtype] for p in parameters]
        ctx.options = options
        ctx.save_for_backward(x, kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out):
        x, kept = ctx.saved_tensors
        grad_x, *grads = _ops.mixer_bwd(
            grad_out.contiguous(), x, kept, ctx.sizes, ctx.types, *ctx.options
        )
        grads = (None if type < 0 else g for g, type in zip(grads, ctx.types, strict=True))
        return grad_x, None, *grads


def _add_rms_norm_fwd_fake(residual, update, weight, eps, dtype):
    total = residual.new_empty(0) if update is None else torch.empty_like(residual)
    rstd = residual.new_empty(residual.shape[:-1], dtype=torch.float32)
    return torch.empty_like(residual, dtype=dtype), total, rstd


def _add_rms_norm_bwd_fake(grad_normed, grad_sum, total, rstd, weight, with_update):
    grad_update = torch.empty_like(grad_normed) if with_update else grad_normed.new_empty(0)
    return torch.empty_like(total), grad_update, torch.empty_like(weight)


def _mixer_fwd_fake(x, parameters, method, reverse, scale, keep):
    out = torch.empty_like(x)
    if not keep:
        return out, x.new_empty(0, dtype=torch.uint8)
    (batch, length, outer), (channels, states, rank, taps) = x.shape, _sizes(parameters)
    directions = len(reverse)
    sets = (len(parameters) - _SINGLE - directions) // _EACH
    rows, tokens = rank + 2 * states, batch * length
    edges = library.edges_shape((batch, directions, channels, length), states, method)
    narrow = [
        2 * channels * outer,  # in_proj, its bias, out_proj, its bias
        2 * channels,
        outer * channels,
        outer,
        sets * rows * channels,  # x_proj, dt_proj
        sets * channels * rank,
        2 * channels * tokens,  # x and z
        sets * rows * tokens,  # dt, B and C
        channels * tokens,  # the sum over directions
    ]
    wide = [
        sets * channels * taps,  # conv, its bias, dt_proj's, D
        *[sets * channels] * 3,
        directions * channels * states,  # A
        math.prod(edges),
    ]
    sizes = [count * x.element_size() for count in narrow] + [count * 4 for count in wide]
    # Each begins at a multiple, see Plan of csrc/cuda/tensors.h.
    bytes_kept = sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
    return out, x.new_empty(bytes_kept, dtype=torch.uint8)


def _mixer_bwd_fake(grad_out, x, kept, sizes, types, method, reverse, scale):
    (channels, states, rank, taps), outer = sizes, x.shape[2]
    single = [(2 * channels, outer), (2 * channels,), (outer, channels), (outer,)]
    each = [
        (channels, 1, taps),
        (channels,),
        (rank + 2 * states, channels),
        (channels, rank),
        (channels,),
        (channels,),
    ]
    sets = (len(types) - len(single) - len(reverse)) // len(each)
    shapes = [*single, *each * sets, *[(channels, states)] * len(reverse)]
    dtypes = [*_TYPES]
    return [
        torch.empty_like(x),
        *(
            x.new_empty(0) if type < 0 else x.new_empty(shape, dtype=dtypes[type])
            for shape, type in zip(shapes, types, strict=True)
        ),
    ]


if library.MISSING is None:
    torch.library.register_fake('vim_mm::add_rms_norm_fwd')(_add_rms_norm_fwd_fake)
    torch.library.register_fake('vim_mm::add_rms_norm_bwd')(_add_rms_norm_bwd_fake)
    torch.library.register_fake('vim_mm::mixer_fwd')(_mixer_fwd_fake)
    torch.library.register_fake('vim_mm::mixer_bwd')(_mixer_bwd_fake)
