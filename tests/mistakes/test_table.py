"""Wrong arguments, configs, options and files: each message names what is wrong, and what came."""

import importlib.util
import io
import re
import zipfile
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS

from tests.configs.data_on_disk import write_ade20k, write_coco
from tests.models.small import small_backbone
from vim_mm import mistakes
from vim_mm.checkpoints.reading import load_from_local
from vim_mm.config import config_path, merge_options
from vim_mm.engine.checks.channels import check_channels
from vim_mm.engine.checks.data import check_data
from vim_mm.engine.checks.settings import check_settings
from vim_mm.engine.cli import import_task_library, read_config
from vim_mm.mistakes import explain, is_mistake, sentence
from vim_mm.models import Mamba, SimpleFPN
from vim_mm.stream.models import for_stream

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope='module')
def command_line():
    spec = importlib.util.spec_from_file_location(
        '_command_line', ROOT / 'tools' / '_command_line.py'
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sentence_of(call, *args, **kwargs) -> str:
    """What a tool would print of the error that the call raises; it must be a user's mistake."""
    with pytest.raises((Exception, SystemExit)) as caught:
        call(*args, **kwargs)
    line = explain(caught.value)
    assert line is not None, f'taken for a bug: {caught.value!r}'
    assert '\n' not in line
    return line


WIDTH = dict(embed_dims=16, num_layers=2)
# Arguments of the backbone, and what the sentence must hold.
BACKBONE = [
    (dict(arch='huge'), r"arch must be one of .*tiny.*'huge'$"),
    (dict(arch='Tny'), r"arch must be one of .*'Tny'; did you mean 'tiny'\?"),
    (dict(arch=''), r"arch must be one of .*''"),
    (dict(arch='T'), r"arch must be one of .*'T'"),
    (dict(arch=7), 'arch must be .* 7'),
    (dict(arch=None), 'arch must be .*None'),
    (dict(arch=dict(embed_dims=8)), 'arch must be .*num_layers'),
    (dict(arch=dict(**WIDTH, depth=3)), 'arch must be .*depth'),
    (dict(arch=dict(embed_dims='192', num_layers=2)), "arch.embed_dims must be an int.* '192'"),
    (dict(arch=dict(embed_dims=19.2, num_layers=2)), r'arch.embed_dims must be an int.* 19\.2'),
    (dict(arch=dict(embed_dims=0, num_layers=2)), 'arch.embed_dims must be at least 1, got 0'),
    (dict(arch=dict(embed_dims=16, num_layers=0)), 'arch.num_layers must be at least 1, got 0'),
    (dict(arch=dict(embed_dims=16, num_layers=True)), 'arch.num_layers must be an int.* True'),
    (dict(img_size=(32, 32, 32)), r'img_size must be one integer or two, got \(32, 32, 32\)'),
    (dict(img_size=()), r'img_size must be one integer or two, got \(\)'),
    (dict(img_size='32'), "img_size must be an integer or .* '32'"),
    (dict(img_size=32.0), r'img_size must be .* 32\.0'),
    (dict(img_size=(32, None)), 'img_size must be an integer, got None'),
    (dict(img_size=-32), 'img_size must be at least 1, got -32'),
    (dict(img_size={32}), r'img_size must be .* \{32\}'),
    (dict(patch_size=0), 'patch_size must be at least 1, got 0'),
    (dict(patch_size=(16, 16)), r'patch_size must be an integer, got \(16, 16\)'),
    (dict(patch_size='16'), "patch_size must be an integer, got '16'"),
    (dict(stride=0), 'stride must be at least 1, got 0'),
    (dict(stride=-4), 'stride must be at least 1, got -4'),
    (dict(stride=(4, 0)), 'stride must be at least 1, got 0'),
    (dict(stride=(4, 2, 4)), r'stride must be one integer or two, got \(4, 2, 4\)'),
    (dict(stride=4.0), r'stride must be .* got 4\.0'),
    (dict(in_channels=0), 'in_channels must be at least 1, got 0'),
    (dict(in_channels=None), 'in_channels must be an integer, got None'),
    (dict(out_indices={0: 0}), r'out_indices must be .* \{0: 0\}'),
    (dict(out_indices={0, 1}), r'out_indices must be .* \{0, 1\}'),
    (dict(out_indices=True), 'out_indices must hold integers, got True'),
    (dict(out_indices=[0, True]), r'out_indices must hold integers, got \[0, True\]'),
    (dict(out_indices='01'), "out_indices must be .* '01'"),
    (dict(out_indices=None), 'out_indices must be .* None'),
    (dict(out_indices=(0.0, 1)), r'out_indices must hold integers, got \(0\.0, 1\)'),
    (dict(out_indices=(0, 2)), r'out_indices must name layers in \[-2, 2\) .* \(0, 2\)'),
    (dict(out_indices=-3), 'out_indices must name layers .* -3'),
    (dict(out_indices=(1, 0)), r'out_indices .*ascending order, got \(1, 0\)'),
    (dict(out_indices=(1, 1)), r'out_indices .*ascending order, got \(1, 1\)'),
    (dict(out_indices=()), 'out_indices must name layers'),
    (dict(out_type='map'), "out_type must be one of .*'map'"),
    (dict(out_type=['raw']), 'out_type must be one of'),
    (dict(out_type='cls_token'), "out_type 'cls_token' needs a cls_token"),
    (dict(out_feature='hidden'), "out_feature must be one of .*'hidden'"),
    (dict(cls_token='end'), "cls_token must be one of .*'end'"),
    (dict(cls_token=True), 'cls_token must be one of .*True'),
    (dict(bimamba_type='v3'), "bimamba_type must be one of .*'v3'"),
    (dict(if_divide_out='yes'), "if_divide_out must be True or False, got 'yes'"),
    (dict(if_rope=1), 'if_rope must be True or False, got 1'),
    (dict(if_rope=True, if_rope_residual=1), 'if_rope_residual must be True or False, got 1'),
    (dict(if_rope_residual=True), 'if_rope_residual needs if_rope, got if_rope False'),
    (dict(if_abs_pos_embed='true'), 'if_abs_pos_embed must be True or False'),
    (dict(residual_in_fp32=None), 'residual_in_fp32 must be True or False, got None'),
    (dict(with_cp=1), 'with_cp must be True or False, got 1'),
    (dict(rope_grid=0), 'rope_grid must be at least 1, got 0'),
    (dict(arch=dict(embed_dims=18, num_layers=2), if_rope=True), 'if_rope needs embed_dims .* 18'),
    (dict(discretization_method='euler'), "discretization method 'euler', expected one of"),
    (dict(discretization_method='hihgorder'), "^discretization_method: .*mean 'highorder'"),
    (dict(discretization_method=['zoh']), r"discretization method \['zoh'\]"),
    (dict(discretization_method=None), 'discretization method None'),
    (dict(drop_path_rate=1.0), r'drop_path_rate must lie in \[0, 1\), got 1\.0'),
    (dict(drop_path_rate=-0.1), r'drop_path_rate must lie in \[0, 1\), got -0\.1'),
    (dict(drop_path_rate='0.1'), "drop_path_rate must be a number, got '0.1'"),
    (dict(drop_path_rate=[0.1]), r'drop_path_rate must be a number, got \[0\.1\]'),
    (dict(frozen_stages=3), r'frozen_stages must lie in \[-1, 2\], got 3'),
    (dict(frozen_stages=-2), r'frozen_stages must lie in \[-1, 2\], got -2'),
    (dict(frozen_stages='all'), "frozen_stages must be an integer, got 'all'"),
    (dict(frozen_stages=2, out_indices=0), r'frozen_stages must lie in \[-1, 1\], got 2'),
    (dict(ssm_cfg=[4]), r'ssm_cfg must be a dict .* \[4\]'),
    (dict(ssm_cfg=dict(d_stat=4)), "ssm_cfg has no 'd_stat': .*did you mean 'd_state'"),
    (dict(ssm_cfg=dict(d_model=4)), "ssm_cfg has no 'd_model'"),
    (dict(ssm_cfg=dict(bimamba_type='v1')), "ssm_cfg must not have 'bimamba_type'"),
    (dict(ssm_cfg=dict(d_state=0)), r'd_state must lie in \[1, 256\], got 0'),
    (dict(ssm_cfg=dict(d_state=257)), r'd_state must lie in \[1, 256\], got 257'),
    (dict(ssm_cfg=dict(expand=-1)), 'expand must be positive, got -1'),
    (dict(emb_dims=3), "unexpected keyword argument 'emb_dims'"),
]
MIXER = [
    (dict(d_model=0), 'd_model must be at least 1, got 0'),
    (dict(d_model='8'), "d_model must be an integer, got '8'"),
    (dict(d_state=16.0), r'd_state must be an integer, got 16\.0'),
    (dict(d_conv=0), 'd_conv must be at least 1, got 0'),
    (dict(expand=0), 'expand must be positive, got 0'),
    (dict(expand=0.01), r'expand must leave .* got 0\.01'),
    (dict(expand='2'), "expand must be a number, got '2'"),
    (dict(dt_rank='automatic'), "dt_rank must be an integer, got 'automatic'"),
    (dict(dt_rank='full'), "dt_rank must be an integer, got 'full'; the one word is 'auto'"),
    (dict(dt_rank=0), 'dt_rank must be at least 1, got 0'),
    (dict(dt_min=0.0), r'dt_min must be positive, got 0\.0'),
    (dict(dt_min=0.2), r'dt_min must be at most dt_max = 0\.1, got 0\.2'),
    (dict(dt_max=float('inf')), 'dt_max must be positive, got inf'),
    (dict(dt_init='normal'), "dt_init must be one of .*'normal'"),
    (dict(dt_init_b='none'), "dt_init_b must be one of .*'none'"),
    (dict(conv_bias=None), 'conv_bias must be True or False, got None'),
    (dict(use_cuda_kernel='no'), "use_cuda_kernel must be True or False, got 'no'"),
]
NECK = [
    (dict(in_channels=18), 'in_channels must be divisible by 4, got 18'),
    (dict(in_channels=0), 'in_channels must be at least 1, got 0'),
    (dict(in_channels='16'), "in_channels must be an integer, got '16'"),
    (dict(in_channels=[16]), r'in_channels must be an integer, got \[16\]'),
    (dict(in_channels=16, out_channels=0), 'out_channels must be at least 1, got 0'),
    (dict(in_channels=16, num_outs=3), 'num_outs must be at least 4, got 3'),
    (dict(in_channels=16, start_level=4), r'start_level must lie in \[0, 3\], got 4'),
    (dict(in_channels=16, num_outs=5.0), r'num_outs must be an integer, got 5\.0'),
    (dict(), "missing 1 required positional argument: 'in_channels'"),
]


@pytest.mark.parametrize(('arguments', 'expected'), BACKBONE)
def test_backbone(arguments, expected):
    assert_matches(expected, sentence_of(small_backbone, **arguments))


@pytest.mark.parametrize(('arguments', 'expected'), MIXER)
def test_mixer(arguments, expected):
    assert_matches(expected, sentence_of(Mamba, **{'d_model': 8, **arguments}))


@pytest.mark.parametrize('shape', [(2, 5, 7), (5, 8), (2, 3, 5, 8)])
def test_the_input_of_a_mixer(shape):
    expected = f'hidden_states: expected shape (B, L, 8), got {shape}'
    assert sentence_of(Mamba(8), torch.zeros(shape)) == expected


@pytest.mark.parametrize(('arguments', 'expected'), NECK)
def test_neck(arguments, expected):
    assert_matches(expected, sentence_of(SimpleFPN, **arguments))


def assert_matches(expected: str, line: str) -> None:
    assert re.search(expected, line), line


@pytest.mark.parametrize(
    ('images', 'expected'),
    [
        (lambda: torch.zeros(3, 32, 32), r'images: expected shape .*got \(3, 32, 32\)'),
        (lambda: torch.zeros(1, 1, 32, 32), r'in_channels = 3, .*got \(1, 1, 32, 32\)'),
        (lambda: torch.zeros(1, 32, 32, 3), r'in_channels = 3, .*got \(1, 32, 32, 3\)'),
        (lambda: torch.zeros(1, 3, 0, 32), r'at least one pixel, got shape \(1, 3, 0, 32\)'),
        (lambda: [torch.zeros(3, 32, 32)], 'images: expected a tensor, got list'),
        (
            lambda: torch.zeros(1, 3, 32, 32, dtype=torch.uint8),
            r'images: expected floating-point numbers, got torch\.uint8',
        ),
        (lambda: None, 'images: expected a tensor, got NoneType'),
    ],
)
def test_pictures(images, expected):
    assert_matches(expected, sentence_of(small_backbone(), images()))


@pytest.mark.parametrize(
    ('maps', 'expected'),
    [
        (lambda: [torch.zeros(1, 8, 4, 4)], 'in_channels of SimpleFPN is 16, .*8 channels'),
        (lambda: [torch.zeros(1, 16, 4, 4)] * 2, 'one map, got 2: out_indices of the backbone'),
        (lambda: [], 'one map, got 0'),
    ],
)
def test_maps_of_another_backbone(maps, expected):
    assert_matches(expected, sentence_of(SimpleFPN(16), maps()))


CLS, SEG, DET = 'cls/vim_t_zoh.py', 'seg/upernet_vim_t_zoh.py', 'det/mask_rcnn_vim_t_zoh.py'


@pytest.mark.parametrize(
    ('name', 'options', 'expected'),
    [
        (SEG, {'backbone.arch': 'small'}, r'neck.embed_dim is 192, .*384 channels'),
        (SEG, {'backbone.arch': 'smal'}, 'arch must be one of'),
        (SEG, {'backbone.out_indices': [5, 11, 17]}, 'neck.rescales: expected .* 4 .*got 3'),
        (SEG, {'backbone.out_indices': [5, 11, 17, 24]}, 'out_indices must name layers'),
        (SEG, {'neck.embed_dim': 384}, 'neck.embed_dim is 384, .*192'),
        (SEG, {'decode_head.in_channels': [192, 192, 192, 384]}, r'decode_head.in_channels is \['),
        (CLS, {'backbone.arch': 'small'}, r'model.head.in_channels is 192, .* gives 384'),
        (SEG, {'auxiliary_head.in_channels': 384}, 'auxiliary_head.in_channels is 384, .*192'),
        (SEG, {'auxiliary_head.in_index': 4}, 'auxiliary_head.in_index is 4, .* 4 maps'),
        (SEG, {'backbone.out_indices': {0: 1}}, 'out_indices must be'),
        (DET, {'neck.in_channels': 384}, 'neck.in_channels is 384, .*192 channels'),
        (DET, {'backbone.arch': 'small'}, 'neck.in_channels is 192, .*384 channels'),
        (DET, {'backbone.out_indices': [11, 23]}, 'SimpleFPN takes one map.* got 2'),
    ],
)
def test_parts_that_do_not_fit(name, options, expected):
    library = {DET: 'mmdet', CLS: 'mmpretrain'}.get(name)
    if library is not None:
        pytest.importorskip(library, reason=f'a base of this config lies in {library}')
    cfg = Config.fromfile(config_path(name))
    for key, value in options.items():
        part, _, argument = key.partition('.')
        cfg.model[part][argument] = value
    assert_matches(expected, sentence_of(check_channels, cfg.model))


def test_shipped_configs_fit():
    for name in (SEG, 'seg/upernet_vim_b_foh.py', 'seg/upernet_vim_shapes.py'):
        check_channels(Config.fromfile(config_path(name)).model)
    for name in (DET, 'det/mask_rcnn_vim_shapes.py'):
        check_channels(Config.fromfile(config_path(name)).model)


@pytest.mark.parametrize(
    ('argument', 'expected'),
    [
        ('model', 'expected KEY=VALUE, got .model.'),
        ('=3', "expected KEY=VALUE, got '=3'"),
        ('', "expected KEY=VALUE, got ''"),
        ('a=[1,2', r"--cfg-options a: '\]' is missing in '\[1,2'"),
        ('a=1,2]', r"--cfg-options a: '\]' closes nothing"),
        ('a=[(1,2]', r"--cfg-options a: '\]' closes nothing"),
        ('a=["x, 1]', "is missing in"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_read(argument, expected, command_line, capsys):
    parser = ArgumentParser()
    command_line.add_arguments(parser)
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(['config.py', '--cfg-options', argument])
    assert caught.value.code == 2
    assert_matches(expected, capsys.readouterr().err.splitlines()[-1])


@pytest.mark.parametrize(
    ('text', 'value'),
    [
        ('/data/my set', '/data/my set'),
        (' padded ', 'padded'),
        ('"/data/my set"', '/data/my set'),
        ('[/a b, /c d]', ['/a b', '/c d']),
        ('["a, b", c]', ['a, b', 'c']),
        ('1,2', [1, 2]),
        ('[1,]', [1]),
        ('[]', []),
        ('()', ()),
        ('(1, 2.5, x)', (1, 2.5, 'x')),
        ('[(1,2),[a, b],c]', [(1, 2), ['a', 'b'], 'c']),
        ('"[1, 2]"', [1, 2]),
        ('[5], [6]', [[5], [6]]),
        ('1e-4', 1e-4),
        ('True', True),
        ('false', False),
        ('None', None),
        ("it's", "it's"),
        ('a=b', 'a=b'),
        ('', ''),
    ],
)
def test_values_of_options(text, value, command_line):
    read = command_line.parse_value(text)
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    ('option', 'expected'),
    [
        ('train_dataloder.batch_size', "did you mean 'train_dataloader'"),
        ('crop_size', "nothing reads 'crop_size'"),
        ('param_scheduler.x.end', 'list indices must be integers'),
        ('param_scheduler.7.end', 'Index 7 exceeds the length of list'),
        ('optim_wrapper.optimizer.lr.x', 'lr is a dict .*float'),
    ],
)
def test_options_that_nothing_reads(option, expected):
    line = sentence_of(read_config, arguments(config_path(SEG), **{option: 1}))
    assert_matches(expected, line)
    assert line.startswith(f'--cfg-options {option}: ') and line.count('--cfg-options') == 1


@pytest.mark.parametrize(
    ('option', 'value', 'expected'),
    [
        ('optim_wrapper.optimizer.lr', 'abc', "must be a number, got 'abc'"),
        ('optim_wrapper.optimizer.weight_decay', None, 'must be a number, got None'),
        ('train_cfg.max_iters', 'ten', "must be a number, got 'ten'"),
        ('train_cfg.max_iters', -1, 'must be a whole number from 1, got -1'),
        ('train_cfg.max_iters', 2.5, r'must be a whole number from 1, got 2\.5'),
        ('train_cfg.val_interval', 0, 'must be a whole number from 1, got 0'),
        ('train_dataloader.batch_size', 'two', "must be an integer, got 'two'"),
        ('val_dataloader.num_workers', -1, 'must be at least 0, got -1'),
        ('randomness.seed', 'abc', "must be an integer, got 'abc'"),
        ('randomness.seed', -1, r'must lie in \[0, 4294967295\], got -1'),
        ('randomness.deterministic', 1, 'must be True or False, got 1'),
        ('randomness.determinstic', True, "did you mean 'deterministic'"),
        ('default_hooks.logger.interval', 0, 'must be at least 1, got 0'),
        ('model.test_cfg.mode', 'slides', "must be one of .*'slides'"),
        ('model.test_cfg.crop_size', None, "two integers with .*mode='slide', got None"),
        ('model.test_cfg.stride', (341, 0), 'must be at least 1, got 0'),
        ('model.decode_head.ignore_index', 3, r'label of padding, .*seg_pad_val = 255, got 3'),
        ('model.auxiliary_head.ignore_index', 'x', "must be an integer, got 'x'"),
    ],
)
def test_settings_that_cannot_be_used(option, value, expected):
    cfg = Config.fromfile(config_path(SEG))
    check_settings(cfg)
    cfg.merge_from_dict({option: value})
    line = sentence_of(check_settings, cfg)
    assert line.startswith(f'{option} ') and re.search(expected, line), line


def test_a_segmentor_without_windows(tmp_path):
    cfg = Config.fromfile(config_path('seg/upernet_vim_shapes.py'))
    cfg.model.test_cfg = dict(mode='slide')
    line = sentence_of(check_settings, cfg)
    assert line.startswith('model.test_cfg.crop_size must be two integers'), line


def test_a_label_to_ignore_with_the_padding_of_it():
    cfg = Config.fromfile(config_path(SEG))
    for part, name in (
        ('data_preprocessor', 'seg_pad_val'),
        ('decode_head', 'ignore_index'),
        ('auxiliary_head', 'ignore_index'),
    ):
        cfg.model[part][name] = 254
    check_settings(cfg)


@pytest.mark.parametrize('kind', ['SegDataPreProcessor', 'mmseg.SegDataPreProcessor', 'own'])
@pytest.mark.parametrize('pack', ['FastPackSegInputs', 'mmengine.FastPackSegInputs', 'mixed'])
def test_labels_of_8_bits_for_a_preprocessor_that_does_not_widen_them(kind, pack):
    from mmseg.models import SegDataPreProcessor

    from vim_mm.segmentation.preprocessor import FastSegDataPreProcessor

    cfg = Config.fromfile(config_path(SEG))
    data = cfg.train_dataloader.dataset
    if pack == 'mixed':
        steps, data.pipeline = [data.pipeline[-1]], data.pipeline[:-1]
        data = dict(type='MultiImageMixDataset', dataset=data, pipeline=steps)
        cfg.train_dataloader.dataset = data
    else:
        data.pipeline[-1].type = pack

    def own(base):
        return type('Own', (base,), {})

    cfg.model.data_preprocessor.type = own(SegDataPreProcessor) if kind == 'own' else kind
    line = sentence_of(check_settings, cfg)
    assert line.startswith('train_dataloader.dataset: FastPackSegInputs needs'), line
    cfg.model.data_preprocessor.type = own(FastSegDataPreProcessor)
    check_settings(cfg)
    cfg.model.data_preprocessor.type = 'SegDataPreProcessor'
    cfg.train_dataloader.dataset.pipeline[-1].type = 'PackSegInputs'
    check_settings(cfg)


SEG_LAYOUT = r'sets the place, now data/ade/ADEChallengeData2016, and seg/README.md describes'
DET_LAYOUT = r'sets the place, now data/coco, and det/README.md describes'


@pytest.mark.parametrize(
    ('name', 'split', 'missing', 'layout'),
    [
        (SEG, 'train', '{}/images/training, the folder data_prefix.img_path', SEG_LAYOUT),
        (SEG, 'val', '{}/images/validation, the folder data_prefix.img_path', SEG_LAYOUT),
        (SEG, 'test', '{}/images/validation, the folder data_prefix.img_path', SEG_LAYOUT),
        (DET, 'train', '{}/annotations/instances_train2017.json, the annotation file', DET_LAYOUT),
        (DET, 'test', '{}/annotations/instances_val2017.json, the annotation file', DET_LAYOUT),
        (CLS, 'train', '{}/train, the folder data_prefix.img_path', 'docs/classification.md'),
        (CLS, 'test', '{}/val, the folder data_prefix.img_path', 'docs/classification.md'),
    ],
)
def test_data_that_are_missing(name, split, missing, layout, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    cfg = data_config(name)
    line = sentence_of(check_data, cfg, split)
    assert line.startswith(f'there is no {missing.format(cfg.data_root)}'), line
    assert_matches(f' of {split}_dataloader.dataset: --cfg-options data_root=', line)
    assert_matches(layout, line)


def test_data_sets_that_look_for_their_files_themselves(monkeypatch, tmp_path):
    """By an assert without a message."""
    monkeypatch.chdir(tmp_path)
    cfg = data_config(SEG)
    cfg.train_dataloader.dataset = dict(
        type='PascalVOCDataset',
        data_root='data/voc',
        data_prefix=dict(img_path='JPEGImages', seg_map_path='SegmentationClass'),
        ann_file='train.txt',
    )
    assert sentence_of(check_data, cfg, 'train') == (
        'PascalVOCDataset does not find its files for train_dataloader.dataset in data/voc: '
        '--cfg-options train_dataloader.dataset.data_root=... sets the place'
    )


def data_config(name: str) -> Config:
    """A config whose task library is imported."""
    library = {SEG: 'mmseg.models', DET: 'mmdet.models', CLS: 'mmpretrain.models'}[name]
    pytest.importorskip(library, exc_type=ImportError, reason=f'needs {library}')
    cfg = Config.fromfile(config_path(name))
    import_task_library(cfg)
    return cfg


def test_data_of_a_place_of_their_own(tmp_path):
    cfg = data_config(SEG)
    write_ade20k(tmp_path)
    merge_options(cfg, dict(data_root=str(tmp_path)))
    check_data(cfg, 'train', 'val', 'test')
    cfg.val_dataloader.dataset.data_root = '/nothing'
    line = sentence_of(check_data, cfg, 'train', 'val')
    assert_matches('val_dataloader.dataset: .* val_dataloader.dataset.data_root=', line)
    inner = cfg.train_dataloader.dataset
    inner.update(data_root=None, ann_file='/nothing/names.txt')
    cfg.train_dataloader.dataset = dict(
        type='ConcatDataset', datasets=[inner, dict(type='RepeatDataset', times=2, dataset=inner)]
    )
    line = sentence_of(check_data, cfg, 'train')
    assert_matches('/nothing/names.txt, the annotation file ann_file of', line)
    assert_matches('--cfg-options train_dataloader.dataset.datasets.0.ann_file=', line)


def test_an_evaluator_of_other_data(tmp_path):
    cfg = data_config(DET)
    write_coco(tmp_path)
    merge_options(cfg, dict(data_root=str(tmp_path)))
    check_data(cfg, 'train', 'val', 'test')
    cfg.val_evaluator.ann_file = '/elsewhere/instances_val2017.json'
    line = sentence_of(check_data, cfg, 'train', 'val')
    assert_matches(
        'val_evaluator.ann_file is /elsewhere/instances_val2017.json, but val_dataloader.dataset '
        f'has the annotations {tmp_path}/annotations/instances_val2017.json',
        line,
    )
    # As of CocoPanopticMetric and CocoMetric, of which each has a file of its own.
    other, same = dict(cfg.val_evaluator), dict(cfg.test_evaluator)
    cfg.val_evaluator = [other, same]
    check_data(cfg, 'train', 'val')
    cfg.val_evaluator = [dict(type='DumpResults'), other, other]
    line = sentence_of(check_data, cfg, 'train', 'val')
    assert_matches('val_evaluator.1.ann_file is /elsewhere/instances_val2017.json', line)


def test_an_evaluator_that_compares_nothing(tmp_path):
    """It writes what a server evaluates, and names the file of pictures without annotations."""
    cfg = data_config(DET)
    write_coco(tmp_path)
    merge_options(cfg, dict(data_root=str(tmp_path)))
    cfg.test_evaluator.update(format_only=True, ann_file='/elsewhere/image_info_test-dev2017.json')
    check_data(cfg, 'test')


def test_a_data_root_that_moves_nothing(tmp_path):
    """Datasets of a base have its data_root: another one beside them changes nothing."""
    data_config(SEG)
    file = tmp_path / 'config.py'
    file.write_text(f"_base_ = 'vim_mm::{SEG}'\ndata_root = '/mine'\n")
    at = (
        'no dataset lies in the data_root of the config, /mine: '
        'train_dataloader.dataset.data_root is data/ade/ADEChallengeData2016'
    )
    assert_matches(f'{file}: {at}', sentence_of(read_config, arguments(file)))
    file.write_text(f"_base_ = 'vim_mm::{SEG}'\ndata_root: str = '/mine'\n")
    assert_matches(f'{file}: {at}', sentence_of(read_config, arguments(file)))
    file.write_text(
        f"_base_ = 'vim_mm::{SEG}'\ndata_root = '/mine'\n"
        'train_dataloader = dict(dataset=dict(data_root=data_root))\n'
        'val_dataloader = dict(dataset=dict(data_root=data_root))\n'
        'test_dataloader = val_dataloader\n'
    )
    cfg = read_config(arguments(file, data_root='/yours'))
    assert cfg.val_dataloader.dataset.data_root == '/yours'
    # A base's that is still there, beside datasets that have a place of their own, is no mistake.
    file.write_text(
        f"_base_ = 'vim_mm::{SEG}'\n"
        "train_dataloader = dict(dataset=dict(data_root='/mine'))\n"
        "val_dataloader = dict(dataset=dict(data_root='/mine'))\n"
        'test_dataloader = val_dataloader\n'
    )
    read_config(arguments(file))
    line = sentence_of(read_config, arguments(file, data_root='/yours'))
    assert_matches('--cfg-options data_root: no dataset lies in the data_root of the config', line)
    assert_matches('train_dataloader.dataset.data_root is /mine', line)


@pytest.mark.parametrize(
    ('root', 'place'),
    [
        ("'data/streets_'", "data_root=data_root + 'train'"),
        ("'./data/streets'", "data_root='data/streets'"),
        ("'data/streets'", "data_root='./data/streets/'"),
        ("'data'", "data_root=f'{data_root}/streets'"),
        ("'/data/streets/'", "data_prefix=dict(img_path=data_root + 'a', seg_map_path='b')"),
        ("['data/a', 'data/b']", 'data_root=data_root[0]'),
        ('None', "data_root='data/streets'"),
        ("''", "data_root='data/streets'"),
    ],
)
def test_a_data_root_that_datasets_use_in_their_way(root, place, tmp_path):
    data_config(SEG)
    file = tmp_path / 'config.py'
    file.write_text(
        f"_base_ = 'vim_mm::{SEG}'\ndata_root = {root}\n"
        f'train_dataloader = dict(dataset=dict({place}))\n'
    )
    read_config(arguments(file))


def test_a_data_root_of_weights(tmp_path):
    data_config(SEG)
    file = tmp_path / 'config.py'
    file.write_text(
        f"_base_ = 'vim_mm::{SEG}'\ndata_root = '/mine'\nload_from = data_root + '/vim.pth'\n"
    )
    assert read_config(arguments(file, data_root='/yours')).load_from == '/yours/vim.pth'


def test_two_options_that_name_the_method_must_agree():
    data_config(SEG)
    args = arguments(config_path(SEG), **{'model.backbone.discretization_method': 'zoh'})
    for args.discretization_method in ('zoh', None):
        assert read_config(args).model.backbone.discretization_method == 'zoh'
    args.discretization_method = 'rk4'
    assert sentence_of(read_config, args).startswith(
        "--discretization-method is 'rk4', and --cfg-options sets model.backbone."
    )


def test_options_move_datasets_out_of_the_data_root(tmp_path):
    data_config(SEG)
    file = tmp_path / 'config.py'
    file.write_text(
        f"_base_ = 'vim_mm::{SEG}'\ndata_root = 'data/streets'\n"
        'train_dataloader = dict(dataset=dict(data_root=data_root))\n'
        'val_dataloader = train_dataloader\ntest_dataloader = train_dataloader\n'
    )
    options = {f'{name}_dataloader.dataset.data_root': '/x' for name in ('train', 'val', 'test')}
    assert read_config(arguments(file, **options)).test_dataloader.dataset.data_root == '/x'


def test_data_that_are_downloaded_may_be_missing(tmp_path):
    data_config(CLS)
    cfg = Config.fromfile(config_path('cls/vim_t_cifar100_zoh.py'))
    merge_options(cfg, dict(data_root=str(tmp_path / 'nothing')))
    check_data(cfg, 'train', 'val', 'test')
    cfg.train_dataloader.dataset.download = False
    assert_matches('/nothing/, the folder data_prefix', sentence_of(check_data, cfg, 'train'))


def test_a_classifier_is_not_streamed():
    line = sentence_of(for_stream, Config(dict(default_scope='mmpretrain')))
    assert_matches("^default_scope must .*'mmpretrain': segmentors and detectors .*infer.py", line)


@pytest.mark.parametrize('value', [1e5, 7])
def test_lengths_that_mmengine_takes(value):
    check_settings(Config(dict(train_cfg=dict(max_iters=value, val_interval=float('inf')))))


def arguments(config: Path, **options) -> Namespace:
    return Namespace(config=str(config), cfg_options=options, discretization_method=None)


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        (None, r'there is no file .*config\.py'),
        ('model = dict(', 'syntax|never closed'),
        ('model = dct()', 'dct'),
        ('model = 1 / 0', r'config\.py: ZeroDivisionError'),
        ("_base_ = './nothing.py'", r'nothing\.py'),
        ("_base_ = 'vim_mm::seg/upernet_vim_t_fo.py'", 'did you mean .*upernet_vim_t_foh'),
        ("_base_ = 'nothing::a.py'", r'config\.py: ValueError: .*package name'),
        ("default_scope = 'mmseg'", 'model must be a dict, got None'),
        ("model = dict(type='X')", r"default_scope must be one of \['mmseg', .*\], got None"),
        ("model = 3\ndefault_scope = 'mmseg'", 'model must be a dict, got 3'),
        (
            "default_scope = 'mmpose'\nmodel = dict(type='X')",
            r"default_scope must be one of .* got 'mmpose'",
        ),
        ('param_schedular = []', r"config\.py: nothing .*; did you mean 'param_scheduler'\?$"),
        ("work_dirs = '/mine'  # work_dirs\nnote = dict(work_dirs='work_dirs')", "mean 'work_dir'"),
        ('optim_wraper = dict()', "'optim_wraper'; did you mean 'optim_wrapper'"),
        ('train_dataloaders = dict()', "'train_dataloaders'; did you mean 'train_dataloader'"),
        (
            "default_scope = 'mmseg'\nmodel = dict(backbone=dict(type='VisionMamba', arch='x'))",
            "arch must be one of .*'x'",
        ),
    ],
)
def test_configs(text, expected, tmp_path):
    file = tmp_path / 'config.py'
    if text is not None:
        file.write_text(text + '\n')
    assert_matches(expected, sentence_of(read_config, arguments(file)))


@pytest.mark.parametrize(
    ('model', 'expected'),
    [
        (dict(type='VisionMambo'), 'VisionMambo is not in the .*registry'),
        (dict(arch='tiny'), 'must contain the key "type"'),
        ('VisionMamba', 'cfg should be a dict'),
        (dict(type='VisionMamba', archs='tiny'), "unexpected keyword argument 'archs'"),
        (dict(type='VisionMamba', patch_size=0), 'patch_size must be at least 1, got 0'),
        (dict(type='SimpleFPN'), "missing 1 required positional argument: 'in_channels'"),
    ],
)
def test_what_a_registry_cannot_build(model, expected):
    assert_matches(expected, sentence_of(MODELS.build, model))


def zip_of_text() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, 'w') as archive:
        archive.writestr('notes.txt', 'text')
    return buffer.getvalue()


def checkpoint_bytes(legacy: bool = False) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(weight=torch.ones(99)), buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ('content', 'expected'),
    [
        (b'', 'the file is empty'),
        (b'<!DOCTYPE html><html>', 'HTML page'),
        (b'\n <html>sign in</html>', 'HTML page'),
        (b'version https://git-lfs.github.com/spec/v1\noid', 'pointer of Git LFS'),
        (b'weights to follow\n', r'text file that starts with "weights to follow'),
        (b'{"weights": 1}', 'text file'),
        (b'\x89PNG\r\n\x1a\n\0\0', 'starts with the bytes 89 50 4e 47'),
        (zip_of_text(), 'zip archive that torch.save did not write'),
        (checkpoint_bytes()[:-200], r'cut off after \d+ bytes'),
        (checkpoint_bytes()[:40], 'cut off after 40 bytes'),
        (checkpoint_bytes(legacy=True)[:-100], 'damaged checkpoint'),
        (b'\x10\0\0\0\0\0\0\0{"a": {"dtype":', 'damaged safetensors file'),
    ],
    ids=lambda value: value if isinstance(value, str) else '',  # bytes hold the time of day
)
def test_files_that_are_no_checkpoints(content, expected, tmp_path):
    file = tmp_path / 'weights.pth'
    file.write_bytes(content)
    line = sentence_of(load_from_local, str(file))
    assert str(file) in line
    assert_matches(expected, line)


