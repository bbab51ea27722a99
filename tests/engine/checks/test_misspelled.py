"""Names that nothing has, found before anything is built."""

from argparse import Namespace

import pytest
from mmengine.config import Config
from mmengine.model import BaseModule

from tests.tools.conftest import configs, data_root  # noqa: F401  fixtures
from vim_mm.config import config_names, config_path
from vim_mm.engine.checks.misspelled import check_arguments_of, check_misspelled
from vim_mm.engine.cli import read_config
from vim_mm.mistakes import check_checkpoint, check_config
from vim_mm.ops import METHODS


def read(config, checkpoint=None, **options):
    return read_config(Namespace(config=str(config), cfg_options=options, checkpoint=checkpoint))


@pytest.mark.parametrize(
    ('option', 'value', 'expected'),
    [
        ('log_level', 'EVIL', r"log_level must be one of \['DEBUG', .*\], got 'EVIL'$"),
        ('log_level', 'debg', r"got 'debg'; did you mean 'DEBUG'\?"),
        (
            'train_cfg.max_iter',
            3,
            r"train_cfg \(IterBasedTrainLoop\) has no 'max_iter'; .*'max_iters'",
        ),
        ('train_cfg.val_intervall', 3, "has no 'val_intervall'; did you mean 'val_interval'"),
        ('val_cfg.fp61', True, "val_cfg .*'fp61'; did you mean 'fp16'"),
        ('model.type', 'EncodeDecoder', r"model\.type must .* 'EncodeDecoder'; .*EncoderDecoder'"),
        ('model.neck.type', 'Feature2Pyramids', r"model\.neck\.type .*'Feature2Pyramid'\?"),
        ('model.neck.type', 'Nothing', r'model\.neck\.type must name a registered class'),
        ('model.decode_head.type', 'UPerHed', r"model\.decode_head\.type .*UPerHead'"),
        (
            'model.backbone.drop_path_rte',
            0.1,
            r"model\.backbone .*'drop_path_rte'; .*drop_path_rate",
        ),
        ('model.backbone.out_indicess', 0, r"'out_indicess'; did you mean 'out_indices'"),
        ('model.neck.rescale', [1], r"model\.neck .* has no 'rescale'; did you mean 'rescales'"),
        ('optim_wrapper.optimizer.type', 'AdamQ', r"\.type must .* 'AdamQ'; did you mean 'Adam"),
        (
            'optim_wrapper.optimizer.weight_decays',
            0.1,
            "'weight_decays'; did you mean 'weight_decay'",
        ),
        ('default_hooks.logger.intervall', 3, r"default_hooks\.logger .*did you mean 'interval'"),
        ('default_hooks.checkpoint.max_keep_ckpt', 1, "did you mean 'max_keep_ckpts'"),
        ('test_evaluator.iou_metric', ['mIoU'], "test_evaluator .*did you mean 'iou_metrics'"),
        ('train_dataloader.dataset.data_prefixx', {}, "dataset .*did you mean 'data_prefix'"),
        ('optim_wrapper.paramwise_cfg.layer_decay_rates', 0.9, "did you mean 'layer_decay_rate'"),
        ('optim_wrapper.paramwise_cfg.custom_key', {}, "has no 'custom_key'; .*'custom_keys'"),
        ('optim_wrapper.constructor', 'LayerDecayConstructor', 'did you mean .LayerDecayOptim'),
        (
            'model.decode_head.loss_decode.loss_wieght',
            2.0,
            r"loss_decode \(CrossEntropyLoss\) has no 'loss_wieght'; .*'loss_weight'",
        ),
        ('model.decode_head.num_classe', 7, r"decode_head .*'num_classe'; .*'num_classes'"),
        ('model.decode_head.norm_cfg.momentun', 0.1, r"norm_cfg .*'momentun'; .*'momentum'"),
        ('model.data_preprocessor.meann', [0], r"data_preprocessor .*'meann'; .*'mean'"),
        ('param_scheduler.0.strat_factor', 0.1, r"param_scheduler\.0 .*; .*'start_factor'"),
        (
            'train_dataloader.dataset.pipeline.2.keep_ration',
            True,
            r"pipeline\.2 \(Resize\) has no 'keep_ration'; .*'keep_ratio'",
        ),
        ('train_dataloader.sampler.shufle', True, r"sampler .*'shufle'; .*'shuffle'"),
        ('train_dataloader.num_worker', 1, r"train_dataloader has no .*; .*'num_workers'"),
        ('optim_wrapper.clip_gard', {}, r"optim_wrapper \(OptimWrapper\) .*; .*'clip_grad'"),
        ('optim_wrapper.clip_grad.max_nrom', 1.0, r"clip_grad has no .*; .*'max_norm'"),
        ('visualizer.alhpa', 0.5, r"visualizer \(SegLocalVisualizer\) .*; .*'alpha'"),
        ('log_processor.window_sise', 5, r"log_processor .*; .*'window_size'"),
        ('auto_scale_lr.base_batchsize', 4, r"auto_scale_lr has no .*; .*'base_batch_size'"),
        ('env_cfg.cudnn_benchmrk', True, r"env_cfg has no .*; .*'cudnn_benchmark'"),
        ('default_hooks.chekpoint.interval', 5, "chekpoint has no type; .*'checkpoint'"),
        ('model.decode_head.norm_cfg.requires_gard', True, r"norm_cfg .*; .*'requires_grad'"),
        ('model.decode_head.norm_cfg.type', 'SynBN', r"norm_cfg\.type must .*; .*'SyncBN'"),
        ('model.backbone.init_cfg.type', 'Pretraind', r"init_cfg\.type must .*; .*'Pretrained'"),
        (
            'model.decode_head.loss_decode.type',
            'CrosEntropyLoss',
            r"loss_decode\.type must .*; .*'CrossEntropyLoss'",
        ),
        (
            'train_dataloader.dataset.pipeline.2.type',
            'Resiz',
            r"pipeline\.2\.type must .*; .*'Resize'",
        ),
    ],
)
def test_it_is_named_with_what_is_like_it(option, value, expected, configs):  # noqa: F811
    with pytest.raises(ValueError, match=expected):
        read(configs['seg'], **{option: value})


