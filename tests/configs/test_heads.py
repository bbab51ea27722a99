"""Every kind of head, as shipped but small, trains and tests on the drawn shapes."""

import json
import math
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS

from tests.gradients import GradientsHook
from vim_mm.config import config_path, merge_options
from vim_mm.datasets.shapes import ShapesConfig, write_dataset
from vim_mm.engine import VimRunner, activate
from vim_mm.engine.cli import import_task_library

pytestmark = pytest.mark.slow

SIZE = 64
BACKBONE = {
    'arch': dict(_delete_=True, embed_dims=16, num_layers=1),
    'img_size': SIZE,
    'out_indices': (0,),
    'discretization_method': 'bilinear',
}
LOADERS = ('train_dataloader', 'val_dataloader', 'test_dataloader')
# What makes each of them small: the numbers of layers, proposals and sampled points.
HEADS = {
    'seg/linear_vim_t_zoh.py': {
        'decode_head.in_channels': 16,
        'decode_head.channels': 16,
        'decode_head.num_classes': 7,
    },
    'seg/mask2former_vim_t_zoh.py': {
        'neck.in_channels': 16,
        'decode_head.num_classes': 7,
        'decode_head.loss_cls.class_weight': [1.0] * 7 + [0.1],
        'decode_head.train_cfg.num_points': 128,
        'decode_head.pixel_decoder.encoder.num_layers': 1,
        'decode_head.transformer_decoder.num_layers': 1,
    },
    'det/cascade_mask_rcnn_vim_t_zoh.py': {
        'neck.in_channels': 16,
        **{
            f'roi_head.bbox_head.{stage}.{key}': value
            for stage in range(3)
            for key, value in dict(num_classes=6, conv_out_channels=32, fc_out_channels=32).items()
        },
        'roi_head.mask_head.num_classes': 6,
        'roi_head.mask_head.num_convs': 1,
        'train_cfg.rpn_proposal.max_per_img': 20,
        'test_cfg.rpn.max_per_img': 20,
        'test_cfg.rcnn.score_thr': 0.0,
        'test_cfg.rcnn.max_per_img': 5,
    },
    'det/retinanet_vim_t_zoh.py': {
        'neck.in_channels': 16,
        'bbox_head.num_classes': 6,
        'test_cfg.score_thr': 0.0,
        'test_cfg.max_per_img': 5,
    },
    'det/dino_vim_t_zoh.py': {
        'neck.in_channels': 16,
        'bbox_head.num_classes': 6,
        'num_queries': 20,
        'encoder.num_layers': 1,
        'decoder.num_layers': 1,
        'test_cfg.max_per_img': 5,
    },
}


@pytest.fixture(scope='module')
def shapes(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp('data') / 'shapes'
    write_dataset(root, ShapesConfig(train=4, val=2, size=SIZE))
    return root


def small_config(name: str, shapes: Path, work_dir: Path) -> Config:
    """A shipped config with a small model, for two iterations of the shapes."""
    activate()
    cfg = Config.fromfile(config_path(name))
    task = name.partition('/')[0]
    data = Config.fromfile(config_path(f'_base_/datasets/shapes_{task}.py'))
    merge_options(data, {'data_root': str(shapes)})
    boxes_only = cfg.val_evaluator.get('metric') == 'bbox'
    for key in (*LOADERS, 'val_evaluator', 'test_evaluator'):
        cfg[key] = data[key]
    if boxes_only:
        cfg.val_evaluator.metric = cfg.test_evaluator.metric = 'bbox'
    options = {f'model.backbone.{key}': value for key, value in BACKBONE.items()}
    options |= {f'model.{key}': value for key, value in HEADS[name].items()}
    options |= {f'{loader}.num_workers': 0 for loader in LOADERS}
    merge_options(cfg, options)
    cfg.train_dataloader.batch_size = 2
    cfg.auto_scale_lr.base_batch_size = 4  # by two passes; the shipped batch would take 32
    if task == 'seg':
        cfg.model.data_preprocessor.size = (SIZE, SIZE)
        cfg.model.test_cfg = dict(mode='slide', crop_size=(SIZE, SIZE), stride=(42, 42))
    else:
        cfg.model.data_preprocessor.pad_size_divisor = SIZE
    cfg.train_cfg = dict(type='IterBasedTrainLoop', max_iters=2, val_interval=2)
    cfg.param_scheduler = []
    cfg.default_hooks.logger = dict(type='LoggerHook', interval=1)
    cfg.default_hooks.checkpoint = dict(type='CheckpointHook', by_epoch=False, interval=2)
    cfg.log_processor = dict(by_epoch=False)
    cfg.visualizer.name = name  # MMEngine keeps one of each name for the whole process
    cfg.work_dir = str(work_dir)
    return cfg


@pytest.mark.parametrize('name', HEADS)
def test_trains_and_tests(name, shapes, tmp_path):
    cfg = small_config(name, shapes, tmp_path)
    import_task_library(cfg)
    runner, hook = VimRunner.from_cfg(cfg), GradientsHook()
    runner.register_hook(hook)
    runner.train()
    assert hook.lacking == [[]] * 4  # two steps of two passes
    (log,) = tmp_path.glob('*/vis_data/scalars.json')
    records = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [record['loss'] for record in records if 'loss' in record]
    assert len(losses) == 2 and all(map(math.isfinite, losses))
    mixer = runner.model.backbone.layers[0].mixer
    assert mixer.discretization_method == 'bilinear'
    # Its start has no random numbers.
    untrained = MODELS.build(cfg.model.backbone).layers[0].mixer
    assert not torch.equal(mixer.A_log.cpu(), untrained.A_log)

    cfg.load_from = str(tmp_path / 'iter_2.pth')
    metrics = VimRunner.from_cfg(cfg).test()
    main = 'mIoU' if name.startswith('seg') else 'coco/bbox_mAP'
    assert metrics[main] == pytest.approx(records[-1][main], abs=1e-6)