def test_a_directory_is_no_checkpoint(tmp_path):
    (tmp_path / 'iter_2.pth').touch()
    said = sentence_of(load_from_local, str(tmp_path))
    assert said == f'{tmp_path} is a folder; {tmp_path} has iter_2.pth'


@pytest.mark.parametrize(
    ('other', 'expected'),
    [
        (dict(arch=dict(embed_dims=16, num_layers=4)), 'num_layers 4, the backbone 2'),
        (
            dict(arch=dict(embed_dims=32, num_layers=2)),
            r'embed_dims 32, the backbone 16 \(patch_embed\.proj\.weight is \(32, .*, here \(16, ',
        ),
        (dict(in_channels=4), 'in_channels 4, the backbone 3'),
        (dict(patch_size=16), 'patch_size 16, the backbone 8'),
        (dict(ssm_cfg=dict(d_state=8)), 'd_state 8, the backbone 4'),
        (dict(bimamba_type='v1'), 'lacks .*conv1d_b'),
    ],
)
def test_weights_of_another_architecture(other, expected):
    weights = small_backbone(**other).state_dict()
    assert_matches(expected, sentence_of(small_backbone().load_state_dict, weights))


@pytest.mark.parametrize('size', [48, (48,), [48], (48, 48)])
def test_sizes_that_mmseg_takes(size):
    assert small_backbone(img_size=size).grid == (6, 6)


