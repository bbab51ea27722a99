"""Losses and proposals of MMDetection's ``RPNHead``, for all images at once.

Shapes follow from the size of the batch and from the config alone, and nothing waits for the
device.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from mmdet.models.dense_heads import RPNHead
from mmdet.models.task_modules import AnchorGenerator, DeltaXYWHBBoxCoder
from mmengine.config import ConfigDict
from torch import Tensor, nn

from vim_mm.detection.assign import assign, why_not_assigned
from vim_mm.detection.boxes import constant_like, decode, encode, pick, widen
from vim_mm.detection.losses import EPS, binary_loss, box_loss, why_other_loss
from vim_mm.detection.sample import sample, why_not_sampled
from vim_mm.detection.suppression import suppress
from vim_mm.detection.truth import GroundTruth
from vim_mm.errors import UserValueError


class Proposals(NamedTuple):
    """Boxes (B, P, 4) of falling scores (B, P), and which of them there are (B, P)."""

    boxes: Tensor
    scores: Tensor
    valid: Tensor


def why_other_coder(coder: object) -> str | None:
    """Why a coder of boxes is not the one of :mod:`vim_mm.detection.boxes`, None if it is."""
    if type(coder) is not DeltaXYWHBBoxCoder:
        return f'{type(coder).__name__} codes boxes'
    if coder.add_ctr_clamp or coder.use_box_type:
        return 'its bbox_coder has add_ctr_clamp or use_box_type'
    return None


def overridden(module: object, base: type, *names: str) -> str | None:
    """A sentence on the first of these methods that a class has in place of its base's."""
    kind = type(module)
    if not isinstance(module, base):
        return f'it is a {kind.__name__}, no {base.__name__}'
    for name in names:
        if getattr(kind, name) is not getattr(base, name):
            return f'{kind.__name__} has a {name} of its own'
    return None


def why_not_fast(head: nn.Module, proposal_cfg: ConfigDict) -> str | None:
    """Why a head is trained by its own methods, None if it is trained by this module."""
    own = overridden(
        head, RPNHead, 'loss_and_predict', 'loss_by_feat', 'loss_by_feat_single', 'get_targets',
        '_get_targets_single', 'predict_by_feat', '_predict_by_feat_single', '_bbox_post_process',
        'get_anchors',
    )  # fmt: skip
    if own is not None:
        return own
    generator = head.prior_generator
    if type(generator) is not AnchorGenerator or generator.use_box_type:
        return f'{type(generator).__name__} makes its anchors'
    nms = proposal_cfg.nms
    if nms.get('type') != 'nms' or {*nms} - {'type', 'iou_threshold', 'split_thr'}:
        return f'its proposals are thinned out by {dict(nms)}'
    if head.reg_decoded_bbox:
        return 'reg_decoded_bbox is set'
    return (
        why_not_assigned(head.assigner)
        or why_not_sampled(head.sampler)
        or ('its sampler adds true boxes' if head.sampler.add_gt_as_proposals else None)
        or why_other_coder(head.bbox_coder)
        or why_other_loss(head.loss_cls, 'sigmoid')
        or why_other_loss(head.loss_bbox, 'box')
    )


class Predicted(NamedTuple):
    """What the head says of the K anchors of all levels, one level after the other.

    Attributes:
        logits: (B, K).
        deltas: (B, K, 4).
        anchors: (K, 4).
        cells: (K, 2), x and y of the cell of the feature map, in pixels.
        levels: Numbers of anchors of each level.
    """

    logits: Tensor
    deltas: Tensor
    anchors: Tensor
    cells: Tensor
    levels: list[int]


def predict(head: RPNHead, x: tuple[Tensor, ...]) -> Predicted:
    """Call the head on feature maps."""
    scores, deltas = head(x)
    sizes = [level.shape[-2:] for level in scores]
    anchors, cells = zip(*(_anchors(head, i, size, x[0]) for i, size in enumerate(sizes)))
    batch = len(scores[0])
    flat = [level.permute(0, 2, 3, 1).reshape(batch, -1) for level in scores]
    deltas = [level.permute(0, 2, 3, 1).reshape(batch, -1, 4) for level in deltas]
    return Predicted(
        widen(torch.cat(flat, 1)),
        widen(torch.cat(deltas, 1)),
        torch.cat(anchors),
        torch.cat(cells),
        [level.shape[1] for level in flat],
    )


def _anchors(
    head: RPNHead, level: int, size: tuple[int, int], like: Tensor
) -> tuple[Tensor, Tensor]:
    """Anchors (n, 4) of a level in the order of ``grid_priors``, and their cells (n, 2)."""
    # Kept on the device: the CPU waits for each copy.
    base = head.prior_generator.base_anchors[level]
    values = tuple(base.flatten().tolist())
    base = constant_like(values, like.new_empty(0, dtype=torch.float32)).view(-1, 4)
    stride = head.prior_generator.strides[level]
    x, y = (torch.arange(n, device=like.device).float() * s for n, s in zip(size[::-1], stride))
    cells = torch.stack([x.expand(*size), y[:, None].expand(*size)], -1)
    cells = cells.view(-1, 1, 2).expand(-1, len(base), 2)
    return (base + cells.repeat(1, 1, 2)).view(-1, 4), cells.reshape(-1, 2)


