"""Boxes of several images at once, by the arithmetic of MMDetection and to its last bit."""

import math
from collections.abc import Sequence
from functools import cache

import torch
from mmdet.models.task_modules import DeltaXYWHBBoxCoder
from torch import Tensor

# Neither grows nor shrinks a side by more, as in MMDetection.
_MAX_RATIO = abs(math.log(16 / 1000))
# What MMDetection's union of two boxes is at least.
_SMALLEST_UNION = 1e-6


@cache
def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of a config on the device, where they stay: the CPU waits for each copy."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def constant_like(values: Sequence[float], like: Tensor) -> Tensor:
    """:func:`constant` of the dtype and the device of a tensor."""
    return constant(tuple(values), like.dtype, like.device)


def widen(x: Tensor) -> Tensor:
    """In float32 at least: losses of 16 bits would be rounded."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def area(boxes: Tensor) -> Tensor:
    """Of boxes (..., 4): (...)."""
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def intersection(a: Tensor, b: Tensor) -> Tensor:
    """Areas that boxes a (..., M, 4) have in common with boxes b (..., N, 4): (..., M, N)."""
    (left, top, right, bottom), (left2, top2, right2, bottom2) = (
        x.unbind(-1) for x in (a[..., :, None, :], b[..., None, :, :])
    )
    width = (torch.min(right, right2) - torch.max(left, left2)).clamp(min=0)
    height = (torch.min(bottom, bottom2) - torch.max(top, top2)).clamp(min=0)
    return width * height


def overlap(a: Tensor, b: Tensor, of_first: bool = False) -> Tensor:
    """Intersection over union of boxes a (..., M, 4) and b (..., N, 4): (..., M, N).

    Args:
        a: Corners.
        b: Corners.
        of_first: Divide by the areas of ``a`` instead.
    """
    common = intersection(a, b)
    whole = area(a)[..., :, None]
    if not of_first:
        whole = whole + area(b)[..., None, :] - common
    return common / whole.clamp(min=_SMALLEST_UNION)


def encode(coder: DeltaXYWHBBoxCoder, boxes: Tensor, targets: Tensor) -> Tensor:
    """Deltas (..., 4) that make ``targets`` of ``boxes``, (..., 4) both."""
    boxes, targets = boxes.float(), targets.float()
    center, size = (boxes[..., :2] + boxes[..., 2:]) * 0.5, boxes[..., 2:] - boxes[..., :2]
    target = (targets[..., :2] + targets[..., 2:]) * 0.5, targets[..., 2:] - targets[..., :2]
    deltas = torch.cat([(target[0] - center) / size, (target[1] / size).log()], dim=-1)
    return (deltas - constant_like(coder.means, deltas)) / constant_like(coder.stds, deltas)


def decode(coder: DeltaXYWHBBoxCoder, boxes: Tensor, deltas: Tensor, limits: Tensor) -> Tensor:
    """Boxes (B, N, 4) that ``deltas`` make of ``boxes``, (B, N, 4) both, clipped to the images.

    Args:
        coder: With the scale of the deltas.
        boxes: Corners.
        deltas: Of center and of the logarithms of the sides.
        limits: (B, 1, 4), see :class:`vim_mm.detection.truth.GroundTruth`.
    """
    deltas = deltas * constant_like(coder.stds, deltas) + constant_like(coder.means, deltas)
    center, size = (boxes[..., :2] + boxes[..., 2:]) * 0.5, boxes[..., 2:] - boxes[..., :2]
    center = center + size * deltas[..., :2]
    half = size * deltas[..., 2:].clamp(min=-_MAX_RATIO, max=_MAX_RATIO).exp() * 0.5
    decoded = torch.cat([center - half, center + half], dim=-1)
    if coder.clip_border:
        decoded = torch.min(decoded.clamp(min=0), limits.to(decoded.dtype))
    return decoded


def pick(x: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` (B, S) of x (B, N, ...): (B, S, ...)."""
    trailing = x.shape[2:]
    index = index.reshape(*index.shape, *(1 for _ in trailing)).expand(-1, -1, *trailing)
    return x.gather(1, index)
