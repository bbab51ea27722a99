"""A segmentation of three classes, as small as one can be: images, labels, a config and its run."""

import json
from argparse import Namespace
from pathlib import Path

import numpy as np
from PIL import Image

from vim_mm.engine import build_runner
from vim_mm.engine.checks.data import check_data
from vim_mm.engine.cli import read_config

CONFIG = """
_base_ = 'vim_mm::seg/upernet_vim_shapes.py'
classes = ('background', 'red', 'green')
data_root = {root!r}
model = dict(
    backbone=dict(arch=dict(_delete_=True, embed_dims=8, num_layers=4)),
    neck=dict(embed_dim=8),
    decode_head=dict(in_channels=[8] * 4, channels=8, num_classes=3),
    auxiliary_head=dict(in_channels=8, channels=8, num_classes=3),
)
pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(type='PackSegInputs'),
]
train_dataloader = dict(batch_size=4, num_workers=0, persistent_workers=False)
val_dataloader = dict(num_workers=0, persistent_workers=False)
for split, loader in (('training', train_dataloader), ('validation', val_dataloader)):
    loader['dataset'] = dict(
        _delete_=True,
        type='BaseSegDataset',
        data_root=data_root,
        data_prefix=dict(img_path=f'images/{{split}}', seg_map_path=f'annotations/{{split}}'),
        metainfo=dict(classes=classes),
        img_suffix='.png',
        reduce_zero_label=False,
        pipeline=pipeline,
    )
del split, loader
test_dataloader = val_dataloader
auto_scale_lr = dict(base_batch_size=4)
param_scheduler = [dict(type='PolyLR', power=1.0, by_epoch=False)]
train_cfg = dict(max_iters=3, val_interval=3)
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=3))
{rest}
"""


def write_data(root: Path, size=(64, 64), train: int = 8) -> None:
    """Images of red and green rectangles, and their labels 0, 1 and 2."""
    random = np.random.default_rng(0)
    for split, count in (('training', train), ('validation', 4)):
        for kind in ('images', 'annotations'):
            (root / kind / split).mkdir(parents=True)
        for i in range(count):
            image = random.integers(0, 60, (*size, 3), np.uint8)
            labels = np.zeros(size, np.uint8)
            for label in (1, 2):
                top, left = random.integers(0, min(size) - 20, 2)
                at = slice(top, top + 16), slice(left, left + 16)
                image[(*at, label - 1)] = 220
                labels[at] = label
            Image.fromarray(image).save(root / 'images' / split / f'{i:03}.png')
            Image.fromarray(labels).save(root / 'annotations' / split / f'{i:03}.png')


def each_label(root: Path, change) -> None:
    """Change all maps of labels: from an array (H, W) to another one."""
    for path in sorted((root / 'annotations').rglob('*.png')):
        Image.fromarray(change(np.array(Image.open(path)))).save(path)


def each_image(root: Path, change) -> None:
    """Call ``change(path)`` for all images."""
    for path in sorted((root / 'images').rglob('*.*')):
        change(path)


def train(folder: Path, text: str | None = None, rest: str = '', test: bool = False) -> str:
    """Train in this process, as ``tools/train.py`` does; the log.

    Args:
        folder (Path): Has the data in ``data``, and gets the run.
        text (str, optional): The config, by default ``CONFIG``, which ends in ``rest``.
        rest (str): Python.
        test (bool): Whether to test in place of training, without weights.
    """
    path = folder / 'config.py'
    path.write_text(CONFIG.format(root=str(folder / 'data'), rest=rest) if text is None else text)
    run = folder / f'run{len([*folder.glob("run*")])}'
    args = dict(config=str(path), cfg_options={}, work_dir=str(run), launcher='none')
    cfg = read_config(Namespace(**args, local_rank=0))
    # By their names MMEngine finds loggers and visualizers of other runs in this process again.
    cfg.experiment_name = f'{folder.name}_{run.name}'  # else the second, of which others may be
    cfg.visualizer.name = str(run)
    check_data(cfg, *(('test',) if test else ('train', 'val')))
    runner = build_runner(cfg)
    runner.test() if test else runner.train()
    return ''.join(log.read_text() for log in run.rglob('*.log'))


def coco(folder: Path, size=(48, 64), change=lambda each: each) -> str:
    """A config of a detector on four images with two objects each, in COCO's format."""
    random = np.random.default_rng(0)
    (folder / 'data').mkdir()
    content = dict(images=[], annotations=[], categories=[dict(id=1, name='box')])
    for i in range(4):
        image = random.integers(0, 60, (*size, 3), np.uint8)
        content['images'].append(dict(id=i, file_name=f'{i}.jpg', height=size[0], width=size[1]))
        for j in range(2):
            x, y = (int(n) for n in random.integers(0, 20, 2))
            image[y : y + 16, x : x + 16] = 220
            corners = [x, y, x + 16, y, x + 16, y + 16, x, y + 16]
            content['annotations'].append(
                change(
                    dict(id=2 * i + j, image_id=i, category_id=1, bbox=[x, y, 16, 16], area=256,
                         iscrowd=0, segmentation=[corners])
                )
            )  # fmt: skip
        Image.fromarray(image).save(folder / 'data' / f'{i}.jpg')
    (folder / 'data' / 'ann.json').write_text(json.dumps(content))
    return f"""
_base_ = 'vim_mm::det/mask_rcnn_vim_shapes.py'
data_root = {str(folder / 'data')!r}
model = dict(
    backbone=dict(arch=dict(_delete_=True, embed_dims=8, num_layers=4)),
    neck=dict(in_channels=8),
    roi_head=dict(bbox_head=dict(num_classes=1), mask_head=dict(num_classes=1)),
)
dataset = dict(data_root=data_root, ann_file='ann.json', data_prefix=dict(img=''),
               metainfo=dict(classes=('box',)))
train_dataloader = dict(batch_size=2, num_workers=0, persistent_workers=False, dataset=dataset)
val_dataloader = dict(num_workers=0, persistent_workers=False, dataset=dataset)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + '/ann.json')
test_evaluator = val_evaluator
auto_scale_lr = dict(base_batch_size=2)
train_cfg = dict(max_iters=2, val_interval=2)
param_scheduler = [dict(type='PolyLR', power=1.0, by_epoch=False)]
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=2))
"""
