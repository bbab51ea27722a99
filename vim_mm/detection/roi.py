"""Losses of MMDetection's RoI heads, and of ours, for all images at once.

Shapes follow from the config and from the padded number of objects, and nothing waits for the
device.
"""

from mmcv.ops import RoIAlign
from mmdet.models.roi_heads import CascadeRoIHead, StandardRoIHead
from mmdet.models.roi_heads.bbox_heads import BBoxHead
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmdet.models.task_modules import RandomSampler
from mmengine.config import ConfigDict
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.utils import _pair

from vim_mm.acceleration import hand_over_float32
from vim_mm.detection.assign import why_not_assigned
from vim_mm.detection.losses import why_other_loss
from vim_mm.detection.masks import mask_loss, mask_targets
from vim_mm.detection.regions import (
    Regions,
    box_losses,
    labels_of,
    refine,
    region_features,
    sample_regions,
)
from vim_mm.detection.roi_head import SharedMaskCascadeRoIHead
from vim_mm.detection.rpn import overridden, why_other_coder
from vim_mm.detection.sample import most_positive, why_not_sampled
from vim_mm.detection.truth import GroundTruth

_METHODS = ('loss', 'bbox_loss', 'mask_loss', '_bbox_forward', '_mask_forward')


def why_not_fast(head: nn.Module) -> str | None:
    """Why a head is trained by its own methods, None if it is trained by this module."""
    bases = SharedMaskCascadeRoIHead, CascadeRoIHead, StandardRoIHead
    base = next((base for base in bases if isinstance(head, base)), StandardRoIHead)
    own = overridden(head, base, *_METHODS)
    if own is not None:
        return own
    if not head.with_bbox:
        return 'it has no bbox_head'
    for module in head.modules():
        if isinstance(module, _BatchNorm):
            return f'{type(module).__name__} would count padded regions'
    reasons = map(_why_not_box_stage, *map(_listed, (
        head.bbox_head, head.bbox_roi_extractor, head.bbox_assigner, head.bbox_sampler
    )))  # fmt: skip
    if head.with_mask:
        masks = map(_why_not_mask_stage, _listed(head.mask_head), _listed(head.mask_roi_extractor))
        reasons = *reasons, *masks
    return next(filter(None, reasons), None)


def _listed(x: object) -> list:
    return [*x] if isinstance(x, list | nn.ModuleList) else [x]


def _why_not_box_stage(
    head: nn.Module, extractor: nn.Module, assigner: object, sampler: object
) -> str | None:
    own = overridden(
        head, BBoxHead, 'loss', 'loss_and_target', 'get_targets', '_get_targets_single',
        'refine_bboxes', 'regress_by_class',
    )  # fmt: skip
    if own is not None:
        return own
    if not (head.with_cls and head.with_reg) or head.reg_decoded_bbox:
        return 'its bbox_head has with_cls=False, with_reg=False or reg_decoded_bbox=True'
    return (
        _why_not_extracted(extractor)
        or why_not_assigned(assigner)
        or why_not_sampled(sampler)
        or why_other_coder(head.bbox_coder)
        or why_other_loss(head.loss_cls, 'softmax')
        or why_other_loss(head.loss_bbox, 'box')
    )


def _why_not_mask_stage(head: nn.Module, extractor: nn.Module) -> str | None:
    own = overridden(head, FCNMaskHead, 'loss_and_target', 'get_targets')
    return own or _why_not_extracted(extractor) or why_other_loss(head.loss_mask, 'mask')


def _why_not_extracted(extractor: nn.Module) -> str | None:
    own = overridden(extractor, SingleRoIExtractor, 'forward')
    if own is not None:
        return own
    for layer in extractor.roi_layers:
        if type(layer) is not RoIAlign or layer.pool_mode != 'avg':
            return f'{layer} extracts the features of regions'
    return None