def test_the_conventions_of_mmpretrain():
    model = small_backbone(arch=dict(embed_dims=16, num_layers=3), out_indices=(0, 1))
    assert model.num_layers == 3
    resized = type(model).resize_pos_embed(model.pos_embed, (4, 4), (2, 8))
    assert resized.shape == model.pos_embed.shape
    assert MODELS.build(dict(type='VisionMamba', arch='Tiny', out_indices=0)).embed_dims == 192


def bug():
    return None + 1


def hidden_bug():
    return [][1]


@pytest.mark.parametrize('call', [bug, hidden_bug])
def test_a_bug_is_no_mistake(call):
    with pytest.raises((TypeError, IndexError)) as caught:
        call()
    assert not is_mistake(caught.value)


@pytest.mark.parametrize(
    ('code', 'bug'),
    [
        ('assert False', True),
        ('raise ValueError', True),
        ("int('a')", True),
        ("b'\\xff'.decode()", False),
        ("import re; re.compile('(')", False),
        ("from vim_mm.errors import UserValueError; raise UserValueError('no')", False),
    ],
)
@pytest.mark.parametrize('own', [True, False])
def test_a_plain_error_of_our_own_code_is_a_bug(code, bug, own):
    file = Path(mistakes.__file__).parent / 'ops/scan.py' if own else Path('/elsewhere/scan.py')
    with pytest.raises((ValueError, AssertionError, re.error)) as caught:
        exec(compile(code, str(file), 'exec'))
    assert is_mistake(caught.value) == (not bug or not own)