def test_layer_decay_without_its_constructor(configs):  # noqa: F811
    options = {
        'optim_wrapper.constructor': None,
        'optim_wrapper.paramwise_cfg.layer_decay_rate': 0.9,
    }
    with pytest.raises(ValueError, match=r'layer_decay_rate needs optim_wrapper\.constructor='):
        read(configs['seg'], **options)


def test_layer_decay_of_another_backbone(configs):  # noqa: F811
    backbone = dict(_delete_=True, type='ResNet', depth=18)
    options = {'model.backbone': backbone, 'optim_wrapper.paramwise_cfg.layer_decay_rate': 0.9}
    with pytest.raises(TypeError, match=r'backbone ResNet has no get_layer_depth\(\)'):
        read(configs['seg'], **options)
    options['optim_wrapper.paramwise_cfg.layer_decay_rate'] = 1.0
    read(configs['seg'], **options)


@pytest.mark.slow
@pytest.mark.parametrize('task', ['seg', 'det', 'cls'])
def test_shipped_configs_have_no_such_name(task):
    """Neither at the top, nor as an argument. Those of other methods differ by the method alone."""
    pytest.importorskip('mmcv.ops' if task == 'det' else 'mmpretrain' if task == 'cls' else 'mmseg')
    others = tuple(f'_{method}.py' for method in METHODS if method != 'zoh')
    names = [n for n in config_names() if n.startswith(f'{task}/') and not n.endswith(others)]
    assert names
    for name in names:
        read(config_path(name))


def test_a_config_that_is_not_there_has_a_suggestion(configs):  # noqa: F811
    with pytest.raises(SystemExit, match=r"no file .*tiny_sg\.py; did you mean 'tiny_seg\.py'"):
        read(configs['seg'].with_name('tiny_sg.py'))
    for name in ('seg/upernet_vim_t_zho.py', 'upernet_vim_t_zho', 'cfgs/seg/upernet_vim_t_zho.py'):
        with pytest.raises(
            SystemExit, match=rf'no file {name}; .*configs/seg/upernet_vim_t_zoh.py'
        ):
            read(name)
    with pytest.raises(SystemExit, match=r'config: \S+ is a folder, not a file\.'):
        read(configs['seg'].parent)
    with pytest.raises(SystemExit, match=r'earth\.pth is a checkpoint; CONFIG comes before'):
        read('demo/earth.pth')


def test_a_checkpoint_that_is_not_there_is_told_with_those_that_are(configs, tmp_path):  # noqa: F811
    for name in ('iter_20.pth', 'iter_40.pth'):
        (tmp_path / name).touch()
    expected = r'no checkpoint .*iter_61\.pth; .* has iter_20\.pth, iter_40\.pth'
    with pytest.raises(FileNotFoundError, match=expected):
        read(configs['seg'], tmp_path / 'iter_61.pth')
    with pytest.raises(FileNotFoundError, match=expected):
        check_checkpoint(tmp_path / 'iter_61.pth')
    with pytest.raises(FileNotFoundError, match=expected.replace(r'\.pth; .*', '; .*')):
        check_checkpoint(tmp_path / 'iter_61')
    with pytest.raises(FileNotFoundError, match=rf'{tmp_path} is a folder; .* has iter_20\.pth, '):
        check_checkpoint(tmp_path)
    (tmp_path / 'empty').mkdir()
    with pytest.raises(FileNotFoundError, match=r'iter_61\.pth; .*/empty has no \.pth file'):
        check_checkpoint(tmp_path / 'empty' / 'iter_61.pth')
    with pytest.raises(FileNotFoundError, match=r'there is no folder .*absent either'):
        read(configs['seg'], tmp_path / 'absent' / 'iter_61.pth')
    for there in (tmp_path / 'iter_20.pth', 'https://example.com/iter_61.pth', None):
        read(configs['seg'], there)


