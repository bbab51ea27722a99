"""What the operators refuse of tensors, whatever their shapes and dtypes."""

from typing import Any

import torch
from torch import Tensor


def check_tensor(name: str, x: Any) -> None:
    """Keep what has no strides from operators, whose errors would not name it.

    Raises:
        TypeError: The argument is no tensor, or a sparse, nested or packed one.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f'{name}: expected a tensor, got {type(x).__name__}')
    if x.layout != torch.strided or x.is_nested:
        kind = 'a nested one' if x.is_nested else f'one of layout {x.layout}'
        raise TypeError(f'{name}: expected a dense tensor, got {kind}')


def check_device(name: str, x: Tensor, first: str, other: Tensor) -> None:
    """ValueError if the tensor is not where the argument called ``first`` is."""
    if x.device != other.device:
        raise ValueError(f'{name}: expected on {other.device}, where {first} is, got {x.device}')
