"""Targets and loss of MMDetection's ``FCNMaskHead``, on the device."""

import torch
from mmcv.ops import roi_align
from torch import Tensor, nn

from vim_mm.detection.boxes import pick, widen
from vim_mm.detection.losses import binary_loss
from vim_mm.detection.truth import GroundTruth

# Far outside of every image: where nothing is found.
FAR = -1e4
# Bytes of float32 that masks of the size of the images are converted to at a time.
CHUNK_BYTES = 256 * 2**20


@torch.no_grad()
def mask_targets(
    truth: GroundTruth, boxes: Tensor, matched: Tensor, size: tuple[int, int], soft: bool
) -> Tensor:
    """The masks of objects, cut out by boxes: (B, P, *size), float32.

    Args:
        truth: With the masks.
        boxes: (B, P, 4).
        matched: (B, P), which object of its image belongs to a box.
        size: Of a target, rows and columns.
        soft: Whether targets are shares of covered area, and not 0 or 1.
    """
    height, width = truth.masks.shape[1:]
    x, y = boxes[..., 0::2].clamp(0, width), boxes[..., 1::2].clamp(0, height)
    boxes = torch.stack([x, y], -1).view(-1, 4)
    index = (truth.first_mask[:, None] + matched).view(-1)
    step = max(1, CHUNK_BYTES // (4 * height * width))
    targets = boxes.new_zeros(len(boxes), 1, *size)
    for start in range(0, len(truth.masks), step):
        masks = truth.masks[start : start + step]
        here = (index >= start) & (index < start + len(masks))
        own = torch.where(here, index - start, 0).to(boxes.dtype)
        rois = torch.cat([own[:, None], torch.where(here[:, None], boxes, FAR)], 1)
        targets += roi_align(masks.to(boxes.dtype)[:, None], rois, size, 1.0, 0, 'avg', True)
    targets = targets.view(*matched.shape, *size)
    return targets if soft else (targets >= 0.5).float()


def mask_loss(
    head: nn.Module, logits: Tensor, labels: Tensor, targets: Tensor, real: Tensor
) -> Tensor:
    """Mean cross entropy of the masks, (1,) as MMDetection gives it; 0 without any.

    Args:
        head: The ``FCNMaskHead``.
        logits: (B P, C, h, w), C classes or one.
        labels: (B, P), int64.
        targets: (B, P, h, w).
        real: (B, P), False for padding.
    """
    labels = torch.zeros_like(labels) if head.class_agnostic else labels
    own = widen(pick(logits, labels.reshape(-1, 1))[:, 0])
    losses = binary_loss(head.loss_mask, own, targets.view_as(own))
    pixels = real.sum().clamp(min=1) * losses[0].numel()
    return (torch.where(real.reshape(-1, 1, 1), losses, 0).sum() / pixels)[None]
