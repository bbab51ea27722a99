"""The cascade of detectron2: one mask head, every box goes on, probabilities are averaged."""

import pytest
import torch
from mmengine.config import Config
from mmengine.structures import InstanceData

from vim_mm.config import config_path
from vim_mm.engine import activate

pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')

SIZE = (64, 96)


@pytest.fixture(scope='module')
def head():
    """The released head, made narrow."""
    from mmdet.registry import MODELS
    from mmdet.utils import register_all_modules

    register_all_modules(init_default_scope=True)
    activate()
    model = Config.fromfile(config_path('det/cascade_mask_rcnn_vim_t_zoh_released.py')).model
    cfg, test = model.roi_head, model.test_cfg.rcnn
    narrow = dict(in_channels=8, conv_out_channels=8)
    for part in cfg.bbox_head:
        part.update(fc_out_channels=8, num_classes=3, **narrow)
    cfg.mask_head.update(num_classes=3, **narrow)
    cfg.bbox_roi_extractor.out_channels = cfg.mask_roi_extractor.out_channels = 8
    torch.manual_seed(0)
    head = MODELS.build({**cfg, 'train_cfg': model.train_cfg.rcnn, 'test_cfg': test})
    for part in head.bbox_head:  # deltas and scores that matter
        torch.nn.init.normal_(part.fc_reg.weight, std=0.5)
        torch.nn.init.normal_(part.fc_cls.weight, std=0.5)
    return head


