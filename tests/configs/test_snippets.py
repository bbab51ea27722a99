"""What somebody copies into a config of his own builds, and trains as it should.

These are the drop-ins of docs/snippets and the configs of docs/own_data.md.
"""

import re
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.optim import build_optim_wrapper
from mmengine.registry import (
    DATASETS,
    METRICS,
    MODELS,
    PARAM_SCHEDULERS,
    init_default_scope,
)

from tests.configs.data_on_disk import SIZES, write_ade20k, write_coco, write_folders
from vim_mm import registered
from vim_mm.config import merge_options
from vim_mm.engine import activate
from vim_mm.engine.checks.classes import check_class_names, check_classes
from vim_mm.engine.cli import import_task_library

ROOT = Path(__file__).parents[2]
SNIPPETS = ROOT / 'docs' / 'snippets'
# What Mamba and Vim leave without decay, besides tensors of one dimension.
MARKED = re.compile(r'backbone\.(pos_embed|layers\.\d+\.mixer\.(A_log|A_b_log))')


def groups_of(model, optim_wrapper_cfg):
    """By parameter, its learning rate and weight decay."""
    names = {param: name for name, param in model.named_parameters()}
    optimizer = build_optim_wrapper(model, optim_wrapper_cfg).optimizer
    return {
        names[param]: (group['lr'], group['weight_decay'])
        for group in optimizer.param_groups
        for param in group['params']
    }


@pytest.mark.parametrize(
    ('library', 'lr', 'decay'),
    [pytest.param('mmdet', 1e-4, 0.1, id='mmdet'), pytest.param('mmseg', 6e-5, 0.01, id='mmseg')],
)
def test_parameter_groups(library, lr, decay):
    if library == 'mmdet':
        pytest.importorskip('mmcv.ops', reason='needs mmcv with compiled operators')
    activate()
    cfg = Config.fromfile(SNIPPETS / f'{library}.py')
    init_default_scope(library)
    model = MODELS.build(cfg.model)
    assert type(model.backbone) is registered.VisionMamba

    found = groups_of(model, cfg.optim_wrapper)
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == weights.keys()
    for setting in sorted({*found.values()}):
        members = [name for name in found if found[name] == setting]
        print(f'lr {setting[0]}, weight decay {setting[1]}: {len(members)}, such as {members[:4]}')
    marked = {name for name in found if MARKED.fullmatch(name)}
    assert len(marked) == 1 + 24 * 2
    for name, setting in found.items():
        free = name in marked or weights[name].dim() == 1
        assert setting == (lr, 0.0 if free else decay), name

    # MMEngine's own constructor, which the snippet had before, decays all of it.
    default = {k: v for k, v in cfg.optim_wrapper.items() if k != 'constructor'}
    assert {groups_of(model, default)[name] for name in marked} == {(lr, decay)}


