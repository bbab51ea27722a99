"""Regions of a batch in tensors of fixed size: sampling, features, losses of the box head."""

from typing import NamedTuple

import torch
from mmdet.models.roi_heads.bbox_heads import BBoxHead
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmengine.config import ConfigDict
from torch import Tensor

from vim_mm.detection.assign import assign
from vim_mm.detection.boxes import decode, encode, pick, widen
from vim_mm.detection.losses import EPS, box_loss, class_loss
from vim_mm.detection.masks import FAR
from vim_mm.detection.sample import Sampled, sample
from vim_mm.detection.truth import GroundTruth


class Regions(NamedTuple):
    """S regions of each of B images.

    Attributes:
        boxes: (B, S, 4).
        positive: (B, S), bool.
        valid: (B, S), bool, False for padding.
        matched: (B, S), int64, the object of a positive region, 0 of others.
        is_truth: (B, S), bool, for the true box of an object.
    """

    boxes: Tensor
    positive: Tensor
    valid: Tensor
    matched: Tensor
    is_truth: Tensor

    @property
    def rois(self) -> Tensor:
        """(B S, 5): the number of the image and the corners; padding lies far outside."""
        boxes = torch.where(self.valid[..., None], self.boxes, FAR)
        image = torch.arange(len(boxes), dtype=boxes.dtype, device=boxes.device)
        image = image[:, None, None].expand(*boxes.shape[:2], 1)
        return torch.cat([image, boxes], -1).view(-1, 5)

    def first(self, number: int) -> 'Regions':
        """The first regions of each image."""
        return Regions(*(x[:, :number] for x in self))


@torch.no_grad()
def sample_regions(
    assigner: object,
    sampler: object,
    boxes: Tensor,
    valid: Tensor,
    truth: GroundTruth,
) -> Regions:
    """Assign proposals to objects, and sample.

    Args:
        assigner: ``MaxIoUAssigner``.
        sampler: ``RandomSampler``; None takes every box that is positive or background.
        boxes: (B, P, 4), proposals.
        valid: (B, P), False for padding.
        truth: Of the batch.
    """
    assigned = assign(assigner, boxes, truth, valid)
    own = 0  # of the boxes, the true ones
    if sampler is not None and sampler.add_gt_as_proposals:
        objects = truth.is_object
        own = objects.shape[1]
        numbers = torch.arange(1, own + 1, device=boxes.device)
        boxes = torch.cat([truth.boxes.to(boxes.dtype), boxes], 1)
        assigned = torch.cat([torch.where(objects, numbers, -1), assigned], 1)
    if sampler is None:
        place = torch.arange(assigned.shape[1], device=boxes.device).expand_as(assigned)
        chosen = Sampled(place, assigned > 0, assigned >= 0)
    else:
        chosen = sample(sampler, assigned)
    matched = torch.where(chosen.positive, pick(assigned, chosen.index) - 1, 0)
    return Regions(
        pick(boxes, chosen.index), chosen.positive, chosen.valid, matched,
        chosen.positive & (chosen.index < own),
    )  # fmt: skip


def region_features(extractor: SingleRoIExtractor, x: tuple[Tensor, ...], rois: Tensor) -> Tensor:
    """As the extractor's own, without looking which level has regions.

    Each level is asked for all regions, those of other levels far outside of it, where every
    sample is zero and costs nothing.
    """
    levels = x[: extractor.num_inputs]
    rois = rois.type_as(levels[0])
    if len(levels) == 1:
        return extractor.roi_layers[0](levels[0], rois)
    level_of = extractor.map_roi_levels(rois, len(levels))
    total = None
    for i, (layer, level) in enumerate(zip(extractor.roi_layers, levels, strict=True)):
        boxes = torch.where((level_of == i)[:, None], rois[:, 1:], FAR)
        features = layer(level, torch.cat([rois[:, :1], boxes], 1))
        total = features if total is None else total + features
    return total


def labels_of(regions: Regions, truth: GroundTruth, background: int) -> Tensor:
    """(B, S), int64: classes of the regions."""
    return torch.where(regions.positive, pick(truth.labels, regions.matched), background)


def box_losses(
    head: BBoxHead,
    scores: Tensor,
    deltas: Tensor,
    regions: Regions,
    truth: GroundTruth,
    cfg: ConfigDict,
) -> dict[str, Tensor]:
    """As ``BBoxHead.loss``: ``loss_cls``, ``acc`` in percent (1,), ``loss_bbox``.

    Args:
        head: With its losses.
        scores: (B S, classes + 1).
        deltas: (B S, 4), or four for each class.
        regions: What was predicted for.
        truth: Of the batch.
        cfg: ``train_cfg`` of the head.
    """
    scores, deltas = widen(scores), widen(deltas)
    with torch.no_grad():
        labels = labels_of(regions, truth, head.num_classes)
        targets = encode(head.bbox_coder, regions.boxes, pick(truth.boxes, regions.matched))
        targets = torch.where(regions.positive[..., None], targets, 0).view(-1, 4)
        labels, valid = labels.view(-1), regions.valid.reshape(-1)
        positive = regions.positive.reshape(-1)
        number = valid.sum()
        correct = ((scores.argmax(1) == labels) & valid).sum()
    of_class = class_loss(head.loss_cls, scores, labels)
    if cfg.pos_weight > 0:
        of_class = torch.where(positive, of_class * cfg.pos_weight, of_class)
    if not head.reg_class_agnostic:
        own = torch.where(positive, labels, 0)
        deltas = pick(deltas.view(len(labels), head.num_classes, 4), own[:, None])[:, 0]
    of_box = box_loss(head.loss_bbox, deltas, targets).sum(1)
    return dict(
        loss_cls=torch.where(valid, of_class, 0).sum() / (number.clamp(min=1) + EPS),
        acc=(correct * 100.0 / number.clamp(min=1))[None],
        loss_bbox=torch.where(positive, of_box, 0).sum() / (number + EPS),
    )


@torch.no_grad()
def refine(
    head: BBoxHead, scores: Tensor, deltas: Tensor, regions: Regions, truth: GroundTruth
) -> Tensor:
    """Regions moved by the deltas of their own class, or of the likeliest: (B, S, 4)."""
    if not head.reg_class_agnostic:
        likeliest = scores[:, : head.num_classes].argmax(1).view_as(regions.matched)
        labels = torch.where(regions.positive, labels_of(regions, truth, 0), likeliest)
        deltas = deltas.view(-1, head.num_classes, 4)
        deltas = pick(deltas, labels.view(-1, 1))
    deltas = deltas.view_as(regions.boxes).to(regions.boxes.dtype)
    return decode(head.bbox_coder, regions.boxes, deltas, truth.limits)
