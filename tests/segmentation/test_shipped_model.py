"""The model in demo/: its file, and the metric that its page promises."""

import re

import pytest
import torch
from mmengine.config import Config

from tests.scripts import ROOT
from vim_mm.checkpoints import read_file
from vim_mm.config import config_path
from vim_mm.engine import VimRunner

CHECKPOINT = ROOT / 'demo/earth.pth'


@pytest.fixture(scope='module')
def page():
    return (ROOT / 'demo/README.md').read_text()


def config():
    return Config.fromfile(config_path('seg/upernet_vim_earth.py'))


def test_the_file_is_small_and_tells_its_method(page):
    assert CHECKPOINT.stat().st_size < 6e6
    checkpoint = read_file(CHECKPOINT)
    weights = checkpoint['state_dict']
    assert {w.dtype for w in weights.values() if w.is_floating_point()} == {torch.float16}
    method = weights._metadata['backbone']['discretization_method']
    assert method == config().model.backbone.discretization_method
    assert f'| method | `{method}` |' in page
    millions = sum(w.numel() for name, w in weights.items() if 'running_' not in name) / 1e6
    assert f'| parameters | {millions:.1f} million' in page


@pytest.mark.slow
def test_its_metric_is_the_promised_one(page, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # where data roots of configs begin
    cfg = config()
    cfg.load_from, cfg.work_dir = str(CHECKPOINT), str(tmp_path)
    cfg.test_dataloader.num_workers = 0
    cfg.test_dataloader.persistent_workers = False
    found = VimRunner.from_cfg(cfg).test()
    promised = float(re.search(r'\| mIoU \| ([\d.]+) %', page)[1])
    accuracy = float(re.search(r'\| pixel accuracy \| ([\d.]+) %', page)[1])
    assert found['mIoU'] == pytest.approx(promised, abs=0.1)
    assert found['aAcc'] == pytest.approx(accuracy, abs=0.1)