def losses(
    head: nn.Module, x: tuple[Tensor, ...], boxes: Tensor, valid: Tensor, truth: GroundTruth
) -> dict[str, Tensor]:
    """As ``head.loss``.

    Args:
        head: One that :func:`why_not_fast` has no objection to.
        x: Feature maps of all levels.
        boxes: (B, P, 4), proposals.
        valid: (B, P), False for padding.
        truth: Of the batch.
    """
    x = hand_over_float32(x)  # MMCV's RoIAlign knows no bfloat16
    if isinstance(head, CascadeRoIHead):
        return _cascade(head, x, boxes, valid, truth)
    regions = sample_regions(head.bbox_assigner, head.bbox_sampler, boxes, valid, truth)
    features = _box_features(head, head.bbox_roi_extractor, x, regions)
    scores, deltas = head.bbox_head(features)
    found = box_losses(head.bbox_head, scores, deltas, regions, truth, head.train_cfg)
    if head.with_mask:
        most = _most_masks(head.bbox_sampler, regions)
        if head.share_roi_extractor:
            features = features.view(*regions.valid.shape, *features.shape[1:])[:, :most].flatten(
                0, 1
            )
        else:
            features = None
        found |= _mask_losses(
            head, head.mask_head, head.mask_roi_extractor, x, regions.first(most), truth,
            head.train_cfg, features,
        )  # fmt: skip
    return found


def _most_masks(sampler: RandomSampler, regions: Regions) -> int:
    """How many regions of each image, from the first, may be positive."""
    if regions.positive.is_cuda:  # to count them would be to wait
        return most_positive(sampler)
    return max(1, int(regions.positive.sum(1).max()))


def _box_features(head: nn.Module, extractor: nn.Module, x: tuple[Tensor, ...], regions: Regions):
    features = region_features(extractor, x, regions.rois)
    return head.shared_head(features) if head.with_shared_head else features


def _mask_losses(
    head: nn.Module,
    mask_head: FCNMaskHead,
    extractor: SingleRoIExtractor,
    x: tuple[Tensor, ...],
    regions: Regions,
    truth: GroundTruth,
    cfg: ConfigDict,
    features: Tensor | None = None,
) -> dict[str, Tensor]:
    """``loss_mask`` at the positive regions; all of these are positive or padding."""
    regions = regions._replace(valid=regions.positive)
    if features is None:
        features = _box_features(head, extractor, x, regions)
    logits = mask_head(features)
    targets = mask_targets(
        truth, regions.boxes, regions.matched, _pair(cfg.mask_size),
        cfg.get('soft_mask_target', False),
    )  # fmt: skip
    labels = labels_of(regions, truth, 0)
    return dict(loss_mask=mask_loss(mask_head, logits, labels, targets, regions.positive))


def _cascade(
    head: CascadeRoIHead, x: tuple[Tensor, ...], boxes: Tensor, valid: Tensor, truth: GroundTruth
) -> dict[str, Tensor]:
    """Of MMDetection's cascade, or of ours: see :mod:`vim_mm.detection.roi_head`."""
    found, shared = {}, isinstance(head, SharedMaskCascadeRoIHead)
    for stage in range(head.num_stages):
        head.current_stage = stage
        cfg, box_head = head.train_cfg[stage], head.bbox_head[stage]
        sampler = None if shared and stage > 0 else head.bbox_sampler[stage]
        regions = sample_regions(head.bbox_assigner[stage], sampler, boxes, valid, truth)
        features = region_features(head.bbox_roi_extractor[stage], x, regions.rois)
        if shared and features.requires_grad:
            features.register_hook(lambda grad: grad / head.num_stages)
        scores, deltas = box_head(features)
        named = box_losses(box_head, scores, deltas, regions, truth, cfg)
        if head.with_mask and sampler is not None:
            named |= _mask_losses(
                head, head.mask_head[stage], head.mask_roi_extractor[stage], x,
                regions.first(_most_masks(sampler, regions)), truth, cfg,
            )  # fmt: skip
        weight = head.stage_loss_weights[stage]
        for name, value in named.items():
            found[f's{stage}.{name}'] = value * weight if 'loss' in name else value
        if stage < head.num_stages - 1:
            boxes, valid = refine(box_head, scores, deltas, regions, truth), regions.valid
            if shared:
                sides = boxes[..., 2:] - boxes[..., :2]
                valid = valid & (sides > 0).all(-1)
            else:
                valid = valid & ~regions.is_truth
    return found
