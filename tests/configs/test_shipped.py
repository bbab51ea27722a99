"""Every shipped config: parses, builds its model at full size, trains a step and predicts."""

import gc
import itertools
import math

import pytest
import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.model import BaseModel, revert_sync_batchnorm
from mmengine.optim import OptimWrapper, build_optim_wrapper
from mmengine.registry import MODELS, init_default_scope
from mmengine.utils import import_modules_from_strings
from torch import nn

from tests.configs.samples import (
    SIZE,
    classification_batch,
    detection_batch,
    segmentation_batch,
)
from tests.gradients import Gradients
from tests.scripts import ROOT
from vim_mm.config import config_names, config_path
from vim_mm.engine import activate
from vim_mm.engine.cli import import_task_library
from vim_mm.models import VisionMamba
from vim_mm.ops import METHODS

SIZES = {'t': 'tiny', 's': 'small', 'b': 'base'}
PER_METHOD = [f'seg/upernet_vim_{size}' for size in 'tsb'] + [
    f'det/{model}_vim_{size}' for model in ('mask_rcnn', 'cascade_mask_rcnn') for size in 'ts'
]
# Small models and comparisons on garments.
STUDY = ROOT / 'studies/discretization/configs'
STUDY_CONFIGS = sorted(path.relative_to(STUDY).as_posix() for path in STUDY.glob('[!_]*/*.py'))
TOP_LEVEL = {
    *('model', 'data_root', 'optim_wrapper', 'param_scheduler', 'auto_scale_lr', 'custom_imports'),
    *('train_dataloader', 'val_dataloader', 'test_dataloader', 'val_evaluator', 'test_evaluator'),
    'test_pipeline',
    *('train_cfg', 'val_cfg', 'test_cfg', 'default_hooks', 'env_cfg', 'log_processor', 'log_level'),
    *('randomness', 'load_from', 'resume', 'default_scope', 'visualizer'),
}


def load(name: str) -> Config:
    activate()
    return Config.fromfile(STUDY / name if name in STUDY_CONFIGS else config_path(name))


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


@pytest.mark.parametrize(
    ('reference', 'others'),
    [
        ('cls/vim_t_fashion.py', ['cls/deit_t_fashion.py', 'cls/resnet18_fashion.py']),
        (
            'seg/upernet_vim_t_fashion_zoh.py',
            [f'seg/upernet_{name}_t_fashion.py' for name in ('deit', 'swin', 'convnext')],
        ),
        ('det/mask_rcnn_vim_t_fashion_zoh.py', ['det/mask_rcnn_swin_t_fashion.py']),
    ],
)
def test_backbones_are_compared_by_one_recipe(reference, others):
    """All but the backbone, its neck, and the widths that a head reads."""

    def rest(name: str) -> dict:
        cfg = load(name).to_dict()
        del cfg['custom_imports'], cfg['model']['backbone']
        cfg['model'].pop('neck', None)
        for head in ('head', 'decode_head', 'auxiliary_head'):
            cfg['model'].get(head, {}).pop('in_channels', None)
        return cfg

    expected = rest(reference)
    for name in others:
        assert rest(name) == expected


@pytest.mark.parametrize('stem', PER_METHOD)
def test_no_stray_names(stem):
    """A name that only the config file uses would look like an option, and change nothing."""
    assert set(load(f'{stem}_zoh.py')) == TOP_LEVEL


def make_cheap(cfg: Config) -> None:
    """Fewer proposals and detections: the size of the model stays."""
    if cfg.default_scope == 'mmpretrain':
        return
    if cfg.default_scope == 'mmseg':
        cfg.model.data_preprocessor.size = SIZE
        return
    cfg.model.data_preprocessor.pad_size_divisor = 32
    train, test = cfg.model.train_cfg, cfg.model.test_cfg
    if 'rcnn' not in train:
        test.update(max_per_img=3, score_thr=0.0)
        if 'num_queries' in cfg.model:
            cfg.model.num_queries = 20  # there are 43 places to choose them from
        return
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
    import_task_library(cfg)
    init_default_scope(cfg.default_scope)
    if cfg.get('custom_imports'):
        import_modules_from_strings(**cfg.custom_imports)
    model = revert_sync_batchnorm(MODELS.build(cfg.model)).train()
    if 'num_queries' in cfg.model:  # what only init_weights gives values to, which takes longer
        nn.init.normal_(model.level_embed)
    return model, build_optim_wrapper(model, cfg.optim_wrapper)


