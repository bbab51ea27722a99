"""Launches kernels with less work on the host than Triton's own call takes."""

from typing import Any

import torch
import triton
from torch import Tensor

# By what Triton compiles them for. AMD's compiler looks at more than this key has.
_compiled: dict[tuple, Any] = {}
_HAS_KEY = torch.version.hip is None


def launch(kernel: Any, grid: tuple[int, ...], num_warps: int = 4, **arguments: Any) -> None:
    """``kernel[grid](**arguments, num_warps=num_warps)`` on the current device.

    Triton examines every argument in Python and makes a text of them to find the compiled kernel.
    Here a tuple has what it would look at: constants, dtypes, and of pointers and numbers whether
    they are multiples of 16; of numbers whether they are 1, and whether they take 64 bits.
    """
    # The interpreter compiles nothing.
    if not isinstance(kernel, triton.JITFunction) or not _HAS_KEY:
        kernel[grid](**arguments, num_warps=num_warps)
        return
    values = [arguments[name] for name in kernel.arg_names]
    constants = kernel.constexprs
    first = constants[0] if constants else len(values)
    key: list = [kernel.fn, num_warps, values[0].get_device(), *values[first:]]
    for x in values[:first]:
        if isinstance(x, Tensor):
            key += (x.dtype, x.data_ptr() % 16 == 0)
        elif isinstance(x, int):
            key += (x == 1, x % 16 == 0, -(2**31) <= x < 2**31)
    found = _compiled.get(tuple(key))
    if found is None:
        _compiled[tuple(key)] = kernel[grid](**arguments, num_warps=num_warps)
    else:
        found[(*grid, 1, 1)[:3]](*values)
