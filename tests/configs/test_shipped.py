"""Every shipped config: parses, builds its model at full size, trains a step and predicts."""

import gc
import math

import pytest
import torch
from mmengine.config import Config
from mmengine.model import BaseModel, revert_sync_batchnorm
from mmengine.optim import OptimWrapper, build_optim_wrapper
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from tests.configs.samples import SIZE, detection_batch, segmentation_batch
from vim_mm.config import config_names, config_path
from vim_mm.ops import METHODS

SIZES = {'t': 'tiny', 's': 'small', 'b': 'base'}
PER_METHOD = [f'seg/upernet_vim_{size}' for size in 'tsb'] + [
    f'det/{model}_vim_{size}' for model in ('mask_rcnn', 'cascade_mask_rcnn') for size in 'ts'
]
TOP_LEVEL = {
    *('model', 'data_root', 'optim_wrapper', 'param_scheduler', 'auto_scale_lr', 'custom_imports'),
    *('train_dataloader', 'val_dataloader', 'test_dataloader', 'val_evaluator', 'test_evaluator'),
    *('train_cfg', 'val_cfg', 'test_cfg', 'default_hooks', 'env_cfg', 'log_processor', 'log_level'),
    *('randomness', 'load_from', 'resume', 'default_scope', 'visualizer'),
}


def load(name: str) -> Config:
    return Config.fromfile(config_path(name))


def methods_of(stem: str) -> list[str]:
    """The methods whose configs are shipped: of the control those of Vim-T alone."""
    return [name for name, method in METHODS.items() if stem[-1] == 't' or not method.control]


@pytest.mark.parametrize('stem', PER_METHOD)
def test_configs_differ_in_the_method_only(stem):
    configs = {method: load(f'{stem}_{method}.py').to_dict() for method in methods_of(stem)}
    for method, cfg in configs.items():
        backbone = cfg['model']['backbone']
        assert backbone.pop('discretization_method') == method
        assert backbone['arch'] == SIZES[stem[-1]]
        assert cfg == configs['zoh']


@pytest.mark.parametrize('stem', PER_METHOD)
def test_no_stray_names(stem):
    """A name that only the config file uses would look like an option, and change nothing."""
    assert set(load(f'{stem}_zoh.py')) == TOP_LEVEL


def make_cheap(cfg: Config) -> None:
    """Fewer proposals and detections: the size of the model stays."""
    if cfg.default_scope == 'mmseg':
        cfg.model.data_preprocessor.size = SIZE
        return
    cfg.model.data_preprocessor.pad_size_divisor = 32
    train, test = cfg.model.train_cfg, cfg.model.test_cfg
    stages = train.rcnn if isinstance(train.rcnn, list) else [train.rcnn]
    for sampled in (train.rpn, *stages):
        sampled.sampler.num = 8
    train.rpn_proposal.max_per_img = test.rpn.max_per_img = 8
    test.rcnn.update(max_per_img=3, score_thr=0.0)


@pytest.fixture(scope='module', autouse=True)
def release_memory():
    yield
    gc.collect()


def build_cheap(cfg: Config) -> tuple[BaseModel, OptimWrapper]:
    """The model in training mode, and its optimizer."""
    make_cheap(cfg)
    init_default_scope(cfg.default_scope)
    model = revert_sync_batchnorm(MODELS.build(cfg.model)).train()
    return model, build_optim_wrapper(model, cfg.optim_wrapper)


@pytest.mark.parametrize('name', config_names())
def test_builds_trains_a_step_and_predicts(name):
    cfg = load(name)
    model, optim_wrapper = build_cheap(cfg)
    segmentation = cfg.default_scope == 'mmseg'
    if segmentation:
        batch = segmentation_batch(model.num_classes)
    else:
        batch = detection_batch(cfg.model.roi_head.mask_head.num_classes)
    mixer = model.backbone.layers[-1].mixer
    before = mixer.A_log.detach().clone()

    log = model.train_step(batch, optim_wrapper)
    assert math.isfinite(log['loss'])
    assert not torch.equal(mixer.A_log, before)
    assert mixer.discretization_method == cfg.model.backbone.discretization_method

    model.eval()
    with torch.no_grad():
        predictions = model.test_step(batch)
    assert len(predictions) == 2
    if segmentation:
        label = predictions[0].pred_sem_seg.data
        assert label.shape == (1, *SIZE)
        assert set(label.unique().tolist()) <= set(range(model.num_classes))
    else:
        instances = predictions[0].pred_instances
        assert 0 < len(instances) <= 3
        assert instances.masks.shape[1:] == SIZE


@pytest.mark.parametrize('name', ['mask_rcnn_vim_shapes.py', 'cascade_mask_rcnn_vim_t_zoh.py'])
def test_detection_heads_hand_over_float32_in_mixed_precision(name):
    from mmdet.models import BBoxHead, FCNMaskHead

    cfg = load(f'det/{name}')
    cfg.optim_wrapper.type = 'BFloat16OptimWrapper'
    model, optim_wrapper = build_cheap(cfg)
    optim_wrapper.initialize_count_status(model, 0, 1)
    dtypes = {}

    def note(module, inputs, outputs):
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        dtypes.setdefault(type(module), set()).update(out.dtype for out in outputs)

    for module in model.roi_head.modules():
        if isinstance(module, (nn.Linear, BBoxHead, FCNMaskHead)):
            module.register_forward_hook(note)
    log = model.train_step(detection_batch(cfg.model.roi_head.mask_head.num_classes), optim_wrapper)
    assert math.isfinite(log['loss'])
    assert dtypes.pop(nn.Linear) == {torch.bfloat16}
    assert list(dtypes.values()) == [{torch.float32}] * 2, dtypes