def check_borders(head: RPNHead, metas: Sequence[dict]) -> None:
    """Refuse images that no anchor fits into, on the CPU.

    Raises:
        ValueError: There is one.
    """
    border = head.train_cfg['allowed_border']
    if border < 0:
        return
    generator = head.prior_generator
    for meta in metas:
        fits = False
        for base, strides in zip(generator.base_anchors, generator.strides, strict=True):
            inside = np.ones(len(base), bool)
            for axis, stride in enumerate(strides):
                side, padded = meta['img_shape'][1 - axis], meta['pad_shape'][1 - axis]
                first, last = base[:, axis].numpy(), base[:, axis + 2].numpy()
                # Of the cell of the first anchor that begins inside.
                cell = np.maximum(np.ceil((-border - first) / stride), 0) * stride
                inside &= (cell < padded) & (cell + last < side + border)
            fits |= bool(inside.any())
        if not fits:
            raise UserValueError(
                f'no anchor lies inside of an image of {tuple(meta["img_shape"][:2])} pixels: '
                'change the anchor_generator, or set train_cfg.rpn.allowed_border=-1'
            )


def usable_anchors(head: RPNHead, predicted: Predicted, truth: GroundTruth) -> Tensor:
    """(B, K): which anchors lie in their images as far as the config demands it."""
    height, width, padded_height, padded_width = truth.sizes.T[..., None]
    cells, anchors = predicted.cells, predicted.anchors
    usable = (cells[:, 0] < padded_width) & (cells[:, 1] < padded_height)
    border = head.train_cfg['allowed_border']
    if border >= 0:
        inside = (anchors[:, 0] >= -border) & (anchors[:, 1] >= -border)
        usable = usable & inside
        usable = usable & (anchors[:, 2] < width + border) & (anchors[:, 3] < height + border)
    return usable


def losses(head: RPNHead, predicted: Predicted, truth: GroundTruth) -> dict[str, list[Tensor]]:
    """As ``RPNHead.loss``: ``loss_rpn_cls`` and ``loss_rpn_bbox`` of each level.

    Args:
        head: With its assigner, its sampler and its losses.
        predicted: From :func:`predict`.
        truth: Of the batch.
    """
    usable = usable_anchors(head, predicted, truth)
    assigned = assign(head.assigner, predicted.anchors, truth, usable)
    index, positive, valid = sample(head.sampler, assigned)
    with torch.no_grad():
        anchors = predicted.anchors[index]
        matched = pick(assigned, index).clamp(min=1) - 1
        targets = encode(head.bbox_coder, anchors, pick(truth.boxes, matched))
        targets = torch.where(positive[..., None], targets, 0)
        number = positive.sum(1).clamp(min=1) + (valid & ~positive).sum(1).clamp(min=1)
        number = number.sum() + EPS
    of_class = binary_loss(head.loss_cls, pick(predicted.logits, index), positive)
    weight = head.train_cfg['pos_weight']
    if weight > 0:
        of_class = torch.where(positive, of_class * weight, of_class)
    of_box = box_loss(head.loss_bbox, pick(predicted.deltas, index), targets).sum(-1)
    # By level, as MMDetection gives them.
    ends = [0, *accumulate(predicted.levels)]
    first, last = (constant_like(n, index)[:, None, None] for n in (ends[:-1], ends[1:]))
    here = (index >= first) & (index < last)
    return dict(
        loss_rpn_cls=_sums(of_class, here & valid, number),
        loss_rpn_bbox=_sums(of_box, here & positive, number),
    )


def _sums(losses: Tensor, masks: Tensor, number: Tensor) -> list[Tensor]:
    return [*(torch.where(masks, losses, 0).sum((1, 2)) / number)]


@torch.no_grad()
def propose(head: RPNHead, predicted: Predicted, truth: GroundTruth, cfg: ConfigDict) -> Proposals:
    """As ``RPNHead.predict_by_feat``, in tensors of fixed size.

    Args:
        head: With its coder of boxes.
        predicted: From :func:`predict`.
        truth: With the sizes of the images.
        cfg: ``train_cfg.rpn_proposal``.
    """
    before = cfg.get('nms_pre', -1)
    values, places, start = [], [], 0
    for level in predicted.logits.sigmoid().split(predicted.levels, 1):
        most = level.shape[1]
        value, place = level.topk(min(before, most) if before > 0 else most)
        values.append(value)
        places.append(place + start)
        start += most
    numbers = [value.shape[1] for value in values]
    index = torch.cat(places, 1)
    deltas = pick(predicted.deltas, index)
    boxes = decode(head.bbox_coder, predicted.anchors[index], deltas, truth.limits)
    valid = torch.ones_like(index, dtype=torch.bool)
    smallest = cfg.get('min_bbox_size', -1)
    if smallest >= 0:
        sides = boxes[..., 2:] - boxes[..., :2]
        valid = (sides > smallest).all(-1)

    # Levels do not suppress each other: each is a set of its own.
    kept = suppress(_by_level(boxes, numbers), _by_level(valid, numbers), cfg.nms.iou_threshold)
    kept = kept.view(len(boxes), len(numbers), -1)
    kept = torch.cat([kept[:, i, :n] for i, n in enumerate(numbers)], 1)
    scores = torch.where(kept, torch.cat(values, 1), -1)
    score, best = scores.topk(min(cfg.max_per_img, scores.shape[1]))
    return Proposals(pick(boxes, best), score, score >= 0)


def _by_level(x: Tensor, numbers: list[int]) -> Tensor:
    """(B, sum of numbers, ...) to (B times levels, largest number, ...), padded with zeros."""
    most, trailing = max(numbers), x.shape[2:]
    after = (0, 0) * len(trailing)
    levels = [F.pad(level, (*after, 0, most - level.shape[1])) for level in x.split(numbers, 1)]
    return torch.stack(levels, 1).view(-1, most, *trailing)
