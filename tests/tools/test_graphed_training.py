"""tools/train.py --graph as a user runs it."""

import json
import os

import pytest
import torch

from tests.tools.conftest import run_tool


@pytest.mark.slow
def test_it_is_refused_in_a_sentence(configs, data_root, tmp_path):
    options = ('--graph', '--cfg-options', f'data_root={data_root}')
    log = run_tool('train.py', configs['seg'], *options, cwd=tmp_path, fails=True)
    assert log.splitlines()[-1] == 'train.py: error: --graph: it needs a CUDA device'
    assert 'Traceback' not in log


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_it_trains_validates_records_and_resumes(configs, data_root, tmp_path):
    """A step has two micro-batches; the first step of a process is observed, and so launched."""
    gpu = dict(CUDA_VISIBLE_DEVICES=os.environ.get('CUDA_VISIBLE_DEVICES', '0'))
    options = (
        configs['seg'], '--amp', '--graph', '--resume', '--record', 'run.json', '--work-dir', 'run',
        '--cfg-options', f'data_root={data_root}', 'train_cfg.val_interval=2',
    )  # fmt: skip
    log = run_tool('train.py', *options, cwd=tmp_path, fresh=True, **gpu)
    assert 'CUDA graphs computed 6 of 8 batches.' in log, log
    assert json.loads((tmp_path / 'run.json').read_text())['batches'] == dict(
        replayed=6, launched=2
    )
    log = run_tool('train.py', *options, 'train_cfg.max_iters=6', cwd=tmp_path, fresh=True, **gpu)
    assert 'CUDA graphs computed 2 of 4 batches.' in log, log
