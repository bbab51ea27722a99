"""benchmarks/benchmark_detector.py: the forms of a detector, and what is printed of them."""

from types import SimpleNamespace

import pytest
from mmengine.config import ConfigDict

from benchmarks.measure.whole_models import change_detector
from tests.scripts import load


def test_the_forms_of_a_detector():
    model = ConfigDict(type='CascadeRCNN', data_preprocessor=dict(type='DetDataPreprocessor'))
    for _ in range(2):
        change_detector(model, 'fast')
        assert model == dict(
            type='FastDetector',
            of='CascadeRCNN',
            data_preprocessor=dict(type='FastDetDataPreprocessor'),
        )
    for _ in range(2):
        change_detector(model, 'mmdet')
        assert model == dict(type='CascadeRCNN', data_preprocessor=dict(type='DetDataPreprocessor'))


def test_the_report():
    tool = SimpleNamespace(**load('benchmarks/benchmark_detector.py'))
    rows = [
        {'form': 'mmdet', 'ms': 141.0, 'waits': 166.0, 'waiting': {'nms.py:30': 2}},
        {'form': 'fast', 'ms': 63.0, 'waits': 3.0, 'longest': {'a_kernel<int>': 1.25}},
    ]
    lines = tool.report(rows).splitlines()
    assert lines[0].split() == ['|', 'form', '|', 'ms', '|', 'waits', '|']
    assert lines[-2].split() == ['mmdet', 'waiting', '2.000', 'times', 'nms.py:30']
    assert lines[-1].split() == ['fast', 'longest', '1.250', 'ms', 'a_kernel<int>']


@pytest.mark.slowest
def test_a_step_of_each_form_on_a_cpu():
    pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
    tool = SimpleNamespace(**load('benchmarks/benchmark_detector.py'))
    args = SimpleNamespace(size=(64, 64), batch=1, fp32=True, device='cpu', steps=1, blocks=1)
    for form in ('mmdet', 'fast'):
        found = tool.measure('det/mask_rcnn_vim_shapes.py', form, args)
        assert found['ms'] > 0 and found['loss'] > 0