def test_an_assertion_while_a_model_runs_is_a_bug():
    class Broken(torch.nn.Module):
        def forward(self, x):
            raise ValueError('not of vim_mm')

    with pytest.raises(ValueError) as caught:
        Broken()(1)
    assert not is_mistake(caught.value)


class Unreadable(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return Path('/nothing/picture.jpg').read_bytes()


@pytest.mark.parametrize('num_workers', [0, 1])
def test_a_missing_picture_is_named_by_a_worker_as_well(num_workers):
    loader = torch.utils.data.DataLoader(Unreadable(), num_workers=num_workers)
    assert_matches(r'/nothing/picture\.jpg', sentence_of(lambda: next(iter(loader))))


def test_an_error_of_a_worker_begins_with_its_file():
    """Not with the name of its class and module, as PyTorch passes it on."""
    text = 'Caught SampleError.\nOriginal Traceback:\n  x\nvim_mm.a.SampleError: 7.png: cut off.\n'
    assert sentence(RuntimeError(text)) == '7.png: cut off.'


def test_what_a_strict_loader_says_is_one_line():
    model, other = torch.nn.Linear(2, 3), torch.nn.Linear(2, 4)
    line = sentence_of(model.load_state_dict, other.state_dict())
    assert_matches('size mismatch for weight', line)


def test_a_long_message_is_cut():
    def fail():
        raise ValueError('word ' * 1000)

    line = sentence_of(fail)
    assert len(line) == 600 and line.endswith(' ...')


def test_the_table_is_long_enough():
    assert len(BACKBONE) + len(MIXER) + len(NECK) >= 90
