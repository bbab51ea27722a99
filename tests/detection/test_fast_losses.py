"""Fast detectors against MMDetection's: losses and gradients at the same samples and regions."""

import pytest
import torch

pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')

from tests.detection import fast as small
from vim_mm.detection import roi
from vim_mm.detection.sample import most_positive

BATCHES = {
    'usual': dict(objects=(5, 3)),
    'an image without objects': dict(objects=(0, 4)),
    'no object': dict(objects=(0, 0)),
    'more than a bucket': dict(objects=(20, 3)),
    'ignored': dict(objects=(3, 0), ignored=3),
    'sizes': dict(objects=(4, 4), sizes=((50, 90), (64, 70))),
}
IGNORING = dict(
    train_cfg__rpn__assigner__ignore_iof_thr=0.3, train_cfg__rcnn__assigner__ignore_iof_thr=0.3
)
OTHERS = {
    'inside': dict(train_cfg__rpn__allowed_border=0),
    'partly inside': dict(train_cfg__rpn__allowed_border=4),
    'one best': dict(train_cfg__rpn__assigner__gt_max_assign_all=False),
    'no weak': dict(train_cfg__rpn__assigner__match_low_quality=False),
    'between': dict(train_cfg__rpn__assigner__neg_iou_thr=(0.1, 0.3)),
    'everything fits': dict(train_cfg__rpn__assigner__min_pos_iou=0.0),
    'few negatives': dict(
        train_cfg__rpn__sampler__neg_pos_ub=2, train_cfg__rcnn__sampler__neg_pos_ub=1.5
    ),
    'weights': dict(train_cfg__rpn__pos_weight=2.0, train_cfg__rcnn__pos_weight=3.0),
    'no true boxes': dict(train_cfg__rcnn__sampler__add_gt_as_proposals=False),
    'agnostic': dict(
        roi_head__bbox_head__reg_class_agnostic=True, roi_head__mask_head__class_agnostic=True
    ),
    'soft masks': dict(train_cfg__rcnn__soft_mask_target=True),
    'smooth': dict(
        rpn_head__loss_bbox=dict(type='SmoothL1Loss', beta=0.1, loss_weight=2.0),
        roi_head__bbox_head__loss_bbox=dict(type='SmoothL1Loss', beta=0.5, loss_weight=3.0),
    ),
    'large boxes': dict(train_cfg__rpn_proposal__min_bbox_size=12),
    'every anchor': dict(train_cfg__rpn_proposal__nms_pre=-1),
    'unclipped': dict(rpn_head__bbox_coder__clip_border=False),
    'ordinary pooling': dict(
        roi_head__bbox_roi_extractor__roi_layer=dict(
            type='RoIAlign', output_size=7, sampling_ratio=2, aligned=False
        )
    ),
    'one level': dict(roi_head__bbox_roi_extractor__featmap_strides=[4]),
    'shared features': dict(
        roi_head__mask_roi_extractor=None,
        roi_head__bbox_roi_extractor__roi_layer__output_size=14,
        roi_head__bbox_head__roi_feat_size=14,
    ),
    'many samples': dict(train_cfg__rcnn__sampler__num=400),
}


@pytest.fixture
def gpu_shapes(monkeypatch):
    """As many masks as a GPU would compute, without counting how many there are."""
    monkeypatch.setattr(roi, '_most_masks', lambda sampler, regions: most_positive(sampler))


def check(changes: dict, batch: dict) -> None:
    fast, slow = small.detectors(small.config(**changes))
    assert fast._why_slow == dict(rpn_head=None, roi_head=None)
    given = small.batch(*batch['objects'], **{k: v for k, v in batch.items() if k != 'objects'})
    ours, theirs = small.both_losses(fast, slow, given)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        value = ours[name]
        if isinstance(expected, list):
            value, expected = torch.stack(value), torch.stack(expected)
        assert value.shape == expected.shape or expected.numel() == 1, name
        torch.testing.assert_close(value.sum(), expected.sum(), rtol=1e-5, atol=1e-6, msg=name)
    small.total(ours).backward()
    small.total(theirs).backward()
    expected = dict(slow.named_parameters())
    for name, param in fast.named_parameters():
        grad = expected[name].grad
        assert (grad is None) == (param.grad is None), name
        assert grad is None or torch.isfinite(param.grad).all(), name
        if grad is not None:
            error = (param.grad - grad).abs().max()
            assert error <= 1e-5 * max(1e-2, grad.abs().max()), f'{name} is off by {error:.1e}'


@pytest.mark.parametrize('batch', BATCHES)
@pytest.mark.parametrize('kind', small.CONFIGS)
def test_losses_and_gradients(kind, batch, gpu_shapes):
    changes = IGNORING if batch == 'ignored' else {}
    check(dict(kind=kind, **changes), BATCHES[batch])


# A cascade has the same RPN; one level and shared features are of the standard head.
OF_ONE_HEAD = {
    *('inside', 'partly inside', 'one best', 'no weak', 'between', 'everything fits'),
    *('large boxes', 'every anchor', 'unclipped', 'one level', 'shared features'),
}


@pytest.mark.parametrize(
    ('kind', 'setting'),
    [('standard', setting) for setting in OTHERS]
    + [
        pytest.param('cascade', setting, marks=pytest.mark.slow)
        for setting in OTHERS
        if setting not in OF_ONE_HEAD
    ],
)
def test_settings(kind, setting, gpu_shapes):
    check(dict(kind=kind, **OTHERS[setting]), dict(objects=(5, 2)))


@pytest.mark.parametrize('objects', [(5, 2), (0, 0)])
def test_as_many_masks_as_there_are(objects):
    check(dict(kind='standard'), dict(objects=objects))
