"""The native operators as torch sees them: loads `vim_mm._C` once, gives fake kernels and autograd.

Shapes and letters of the operators stand with their schemas in csrc/ops.cpp.
"""

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vim_mm.ops.discretization import METHODS
from vim_mm.ops.reference import state_dtype

_CHUNK = 64  # kChunk of csrc/cuda/kernels.h
_CAUSAL = {method.id: method.causal for method in METHODS.values()}

# Why `vim_mm._C` is missing, for the messages of those who need it; None when it is loaded.
MISSING: str | None = None
if importlib.util.find_spec('vim_mm._C') is None:
    MISSING = 'vim_mm._C is not built (build it with `pip install -e . --no-build-isolation`)'
else:
    try:
        importlib.import_module('vim_mm._C')
    except ImportError as error:
        MISSING = f'vim_mm._C is built but does not load: {error}'


def has_kernel(device_type: str) -> bool:
    """Whether the compiled scan exists for tensors of a device type such as 'cpu' or 'cuda'."""
    if MISSING is not None:
        return False
    return _is_registered(device_type)


@functools.cache  # to ask takes longer than to launch a kernel, and a mixer asks at every call
def _is_registered(device_type: str) -> bool:
    key = {'cpu': 'CPU', 'cuda': 'CUDA'}.get(device_type)
    if key is None:
        return False
    try:
        torch.library.get_kernel('vim_mm::selective_scan_fwd', key)
    except RuntimeError:  # how it says that there is none
        return False
    return True


def _forward_fake(
    u, delta, A, B, C, D, z, delta_bias, delta_softplus, method, reverse
) -> tuple[Tensor, Tensor, Tensor]:
    state_shape = (*u.shape[:3], A.shape[-1])
    last_state = u.new_empty(state_shape, dtype=state_dtype(u, A))
    # The CPU kernel needs nothing of its forward.
    on_cuda = u.device.type == 'cuda'
    edges = edges_shape(u.shape, A.shape[-1], method) if on_cuda else (0,)
    return torch.empty_like(u), last_state, last_state.new_empty(edges)


def edges_shape(shape: Sequence[int], states: int, method: int) -> tuple[int, ...]:
    """(directions, B, G, H, chunks, N), given (B, G, H, L): of what CUDA's backward takes."""
    directions = 1 if _CAUSAL[method] else 2
    return (directions, *shape[:3], -(-shape[3] // _CHUNK), states)


def _backward_fake(
    grad_out,
    grad_last_state,
    edges,
    u,
    delta,
    A,
    B,
    C,
    D,
    z,
    delta_bias,
    delta_softplus,
    method,
    reverse,
) -> tuple[Tensor, ...]:
    inputs = (u, delta, A, B, C, D, z, delta_bias)
    return tuple(u.new_empty(0) if x is None else torch.empty_like(x) for x in inputs)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.delta_softplus, ctx.method, ctx.reverse = inputs
    edges = output[2]
    ctx.mark_non_differentiable(edges)
    ctx.save_for_backward(edges, *tensors)
    # An output that nobody used costs no tensor of zeros.
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_last_state: Tensor | None, _: Tensor | None
) -> tuple:
    edges, *inputs = ctx.saved_tensors
    rest = (None, None, None)
    if grad_out is None and grad_last_state is None:
        return (*(None for _ in inputs), *rest)
    grads = torch.ops.vim_mm.selective_scan_bwd(
        grad_out, grad_last_state, edges, *inputs, ctx.delta_softplus, ctx.method, ctx.reverse
    )
    return (*(None if x is None else g for x, g in zip(inputs, grads, strict=True)), *rest)


def _no_double_backward(ctx: Any, *grads: Tensor | None) -> tuple:
    raise RuntimeError(
        'the compiled selective scan has no second derivative; '
        'use_cuda_kernel=False takes the PyTorch reference, which has'
    )


if MISSING is None:
    torch.library.register_fake('vim_mm::selective_scan_fwd')(_forward_fake)
    torch.library.register_fake('vim_mm::selective_scan_bwd')(_backward_fake)
    torch.library.register_autograd(
        'vim_mm::selective_scan_fwd', _backward, setup_context=_setup_context
    )
    torch.library.register_autograd('vim_mm::selective_scan_bwd', _no_double_backward)
