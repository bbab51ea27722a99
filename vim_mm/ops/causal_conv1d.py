"""The short depthwise convolution that stands in front of the scan in each direction of a block."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vim_mm.errors import UserTypeError, UserValueError
from vim_mm.ops.discretization import check_device, check_reset, check_tensor
from vim_mm.ops.library import without_autocast
from vim_mm.ops.selective_scan import check_bool


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    reverse: bool = False,
    activation: str | None = None,
    *,
    return_last_state: bool = False,
    initial_state: Tensor | None = None,
    reset: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Depthwise convolution that sees the past only, or with ``reverse`` the future only.

    out_t = act(bias + sum over w of weight_w x_{t-(W-1)+w}), zeros before the start. ``reverse``
    equals flipping x along L, convolving, and flipping the output back, without flipping anything
    but the kernel.

    Of float32 with channels contiguous, not L, CUDA's is cuDNN's convolution, which may round
    products to TF32 unless ``torch.backends.cudnn.allow_tf32`` is False.

    Args:
        x: (B, D, L), floating point, any strides; D from 1.
        weight: (D, W), W from 1, in x's dtype (under autocast any).
        bias: (D,) or None, likewise.
        reverse: Whether t runs backwards.
        activation: 'silu' or None.
        return_last_state: Also return the state after the last step in scan order.
        initial_state: (B, D, W - 1), likewise: the steps of x before the first (with ``reverse``
            after the last) in the order of x. None is 0.
        reset: (B, L), bool. Where true a sequence begins: no tap reaches over the boundary between
            steps t - 1 and t, in either direction.

    Returns:
        (B, D, L) in x's dtype, under autocast in autocast's; with ``return_last_state`` also the
        ``initial_state`` (B, D, W - 1) of what comes next, in x's dtype. With ``reverse`` it is
        that of a row that goes on whatever ``reset[:, 0]`` is: where it is true, continue with 0.

    Raises:
        TypeError: An argument is no dense tensor or no bool, or of another dtype.
        ValueError: A shape, a device or the activation is not as above.
    """
    if activation not in (None, 'silu'):
        raise UserValueError(f"activation must be None or 'silu', got {activation!r}")
    check_bool('reverse', reverse)
    check_bool('return_last_state', return_last_state)
    _check_types(x, weight, bias, initial_state)
    if x.dim() != 3 or x.shape[1] == 0:
        raise UserValueError(f'x must be (B, D, L), D from 1, got shape {tuple(x.shape)}')
    channels, length = x.shape[1:]
    if weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] == 0:
        raise UserValueError(
            f'weight must be ({channels}, W), W from 1, got shape {tuple(weight.shape)}'
        )
    if bias is not None and bias.shape != (channels,):
        raise UserValueError(f'bias must be ({channels},), got shape {tuple(bias.shape)}')
    width = weight.shape[1]
    state = (*x.shape[:2], width - 1)
    if initial_state is not None and tuple(initial_state.shape) != state:
        raise UserValueError(
            f'initial_state must be (B, D, W - 1) = {state}, got shape {tuple(initial_state.shape)}'
        )
    if reset is not None:
        check_reset(reset, (x.shape[0], length), 'x', x)

    kernel = weight.flip(1) if reverse else weight
    steps = F.pad(x, (0, 1)) if length == 0 else x  # conv1d takes no row of nothing
    if reset is not None:
        starts = F.pad(reset, (0, 1)) if length == 0 else reset
        taps = taps_within(steps, width, reverse, initial_state, starts)
        out = torch.einsum('bdlw,dw->bdl', taps, kernel)
        out = out if bias is None else out + bias.to(out.dtype)[:, None]
    elif initial_state is not None:
        extended = extend(steps, width, reverse, initial_state)
        out = F.conv1d(extended, kernel.unsqueeze(1), bias, groups=channels)
    else:
        margin = width - 1
        # Padding inside of conv1d and cutting afterwards copies nothing, unlike F.pad on one side.
        out = F.conv1d(steps, kernel.unsqueeze(1), bias, padding=margin, groups=channels)
        out = out.narrow(2, margin if reverse else 0, steps.shape[2])
    out = out.narrow(2, 0, length)
    out = F.silu(out) if activation else out
    if return_last_state:
        return out, last_state_of(x, width, reverse, initial_state, reset)
    return out


def extend(x: Tensor, width: int, reverse: bool, initial_state: Tensor | None = None) -> Tensor:
    """x (B, D, L) with the width - 1 steps before its first in scan order: (B, D, L + width - 1).

    Those are ``initial_state``, or zeros.
    """
    if initial_state is None:
        return F.pad(x, _margin(width, reverse))
    state = initial_state.to(x.dtype)
    with without_autocast(x):
        return torch.cat([x, state] if reverse else [state, x], dim=2)


def taps_within(
    x: Tensor, width: int, reverse: bool, initial_state: Tensor | None, reset: Tensor
) -> Tensor:
    """What each step's taps read, in the order of x, zero across a boundary: (B, D, L, width)."""
    taps = extend(x, width, reverse, initial_state).unfold(2, width, 1)
    sequences = _count_sequences(reset, width, reverse).unfold(1, width, 1)
    own = sequences[..., :1] if reverse else sequences[..., -1:]
    return taps.masked_fill((sequences != own).unsqueeze(1), 0)


def last_state_of(
    x: Tensor, width: int, reverse: bool, initial_state: Tensor | None, reset: Tensor | None
) -> Tensor:
    """The width - 1 steps of x that end a scan of it, zero across a boundary."""
    first = 0 if reverse else x.shape[2]
    state = extend(x, width, reverse, initial_state).narrow(2, first, width - 1)
    if reset is None:
        return state.clone()  # no view that keeps all steps alive
    sequences = _count_sequences(reset, width, reverse)
    own = sequences[:, :1] if reverse else sequences[:, -1:]
    return state.masked_fill((sequences.narrow(1, first, width - 1) != own).unsqueeze(1), 0)


def _count_sequences(reset: Tensor, width: int, reverse: bool) -> Tensor:
    """In which sequence each step of an extended row is: (B, L + width - 1)."""
    return F.pad(reset, _margin(width, reverse)).cumsum(1)


def _margin(width: int, reverse: bool) -> tuple[int, int]:
    return (0, width - 1) if reverse else (width - 1, 0)


def _check_types(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None
) -> None:
    """Layouts, dtypes and devices."""
    tensors: dict[str, Any] = {
        'x': x, 'weight': weight, 'bias': bias, 'initial_state': initial_state
    }  # fmt: skip
    for name, tensor in tensors.items():
        if tensor is None and name in ('bias', 'initial_state'):
            continue
        check_tensor(name, tensor)
        if not tensor.is_floating_point():
            raise UserTypeError(f'{name} must be floating point, got {tensor.dtype}')
        if tensor.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise UserTypeError(f'{name} must be {x.dtype}, as x is, got {tensor.dtype}')
        check_device(name, tensor, 'x', x)
