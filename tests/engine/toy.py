"""The smallest model that VimRunner trains, in milliseconds, in this process."""

from pathlib import Path

import numpy as np
import torch
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vim_mm.engine import VimRunner
from vim_mm.registered import VisionMamba


def make_backbone(**kwargs) -> VisionMamba:
    return VisionMamba(dict(embed_dims=8, num_layers=1), img_size=8, patch_size=4, **kwargs)


class ToyModel(BaseModel):
    """A backbone, a head for some classes, and the mean square of its output as the loss."""

    def __init__(self, classes: int = 3, **kwargs):
        super().__init__()
        self.backbone = make_backbone(**kwargs)
        self.head = nn.Conv2d(8, classes, 1)

    def forward(self, inputs, mode='tensor'):
        out = self.head(self.backbone(inputs)[0])
        return {'loss': out.square().mean()} if mode == 'loss' else [*out]


class Mean(BaseMetric):
    """Mean of all outputs, a numpy scalar."""

    def process(self, data_batch, data_samples):
        self.results += [sample.mean().item() for sample in data_samples]

    def compute_metrics(self, results):
        return {'mean': np.mean(results)}


def make_runner(work_dir: Path, model: nn.Module | None = None, **kwargs) -> VimRunner:
    """A runner for two iterations, with a checkpoint after each and one of the best metric."""
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(4, 3, 8, 8)), batch_size=2)
    checkpoint = dict(type='CheckpointHook', by_epoch=False, interval=1, save_best='mean')
    options = dict(
        train_dataloader=data,
        val_dataloader=data,
        test_dataloader=data,
        val_evaluator=[Mean()],
        test_evaluator=[Mean()],
        train_cfg=dict(by_epoch=False, max_iters=2, val_interval=2),
        val_cfg=dict(),
        test_cfg=dict(),
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.1)),
        param_scheduler=dict(type='LinearLR', by_epoch=False),
        default_hooks=dict(checkpoint={**checkpoint, 'rule': 'greater'}),
        experiment_name=str(work_dir),
    )
    return VimRunner(model or ToyModel(), str(work_dir), **{**options, **kwargs})
