"""How the parameters of a fused mixer lie in one list, for the native and for Triton's block.

First those that there are once, then for each set those of one direction, or of both; last A_log of
each direction. :class:`vim_mm.ops.block.FusedMixer` names them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# Where those that there are for each set begin, and how many they are.
SINGLE, EACH = 4, 6
CONV, DT_PROJ = SINGLE, SINGLE + 3
# Storage of csrc/cuda/common/scan_arguments.h.
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
DTYPES = [*TYPES]  # by that number


def sizes_of(parameters: Sequence[Tensor | None]) -> list[int]:
    """H, N, R and W."""
    return [
        *parameters[-1].shape,
        parameters[DT_PROJ].shape[1],
        parameters[CONV].shape[2],
    ]


def count_sets(parameters: int, directions: int) -> int:
    """The number of sets among so many parameters."""
    return (parameters - SINGLE - directions) // EACH
