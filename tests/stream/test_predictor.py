"""The order of copies, stages and events of the GPU's path, on tensors of the CPU.

Streams here do at once what they are given, and graphs are those of ``tests/graphs.py``. So this
sees wrong buffers and missing calls, and not a missing wait: for that there is
test_predictor_cuda.py.
"""

import copy
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tests.graphs import GraphOfCalls, record_calls
from tests.stream.conftest import draw
from tests.stream.test_running import Drawn, infer, stream
from vim_mm import acceleration
from vim_mm.acceleration import GraphedCall
from vim_mm.stream import predictor as module
from vim_mm.stream.predictor import Predictor
from vim_mm.stream.stages import GraphedStages


class Event:
    def __init__(self, enable_timing=False):
        self.time = None

    def record(self):
        self.time = time.perf_counter()

    def synchronize(self):
        assert self.time is not None

    def elapsed_time(self, end):
        return 1e3 * (end.time - self.time)


class Stream:
    def __init__(self, device):
        assert device == torch.device('cpu')

    def wait_stream(self, other):
        assert other is not self


@contextmanager
def stream_context(stream):
    yield stream


@pytest.fixture
def gpu(monkeypatch):
    """PyTorch's CUDA, as far as a stream calls it."""
    empty = torch.empty
    monkeypatch.setattr(torch, 'empty', lambda *args, pin_memory=False, **kw: empty(*args, **kw))
    for name, value in {
        'Event': Event,
        'Stream': Stream,
        'stream': stream_context,
        'synchronize': lambda device: None,
        'graph_pool_handle': lambda: (0, 0),
        'is_available': lambda: True,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(module, 'on_gpu', lambda device: True)
    monkeypatch.setattr('vim_mm.stream.stages.record', record_calls)
    monkeypatch.setattr(acceleration, 'record', record_calls)
    monkeypatch.setattr(GraphedCall, '_can_be_recorded', lambda self, leaves: True)
    monkeypatch.setattr(GraphOfCalls, 'replays', 0)


@pytest.mark.usefixtures('gpu')
@pytest.mark.parametrize(('mode', 'graph'), [('whole', False), ('whole', True), ('slide', True)])
def test_labels(mode, graph, seg, tmp_path, monkeypatch):
    if mode == 'slide':
        window = dict(mode='slide', crop_size=(32, 32), stride=(24, 20))
        monkeypatch.setattr(seg.model, 'test_cfg', type(seg.model.test_cfg)(window))
    pictures = [draw(i, *((96, 64) if i % 3 else (64, 80))) for i in range(4)]
    predictor = Predictor(copy.deepcopy(seg.model), seg.transforms, graph=graph, timed=True)
    seen = []
    stream(
        Drawn(pictures),
        predictor,
        on_result=lambda number, slot, x: seen.append((x.copy(), slot.seconds)),
    ).run()
    stages = ['upload', 'preprocess', 'backbone', 'head', 'postprocess', 'download']
    for picture, (labels, seconds) in zip(pictures, seen, strict=True):
        truth = infer(seg, picture, tmp_path).pred_sem_seg.data[0].numpy()
        assert np.array_equal(labels, truth)
        assert [*seconds] == stages and min(seconds.values()) > 0
    assert [*predictor._stages] == [(80, 64), (64, 96)]
    graphed = [isinstance(stages, GraphedStages) for stages in predictor._stages.values()]
    assert graphed == [graph] * 2 and GraphOfCalls.replays == (4 * len(pictures) if graph else 0)


@pytest.mark.usefixtures('gpu')
def test_instances(det, tmp_path):
    predictor = Predictor(
        copy.deepcopy(det.model), det.transforms, graph=True, score=0.1, timed=True
    )
    pictures, seen = [draw(i) for i in range(3)], []
    stream(
        Drawn(pictures), predictor, on_result=lambda n, slot, x: seen.append((x, slot.seconds))
    ).run()
    for picture, (found, seconds) in zip(pictures, seen, strict=True):
        truth = infer(det, picture, tmp_path).pred_instances
        assert len(found.scores) == (truth.scores >= 0.1).sum() > 0
        assert {*seconds} == {
            'upload', 'preprocess', 'backbone', 'head', 'postprocess', 'download'
        }  # fmt: skip
    # Backbone, neck and RPN: the second of three calls that warm up records, all others replay.
    assert GraphOfCalls.replays == 3 * (2 + 3)


def test_frames_of_many_sizes_leave_no_hooks(det):
    """A folder of pictures of many sizes has stages for each size."""
    model = copy.deepcopy(det.model)
    predictor = Predictor(model, det.transforms)
    frames = [draw(i, 64 + 8 * i, 64) for i in range(3)]
    stream(Drawn(frames), predictor).run()
    assert len(predictor._stages) == 3
    assert not any(module._forward_hooks for module in model.modules())
