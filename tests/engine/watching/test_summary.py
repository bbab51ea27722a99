"""What is told of a run that begins."""

import re
import time

import pytest
import torch
from mmengine.hooks import Hook

from tests.engine.optimization.test_graphed_step import GRAPHED, train
from tests.engine.toy import ToyModel, make_runner
from vim_mm import accelerate
from vim_mm.engine.watching import summary


@pytest.fixture
def told(monkeypatch):
    """The dtypes of the scans whose path is told."""
    dtypes = []

    def path_of(device, dtype, *args, **kwargs):
        dtypes.append(dtype)
        return real(device, dtype, *args, **kwargs)

    real = summary.path_of
    monkeypatch.setattr(summary, 'path_of', path_of)
    return dtypes


@pytest.mark.parametrize(
    ('kind', 'dtype'),
    [
        ('OptimWrapper', torch.float32),
        ('BFloat16OptimWrapper', torch.bfloat16),
        ('AmpOptimWrapper', torch.bfloat16),  # without a dtype: on the CPU
    ],
)
def test_the_path_is_that_of_the_dtype_of_a_training(kind, dtype, told, tmp_path, monkeypatch):
    if kind == 'AmpOptimWrapper':  # for accelerators only
        monkeypatch.setattr('mmengine.optim.optimizer.amp_optimizer_wrapper.is_npu_available',
                            lambda: True)  # fmt: skip
    options = dict(type=kind, optimizer=dict(type='SGD', lr=0.1))
    runner = make_runner(tmp_path, optim_wrapper=options)
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    lines = [*summary.describe(runner, 'train')]
    assert any(line.startswith('Method:') for line in lines)
    assert {*told} == {dtype} and not torch.is_autocast_enabled('cpu')


@pytest.mark.parametrize('amp', [False, True])
def test_the_path_is_that_of_the_dtype_of_a_test(amp, told, tmp_path):
    model = ToyModel()
    runner = make_runner(tmp_path, model)
    accelerate(model, amp=amp)
    assert any(line.startswith('Method:') for line in summary.describe(runner, 'test'))
    assert {*told} == {torch.bfloat16 if amp else torch.float32}


class SlowBeginning(Hook):
    """Takes two seconds for an iteration that compiles or is recorded, and no time for others."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter < 2:
            time.sleep(2)


def estimates(folder) -> list[str]:
    (log,) = folder.glob('*/*.log')
    return re.findall(r'- INFO - (.* more, and validations besides\.)', log.read_text())


@pytest.mark.usefixtures('graph_device')
def test_the_time_to_go_is_that_of_replays(tmp_path):
    """Neither ours nor MMEngine's estimate has the compilation in it."""
    slow = [SlowBeginning(), summary.SummaryHook()]
    steps = dict(steps=8, val_dataloader=None, val_cfg=None, val_evaluator=None)
    steps |= dict(train_cfg=dict(by_epoch=False, max_iters=8))
    train(tmp_path, False, custom_hooks=[*slow, GRAPHED], **steps)
    assert estimates(tmp_path) == [
        'At the speed of its graphs the training takes 0:00:00 more, and validations besides.'
    ]
    (log,) = tmp_path.glob('*/*.log')
    assert re.search(r'First iteration after [2-9]\.\d s\.\n', log.read_text())
    train(tmp_path / 'eager', False, custom_hooks=slow, **steps)
    (told,) = estimates(tmp_path / 'eager')
    assert re.search(r'at its speed the training takes 0:00:1\d more', told)
