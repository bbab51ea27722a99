"""Finding shipped configs by name, and merging command-line options into them."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from tests.registered.fresh import run_fresh
from vim_mm.config import check_names, config_names, config_path, merge_options
from vim_mm.engine import activate
from vim_mm.models import VisionMamba
from vim_mm.ops.discretization import METHODS

ROOT = Path(__file__).parents[2]
SEG = 'seg/upernet_vim_t_bilinear.py'
DET = 'det/cascade_mask_rcnn_vim_t_bilinear.py'


def test_config_names_are_the_files_in_configs():
    expected = [
        f'{task}/{p.name}'
        for task in ('cls', 'seg', 'det')
        for p in (ROOT / 'configs' / task).glob('*.py')
    ]
    assert config_names() == sorted(expected)


def test_inheritance_has_one_direction():
    """Parts make up `zoh` and what was released. Other methods and the paper inherit `zoh`,
    and a released config another whose values it takes."""
    other = re.compile(rf'_({"|".join(METHODS)}|zoh_paper)$')
    for name in config_names():
        path = ROOT / 'configs' / name
        bases = runpy.run_path(str(path)).get('_base_', [])
        for base in [bases] if isinstance(bases, str) else bases:
            if '/_base_/' in base or base.startswith(('mmdet::', 'mmseg::')):
                continue
            if name.endswith('_released.py'):
                assert base.endswith('_released.py'), name
            else:
                plain = other.sub('_zoh', path.stem)
                assert base == f'./{plain}.py' and plain != path.stem, name


@pytest.mark.parametrize('name', [SEG, '_base_/models/upernet_vim_t.py'])
def test_config_path(name):
    path = config_path(name)
    assert Path(path).is_absolute()
    assert Path(path).read_text() == (ROOT / 'configs' / name).read_text()


def test_config_path_names_similar_configs():
    with pytest.raises(
        FileNotFoundError, match=f"'seg/upernet_vim_bilinear.py': did you mean.*{SEG}"
    ):
        config_path('seg/upernet_vim_bilinear.py')


def test_config_path_without_similar_configs():
    with pytest.raises(FileNotFoundError, match=r'see vim_mm\.config_names\(\)'):
        config_path('xyz')


@pytest.mark.slow
@pytest.mark.parametrize('name', [SEG, DET])
def test_shipped_bases_resolve_in_a_fresh_process_elsewhere(name, tmp_path):
    (tmp_path / 'mine.py').write_text(
        f"_base_ = 'vim_mm::{name}'\nmodel = dict(backbone=dict(with_cp=True))\n"
    )
    script = (
        'import vim_mm; vim_mm.activate()\n'
        'from mmengine.config import Config\n'
        'from mmengine.registry import MODELS, init_default_scope\n'
        "cfg = Config.fromfile('mine.py')\n"
        'init_default_scope(cfg.default_scope)\n'
        'model = MODELS.build(cfg.model)\n'
        "print(type(model).__name__, model.backbone.with_cp, cfg.model.get('_scope_'))\n"
    )
    printed = run_fresh(script, tmp_path)
    model = {SEG: 'FastEncoderDecoder True None', DET: 'FastCascadeRCNN True mmdet'}[name]
    assert printed.splitlines()[-1] == model
    assert 'Failed to search registry' not in printed  # MMEngine logs to standard output


def test_unknown_shipped_base(tmp_path):
    activate()
    (tmp_path / 'mine.py').write_text("_base_ = 'vim_mm::seg/upernet_vim_t_bilineer.py'\n")
    with pytest.raises(FileNotFoundError, match=SEG):
        Config.fromfile(tmp_path / 'mine.py')


@pytest.mark.parametrize('scope', ['mmdet', 'mmseg', 'mmpretrain'])
def test_bases_of_other_packages_resolve(scope, tmp_path):
    activate()
    (tmp_path / 'mine.py').write_text(f"_base_ = '{scope}::_base_/default_runtime.py'\n")
    assert Config.fromfile(tmp_path / 'mine.py').default_scope == scope


def strings(value):
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, str):
        yield value
    elif not isinstance(value, int | float | None):
        for item in value:
            yield from strings(item)


@pytest.mark.parametrize('name', [SEG, DET])
def test_data_root_moves_all_paths(name):
    cfg = Config.fromfile(config_path(name))
    old = cfg.data_root
    before = [*strings(cfg.to_dict())]
    merge_options(cfg, {'data_root': '/elsewhere', 'train_dataloader.batch_size': 3})
    after = [*strings(cfg.to_dict())]
    assert cfg.train_dataloader.dataset.data_root == '/elsewhere'
    assert [s for s in after if s.startswith('/elsewhere/annotations')] == [
        s.replace(old, '/elsewhere') for s in before if s.startswith(f'{old}/annotations')
    ]
    assert not any(s.startswith(old) for s in after)
    assert cfg.train_dataloader.batch_size == 3
    # Nothing else moved, and sequences kept their types.
    assert [s.replace('/elsewhere', old) for s in after] == before
    assert (
        cfg.model.backbone.out_indices
        == Config.fromfile(config_path(name)).model.backbone.out_indices
    )


def test_an_explicit_path_wins_over_data_root():
    cfg = Config.fromfile(config_path(SEG))
    merge_options(cfg, {'data_root': '/a', 'val_dataloader.dataset.data_root': '/b'})
    roots = [cfg[f'{split}_dataloader'].dataset.data_root for split in ('train', 'val', 'test')]
    assert roots == ['/a', '/b', '/a']


@pytest.mark.parametrize(
    ('root', 'new', 'places'),
    [
        ('data/a', '/x', {'data/a': '/x', 'data/a/b/': '/x/b/', 'data/ab': 'data/ab', '': ''}),
        ('data/a/', '/x/', {'data/a': '/x', 'data/a/': '/x/', 'data/a/b': '/x/b'}),
        ('data/a', '/x', {'./data/a/b': '/x/b', 'data//a': '/x', 'data/a/../b': '/x/../b'}),
        ('./data/a', '/x', {'data/a/b': '/x/b', './data/a/b': '/x/b'}),
        ('.', '/x', {'./a': '/x/a', '': '', 'a': 'a'}),
        ('data/a_', '/x/', {'data/a_train': '/x/train', 'data/b': 'data/b'}),
        ('data/a_', '/x_', {'data/a_train': '/x_train'}),
    ],
)
def test_what_data_root_moves(root, new, places):
    cfg = Config(dict(data_root=root, model=dict(places=[*places])))
    merge_options(cfg, {'data_root': new})
    assert cfg.data_root == new and cfg.model.places == [*places.values()]


@pytest.mark.parametrize('root', ['data/a', '', None, ['data/a']])
def test_a_data_root_that_would_move_nothing(root):
    cfg = Config(dict(data_root=root, model=dict(places=['data/b', ''])))
    with pytest.raises(ValueError, match='no dataset lies in the data_root of the config, '):
        merge_options(cfg, {'data_root': '/x'})


@pytest.mark.parametrize('new', [None, 5, ''])
def test_a_new_data_root_is_a_path(new):
    cfg = Config.fromfile(config_path(SEG))
    with pytest.raises(TypeError, match=f'data_root must be a path, got {new!r}'):
        merge_options(cfg, {'data_root': new})


def test_options_reach_into_lists():
    cfg = Config.fromfile(config_path(SEG))
    merge_options(cfg, {'param_scheduler.0.end': 5, 'train_cfg.max_iters': 10})
    assert cfg.param_scheduler[0].end == 5
    assert cfg.param_scheduler[1].type == 'PolyLR'
    assert cfg.train_cfg.max_iters == 10


def test_weights_of_vim_by_options(tmp_path):
    pretrained = VisionMamba('tiny', img_size=224, cls_token='middle', out_feature='norm')
    torch.save(pretrained.state_dict(), tmp_path / 'vim_t.pth')
    cfg = Config.fromfile(config_path(SEG))
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'vim_t.pth'))
    merge_options(cfg, {f'model.backbone.init_cfg.{key}': init_cfg[key] for key in init_cfg})
    init_default_scope(cfg.default_scope)
    backbone = MODELS.build(cfg.model.backbone)
    backbone.init_weights()
    for name, weight in backbone.layers.named_parameters():
        assert torch.equal(weight, pretrained.layers.get_parameter(name))
    assert backbone.pos_embed.shape == (1, 32 * 32, 192)


@pytest.mark.parametrize(
    'option, hint',
    [
        pytest.param('train_dataloder.batch_size', "did you mean 'train_dataloader'?", id='typo'),
        pytest.param('crop_size', "nothing reads 'crop_size'", id='unknown'),
    ],
)
def test_an_option_that_nothing_reads_is_an_error(option, hint):
    cfg = Config.fromfile(config_path(SEG))
    with pytest.raises(ValueError, match=r'^nothing reads ') as error:
        merge_options(cfg, {option: 1})
    assert hint in str(error.value)


def test_an_option_that_lies_deeper_is_found_there():
    dataset = dict(data_root='a', pipeline=[dict(type='Resize', scale=(1, 2))])
    cfg = Config(dict(train_dataloader=dict(dataset=dict(datasets=[dataset, dataset]))))
    inner = 'train_dataloader.dataset.datasets'
    for option, place in (('data_root', 'data_root'), ('scale', 'pipeline.0.scale')):
        places = f'{inner}.0.{place}, {inner}.1.{place}'
        message = f'nothing reads {option!r} at the top; the config has {places}'
        with pytest.raises(ValueError, match=f'^{re.escape(message)}$'):
            merge_options(cfg, {option: 'b'})


# The last are of mmseg, mmdet and mmpretrain: 2600 configs, none of which is refused.
NOTES = (
    *('backbone_norm_cfg', 'base_lr', 'crop_size', 'custom_keys', 'data_root2', 'dataset_type'),
    *('img_scale', 'max_epochs', 'norm_cfg', 'num_classes', 'optim_wrapper_1', 'test_pipeline'),
    *('train_dataloader2', 'train_pipeline', 'val_pipeline', 'conv_cfg', 'gallery_dataloader'),
    *('load_pipeline', 'models', 'val_evaluator_abs', 'weak_pipeline'),
)


def test_names_of_notes_are_left_alone():
    check_names(Config(dict.fromkeys(NOTES)))


@pytest.mark.parametrize(
    'text',
    [
        "custom_hook = dict(type='EMAHook')\ncustom_hooks = [custom_hook]",
        "work_dirs = '/data'\nwork_dir = f'{work_dirs}/a'",
        "_base_ = 'base.py'\nval_evaluator = {{_base_.val_evaluators}}",
        "_base_ = 'base.py'\nval_evaluator = _base_.val_evaluators",
        "_base_ = 'reads.py'",
    ],
)
def test_variables_of_a_config_are_left_alone(text, tmp_path):
    base = "val_evaluators = dict(type='IoUMetric')\n"
    (tmp_path / 'base.py').write_text(base)
    (tmp_path / 'reads.py').write_text(f'{base}val_evaluator = [val_evaluators]\n')
    (tmp_path / 'config.py').write_text(text)
    check_names(Config.fromfile(tmp_path / 'config.py'))


@pytest.mark.parametrize('option', ['custom_hooks', 'experiment_name', 'runner_type', 'work_dir'])
def test_options_of_the_runner_need_not_stand_in_the_config(option):
    cfg = Config.fromfile(config_path(SEG))
    assert option not in cfg
    merge_options(cfg, {option: 'value'})
    assert cfg[option] == 'value'
