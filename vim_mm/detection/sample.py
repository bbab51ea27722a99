"""Random boxes for the losses: MMDetection's ``RandomSampler`` for all images at once."""

from typing import NamedTuple

import torch
from mmdet.models.task_modules import RandomSampler
from torch import Tensor


class Sampled(NamedTuple):
    """S boxes of each of B images; the positive ones come first, padding comes last.

    Attributes:
        index: (B, S), int64, among the boxes that there were.
        positive: (B, S), bool.
        valid: (B, S), bool, False for padding.
    """

    index: Tensor
    positive: Tensor
    valid: Tensor


def why_not_sampled(rule: object) -> str | None:
    """Why :func:`sample` does not take a sampler of MMDetection, None if it does."""
    return None if type(rule) is RandomSampler else f'{type(rule).__name__} samples boxes'


def most_positive(rule: RandomSampler) -> int:
    """How many positive boxes of an image are sampled at most."""
    return int(rule.num * rule.pos_fraction)


@torch.no_grad()
def sample(rule: RandomSampler, assigned: Tensor, keys: Tensor | None = None) -> Sampled:
    """A sample of the distribution that ``rule`` has, without replacement.

    Each box draws a number, and those with the largest are taken.

    Args:
        rule: With the numbers of boxes.
        assigned: (B, K), see :func:`vim_mm.detection.assign.assign`.
        keys: (B, K), the numbers, in [0, 1); None draws them.
    """
    if keys is None:  # in float64, where hardly any two are equal
        keys = torch.rand(assigned.shape, dtype=torch.float64, device=assigned.device)
    size = min(rule.num, assigned.shape[1])
    most = min(most_positive(rule), size)
    value, positive = torch.where(assigned > 0, keys, -1).topk(most)
    positives = (value >= 0).sum(1, keepdim=True)
    value, negative = torch.where(assigned == 0, keys, -1).topk(size)
    room = rule.num - positives
    if rule.neg_pos_ub >= 0:
        bound = (rule.neg_pos_ub * positives.clamp(min=1)).floor().long()
        room = torch.min(room, bound)
    negatives = torch.min((value >= 0).sum(1, keepdim=True), room)

    slot = torch.arange(size, device=assigned.device)[None]
    is_positive = slot < positives
    following = negative.gather(1, (slot - positives).clamp(min=0))
    leading = torch.nn.functional.pad(positive, (0, size - most))
    index = torch.where(is_positive, leading, following)
    return Sampled(index, is_positive, slot < positives + negatives)