class Open:
    def __init__(self, size, **kwargs):
        self.shape = kwargs.pop('shapes', size)


class Closed(Open):
    def __init__(self, *args, colour=None, **kwargs):
        super().__init__(*args, **kwargs)


def test_what_a_class_takes_from_arguments_of_any_name():
    check_arguments_of(Closed, 'x', dict(type=Closed, size=1, colour=2, shapes=3, other=4))
    with pytest.raises(ValueError, match=r"x \(Closed\) has no 'colours'; did you mean 'colour'"):
        check_arguments_of(Closed, 'x', dict(colours=2))


def test_types_given_as_classes(configs):  # noqa: F811
    from mmseg.models import Feature2Pyramid

    cfg = Config.fromfile(configs['seg'])
    with pytest.raises(ValueError, match=r"Feature2Pyramid\) has no 'rescale'"):
        check_arguments_of(Feature2Pyramid, 'neck', {**cfg.model.neck, 'rescale': 1})


class Swallowing(BaseModule):
    """Its ``**kwargs`` are for something else than what it inherits from."""

    def __init__(self, name, init_cfg=None, **kwargs):
        super().__init__(init_cfg)
        self.options = dict(name=name, **kwargs)


class Named(Closed):
    def __init__(self, size, **kwargs):
        super(Closed, self).__init__(size, **kwargs)


class Passing(BaseModule):
    def __init__(self, width, **rest):
        super().__init__(**rest)


class Taking(Passing):
    def __init__(self, width, **kwargs):
        self.height = kwargs.pop('height', None)
        super().__init__(width, **kwargs)


class Holder(BaseModule):
    def __init__(self, backbone, dqs_cfg=None, tokenizer=None, init_cfg=None):
        super().__init__(init_cfg)


class Constructor:
    def __init__(self, optim_wrapper_cfg, paramwise_cfg=None):
        pass


def test_arguments_are_complete_only_where_all_are_passed_on():
    for kind in (Swallowing, Named, Taking):
        check_arguments_of(kind, 'x', dict(type=kind, other=4))
    without_source = {'BaseModule': BaseModule}
    exec('class A(BaseModule):\n def __init__(self, **kw): super().__init__(**kw)', without_source)
    check_arguments_of(without_source['A'], 'x', dict(other=4))
    for kind, key in ((Passing, 'other'), (Passing, 'rest'), (Swallowing, 'init_cgf')):
        with pytest.raises(ValueError, match=f'has no {key!r}'):
            check_arguments_of(kind, 'x', {key: 4})


def part(**options):
    return Config(
        dict(default_scope='mmseg', model=dict(type='EncoderDecoder', backbone=RESNET)) | options
    )


RESNET = dict(type='ResNet', depth=18)
ADAM = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-3))


def model(**parts):
    return part(model=dict(dict(type='EncoderDecoder', backbone=RESNET), **parts))


def pipeline(*transforms):
    loader = dict(dataset=dict(type='ADE20KDataset', pipeline=[*transforms]))
    return part(train_dataloader=loader)


ROTATE = dict(type='Rotate', limit=20, mask_value=255, border_mode=0, p=0.5, probs=1)
DETECTOR = dict(_scope_='mmdet', type='CocoDataset', filter_cfg={}, pipeline=[dict(type='Resize')])


