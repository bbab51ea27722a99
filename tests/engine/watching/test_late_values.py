"""Losses that are read one iteration later are the same, and there where they are looked at."""

import json

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.model import BaseDataPreprocessor

from tests.engine.toy import ToyModel, make_runner
from vim_mm.engine.watching.late_values import HostCopy


class Reader(Hook):
    """Notes how many losses the hub has after each step, and before each validation."""

    def __init__(self):
        self.known = []

    def before_val(self, runner):
        self.after_train_iter(runner, 0)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        scalars = runner.message_hub.log_scalars
        history = scalars['train/loss'].data[0] if 'train/loss' in scalars else []
        self.known.append(len(history))


def trained(folder):
    """What the hub had after each step, the log, and the losses in the checkpoints."""
    reader = Reader()
    hooks = dict(
        checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=5),
        logger=dict(type='LoggerHook', interval=3),
    )
    runner = make_runner(
        folder, custom_hooks=[reader], default_hooks=hooks, randomness=dict(seed=0),
        train_cfg=dict(by_epoch=False, max_iters=8, val_interval=7),
    )  # fmt: skip
    runner.train()
    lines = next(folder.rglob('scalars.json')).read_text().splitlines()
    log = [(line['step'], line['loss']) for line in map(json.loads, lines) if 'loss' in line]
    checkpoint = torch.load(folder / 'iter_5.pth', weights_only=False)
    return reader.known, log, len(checkpoint['message_hub']['log_scalars']['train/loss'].data[0])


def test_the_log_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(HostCopy, 'is_late', False)
    known, log, saved = trained(tmp_path / 'at_once')
    assert known == [1, 2, 3, 4, 5, 6, 7, 7, 8, 8]
    monkeypatch.setattr(HostCopy, 'is_late', True)
    # MMEngine logs the end of the loader, of two batches, and every third step; the fifth is saved,
    # and validations follow the seventh and the last.
    known, late_log, late_saved = trained(tmp_path / 'late')
    assert known == [0, 2, 3, 3, 5, 6, 6, 7, 8, 8]
    assert late_log == log and [step for step, _ in log] == [2, 3, 6]
    assert late_saved == saved == 5


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_values_of_a_gpu_do_not_wait():
    values = {'loss': torch.full((), 3.0, device='cuda'), 'count': 4}
    # In a new process CUDA waits until it is idle to load a kernel, and to pin memory.
    HostCopy(values).read()
    torch.cuda._sleep(1_000_000_000)
    copy = HostCopy(values)
    end = torch.cuda.current_stream().record_event()
    assert copy.is_late and not end.query()
    assert {name: float(value) for name, value in copy.read().items()} == {'loss': 3, 'count': 4}


def test_batches_are_copied_without_waiting(tmp_path):
    class Preprocessed(ToyModel):
        def __init__(self):
            super().__init__()
            self.data_preprocessor = BaseDataPreprocessor()

    runner = make_runner(tmp_path, Preprocessed())
    assert runner.model.data_preprocessor._non_blocking