def features() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return tuple(torch.randn(2, 8, *(s // 2**i for s in SIZE)) for i in (2, 3, 4, 5))


def proposals(number: int = 20) -> list[InstanceData]:
    torch.manual_seed(2)
    corners = torch.rand(2, number, 2) * 40
    boxes = torch.cat([corners, corners + 4 + torch.rand(2, number, 2) * 20], -1)
    return [InstanceData(bboxes=b, scores=torch.rand(number)) for b in boxes]


def samples():
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import PolygonMasks

    made = []
    for boxes in ([[4.0, 4, 30, 40], [20, 10, 60, 50]], []):
        polygons = [[[b[0], b[1], b[2], b[1], b[2], b[3], b[0], b[3]]] for b in boxes]
        polygons = [[torch.tensor(p).numpy() for p in shape] for shape in polygons]
        sample = DetDataSample(metainfo=dict(img_shape=SIZE, ori_shape=SIZE, scale_factor=(1, 1)))
        sample.gt_instances = InstanceData(
            bboxes=torch.tensor(boxes).reshape(-1, 4),
            labels=torch.arange(len(boxes)),
            masks=PolygonMasks(polygons, *SIZE),
        )
        made.append(sample)
    return made


def test_one_mask_head(head):
    masks = [name for name, _ in head.named_parameters() if name.startswith('mask_head')]
    assert masks and all(name.startswith('mask_head.0.') for name in masks)
    state = head.state_dict()
    stages = {name.split('.')[1] for name in state if name.startswith('mask_head')}
    assert stages == {'0', '1', '2'}, 'checkpoints have the form of CascadeRoIHead'
    # Without an image that has an object there is no positive sample, and no mask to learn.
    losses = head.loss(features(), proposals(), samples())
    assert [name for name in losses if 'mask' in name] == ['s0.loss_mask']
    assert {name for name in losses if 'cls' in name} == {f's{i}.loss_cls' for i in range(3)}
    sum(v for name, v in losses.items() if 'loss' in name).backward()
    assert all(param.grad is not None for param in head.parameters())
    head.zero_grad()


def test_every_box_goes_on_to_the_next_stage(head, monkeypatch):
    seen = []
    forward = type(head).bbox_loss

    def record(self, stage, x, sampled):
        results = forward(self, stage, x, sampled)
        seen.append(([len(s.priors) for s in sampled], results['rois'], results['bbox_pred']))
        return results

    monkeypatch.setattr(type(head), 'bbox_loss', record)
    head.loss(features(), proposals(), samples())
    # The first stage adds the two true boxes to the 20 proposals of the first image.
    assert seen[0][0] == [22, 20]
    metas = [sample.metainfo for sample in samples()]
    for stage in (0, 1):
        counts, rois, deltas = seen[stage]
        moved = torch.cat(head._refine(stage, rois, deltas, counts, metas))
        moved = moved[(moved[:, 2] > moved[:, 0]) & (moved[:, 3] > moved[:, 1])]
        following = seen[stage + 1][1][:, 1:]
        # Positive samples come first, so the order is another.
        torch.testing.assert_close(_ordered(following), _ordered(moved))


def _ordered(boxes: torch.Tensor) -> torch.Tensor:
    return boxes[boxes[:, 0].argsort(stable=True)]


def test_gradients_of_a_stage_reach_features_by_a_third(head):
    x = [level.requires_grad_() for level in features()]
    rois = torch.cat([torch.zeros(20, 1), proposals()[0].bboxes], 1)
    results = head._bbox_forward(0, x, rois)
    extracted = head.bbox_roi_extractor[0](x, rois)
    scores, _ = head.bbox_head[0](extracted)
    torch.testing.assert_close(results['cls_score'], scores)
    of_features, of_weights = [], []
    for out in (results['cls_score'], scores):
        grads = torch.autograd.grad(out.square().sum(), [x[0], head.bbox_head[0].fc_cls.weight])
        of_features.append(grads[0])
        of_weights.append(grads[1])
    torch.testing.assert_close(of_features[0], of_features[1] / 3)
    torch.testing.assert_close(*of_weights)


def test_probabilities_are_averaged(head):
    x, found = features(), proposals()
    boxes = [result.bboxes for result in found]
    metas = [sample.metainfo for sample in samples()]
    with torch.no_grad():
        rois = torch.cat(
            [torch.cat([torch.full((20, 1), float(i)), b], 1) for i, b in enumerate(boxes)]
        )
        expected = torch.zeros(40, 4)
        for stage in range(3):
            pooled = head.bbox_roi_extractor[stage](x, rois)
            scores, deltas = head.bbox_head[stage](pooled)
            expected += scores.softmax(-1) / 3
            if stage < 2:
                moved = head.bbox_head[stage].bbox_coder.decode(rois[:, 1:], deltas, max_shape=SIZE)
                rois = torch.cat([rois[:, :1], moved], 1)
        last_rois, logits, last_deltas = head._refine_roi(
            x,
            torch.cat(
                [torch.cat([torch.full((20, 1), float(i)), b], 1) for i, b in enumerate(boxes)]
            ),
            metas,
            (20, 20),
        )
    torch.testing.assert_close(torch.cat(logits).softmax(-1), expected)
    torch.testing.assert_close(torch.cat(last_rois), rois)
    torch.testing.assert_close(torch.cat(last_deltas), deltas)
    predicted = head.eval().predict(x, found, samples(), rescale=False)
    assert all(len(p.bboxes) and p.masks.shape[1:] == SIZE for p in predicted)


def test_masks_are_computed_once(head, monkeypatch):
    """They are those of CascadeRoIHead, which computes them for each stage."""
    from mmdet.models.roi_heads import CascadeRoIHead

    calls = []
    forward = type(head)._mask_forward

    def record(self, stage, x, rois):
        calls.append(stage)
        return forward(self, stage, x, rois)

    monkeypatch.setattr(type(head), '_mask_forward', record)
    x, found = features(), proposals()
    half = dict(scale_factor=(2, 2), ori_shape=(32, 48))
    metas = [sample.metainfo | half for sample in samples()]
    empty = InstanceData(bboxes=torch.empty(0, 4), labels=torch.empty(0, dtype=torch.long))

    def boxes(*numbers: int) -> list[InstanceData]:
        labels = torch.arange(20) % 3
        full = [InstanceData(bboxes=f.bboxes.clone(), labels=labels) for f in found]
        return [f[:n] if n else empty for f, n in zip(full, numbers)]

    for numbers, computed in (((20, 20), 1), ((20, 0), 1), ((0, 0), 0)):
        calls.clear()
        with torch.no_grad():
            masks = head.predict_mask(x, metas, boxes(*numbers), rescale=True)
            assert len(calls) == computed
            expected = CascadeRoIHead.predict_mask(head, x, metas, boxes(*numbers), rescale=True)
        for a, b in zip(masks, expected, strict=True):
            assert torch.equal(a.masks, b.masks) and torch.equal(a.bboxes, b.bboxes)
        assert any(each.masks.any() for each in masks) == bool(computed)


def test_boxes_of_each_class_are_refused():
    from vim_mm.detection.roi_head import SharedMaskCascadeRoIHead

    activate()
    model = Config.fromfile(config_path('det/cascade_mask_rcnn_vim_t_zoh_released.py')).model
    cfg = {k: v for k, v in model.roi_head.items() if k != 'type'}
    cfg['bbox_head'][1]['reg_class_agnostic'] = False
    with pytest.raises(ValueError, match='reg_class_agnostic=True'):
        SharedMaskCascadeRoIHead(**cfg)
