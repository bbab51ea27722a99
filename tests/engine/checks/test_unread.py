"""Entries that nothing reads, in parts that no class takes as its arguments."""

from collections import OrderedDict

import pytest
import torch
from mmengine.config import Config

from tests.engine.checks.test_misspelled import read
from tests.tools.conftest import configs, data_root  # noqa: F401  fixtures
from vim_mm.engine.checks.unread import check_unread, misspelled_keys
from vim_mm.engine.cli import _suffix

CUSTOM = 'optim_wrapper.paramwise_cfg.custom_keys'


@pytest.mark.parametrize(
    ('option', 'value', 'expected'),
    [
        ('model.neck.norm_cfg.tpye', 'BN', r"model\.neck\.norm_cfg has 'tpye'; .*'type'"),
        ('train_dataloader.dataset.pipeline.3.typ', 'RandomFlip', r"pipeline\.3 has 'typ'; "),
        ('visualizer.vis_backends.0.tyep', 'x', r"vis_backends\.0 has 'tyep'; did you mean 'type'"),
        ('model.neck.norm_cfg.eps', 1e-3, r'model\.neck\.norm_cfg has no type: '),
        ('model.decode_head.sampler.thresh', 0.3, r'decode_head\.sampler has no type: '),
        ('model.backbone.init_cfg.checkpiont', 'x', r'backbone\.init_cfg has no type: '),
        ('model.test_cfg.mod', 'slide', r"nothing reads model\.test_cfg\.mod; .*'mode'"),
        ('model.test_cfg.stirde', 3, r"nothing reads model\.test_cfg\.stirde; .*'stride'"),
        ('model.data_preprocessor.test_cfg.siz', 3, r"test_cfg has no 'siz'; .*'size'"),
        ('train_dataloader.dataset.metainfo.clases', ['a'], r"metainfo\.clases; .*'classes'"),
        ('val_dataloader.dataset.metainfo.CLASSES', ['a'], r"metainfo\.CLASSES; .*'classes'"),
        ('train_dataloader.dataset.data_prefix.img_pth', 'x', r"img_pth; .*'img_path'"),
        ('train_dataloader.collate_fn.type', 'pseudo_collat', r"collate_fn\.type .*_collate'"),
        ('optim_wrapper.parmwise_cfg', {}, "has no 'parmwise_cfg'; .*'paramwise_cfg'"),
        (f'{CUSTOM}.norm', dict(decay_mul=0), r"norm has no 'decay_mul'; .*'decay_mult'"),
        (f'{CUSTOM}.absolute.pos', dict(lr_mult=0), r"absolute must have numbers, got 'pos'"),
        (f'{CUSTOM}.norm', 0.0, r'custom_keys\.norm must be a dict'),
        ('default_hooks.checkpoint.fo', 'x', r"default_hooks\.checkpoint has no 'fo'"),
        ('optim_wrapper.optimizer.betas', 0.9, r'betas must be two numbers, .*got 0\.9'),
        ('optim_wrapper.optimizer.betas', [0.9, 1], r'betas\.1 must be from 0 to less than 1'),
        ('model.backbone.discretization_method', 'fooh', r"unknown .*'fooh'.* did you mean 'foh'"),
        ('env_cfg.dist_cfg.backnd', 'gloo', r"dist_cfg has no 'backnd'; .*'backend'"),
        ('data_preprocessor.mean', [1, 2, 3], r'the model has its own; give model\.data_prep'),
    ],
)
def test_it_is_named(option, value, expected, configs):  # noqa: F811
    with pytest.raises(ValueError, match=expected):
        read(configs['seg'], **{option: value})


def test_settings_of_a_detector_and_its_data():
    for options, expected in (
        (dict(test_cfg=dict(rcnn=dict(score_th=0.5))), r"rcnn\.score_th; .*'score_thr'"),
        (dict(train_cfg=dict(rcnn=[dict(pos_wieght=1)])), r"rcnn\.0\.pos_wieght; .*'pos_weight'"),
    ):
        with pytest.raises(ValueError, match=expected):
            check_unread(Config(dict(model=options)))
    loader = dict(dataset=dict(type='A', filter_cfg=dict(filter_empty_gtt=True)))
    with pytest.raises(ValueError, match=r"filter_empty_gtt; did you mean 'filter_empty_gt'"):
        check_unread(Config(dict(train_dataloader=loader)))


def test_what_may_be_somebodys_own_is_taken():
    dataset = dict(
        type='A',
        metainfo=dict(classes=['cat'], classes_2=['dog'], typ='photographs'),
        data_prefix=dict(img_path='a', img_path2='b', imgs='c'),
    )
    model = dict(
        type='A',
        test_cfg=dict(mode='whole', own=1, nms=dict(type='nms', iou_threshold=0.5)),
        backbone=dict(dtype='x', types=[1], init_cfg=dict(checkpoint='a.pth'), norm_cfg=dict()),
    )
    custom = {'typ': dict(lr_mult=0.1), 'norm': dict(decay_mult=0.0, betas=(0.9, 0.95), own=True)}
    wrapper = dict(optimizer=dict(type='AdamW'), paramwise_cfg=dict(custom_keys=custom))
    hook = dict(type='CheckpointHook', interval=3, save_optimizer=False, save_best='auto')
    loader = dict(dataset=dataset)
    hooks = dict(checkpoint=hook)
    check_unread(
        Config(
            dict(train_dataloader=loader, model=model, optim_wrapper=wrapper, default_hooks=hooks)
        )
    )


def test_keys_of_no_parameter():
    model = torch.nn.Sequential(OrderedDict(backbone=torch.nn.Linear(1, 1)))
    names = ('backbone', 'e.bias', 'backbone.wieght', 'absolute_pos_embed', 'bias_table')
    keys = {name: dict(lr_mult=0.1) for name in names}
    wrapper = dict(paramwise_cfg=dict(custom_keys=keys))
    assert [*misspelled_keys(wrapper, model)] == [('backbone.wieght', 'weight')]
    assert [*misspelled_keys(dict(paramwise_cfg=dict(custom_keys=dict(backbnoe={}))), model)] == [
        ('backbnoe', 'backbone')
    ]
    assert [*misspelled_keys(dict(), model)] == [*misspelled_keys(None, model)] == []


def test_a_preprocessor_beside_the_model_names_the_folder_too():
    before = dict(model=dict(type='A'), data_preprocessor=dict(mean=[0]))
    assert _suffix(before, {'data_preprocessor.mean': [0]}) == ''
    assert _suffix(before, {'data_preprocessor.pad': 7}) == '_data_preprocessor.pad=7'
