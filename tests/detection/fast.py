"""Small detectors and batches, and the losses of MMDetection at the samples of a fast detector."""

import copy
import functools
from contextlib import ExitStack
from unittest.mock import patch

import numpy as np
import torch
from mmdet.models.dense_heads import RPNHead
from mmdet.models.task_modules import RandomSampler
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmdet.utils import register_all_modules
from mmengine.config import Config, ConfigDict
from mmengine.structures import InstanceData
from torch import Tensor, nn

from vim_mm.config import config_path
from vim_mm.detection import roi, rpn
from vim_mm.engine import activate

SIZE = (64, 96)
CLASSES = 3
WIDTH = 8
STRIDES = (4, 8, 16)
CONFIGS = {
    'standard': 'det/mask_rcnn_vim_t_zoh.py',
    'cascade': 'det/cascade_mask_rcnn_vim_t_zoh.py',
    'shared': 'det/cascade_mask_rcnn_vim_t_zoh_released.py',
}


@MODELS.register_module(force=True)
class ToyPyramid(nn.Module):
    """Feature maps of ``STRIDES`` and of one more for the RPN alone."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Conv2d(3, WIDTH, 4, stride=4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        levels = [self.proj(x)]
        for _ in STRIDES:
            levels.append(nn.functional.avg_pool2d(levels[-1], 2, ceil_mode=True).sin() * 3)
        return tuple(levels)


@functools.cache
def shipped(kind: str) -> ConfigDict:
    """The model of a config, read once."""
    return Config.fromfile(config_path(CONFIGS[kind])).model


def config(kind: str, **changes) -> ConfigDict:
    """Of a detector that is shipped, made small.

    Args:
        kind: A key of ``CONFIGS``.
        changes: By dotted names with '__' for a dot; of a cascade, those of all stages in one.
    """
    register_all_modules(init_default_scope=True)
    activate()
    model = copy.deepcopy(shipped(kind))
    if model.type == 'FastDetector':
        model.type = model.pop('of')
    model.data_preprocessor = dict(
        type='DetDataPreprocessor', pad_size_divisor=32, pad_mask=True, bgr_to_rgb=True,
        mean=[120.0] * 3, std=[60.0] * 3,
    )  # fmt: skip
    model.backbone = dict(type='ToyPyramid')
    model.neck = None
    model.rpn_head.update(in_channels=WIDTH, feat_channels=WIDTH, num_convs=1)
    generator = model.rpn_head.anchor_generator
    generator.update(strides=[*STRIDES, 32], scales=[3])
    head = model.roi_head
    stages = head.bbox_head if isinstance(head.bbox_head, list) else [head.bbox_head]
    for stage in stages:
        stage.update(
            in_channels=WIDTH, conv_out_channels=WIDTH, fc_out_channels=WIDTH, num_classes=CLASSES
        )
    for extractor in (head.bbox_roi_extractor, head.mask_roi_extractor):
        extractor.update(out_channels=WIDTH, featmap_strides=[*STRIDES], finest_scale=12)
    head.mask_head.update(
        num_convs=1, in_channels=WIDTH, conv_out_channels=WIDTH, num_classes=CLASSES
    )
    train = model.train_cfg
    train.rpn.sampler.num = 64
    train.rpn_proposal.update(nms_pre=150, max_per_img=100)
    model.test_cfg.rcnn.score_thr = 0.0
    for stage in train.rcnn if isinstance(train.rcnn, list) else [train.rcnn]:
        stage.sampler.num = 48
        stage.assigner.update(pos_iou_thr=0.3, neg_iou_thr=0.3, min_pos_iou=0.3)
    wrapped = ConfigDict(model=model)
    for name, value in changes.items():
        parts = name.split('__')
        places = [wrapped.model]
        for part in parts[:-1]:
            found = [place[part] for place in places]
            places = [x for each in found for x in (each if isinstance(each, list) else [each])]
        for place in places:
            place[parts[-1]] = value
    return wrapped.model


def detectors(model: ConfigDict) -> tuple[nn.Module, nn.Module]:
    """The fast detector and MMDetection's, with the same random weights."""
    torch.manual_seed(0)
    slow = MODELS.build(copy.deepcopy(model))
    for name, param in slow.named_parameters():
        if 'rpn_head' in name or 'fc_' in name or 'conv_logits' in name:
            nn.init.normal_(param, std=0.15)
    fast = MODELS.build({**copy.deepcopy(model), 'type': 'FastDetector', 'of': model.type})
    fast.load_state_dict(slow.state_dict())
    return fast.train(), slow.train()


