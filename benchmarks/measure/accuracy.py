"""How far a result is from the right one."""

import math

from torch import Tensor


def relative_error(value: Tensor, exact: Tensor) -> float:
    """The largest error relative to the largest entry (absolute if that is 0)."""
    return (value - exact).abs().max().item() / (exact.abs().max().item() or 1.0)


def largest(errors: dict) -> tuple:
    """The key and the size of the largest of several errors, where a NaN is the largest of all."""
    return max(errors.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])