def learning_rates(cfg) -> list[float]:
    """Of the whole training, by the iteration, or by the epoch where no scheduler is finer."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=cfg.optim_wrapper.optimizer.lr)
    by_iteration = 'max_iters' in cfg.train_cfg
    length = cfg.train_cfg.max_iters if by_iteration else cfg.train_cfg.max_epochs
    schedulers = [
        # As MMEngine's runner builds them.
        PARAM_SCHEDULERS.build({'end': length, **scheduler, 'optimizer': optimizer})
        for scheduler in cfg.param_scheduler
        if by_iteration or scheduler.by_epoch  # the warmup of iterations is over in an epoch
    ]
    rates = []
    optimizer.step()  # once: there is nothing to learn, but MMEngine would warn
    for _ in range(length):
        rates.append(optimizer.param_groups[0]['lr'])
        for scheduler in schedulers:
            scheduler.step()
    return rates


@pytest.mark.parametrize('snippet', sorted(SNIPPETS.glob('*.py')), ids=lambda path: path.stem)
def test_the_learning_rate_ends_far_below_its_peak(snippet):
    pytest.importorskip(snippet.stem)
    activate()
    cfg = Config.fromfile(snippet)
    init_default_scope(snippet.stem)
    rates = learning_rates(cfg)
    assert max(rates) == pytest.approx(cfg.optim_wrapper.optimizer.lr, rel=0.02)
    assert rates[-1] < max(rates) / 50


@pytest.mark.parametrize(('page', 'snippet'), [('README.md', 'mmseg'), ('det/README.md', 'mmdet')])
def test_a_page_shows_its_snippet(page, snippet):
    shown = re.findall(r'```python\n(_base_ = .*?)```', (ROOT / page).read_text(), re.S)
    assert shown == [(SNIPPETS / f'{snippet}.py').read_text()]


OWN_DATA = (ROOT / 'docs/own_data.md').read_text()
SEG, DET, CLS, CASCADE_HEADS, SMALL, LARGE, _, INIT, _ = re.findall(
    r'```python\n(.*?)```', OWN_DATA, re.S
)
# The task of each text, how its data are drawn, and the classes that it has.
OWN = {
    'mmseg': (SEG, write_ade20k, ['road', 'tree', 'car']),
    'mmdet': (
        DET,
        lambda root: write_coco(root, ('train', 'val'), ('dog', 'cat'), '{}.json'),
        ['dog', 'cat'],
    ),
    'mmpretrain': (
        CLS,
        # Written in another order than that of their names.
        lambda root: write_folders(root, ('train', 'val'), ('pear', 'quince', 'apple')),
        ['apple', 'pear', 'quince'],
    ),
}


def own_config(text: str, folder: Path) -> Config:
    """The config of the page, as it reads when its data lie in ``folder / 'data'``."""
    activate()
    (folder / 'own.py').write_text(text)
    cfg = Config.fromfile(folder / 'own.py')
    merge_options(cfg, dict(data_root=str(folder / 'data')))
    import_task_library(cfg)
    init_default_scope(cfg.default_scope)
    return cfg


def labels_of(sample) -> set[int]:
    """Numbers of the classes in a sample of any task."""
    if 'gt_sem_seg' in sample:
        return set(sample.gt_sem_seg.data.unique().tolist())
    return set(
        (sample.gt_instances.labels if 'gt_instances' in sample else sample.gt_label).tolist()
    )


@pytest.mark.parametrize('library', OWN)
def test_configs_of_own_data_fit_their_data(library, tmp_path):
    if library == 'mmdet':
        pytest.importorskip('mmcv.ops', reason='needs mmcv with compiled operators')
    pytest.importorskip(library)
    text, write, classes = OWN[library]
    write(tmp_path / 'data')
    cfg = own_config(text, tmp_path)
    assert cfg.default_scope == library
    model = MODELS.build(cfg.model)
    for split in ('train', 'val', 'test'):
        dataset = DATASETS.build(cfg[f'{split}_dataloader'].dataset)
        assert [*dataset.metainfo['classes']] == classes
        if library != 'mmpretrain':
            assert len(dataset.metainfo['palette']) == len(classes)
        check_classes(model, dataset, split)
        check_class_names(dataset, split)
        samples = [dataset[i]['data_samples'] for i in range(len(dataset))]
        # Annotations 1 and 2 of a segmentation, all categories and all folders otherwise.
        found = set().union(*map(labels_of, samples)) - {255}
        assert found <= set(range(len(classes))) and len(found) >= 2
        if library == 'mmpretrain':
            for sample in samples:
                assert Path(sample.img_path).parent.name == classes[int(sample.gt_label)]
        if split != 'train':
            METRICS.build(cfg[f'{split}_evaluator'])  # that of COCO reads its annotations


def test_own_segmentation_whose_labels_begin_at_zero(tmp_path):
    pytest.importorskip('mmseg')
    write_ade20k(tmp_path / 'data')
    text = SEG.replace('reduce_zero_label=True', 'reduce_zero_label=False')
    cfg = own_config(text, tmp_path)
    for split in ('train', 'val', 'test'):
        dataset = DATASETS.build(cfg[f'{split}_dataloader'].dataset)
        samples = [dataset[i]['data_samples'] for i in range(len(SIZES))]
        assert set().union(*map(labels_of, samples)) <= {0, 1, 2, 255}
        assert all(0 in labels_of(sample) for sample in samples)


def test_large_images_keep_their_pixels(tmp_path):
    pytest.importorskip('mmseg')
    write_ade20k(tmp_path / 'data')
    (tmp_path / 'own_seg.py').write_text(SEG)
    cfg = own_config(LARGE, tmp_path)
    assert cfg.model.test_cfg.mode == 'slide' and cfg.model.decode_head.num_classes == 3
    dataset = DATASETS.build(cfg.test_dataloader.dataset)
    for i in range(len(SIZES)):
        sample = dataset[i]['data_samples']
        assert sample.img_shape == sample.ori_shape == sample.gt_sem_seg.shape


def test_small_images_train_and_keep_their_size(tmp_path):
    pytest.importorskip('mmseg')
    write_ade20k(tmp_path / 'data')
    (tmp_path / 'own_seg.py').write_text(SEG)
    cfg = own_config(SMALL, tmp_path)
    assert cfg.train_dataloader.batch_size == cfg.auto_scale_lr.base_batch_size == 16
    # As the page has it but for the width and depth.
    cfg.merge_from_dict(
        dict(
            model=dict(
                backbone=dict(arch=dict(_delete_=True, embed_dims=8, num_layers=4)),
                neck=dict(embed_dim=8),
                decode_head=dict(in_channels=[8] * 4, channels=8),
                auxiliary_head=dict(in_channels=8, channels=8),
            )
        )
    )
    cfg.model.backbone.out_indices = (0, 1, 2, 3)
    model = MODELS.build(cfg.model)
    dataset = DATASETS.build(cfg.train_dataloader.dataset)
    batch = pseudo_collate([dataset[i] for i in range(4)])
    data = model.data_preprocessor(batch, training=True)
    assert data['inputs'].shape == (4, 3, 128, 128)
    sum(v.sum() for k, v in model(**data, mode='loss').items() if 'loss' in k).backward()
    model.eval()
    strides = [128 / m.shape[-1] for m in model.extract_feat(data['inputs'])]
    assert strides == [4, 8, 16, 32]
    dataset = DATASETS.build(cfg.test_dataloader.dataset)
    for i in range(len(SIZES)):
        with torch.no_grad():
            (sample,) = model.test_step(pseudo_collate([dataset[i]]))
        assert sample.pred_sem_seg.data.shape[1:] == sample.ori_shape


def leaves(value, name: str = ''):
    """Names and values in nested dicts and lists."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f'{name}.{key}'.lstrip('.'))
    else:
        yield name, value


