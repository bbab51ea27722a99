"""The fast block: residual add + RMSNorm, and the mixer, as fused operators around the scan.

There are compiled ones for CUDA, and Triton's. All of them equal a plain composition (``Block`` and
``Mamba.forward_plain`` of vim_mm.models) and exist because that takes some thirty launches a layer
and as much of Python's time. Their backward passes are written by hand. Shapes and letters of the
operators stand with their schemas in csrc/ops.cpp.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vim_mm.ops import library, triton  # noqa: F401, which defines Triton's operators
from vim_mm.ops.library import refuse_forward_mode
from vim_mm.ops.mixer_parameters import (
    DTYPES,
    SINGLE,
    TYPES,
    count_sets,
    sizes_of,
)

MAX_TAPS = 8  # kMaxTaps of csrc/cuda/block/block.h
_ops = torch.ops.vim_mm


def add_rms_norm(
    residual: Tensor,
    update: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    backend: str = 'native',
) -> tuple[Tensor, Tensor]:
    """RMSNorm of ``residual + update``, and that sum, in one launch on CUDA.

    Args:
        residual: (.., C), float32 or ``dtype``.
        update: Like residual, ``dtype``; None for none.
        weight: (C,), float32 or ``dtype``.
        eps: Added to the mean of squares.
        dtype: float32, float16 or bfloat16.
        backend: 'native' or 'triton'.

    Returns:
        The normalized sum in ``dtype``, and the sum in residual's dtype.

    Raises:
        RuntimeError: An argument is not as above.
    """
    refuse_forward_mode(residual, update, weight)
    residual = residual.contiguous()
    update = None if update is None else update.contiguous()
    if torch.is_grad_enabled() and _any_requires_grad(residual, update, weight):
        normed, total = _AddRMSNorm.apply(residual, update, weight, eps, dtype, backend)
    else:
        arguments = (residual, update, weight, eps, dtype)
        normed, total, _ = _call('add_rms_norm_fwd', backend, *arguments)
    return normed, residual if update is None else total


def _call(name: str, backend: str, *arguments: Any) -> Any:
    name = name if backend == 'native' else f'{backend}_{name}'
    return library.call(getattr(_ops, name), *arguments)


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual, update, weight, eps, dtype, backend):
        arguments = (residual, update, weight, eps, dtype)
        normed, total, rstd = _call('add_rms_norm_fwd', backend, *arguments)
        ctx.backend = backend
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
        arguments = (grad_normed.contiguous(), grad_total, total, rstd, weight, ctx.with_update)
        grad_residual, grad_update, grad_weight = _call('add_rms_norm_bwd', ctx.backend, *arguments)
        return (
            grad_residual,
            grad_update if ctx.with_update else None,
            grad_weight,
            None,
            None,
            None,
        )


class FusedMixer(NamedTuple):
    """What the operator takes of a mixer, see :class:`vim_mm.models.Mamba`.

    Parameters are as they are stored, contiguous, any float: in_proj (2 H, C) and its bias,
    out_proj (C, H) and its bias; then conv (H, 1, W), W up to MAX_TAPS, its bias, x_proj
    (R + 2 N, H), dt_proj (H, R), its bias, and D (H,), once or for each direction; then A_log
    (H, N) for each direction. Biases but dt_proj's may be None.
    """

    parameters: list[Tensor | None]
    method: int  # number of the discretization
    reverse: list[bool]  # one flag per direction, of which there are one or two
    scale: float  # on the sum of directions
    backend: str = 'native'  # or 'triton'


def fused_mixer(x: Tensor, mixer: FusedMixer, reset: Tensor | None = None) -> Tensor:
    """The mixer of a block, in the dtype of ``x``.

    Parameters are converted at every call. Backward computes the convolution and the step sizes
    once more, accumulates gradients of parameters in float32, and has no derivative itself.

    Args:
        x: (B, L, C), float32, float16 or bfloat16.
        mixer: Parameters and options.
        reset: (B, L), bool, where sequences begin; of the compiled operator alone.

    Returns:
        (B, L, C) in x's dtype.

    Raises:
        RuntimeError: An argument is not as above.
        AttributeError: The compiled kernels are missing.
    """
    return _mix(x, None, None, 0.0, x.dtype, mixer, reset)[0]


def fused_block(
    residual: Tensor,
    update: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    mixer: FusedMixer,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The mixer of RMSNorm of ``residual + update``, in ``dtype``, and that sum.

    :func:`add_rms_norm` and :func:`fused_mixer` as one operator: on the host a layer takes as long
    as what it asks torch for.

    Args:
        residual: (B, L, C), float32 or ``dtype``.
        update: Like residual, ``dtype``; None for none.
        weight: (C,), float32 or ``dtype``, of the norm.
        eps: Added to the mean of squares.
        dtype: float32, float16 or bfloat16.
        mixer: Parameters and options.
        reset: As of :func:`fused_mixer`.

    Returns:
        The mixer's output (B, L, C) in ``dtype``, and the sum in residual's dtype.

    Raises:
        RuntimeError: An argument is not as above.
        AttributeError: The compiled kernels are missing.
    """
    out, stream = _mix(residual, update, weight, eps, dtype, mixer, reset)
    return out, residual if update is None else stream


