"""Which object each box belongs to: MMDetection's ``MaxIoUAssigner`` for all images at once."""

import torch
from mmdet.models.task_modules import BboxOverlaps2D, MaxIoUAssigner
from torch import Tensor

from vim_mm.detection.boxes import overlap
from vim_mm.detection.truth import GroundTruth

# Overlaps that are computed at once: those of some objects of each image with all boxes.
CHUNK = 2**25


def why_not_assigned(rule: object) -> str | None:
    """Why :func:`assign` does not take an assigner of MMDetection, None if it does."""
    if type(rule) is not MaxIoUAssigner:
        return f'{type(rule).__name__} assigns boxes'
    calculator = rule.iou_calculator
    if type(calculator) is not BboxOverlaps2D or calculator.dtype is not None:
        return f'{calculator} computes overlaps'
    if rule.perm_repeat_gt_cfg is not None:
        return 'perm_repeat_gt_cfg moves boxes that are there twice'
    return None


def needs_ignored(rule: MaxIoUAssigner) -> bool:
    """Whether the assigner looks at boxes to ignore."""
    return rule.ignore_iof_thr > 0


@torch.no_grad()
def assign(
    rule: MaxIoUAssigner, boxes: Tensor, truth: GroundTruth, usable: Tensor | None = None
) -> Tensor:
    """The object of each box, as ``rule.assign(...).gt_inds`` of each image.

    Args:
        rule: With the thresholds.
        boxes: (B, K, 4), or (K, 4) for all images.
        truth: Of the B images.
        usable: (B, K), False for boxes that are not there; None: all are.

    Returns:
        Tensor: (B, K), int64: the number of the object, counted from 1; 0 for background; -1 for
        boxes that are neither, or not there.
    """
    boxes = boxes.expand(len(truth.boxes), *boxes.shape[-2:])
    counted = _counted(rule, boxes, truth, usable)
    objects = truth.is_object
    best = boxes.new_full(boxes.shape[:2], -1)
    nearest = torch.zeros_like(best, dtype=torch.int64)
    weak = nearest  # the last object that has no better box
    step = max(1, CHUNK // best.numel())
    for start in range(0, objects.shape[1], step):
        present = objects[:, start : start + step, None]
        there = present if counted is None else present & counted[:, None]
        overlaps = overlap(truth.boxes[:, start : start + step], boxes)
        overlaps = torch.where(there, overlaps, -1)
        value, index = overlaps.max(1)
        nearest = torch.where(value > best, index + start, nearest)
        best = torch.max(best, value)
        if rule.match_low_quality:
            weak = torch.max(weak, _best_of_objects(rule, overlaps, present, start))
    assigned = torch.full_like(nearest, -1)
    low = rule.neg_iou_thr
    if isinstance(low, float):
        assigned = torch.where((best >= 0) & (best < low), 0, assigned)
    elif isinstance(low, tuple):
        assigned = torch.where((best >= low[0]) & (best < low[1]), 0, assigned)
    assigned = torch.where(best >= rule.pos_iou_thr, nearest + 1, assigned)
    assigned = torch.where(weak > 0, weak, assigned)
    # Without an object everything is background, boxes that would be ignored as well.
    assigned = torch.where(objects.any(1, keepdim=True), assigned, 0)
    return assigned if usable is None else torch.where(usable, assigned, -1)


def _counted(
    rule: MaxIoUAssigner, boxes: Tensor, truth: GroundTruth, usable: Tensor | None
) -> Tensor | None:
    """(B, K): which boxes overlap with objects at all; None for all of them."""
    number = truth.ignored.shape[1]
    if not needs_ignored(rule) or number == 0:
        return usable
    given = torch.arange(number, device=boxes.device) < truth.ignored_number[:, None]
    if rule.ignore_wrt_candidates:
        inside = overlap(boxes, truth.ignored, of_first=True).transpose(1, 2)
    else:
        inside = overlap(truth.ignored, boxes, of_first=True)
    kept = torch.where(given[:, :, None], inside, -1).amax(1) <= rule.ignore_iof_thr
    return kept if usable is None else kept & usable


def _best_of_objects(rule: MaxIoUAssigner, overlaps: Tensor, present: Tensor, start: int) -> Tensor:
    """(B, K): the last of these objects that a box fits better than any other, from 1; else 0."""
    numbers = torch.arange(start + 1, start + 1 + overlaps.shape[1], device=overlaps.device)
    most, first = overlaps.max(2, keepdim=True)
    if rule.gt_max_assign_all:
        fits = overlaps == most
    else:
        fits = torch.arange(overlaps.shape[2], device=overlaps.device) == first
    fits = fits & present & (most >= rule.min_pos_iou)
    return torch.where(fits, numbers[:, None], 0).amax(1)