@pytest.mark.parametrize(
    ('row', 'base'),
    [
        ('UPerNet', 'seg/upernet_vim_t_zoh.py'),
        ('linear', 'seg/linear_vim_t_zoh.py'),
        ('Mask2Former', 'seg/mask2former_vim_t_zoh.py'),
        ('Mask R-CNN', 'det/mask_rcnn_vim_t_zoh.py'),
        ('Cascade Mask R-CNN', 'det/cascade_mask_rcnn_vim_t_zoh.py'),
        ('RetinaNet, DINO', 'det/retinanet_vim_t_zoh.py'),
        ('RetinaNet, DINO', 'det/dino_vim_t_zoh.py'),
        ('classifier', 'cls/vim_t_zoh.py'),
    ],
)
def test_the_page_names_every_number_of_classes(row, base, tmp_path):
    pytest.importorskip({'seg': 'mmseg', 'det': 'mmdet', 'cls': 'mmpretrain'}[base[:3]])
    activate()
    heads = dict(re.findall(r'^\| ([\w ,-]+) \| (.*num_classes.*|the same;.*) \|$', OWN_DATA, re.M))
    keys = re.findall(r'`([\w.]+\.num_classes)`', heads[row])
    text = f"_base_ = 'vim_mm::{base}'\n"
    if row == 'Cascade Mask R-CNN':
        text += CASCADE_HEADS.replace('num_classes=2', 'num_classes=7')
    (tmp_path / 'own.py').write_text(text)
    cfg = Config.fromfile(tmp_path / 'own.py')
    cfg.merge_from_dict({f'model.{key}': 7 for key in keys})
    if row == 'Mask2Former':
        cfg.model.decode_head.loss_cls.class_weight = [1.0] * 7 + [0.1]
    named = [*leaves(cfg.model.to_dict())]
    assert {value for name, value in named if name.endswith('.num_classes')} == {7}
    assert not [name for name, _ in named if re.search(r'class_weight\.(8|80|150)$', name)]


def test_own_configs_take_their_backbone_from_a_classifier(tmp_path):
    pytest.importorskip('mmseg')
    checkpoint = tmp_path / 'classifier.pth'
    small = dict(arch=dict(embed_dims=8, num_layers=4), img_size=32)
    trained = registered.VisionMamba(**small, cls_token='middle', out_type='cls_token')
    weights = {f'backbone.{name}': value for name, value in trained.state_dict().items()}
    torch.save(dict(state_dict={**weights, 'head.fc.bias': torch.zeros(3)}), checkpoint)
    (tmp_path / 'own.py').write_text(INIT)
    init_cfg = Config.fromfile(tmp_path / 'own.py').model.backbone.init_cfg
    init_cfg.checkpoint = str(checkpoint)
    activate()
    backbone = registered.VisionMamba(**small, init_cfg=init_cfg)
    backbone.init_weights()
    same = torch.equal(
        backbone.layers[0].mixer.in_proj.weight, trained.layers[0].mixer.in_proj.weight
    )
    assert same
