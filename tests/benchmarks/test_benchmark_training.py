"""The benchmarks of training as a user runs them, at sizes that say nothing about speed."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from mmengine.structures import PixelData

from tests.scripts import load
from tests.tools.conftest import run_tool
from vim_mm.config import config_path

pytest.importorskip('mmseg')
from mmseg.structures import SegDataSample

LOADER = dict(batch_size=8, sampler=dict(type='InfiniteSampler'))


@pytest.fixture(scope='module')
def tool():
    return load('benchmarks/benchmark_training.py')


@pytest.mark.slowest
def test_an_iteration_is_data_and_host(tmp_path):
    printed = run_tool(
        'benchmarks/benchmark_training.py', config_path('seg/upernet_vim_shapes.py'), '--iters', 6,
        '--warmup', 1, '--pictures', 2, '--out', 'figures.json', '--cfg-options',
        'train_dataloader.batch_size=2', 'train_dataloader.num_workers=99', cwd=tmp_path,
    )  # fmt: skip
    assert 'data/shapes is not there: drawing pictures' in printed
    result = json.loads((tmp_path / 'figures.json').read_text())
    assert 0 < result['num_workers'] < 99 or len(os.sched_getaffinity(0)) >= 99
    times = result['seconds']
    assert 0 < times['data'] < times['iteration']
    assert 0 < times['host'] < 2 * times['iteration']
    assert [*result['transforms']] == [
        'LoadImageFromFile', 'LoadAnnotations', 'Resize', 'RandomFlip', 'PackSegInputs'
    ]  # fmt: skip
    assert all(line in printed for line in result['advice'])
    assert [path.name for path in tmp_path.iterdir()] == ['figures.json']


def test_only_the_loader_is_data(tool, monkeypatch):
    """The loop and the hooks before a step are work of the host."""
    seconds = [0.0]
    clock = tool['IterationClock'](warmup=0, last=9)
    monkeypatch.setitem(type(clock).before_train.__globals__, 'perf_counter', lambda: seconds[0])

    def work(duration: float) -> None:
        seconds[0] += duration

    runner = SimpleNamespace(
        train_loop=SimpleNamespace(dataloader_iterator=(work(4) for _ in range(3)))
    )
    clock.before_train(runner)
    for index in range(3):
        work(1)
        next(runner.train_loop.dataloader_iterator)
        work(2)
        clock.before_train_iter(runner, index)
        work(8)
        clock.after_train_iter(runner, index)
    assert clock.rows == [dict(iteration=15, data=4, host=11)] * 2


@pytest.mark.parametrize(
    ('times', 'says'),
    [
        (dict(iteration=0.1, data=0.06, host=0.04), 'waits for data 60 % of the time'),
        (dict(iteration=0.1, data=0.001, host=0.09, device=0.03), 'device waits for the host'),
        (dict(iteration=0.1, data=0.001, host=0.01, device=0.095), 'The device is busy'),
        (dict(iteration=0.1, data=0.06, host=0.04, device=0.03), 'waits for data 60 % of the time'),
        # The host waits for the loader, and the device works on.
        (dict(iteration=0.1, data=0.06, host=0.04, device=0.095), 'does not wait for data'),
    ],
)
def test_advice(tool, times, says):
    loader = dict(LOADER, num_workers=4)
    found = ' '.join(tool['advice'](times, 0.02, loader))
    assert says in found
    if says.startswith('waits for data'):
        assert 'The device' not in found


def test_a_graph_is_not_advised_twice(tool):
    times = dict(iteration=0.1, data=0.001, host=0.09, device=0.03)
    loader = dict(LOADER, num_workers=4)
    launched, graph = (' '.join(tool['advice'](times, 0.02, loader, g)) for g in (False, True))
    assert '--graph' in launched and '--graph' not in graph
    assert 'The device waits for the host: a larger batch.' in graph


def test_compile_without_graph_is_refused(tmp_path):
    arguments = ('benchmarks/benchmark_training.py', 'a.py', '--compile')
    log = run_tool(*arguments, cwd=tmp_path, fails=True)
    assert log.splitlines()[-1].endswith('give --graph as well')


def test_workers_that_keep_up(tool):
    """8 pictures of 20 ms each in 40 ms of work: 4 workers, and a fifth more."""
    loader = dict(LOADER, num_workers=1)
    (first, *_) = tool['advice'](dict(iteration=0.1, data=0.06, host=0.04), 0.02, loader)
    assert 'num_workers=5' in first
    loader = dict(LOADER, num_workers=8)
    (first, *_) = tool['advice'](dict(iteration=0.1, data=0.06, host=0.04), 0.02, loader)
    assert 'although 5 of 8 workers would keep up' in first


def test_a_batch_over_and_over(tool):
    """Copies of all but the tensors: a preprocessor pads labels in their samples."""
    label = torch.zeros(1, 4, 4)
    sample = SegDataSample(gt_sem_seg=PixelData(data=label), metainfo=dict(img_shape=(4, 4)))
    batch = dict(inputs=[torch.ones(3, 4, 4)], data_samples=[sample])
    batches = tool['copies'](batch)
    for _ in range(2):
        found = next(batches)
        (own,) = found['data_samples']
        assert own.gt_sem_seg.data is label and found['inputs'][0] is batch['inputs'][0]
        assert own.img_shape == (4, 4)
        del own.gt_sem_seg.data
        found['inputs'].clear()
