"""MMDetection's metric by faster-coco-eval; nox -s adapters has that installed."""

import sys

import numpy as np
import pytest
import torch

from tests.field.base import coco, train


def test_a_missing_package_is_named_before_the_first_iteration(tmp_path, monkeypatch):
    pytest.importorskip('mmdet.evaluation.metrics.faster_coco_metric')
    monkeypatch.setitem(sys.modules, 'faster_coco_eval', None)
    text = coco(tmp_path) + "val_evaluator['type'] = 'FasterCocoMetric'\n"
    for phase in ('val', 'test'):
        message = f'{phase}_evaluator: FasterCocoMetric needs faster-coco-eval, which is not'
        with pytest.raises(RuntimeError, match=message):
            train(tmp_path, text, test=phase == 'test')
    assert not [*tmp_path.rglob('*.pth')]


@pytest.mark.slow
def test_equal_figures(tmp_path):
    """Those of the metric by pycocotools."""
    pytest.importorskip('faster_coco_eval', reason='faster-coco-eval is not installed')
    from mmdet.evaluation.metrics import CocoMetric, FasterCocoMetric
    from pycocotools.coco import COCO

    coco(tmp_path)
    truth = COCO(str(tmp_path / 'data/ann.json'))
    random = np.random.default_rng(0)
    samples = []
    for image_id in truth.getImgIds():
        found = [*truth.loadAnns(truth.getAnnIds(image_id))] * 3
        boxes = np.array([[x, y, x + w, y + h] for x, y, w, h in (each['bbox'] for each in found)])
        boxes = boxes + random.normal(0, 2, boxes.shape)
        masks = np.zeros((len(found), 48, 64), bool)
        for mask, (left, top, right, bottom) in zip(masks, boxes.round().clip(0).astype(int)):
            mask[top:bottom, left:right] = True
        instances = dict(
            bboxes=torch.tensor(boxes, dtype=torch.float32),
            scores=torch.tensor(random.random(len(found)), dtype=torch.float32),
            labels=torch.zeros(len(found), dtype=torch.int64),
            masks=torch.from_numpy(masks),
        )
        sample = dict(img_id=image_id, ori_shape=(48, 64), pred_instances=instances)
        samples.append(dict(sample, gt_instances=dict(bboxes=[], labels=[])))
    figures = []
    for kind in (CocoMetric, FasterCocoMetric):
        metric = kind(ann_file=str(tmp_path / 'data/ann.json'), metric=['bbox', 'segm'])
        metric.dataset_meta = dict(classes=('box',))
        metric.process({}, samples)
        figures.append(metric.evaluate(len(samples)))
    expected, found = figures
    assert 0.1 < expected['coco/bbox_mAP'] < 1 and 0.1 < expected['coco/segm_mAP'] < 1
    assert expected == {name: found[name] for name in expected}
