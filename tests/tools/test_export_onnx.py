"""The loops of tools/export_onnx.py that take minutes, over models and data of no size."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from mmengine.dataset import pseudo_collate
from torch.utils.data import DataLoader

import vim_mm.progress
from tests.engine.toy import Mean, ToyModel
from tests.scripts import TOOLS
from vim_mm.engine import VimRunner


class Pictures(torch.utils.data.Dataset):
    metainfo: dict = {}

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return dict(inputs=torch.full((3, 8, 8), float(index)))


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    spec = importlib.util.spec_from_file_location('export_onnx', TOOLS / 'export_onnx.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bars(monkeypatch):
    """What bars were shown: their titles and lengths."""
    shown = []

    def progress(items, what, total=None):
        items = [*items]
        shown.append((what, total or len(items)))
        return items

    monkeypatch.setattr(vim_mm.progress, 'progress', progress)
    return shown


def test_calibration(tool, bars, monkeypatch):
    loader = DataLoader(Pictures(), batch_size=1, collate_fn=lambda batch: batch[0])
    monkeypatch.setattr(VimRunner, 'build_dataloader', lambda cfg, seed: loader)
    model = SimpleNamespace(
        data_preprocessor=lambda batch, training: {'inputs': batch['inputs'][None]}
    )
    batches = [*tool.calibration_batches(SimpleNamespace(train_dataloader={}), model, 3, (6, 10))]
    assert [batch.shape for batch in batches] == [(1, 3, 6, 10)] * 3
    assert bars == [('images for calibration', 3)]


def test_evaluation(tool, bars):
    loader = DataLoader(Pictures(), batch_size=2, collate_fn=pseudo_collate)
    model = ToyModel().eval()
    model.test_step = lambda batch: [*model(torch.stack(batch['inputs']))]
    cfg = SimpleNamespace(test_dataloader=loader, test_evaluator=[Mean()])
    assert tool.metrics(cfg, model).keys() == {'mean'}
    assert bars == [('batches', 2)]
