"""Losses of MMDetection of single entries, to be weighted and summed without a wait."""

import torch
import torch.nn.functional as F
from mmdet.models.losses import CrossEntropyLoss, L1Loss, SmoothL1Loss
from torch import Tensor, nn

# What MMDetection adds to counts.
EPS = torch.finfo(torch.float32).eps


def why_other_loss(criterion: nn.Module, kind: str) -> str | None:
    """Why a loss is not known here, None if it is.

    Args:
        criterion: Of a head.
        kind: What it must be: 'softmax', 'sigmoid', 'mask' or 'box'.
    """
    name = type(criterion).__name__
    if kind == 'box':
        known = type(criterion) in (L1Loss, SmoothL1Loss)
    else:
        given = 'sigmoid' if getattr(criterion, 'use_sigmoid', False) else 'softmax'
        given = 'mask' if getattr(criterion, 'use_mask', False) else given
        known = type(criterion) is CrossEntropyLoss and given == kind
    if not known:
        return f'its loss is {name}' + ('' if kind == 'box' else f', not a {kind} cross entropy')
    if criterion.reduction != 'mean':
        return f'{name} has reduction {criterion.reduction!r}'
    for setting in ('class_weight', 'ignore_index'):
        if getattr(criterion, setting, None) is not None:
            return f'{name} has a {setting}'
    return None


def box_loss(criterion: nn.Module, deltas: Tensor, targets: Tensor) -> Tensor:
    """Of each number of (..., 4), times ``loss_weight``."""
    difference = (deltas - targets).abs()
    if type(criterion) is SmoothL1Loss:
        beta = criterion.beta
        square = 0.5 * difference * difference / beta
        difference = torch.where(difference < beta, square, difference - 0.5 * beta)
    return criterion.loss_weight * difference


def binary_loss(criterion: nn.Module, logits: Tensor, targets: Tensor) -> Tensor:
    """Sigmoid cross entropy of each number, times ``loss_weight``."""
    loss = F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction='none')
    return criterion.loss_weight * loss


def class_loss(criterion: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
    """Softmax cross entropy of logits (N, C), times ``loss_weight``: (N,)."""
    return criterion.loss_weight * F.cross_entropy(logits, labels, reduction='none')
