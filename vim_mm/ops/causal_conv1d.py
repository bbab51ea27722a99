"""The short depthwise convolution that stands in front of the scan in each direction of a block."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vim_mm.errors import UserTypeError, UserValueError
from vim_mm.ops.discretization import check_device, check_tensor


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    reverse: bool = False,
    activation: str | None = None,
) -> Tensor:
    """Depthwise convolution that sees the past only, or with ``reverse`` the future only.

    out_t = act(bias + sum over w of weight_w x_{t-(W-1)+w}), zeros before the start. ``reverse``
    equals flipping x along L, convolving, and flipping the output back, without flipping anything
    but the kernel.

    Args:
        x: (B, D, L), floating point, any strides; D from 1.
        weight: (D, W), W from 1, in x's dtype (under autocast any).
        bias: (D,) or None, likewise.
        reverse: Whether t runs backwards.
        activation: 'silu' or None.

    Returns:
        (B, D, L) in x's dtype, under autocast in autocast's.

    Raises:
        TypeError: An argument is no dense tensor, or of another dtype.
        ValueError: A shape, a device or the activation is not as above.
    """
    if activation not in (None, 'silu'):
        raise UserValueError(f"activation must be None or 'silu', got {activation!r}")
    _check_types(x, weight, bias)
    if x.dim() != 3 or x.shape[1] == 0:
        raise UserValueError(f'x must be (B, D, L), D from 1, got shape {tuple(x.shape)}')
    channels, length = x.shape[1:]
    if weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] == 0:
        raise UserValueError(
            f'weight must be ({channels}, W), W from 1, got shape {tuple(weight.shape)}'
        )
    if bias is not None and bias.shape != (channels,):
        raise UserValueError(f'bias must be ({channels},), got shape {tuple(bias.shape)}')

    if length == 0:  # of which conv1d takes none
        x = F.pad(x, (0, 1))
    margin = weight.shape[1] - 1
    kernel = (weight.flip(1) if reverse else weight).unsqueeze(1)
    # Padding inside of conv1d and cutting afterwards copies nothing, unlike F.pad on one side.
    out = F.conv1d(x, kernel, bias, padding=margin, groups=channels)
    out = out.narrow(2, margin if reverse else 0, length)
    return F.silu(out) if activation else out


def _check_types(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Layouts, dtypes and devices."""
    given = {'x': x, 'weight': weight} | ({} if bias is None else {'bias': bias})
    for name, tensor in given.items():
        check_tensor(name, tensor)
        if not tensor.is_floating_point():
            raise UserTypeError(f'{name} must be floating point, got {tensor.dtype}')
        if tensor.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise UserTypeError(f'{name} must be {x.dtype}, as x is, got {tensor.dtype}')
        check_device(name, tensor, 'x', x)
