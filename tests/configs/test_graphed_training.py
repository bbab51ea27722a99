"""Models of shipped configs train by CUDA graphs to the same bits as without."""

import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.registry import MODELS, init_default_scope

from tests.configs.samples import (
    SIZE,
    classification_batch,
    detection_batch,
    segmentation_batch,
)
from tests.graphs import assert_same_bits
from tests.scripts import ROOT
from vim_mm.config import config_path
from vim_mm.engine import BFloat16OptimWrapper, activate
from vim_mm.engine.cli import import_task_library
from vim_mm.engine.optimization.graphed_step import GraphedStep

STEPS = 5
WIDTH = 8
WRAPPERS = {
    'float32': OptimWrapper,
    'bfloat16': BFloat16OptimWrapper,
    'float16': lambda optimizer: AmpOptimWrapper(
        optimizer=optimizer, dtype='float16', loss_scale=dict(init_scale=2.0**24)
    ),
}


def segmentor() -> Config:
    """UPerNet whose position embedding is resized, with class weights."""
    cfg = Config.fromfile(config_path('seg/upernet_vim_shapes.py'))
    model = cfg.model
    model.data_preprocessor.size = SIZE
    model.backbone.update(
        arch=dict(embed_dims=WIDTH, num_layers=4), img_size=32, drop_path_rate=0.3
    )
    model.neck.embed_dim = WIDTH
    model.decode_head.update(in_channels=[WIDTH] * 4, channels=WIDTH)
    model.auxiliary_head.update(in_channels=WIDTH, channels=WIDTH)
    classes = model.decode_head.num_classes
    model.decode_head.loss_decode.class_weight = [0.5 + i / classes for i in range(classes)]
    return cfg


def recomputing_segmentor() -> Config:
    cfg = segmentor()
    cfg.model.backbone.with_cp = True
    return cfg


def classifier() -> Config:
    """With mixtures of pictures and of labels, which are drawn on the host."""
    cfg = Config.fromfile(ROOT / 'studies/discretization/configs/cls/vim_t_fashion.py')
    model = cfg.model
    model.backbone.update(arch=dict(embed_dims=WIDTH, num_layers=2), drop_path_rate=0.3)
    model.head.in_channels = WIDTH
    model.train_cfg = dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)])
    return cfg


def detector() -> Config:
    """Mask R-CNN, with an image that has no object."""
    cfg = Config.fromfile(config_path('det/mask_rcnn_vim_shapes.py'))
    cfg.model.backbone.update(
        arch=dict(embed_dims=WIDTH, num_layers=4), img_size=64, drop_path_rate=0.3
    )
    cfg.model.neck.update(in_channels=WIDTH, out_channels=WIDTH)
    cfg.model.rpn_head.update(in_channels=WIDTH, feat_channels=WIDTH)
    head = cfg.model.roi_head
    for part in (head.bbox_roi_extractor, head.mask_roi_extractor):
        part.out_channels = WIDTH
    head.bbox_head.update(in_channels=WIDTH, fc_out_channels=WIDTH)
    head.mask_head.update(in_channels=WIDTH, conv_out_channels=WIDTH)
    return cfg


def seed(step: int) -> None:
    for function in (random.seed, np.random.seed, torch.manual_seed):
        function(step)


def trained(model, wrapper: str, make_batch, graph: bool) -> dict:
    """Losses of all steps, then weights and statistics, by name."""
    model = copy.deepcopy(model)
    optim_wrapper = WRAPPERS[wrapper](optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    optim_wrapper.initialize_count_status(model, 0, STEPS)
    train_step = GraphedStep(model) if graph else model.train_step
    found = {}
    for i in range(STEPS):
        seed(i)
        batch = make_batch()
        seed(100 + i)
        losses = train_step(batch, optim_wrapper)
        found |= {f'step {i}: {name}': value.detach() for name, value in losses.items()}
        if i == 2:  # as a validation does it
            with torch.no_grad():
                model.eval().val_step(make_batch())
            model.train()
    if graph:
        assert (train_step.replayed, train_step.launched) == (STEPS - 1, 1)
    return found | model.state_dict()


# In a hurry a segmentor in bfloat16 and a classifier speak for all.
EACH = [
    pytest.param(
        make,
        wrapper,
        marks=()
        if (make, wrapper) in ((segmentor, 'bfloat16'), (classifier, 'float32'))
        else pytest.mark.slow,
    )
    for make in (segmentor, recomputing_segmentor, classifier, detector)
    for wrapper in WRAPPERS
]


@pytest.mark.parametrize(('make', 'wrapper'), EACH)
def test_a_training_of_a_shipped_model(make, wrapper, graph_device):
    pytest.importorskip({classifier: 'mmpretrain', detector: 'mmcv.ops'}.get(make, 'mmseg'))
    if wrapper == 'float16' and graph_device == 'cpu':
        pytest.skip('float16 with a loss scaler needs a CUDA device')
    activate()
    cfg = make()
    import_task_library(cfg)
    init_default_scope(cfg.default_scope)
    model = revert_sync_batchnorm(MODELS.build(cfg.model)).to(graph_device).train()
    if make is classifier:
        batches = partial(classification_batch, model.head.num_classes)
    elif make is detector:
        batches = partial(detection_batch, model.roi_head.bbox_head.num_classes)
    else:
        batches = partial(segmentation_batch, model.num_classes)
    eager = trained(model, wrapper, batches, graph=False)
    graphed = trained(model, wrapper, batches, graph=True)
    assert len({float(eager[f'step {i}: loss']) for i in range(STEPS)}) == STEPS
    if make is detector and graph_device == 'cuda':
        # The gradient of MMCV's RoIAlign adds atomically: no two steps have the same bits.
        losses = {name: value for name, value in eager.items() if 'loss' in name}
        for name, value in losses.items():
            torch.testing.assert_close(graphed[name], value, rtol=2e-2, atol=1e-2, msg=name)
        return
    assert_same_bits(graphed, eager)
