"""Frames under way on a GPU: the same predictions as one picture at a time."""

import copy

import cv2
import numpy as np
import pytest
import torch
from mmengine.dataset import Compose, pseudo_collate

from tests.stream.conftest import draw
from tests.stream.test_running import Drawn, stream
from vim_mm.acceleration import accelerate
from vim_mm.stream.predictor import Predictor

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device'),
]


def one_at_a_time(task, pictures, amp, tmp_path):
    """What tools/infer.py predicts on the GPU."""
    model = accelerate(copy.deepcopy(task.model).cuda(), amp=amp)
    samples = []
    for picture in pictures:
        cv2.imwrite(str(tmp_path / 'picture.png'), picture)
        data = Compose(task.transforms)(dict(img_path=str(tmp_path / 'picture.png'), img_id=0))
        with torch.no_grad():
            samples.append(model.test_step(pseudo_collate([data]))[0].cpu())
    return samples


def streamed(task, pictures, **options):
    """What the stream predicts, copied, and the seconds of the stages."""
    predictor = Predictor(copy.deepcopy(task.model).cuda(), task.transforms, timed=True, **options)
    seen = []
    stream(
        Drawn(pictures),
        predictor,
        on_result=lambda number, slot, x: seen.append((copy.deepcopy(x), slot.seconds)),
    ).run()
    return zip(*seen, strict=True)


@pytest.mark.parametrize(
    ('mode', 'amp', 'graph'),
    [('whole', False, False), ('whole', True, True), ('slide', False, True)],
)
def test_labels(mode, amp, graph, seg, tmp_path, monkeypatch):
    if mode == 'slide':
        window = dict(mode='slide', crop_size=(32, 32), stride=(24, 20))
        monkeypatch.setattr(seg.model, 'test_cfg', type(seg.model.test_cfg)(window))
    pictures = [draw(i, *((96, 64) if i % 3 else (64, 80))) for i in range(12)]
    labels, seconds = streamed(seg, pictures, amp=amp, graph=graph)
    expected = one_at_a_time(seg, pictures, amp, tmp_path)
    assert len({x.tobytes() for x in labels}) == 12
    for found, truth in zip(labels, expected, strict=True):
        assert found.dtype == np.uint8
        assert np.array_equal(found, truth.pred_sem_seg.data[0].numpy())
    stages = ['upload', 'preprocess', 'backbone', 'head', 'postprocess', 'download']
    assert all([*row] == stages and min(row.values()) > 0 for row in seconds)


@pytest.mark.parametrize('graph', [False, True])
def test_instances(graph, det, tmp_path):
    pictures = [draw(i) for i in range(6)]
    found, seconds = streamed(det, pictures, graph=graph, score=0.1)
    expected = one_at_a_time(det, pictures, False, tmp_path)
    assert sum(len(x.scores) for x in found) > 0
    for ours, sample in zip(found, expected, strict=True):
        truth = sample.pred_instances
        truth = truth[truth.scores >= 0.1]
        assert len(ours.scores) == len(truth)
        # Orders of equal scores, and of additions in RoIAlign, may differ.
        np.testing.assert_allclose(ours.scores, np.sort(truth.scores.numpy())[::-1], rtol=1e-4)
    stages = {'upload', 'preprocess', 'backbone', 'head', 'postprocess', 'download'}
    assert all({*row} == stages for row in seconds)
