"""Non-maximum suppression of several sets of boxes at once, with a result of fixed size."""

import torch
from mmcv.ops import nms
from torch import Tensor

from vim_mm.ops import triton

# Boxes of a set that the kernels take at most: they note for each pair whether it overlaps.
MAX_BOXES = 2**14


@torch.no_grad()
def suppress(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """Which boxes stay when each removes those after it that overlap with it too much.

    With Triton on a GPU two launches do it, and nothing waits. Elsewhere each set is one call of
    MMCV's.

    Args:
        boxes: (S, P, 4), float32, each of the S sets in the order of falling scores.
        valid: (S, P), False for padding.
        threshold: Intersection over union that is too much.

    Returns:
        Tensor: (S, P), bool.
    """
    no_triton = triton.obstacle(boxes.device.type, boxes.dtype)
    if no_triton is None and boxes.shape[1] <= MAX_BOXES:
        from vim_mm.detection.suppression_kernels import suppress_by_kernels

        return suppress_by_kernels(boxes, valid, threshold)
    kept = torch.zeros_like(valid)
    order = torch.arange(boxes.shape[1], 0, -1, dtype=torch.float32, device=boxes.device)
    for own, given, real in zip(kept, boxes.float(), valid, strict=True):
        places = real.nonzero()[:, 0]
        if len(places):
            _, index = nms(given[places], order[places], float(threshold))
            own[places[index]] = True
    return kept