def _mix(x, update, norm, eps, dtype, mixer, reset):
    x = x.contiguous()
    update = None if update is None else update.contiguous()
    reset = None if reset is None else reset.contiguous()
    parameters, *options, backend = mixer
    refuse_forward_mode(x, update, norm, *parameters)
    if torch.is_grad_enabled() and _any_requires_grad(x, update, norm, *parameters):
        return _Mixer.apply(x, update, norm, (eps, dtype), options, backend, reset, *parameters)
    arguments = (x, update, norm, eps, dtype, parameters, *options, False, *_given(reset))
    return _call('mixer_fwd', backend, *arguments)[:2]


def _given(reset: Tensor | None) -> tuple[Tensor, ...]:
    """An argument that Triton's operators do not have."""
    return () if reset is None else (reset,)


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


class _Mixer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, update, norm, norm_options, options, backend, reset, *parameters):
        arguments = (x, update, norm, *norm_options, parameters, *options, True, *_given(reset))
        out, total, saved = _call('mixer_fwd', backend, *arguments)
        # Backward takes the parameters as forward converted them, and of themselves no more than
        # this: to save and restore each takes longer than to launch a kernel.
        ctx.sizes = sizes_of(parameters)
        ctx.types = [-1 if p is None else TYPES[p.dtype] for p in parameters]
        ctx.dtype, ctx.options, ctx.with_update = out.dtype, options, update is not None
        ctx.backend = backend
        ctx.save_for_backward(total if ctx.with_update else x, norm, reset, *saved)
        ctx.set_materialize_grads(False)
        return out, total if ctx.with_update else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out, grad_total):
        x, norm, reset, *saved = ctx.saved_tensors
        if grad_out is None:  # only the sum was used
            grad_out = x.new_zeros(x.shape, dtype=ctx.dtype)
        if grad_total is not None:
            grad_total = grad_total.contiguous()
        grad_x, grad_update, grad_norm, *grads = _call(
            'mixer_bwd',
            ctx.backend,
            grad_out.contiguous(),
            grad_total,
            x,
            norm,
            saved,
            ctx.sizes,
            ctx.types,
            ctx.with_update,
            *ctx.options,
            *_given(reset),
        )
        grads = (None if type < 0 else g for g, type in zip(grads, ctx.types, strict=True))
        return (
            grad_x,
            grad_update if ctx.with_update else None,
            None if norm is None else grad_norm,
            None,
            None,
            None,
            None,
            *grads,
        )


def _add_rms_norm_fwd_fake(residual, update, weight, eps, dtype):
    total = residual.new_empty(0) if update is None else torch.empty_like(residual)
    rstd = residual.new_empty(residual.shape[:-1], dtype=torch.float32)
    return torch.empty_like(residual, dtype=dtype), total, rstd


def _add_rms_norm_bwd_fake(grad_normed, grad_sum, total, rstd, weight, with_update):
    grad_update = torch.empty_like(grad_normed) if with_update else grad_normed.new_empty(0)
    return torch.empty_like(total), grad_update, torch.empty_like(weight)


def _shapes(outer: int, sizes: Sequence[int], sets: int, directions: int) -> list[list[tuple]]:
    """Of the parameters of each kind, in the kinds' order."""
    channels, states, rank, taps = sizes
    single = [(2 * channels, outer), (2 * channels,), (outer, channels), (outer,)]
    each = [
        (channels, 1, taps),
        (channels,),
        (rank + 2 * states, channels),
        (channels, rank),
        (channels,),
        (channels,),
    ]
    return [
        *([shape] for shape in single),
        *([shape] * sets for shape in each),
        [(channels, states)] * directions,
    ]