def batch(*objects: int, ignored: int = 0, sizes=(SIZE, SIZE), seed: int = 0) -> dict:
    """Random images with so many objects each, as a loader hands them over."""
    torch.manual_seed(seed)
    samples = []
    for number, size in zip(objects, sizes, strict=True):
        boxes = _boxes(number + ignored, size)
        masks = (torch.rand(number, *size) < 0.8).numpy().astype(np.uint8)
        for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist()):
            mask[:top] = mask[bottom:] = mask[:, :left] = mask[:, right:] = 0
        sample = DetDataSample(metainfo=dict(img_shape=size, ori_shape=size, scale_factor=(1, 1)))
        sample.gt_instances = InstanceData(
            bboxes=boxes[:number],
            labels=torch.randint(0, CLASSES, (number,)),
            masks=BitmapMasks(masks, *size),
        )
        sample.ignored_instances = InstanceData(bboxes=boxes[number:])
        samples.append(sample)
    inputs = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in sizes]
    return dict(inputs=inputs, data_samples=samples)


def _boxes(number: int, size: tuple[int, int]) -> Tensor:
    sides = torch.tensor(size[::-1])
    extent = (torch.rand(number, 2) * 0.4 + 0.1) * sides
    corner = torch.rand(number, 2) * (sides - extent)
    return torch.cat([corner, corner + extent], 1)


class Recorder:
    """What a fast detector sampled and proposed: calls of the functions of this package."""

    def __init__(self, stack: ExitStack):
        self.calls: dict[str, list] = {}
        for module, name in (
            (rpn, 'predict'), (rpn, 'sample'), (rpn, 'propose'), (roi, 'sample_regions')
        ):  # fmt: skip
            stack.enter_context(patch.object(module, name, self._recorded(module, name)))

    def _recorded(self, module, name):
        function, calls = getattr(module, name), self.calls.setdefault(name, [])

        def call(*args):
            calls.append(function(*args))
            return calls[-1]

        return call

    def samples(self) -> list[tuple[Tensor, Tensor]]:
        """Positive and negative boxes, image by image and stage by stage."""
        (sampled,), (predicted,) = self.calls['sample'], self.calls['predict']
        stages = [(predicted.anchors[sampled.index], sampled.positive, sampled.valid)]
        stages += [(r.boxes, r.positive, r.valid) for r in self.calls['sample_regions']]
        return [
            (boxes[positive], boxes[valid & ~positive])
            for stage in stages
            for boxes, positive, valid in zip(*stage, strict=True)
        ]


def both_losses(fast: nn.Module, slow: nn.Module, given: dict) -> tuple[dict, dict]:
    """Losses of a fast detector, and MMDetection's at the same samples and regions."""
    data = slow.data_preprocessor(copy.deepcopy(given), True)
    with ExitStack() as stack:
        recorder = Recorder(stack)
        ours = fast.loss(data['inputs'], copy.deepcopy(data['data_samples']))
    (proposed,) = recorder.calls['propose']
    queue = iter(recorder.samples())
    proposals = []
    own = RPNHead.predict_by_feat

    def predict_by_feat(self, *args, **kwargs):
        proposals.extend(own(self, *args, **kwargs))
        return [
            InstanceData(bboxes=boxes[valid], scores=scores[valid])
            for boxes, scores, valid in zip(*proposed, strict=True)
        ]

    wanted = []

    def sample_positive(self, assigned, most, bboxes, **_):
        wanted[:] = next(queue)
        return _find(bboxes, wanted[0], assigned.gt_inds > 0, most)

    def sample_negative(self, assigned, most, bboxes, **_):
        return _find(bboxes, wanted[1], assigned.gt_inds == 0, most)

    with ExitStack() as stack:
        for target, name, function in (
            (RPNHead, 'predict_by_feat', predict_by_feat),
            (RandomSampler, '_sample_pos', sample_positive),
            (RandomSampler, '_sample_neg', sample_negative),
        ):
            stack.enter_context(patch.object(target, name, function))
        theirs = slow.loss(data['inputs'], copy.deepcopy(data['data_samples']))
    for boxes, scores, valid, expected in zip(*proposed, proposals, strict=True):
        torch.testing.assert_close(scores[valid], expected.scores)
        # Boxes of the same score come in any order.
        columns = [x.sort(0).values for x in (boxes[valid], expected.bboxes)]
        torch.testing.assert_close(*columns)
    return ours, theirs


def _find(boxes: Tensor, wanted: Tensor, candidates: Tensor, most: int) -> Tensor:
    """Places of the wanted boxes among the candidates, as many as MMDetection would draw."""
    assert len(wanted) == min(int(candidates.sum()), most)
    free, places = candidates.clone(), []
    for box in wanted:
        distance = torch.where(free, (boxes - box).abs().amax(1), torch.inf)
        places.append(int(distance.argmin()))
        assert distance[places[-1]] < 1e-3, 'what was sampled is no candidate'
        free[places[-1]] = False
    return torch.tensor(places, dtype=torch.int64)


def total(losses: dict) -> Tensor:
    """Their sum, as MMEngine takes it."""
    named = (value for name, value in losses.items() if 'loss' in name)
    return sum(v.mean() for value in named for v in (value if isinstance(value, list) else [value]))
