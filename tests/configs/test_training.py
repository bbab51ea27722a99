"""The configs on ADE20K and COCO as they lie on disk: what models see, and tools/train.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import DATASETS, init_default_scope

from tests.configs.data_on_disk import SIZES, rectangles, write_ade20k, write_coco
from vim_mm.config import config_path, merge_options

ROOT = Path(__file__).parents[2]
SEG = 'seg/upernet_vim_t_bilinear.py'
DET = ['det/mask_rcnn_vim_t_bilinear.py', 'det/cascade_mask_rcnn_vim_t_bilinear.py']
RELEASED = 'det/cascade_mask_rcnn_vim_t_zoh_released.py'


@pytest.fixture(scope='module')
def ade20k(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp('ade20k')
    write_ade20k(root)
    return root


@pytest.fixture(scope='module')
def coco(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp('coco')
    write_coco(root)
    return root


def build_dataset(config: str, split: str, data_root: Path):
    cfg = Config.fromfile(config_path(config))
    merge_options(cfg, {'data_root': str(data_root)})
    init_default_scope(cfg.default_scope)
    return DATASETS.build(cfg[f'{split}_dataloader'].dataset)


def test_ade20k_training_images(ade20k):
    dataset = build_dataset(SEG, 'train', ade20k)
    assert len(dataset) == len(SIZES)
    for i in range(len(dataset)):
        sample = dataset[i]
        labels = sample['data_samples'].gt_sem_seg.data
        assert sample['inputs'].dtype == torch.uint8
        assert labels.shape[1:] == sample['inputs'].shape[1:]
        assert max(labels.shape) <= 512
        # 'other' is ignored, class 1 of the annotation is class 0 of the 150.
        empty = Path(sample['data_samples'].img_path).stem == 'empty'
        assert set(labels.unique().tolist()) <= ({255} if empty else {0, 1, 255})


def test_ade20k_validation_images(ade20k):
    dataset = build_dataset(SEG, 'val', ade20k)
    for i in range(len(dataset)):
        sample = dataset[i]
        name = Path(sample['data_samples'].img_path).stem
        height, width = SIZES[name]
        # Images get a shorter side of 512, annotations stay as they are.
        assert min(sample['inputs'].shape[1:]) == 512
        assert sample['inputs'].shape[1] / sample['inputs'].shape[2] == pytest.approx(
            height / width, rel=0.01
        )
        labels = sample['data_samples'].gt_sem_seg.data[0].numpy()
        expected = np.full((height, width), 255)
        for label, (left, top, right, bottom) in enumerate(rectangles(name)):
            expected[top:bottom, left:right] = label
        np.testing.assert_array_equal(labels, expected)


@pytest.mark.parametrize('config', DET)
def test_coco_training_images(config, coco):
    dataset = build_dataset(config, 'train', coco)
    names = {
        Path(info['img_path']).stem for info in map(dataset.get_data_info, range(len(dataset)))
    }
    assert names == set(SIZES) - {'empty'}
    for i in range(len(dataset)):
        sample = dataset[i]
        found = sample['data_samples'].gt_instances
        assert found.masks.masks.shape == (len(found), *sample['inputs'].shape[1:])
        assert max(sample['inputs'].shape) <= 1024
        assert set(found.labels.tolist()) <= {0, 1}


def test_coco_images_of_the_released_recipe(coco):
    """Masks stay polygons, which fit the boxes; a crop without objects is an image."""
    pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
    dataset = build_dataset(RELEASED, 'train', coco)
    dataset.pipeline.transforms[4].crop_size = (200, 200)  # of pictures from 102 to 2048 pixels
    seen = set()
    for i in range(20):
        torch.manual_seed(i)
        np.random.seed(i)
        found = dataset[i % len(dataset)]['data_samples'].gt_instances
        seen.add(len(found))
        boxes = found.bboxes.tensor
        # A mask is cut by the image's border only where it is drawn.
        drawn = found.masks.get_bboxes('hbox').tensor
        assert len(found.masks.masks) == len(boxes)
        torch.testing.assert_close(drawn.clamp(0, 200), boxes, rtol=0, atol=1.0)
    assert seen == {0, 1, 2}


@pytest.mark.parametrize('config', DET)
def test_coco_validation_images(config, coco):
    dataset = build_dataset(config, 'val', coco)
    assert len(dataset) == len(SIZES)
    for i in range(len(dataset)):
        sample = dataset[i]
        assert max(sample['inputs'].shape) == 1024
        name = Path(sample['data_samples'].img_path).stem
        assert len(sample['data_samples'].gt_instances) == len(rectangles(name))
        assert sample['data_samples'].ori_shape == SIZES[name]


def train(config: str, work_dir: Path, options: dict) -> dict:
    """Two iterations and a validation through tools/train.py; returns the metrics in the log."""
    options = {
        'train_cfg.max_iters': 2,
        'train_cfg.val_interval': 2,
        'default_hooks.logger.interval': 1,
        'train_dataloader.batch_size': 2,
        'auto_scale_lr.base_batch_size': 2,
        'train_dataloader.num_workers': 0,
        'val_dataloader.num_workers': 0,
        **options,
    }
    done = subprocess.run(
        [
            *(sys.executable, ROOT / 'tools' / 'train.py', config_path(config)),
            *('--work-dir', work_dir, '--cfg-options'),
            *(f'{key}={value}' for key, value in options.items()),
        ],
        cwd=work_dir,
        env={**os.environ, 'CUDA_VISIBLE_DEVICES': '', 'PYTHONPATH': os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    assert (work_dir / 'iter_2.pth').is_file()
    (log,) = work_dir.glob('*/vis_data/scalars.json')
    records = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [record['loss'] for record in records if 'loss' in record]
    assert len(losses) == 2 and np.isfinite(losses).all()
    return records[-1]


@pytest.mark.slow
def test_train_on_ade20k(ade20k, tmp_path):
    options = {
        'data_root': ade20k,
        # Everything at an eighth of its size.
        'train_dataloader.dataset.pipeline.2.scale': '(256,64)',
        'train_dataloader.dataset.pipeline.3.crop_size': '(64,64)',
        'val_dataloader.dataset.pipeline.1.scale': '(256,64)',
        'model.data_preprocessor.size': '(64,64)',
        'model.test_cfg.crop_size': '(64,64)',
        'model.test_cfg.stride': '(42,42)',
    }
    metrics = train(SEG, tmp_path, options)
    assert 0 <= metrics['mIoU'] <= 100
    assert metrics['step'] == 2


@pytest.mark.slow
@pytest.mark.parametrize('config', [DET[0], RELEASED])
def test_train_on_coco(config, coco, tmp_path):
    options = {
        'data_root': coco,
        # Everything at an eighth of its size.
        'train_dataloader.dataset.pipeline.3.scale': '(128,128)',
        'train_dataloader.dataset.pipeline.4.crop_size': '(128,128)',
        'val_dataloader.dataset.pipeline.1.scale': '(128,128)',
        'model.data_preprocessor.pad_size_divisor': 128,
        'model.train_cfg.rpn_proposal.max_per_img': 50,
        'model.test_cfg.rpn.max_per_img': 50,
        'model.test_cfg.rcnn.max_per_img': 10,
        'model.test_cfg.rcnn.score_thr': 0.0,
    }
    metrics = train(config, tmp_path, options)
    assert 0 <= metrics['coco/bbox_mAP'] <= 1
    assert 0 <= metrics['coco/segm_mAP'] <= 1
    assert metrics['step'] == 2