@pytest.mark.parametrize(
    'config',
    [
        part(model=dict(type='EncoderDecoder', backbone=dict(type=Swallowing, name='a', width=3))),
        part(val_evaluator=dict(type='Evaluator', metrics=[dict(type='IoUMetric')])),
        part(val_evaluator=dict(metrics=dict(type='IoUMetric'))),
        part(train_cfg=dict(max_epochs=10)),
        model(type=Holder, dqs_cfg=dict(type='nms', iou_threshold=0.8)),
        model(type=Holder, tokenizer=dict(type='AutoTokenizer', name_or_path='bert')),
        model(init_cfg=dict(type='Normal', layer='Conv2d', override=dict(name='decode_head'))),
        model(neck=dict(_scope_='mmdet', type='ChannelMapper', in_channels=[8], out_channels=8)),
        part(train_dataloader=dict(dataset=DETECTOR)),
        part(train_dataloader=dict(dataset=dict(type='RepeatDataset', times=2, dataset=DETECTOR))),
        part(optim_wrapper=dict(ADAM, constructor=Constructor, paramwise_cfg=dict(width=1))),
        part(
            optim_wrapper=dict(
                ADAM,
                constructor='mmdet.LearningRateDecayOptimizerConstructor',
                paramwise_cfg=dict(decay_rate=0.9),
            )
        ),
        part(optim_wrapper=dict(ADAM, paramwise_cfg=dict(foo=1))),
        pipeline(dict(type='Albu', transforms=[ROTATE])),
    ],
)
def test_what_is_legal_is_taken(config):
    pytest.importorskip('mmdet.engine')
    pytest.importorskip('mmdet.models')
    pytest.importorskip('mmseg.models')
    check_misspelled(config)


@pytest.mark.parametrize(
    ('config', 'expected'),
    [
        (
            part(val_evaluator=dict(type='Evaluatr', metrics=[])),
            r"val_evaluator\.type .*'Evaluator'",
        ),
        (
            part(val_evaluator=dict(metrics=[dict(type='IoUMetric', iou_metric=[])])),
            r"val_evaluator\.metrics\.0 \(IoUMetric\) .*'iou_metrics'",
        ),
        (
            model(type=Holder, dqs_cfg=dict(type='CrossEntropyLos')),
            r"model\.dqs_cfg\.type .*'CrossEntropyLoss'",
        ),
        (model(decode_head=dict(type='Nothing')), r'decode_head\.type must name'),
        (model(decode_head=[dict(type='Nothing')]), r'decode_head\.0\.type must name'),
        (model(neck=dict(_scope_='mmdet', type='ChanelMapper')), "did you mean 'ChannelMapper'"),
        (
            part(optim_wrapper=dict(ADAM, constructor='mmdet.LearningRateDecayOptimConstructor')),
            "did you mean 'LearningRateDecayOptimizerConstructor'",
        ),
    ],
)
def test_what_is_not_is_told_of_all_the_same(config, expected):
    pytest.importorskip('mmdet.engine')
    pytest.importorskip('mmdet.models')
    pytest.importorskip('mmseg.models')
    with pytest.raises(ValueError, match=expected):
        check_misspelled(config)


def folder_of(config, method=None, work_dir=None, **options) -> str:
    """The name of the folder that a training writes into."""
    args = Namespace(
        config=str(config), cfg_options=options, discretization_method=method, work_dir=work_dir,
        launcher='none', local_rank=0,
    )  # fmt: skip
    return read_config(args, import_library=False).work_dir.rpartition('/')[2]


def test_a_run_of_another_model_has_a_folder_of_its_own(configs, tmp_path):  # noqa: F811
    seg = configs['seg']
    method = 'model.backbone.discretization_method'
    assert folder_of(seg) == folder_of(seg, 'bilinear') == 'tiny_seg'  # its own method
    assert folder_of(seg, 'foh') == folder_of(seg, **{method: 'foh'}) == 'tiny_seg_foh'
    assert folder_of(seg, **{'train_cfg.max_iters': 5, 'optim_wrapper.type': 'A'}) == 'tiny_seg'
    assert folder_of(seg, 'foh', work_dir='mine') == 'mine'
    assert folder_of(seg, 'foh', **{'work_dir': 'mine'}) == 'mine'
    several = {'model.decode_head.pool_scales': [1, 2], 'model.backbone.drop_path_rate': 0.1}
    name = folder_of(seg, 'foh', **several)
    assert name.startswith('tiny_seg_foh_drop_path_rate=0.1_decode_head.pool_scales=')
    assert name == folder_of(seg, 'foh', **dict(reversed(several.items())))
    names = {
        folder_of(seg, **{'model.decode_head.pool_scales': scales})
        for scales in ([1, 2], [12], [1, 2, 3] * 40, [1, 2, 3] * 41, 'a/b', 'a b', '../../b')
    }
    assert len(names) == 7 and all(len(each) < 100 for each in names)
    (tmp_path / 'named.py').write_text(f'_base_ = {str(seg)!r}\nwork_dir = "runs/mine"\n')
    assert folder_of(tmp_path / 'named.py') == 'mine'
    assert folder_of(tmp_path / 'named.py', 'foh') == 'mine_foh'


def test_a_config_of_another_suffix_has_a_suggestion(tmp_path):
    (tmp_path / 'small.py').touch()
    for name in ('small.yp', 'small.yml', 'smal'):
        with pytest.raises(SystemExit, match=r"did you mean 'small\.py'"):
            check_config(tmp_path / name)