# Configs of one model differ in the method only, as the first tests show. So each model is built
# once at full size, and each method by one of the models.
NOT_CONTROL = [name for name, method in METHODS.items() if not method.control]
ONE_METHOD = dict(zip(PER_METHOD, itertools.cycle(NOT_CONTROL)))
BUILT = {f'{stem}_{method}.py' for stem, method in ONE_METHOD.items()}
BUILT.add('seg/upernet_vim_t_zoh_exact.py')
OF_ANOTHER_METHOD = {f'{stem}_{method}.py' for stem in ONE_METHOD for method in METHODS} - BUILT
# In a hurry a classifier and a segmentor speak for all.
IN_A_HURRY = ('cls/vim_fashion_zoh.py', f'seg/upernet_vim_t_{ONE_METHOD["seg/upernet_vim_t"]}.py')
EACH_CONFIG = [
    pytest.param(name, marks=() if name in IN_A_HURRY else pytest.mark.slow)
    for name in (*config_names(), *STUDY_CONFIGS)
    if name not in OF_ANOTHER_METHOD
]


def test_every_method_is_built():
    names = {param.values[0] for param in EACH_CONFIG}
    assert BUILT | set(IN_A_HURRY) <= names
    assert all(any(name.endswith(f'_{method}.py') for name in names) for method in METHODS)


def num_classes(model: dict) -> int:
    """What the heads of a config tell apart."""
    if 'roi_head' in model:
        return model.roi_head.mask_head.num_classes
    return next(model[h].num_classes for h in ('head', 'decode_head', 'bbox_head') if h in model)


def check_predictions(predictions: list, cfg: Config) -> None:
    """Of two images: classes, maps of labels, or up to three boxes, with masks if asked for."""
    assert len(predictions) == 2
    first, classes = predictions[0], num_classes(cfg.model)
    if cfg.default_scope == 'mmpretrain':
        assert first.pred_score.shape == (classes,)
        assert int(first.pred_label) == int(first.pred_score.argmax())
    elif cfg.default_scope == 'mmseg':
        label = first.pred_sem_seg.data
        assert label.shape == (1, *SIZE)
        assert set(label.unique().tolist()) <= set(range(classes))
    else:
        instances = first.pred_instances
        assert 0 < len(instances) <= 3
        if 'roi_head' in cfg.model:
            assert instances.masks.shape[1:] == SIZE


@pytest.mark.parametrize('name', EACH_CONFIG)
def test_builds_trains_a_step_and_predicts(name):
    cfg = load(name)
    model, optim_wrapper = build_cheap(cfg)
    make_batch = {
        'mmpretrain': classification_batch,
        'mmseg': segmentation_batch,
        'mmdet': detection_batch,
    }[cfg.default_scope]
    batch = make_batch(num_classes(cfg.model))
    watched = next(model.backbone.parameters())
    if isinstance(model.backbone, VisionMamba):
        # Stochastic depth never drops the first layer: its parameters always have a gradient.
        mixer = model.backbone.layers[0].mixer
        watched = mixer.A_log
        assert mixer.discretization_method == cfg.model.backbone.discretization_method
    before = watched.detach().clone()

    gradients = Gradients(model)
    log = model.train_step(batch, optim_wrapper)
    assert not gradients.lacking()
    assert math.isfinite(log['loss'])
    assert not torch.equal(watched, before)

    model.eval()
    with torch.no_grad():
        check_predictions(model.test_step(batch), cfg)


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    [
        'mask_rcnn_vim_shapes.py',
        'cascade_mask_rcnn_vim_t_zoh_released.py',  # whose recipe keeps such images
        'retinanet_vim_t_zoh.py',
        'dino_vim_t_zoh.py',
    ],
)
def test_images_without_objects_give_every_parameter_a_gradient(name):
    cfg = load(f'det/{name}')
    model, optim_wrapper = build_cheap(cfg)
    batch = detection_batch(num_classes(cfg.model))
    for sample in batch['data_samples']:
        sample.gt_instances = sample.gt_instances[:0]
    gradients = Gradients(model)
    log = model.train_step(batch, optim_wrapper)
    assert math.isfinite(log['loss']) and not gradients.lacking()


@pytest.mark.slow
@pytest.mark.parametrize('name', ['mask_rcnn_vim_shapes.py', 'cascade_mask_rcnn_vim_t_zoh.py'])
def test_detection_heads_hand_over_float32_in_mixed_precision(name):
    from mmdet.models import BBoxHead, FCNMaskHead

    cfg = load(f'det/{name}')
    cfg.optim_wrapper.type = 'BFloat16OptimWrapper'
    model, optim_wrapper = build_cheap(cfg)
    model.to(get_device())  # that of MMEngine's autocast
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