def _mixer_fwd_fake(
    x, update, norm, eps, dtype, parameters, method, reverse, scale, keep, reset=None
):
    out = torch.empty_like(x, dtype=dtype)
    total = x.new_empty(0) if update is None else torch.empty_like(x)
    if not keep:
        return out, total, []
    options = (sizes_of(parameters), len(parameters), dtype, norm is not None, method, len(reverse))
    return out, total, [x.new_empty(n, dtype=torch.uint8) for n in _saved_bytes(x.shape, *options)]


def _saved_bytes(shape, sizes, parameters, dtype, normed, method, directions) -> list:
    """Bytes of each tensor that forward saves for backward; symbols where B and L of ``shape`` are.

    A buffer's bytes are a sum of something for each token, for each chunk of an image, and once:
    the operator, which takes numbers alone, tells them at three points.
    """
    batch, length, outer = shape

    def ask(batch: int, length: int) -> tuple[int, list[int]]:
        alignment, _, _, sizes_in_bytes, _ = _ops.mixer_workspace(
            'saved', batch, length, int(outer), [int(size) for size in sizes], [0] * parameters,
            dtype, normed, method, directions,
        )  # fmt: skip
        return alignment, sizes_in_bytes

    step, chunk = library.CHUNK - 1, library.CHUNK
    alignment, once = ask(0, 1)
    buffers = []
    for n, first, last in zip(once, ask(1, 1)[1], ask(1, chunk)[1], strict=True):
        by_token = (last - first) // step
        by_chunk = first - n - by_token
        buffers.append(batch * (length * by_token + -(-length // chunk) * by_chunk) + n)
    if alignment == 0:  # each is an allocation of its own
        return buffers
    return [sum(-(-n // alignment) * alignment for n in buffers)]


def _mixer_bwd_fake(
    grad_out,
    grad_sum,
    x,
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
    sets = count_sets(len(types), len(reverse))
    kinds = _shapes(x.shape[2], sizes, sets, len(reverse))
    single, each, A_log = kinds[:SINGLE], kinds[SINGLE:-1], kinds[-1]
    shapes = [*chain(*single), *chain(*zip(*each, strict=True)), *A_log]
    return [
        torch.empty_like(x),
        torch.empty_like(grad_out) if with_update else grad_out.new_empty(0),
        grad_out.new_empty(0) if norm is None else torch.empty_like(norm),
        *(
            grad_out.new_empty(0) if type < 0 else x.new_empty(shape, dtype=DTYPES[type])
            for shape, type in zip(shapes, types, strict=True)
        ),
    ]


if library.MISSING is None:
    torch.library.register_fake('vim_mm::add_rms_norm_fwd')(_add_rms_norm_fwd_fake)
    torch.library.register_fake('vim_mm::add_rms_norm_bwd')(_add_rms_norm_bwd_fake)
    torch.library.register_fake('vim_mm::mixer_fwd')(_mixer_fwd_fake)
    torch.library.register_fake('vim_mm::mixer_bwd')(_mixer_bwd_fake)


def _triton_mixer_fwd_fake(x, update, norm, eps, dtype, parameters, method, reverse, scale, keep):
    from vim_mm.ops.triton.block import kept_shapes, shape_of

    out = torch.empty_like(x, dtype=dtype)
    total = x.new_empty(0) if update is None else torch.empty_like(x)
    if not keep:
        return out, total, []
    sizes = shape_of(x, sizes_of(parameters), len(parameters), len(reverse), dtype)
    kept = kept_shapes(sizes, method, norm is not None)
    return out, total, [x.new_empty(shape, dtype=dtype) for shape, dtype in kept]


torch.library.register_fake('vim_mm::triton_add_rms_norm_fwd')(_add_rms_norm_fwd_fake)
torch.library.register_fake('vim_mm::triton_add_rms_norm_bwd')(_add_rms_norm_bwd_fake)
torch.library.register_fake('vim_mm::triton_mixer_fwd')(_triton_mixer_fwd_fake)
torch.library.register_fake('vim_mm::triton_mixer_bwd')(_mixer_bwd_fake)
