"""What is told of a run that begins."""

import pytest
import torch

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
