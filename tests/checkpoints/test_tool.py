"""tools/convert_checkpoint.py, and what loads its files and those that it has not seen."""

import errno
import gc
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from mmengine.config import Config

from tests.checkpoints import released
from tests.scripts import TOOLS
from tests.tools.conftest import run_tool
from vim_mm import registered
from vim_mm.checkpoints import ConversionError, convert_checkpoint
from vim_mm.checkpoints.converted_file import write
from vim_mm.checkpoints.provenance import CheckpointMismatchError, check_switches
from vim_mm.checkpoints.reading import read_as_data
from vim_mm.engine import activate
from vim_mm.engine.cli import load_model
from vim_mm.models import VisionMamba

WIDTH, LAYERS = 16, 4
ARCH = dict(embed_dims=WIDTH, num_layers=LAYERS)
# A segmentor of the size of the weights below.
SEGMENTOR = f"""
_base_ = 'vim_mm::seg/upernet_vim_shapes.py'
model = dict(
    data_preprocessor=dict(size=(64, 64)),
    backbone=dict(
        arch=dict(_delete_=True, embed_dims={WIDTH}, num_layers={LAYERS}), img_size=64,
        patch_size=16, stride=16, out_indices=(0, 1, 2, 3), out_feature='mixer', cls_token='none',
        discretization_method='zoh', if_divide_out=True),
    neck=dict(embed_dim={WIDTH}, rescales=[4, 2, 1, 0.5]),
    decode_head=dict(in_channels=[{WIDTH}] * 4, channels={WIDTH}, num_classes=5),
    auxiliary_head=dict(in_channels={WIDTH}, channels=6, num_classes=5))
"""


@pytest.fixture
def tool(monkeypatch):
    """The tool in this process: a function of its arguments."""
    monkeypatch.syspath_prepend(str(TOOLS))
    spec = importlib.util.spec_from_file_location('convert', TOOLS / 'convert_checkpoint.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def convert(*args):
        monkeypatch.setattr(sys, 'argv', ['convert_checkpoint.py', *map(str, args)])
        module.main(module.parse_args())

    return convert


@pytest.fixture
def classifier(tmp_path):
    """A file of classification: 4 x 4 patches and the class token in the middle."""
    shapes = released.classifier_shapes(WIDTH, 10, depth=LAYERS, tokens=17)
    weights = released.random_weights(shapes)
    file = tmp_path / 'vim.pth'
    torch.save(released.as_classifier(weights), file)
    return file, weights


@pytest.fixture
def segmentor(tmp_path):
    """A file of segmentation, and a config for it."""
    shapes = released.segmentor_shapes(WIDTH, 5, 6, depth=LAYERS, tokens=16)
    file, config = tmp_path / 'segmentor.pth', tmp_path / 'segmentor.py'
    torch.save(released.as_segmentor(released.random_weights(shapes)), file)
    config.write_text(SEGMENTOR)
    return file, config


def backbone_from(file, **options):
    init_cfg = dict(type='Pretrained', checkpoint=str(file), **options.pop('init_cfg', {}))
    model = registered.VisionMamba(ARCH, img_size=64, init_cfg=init_cfg, **options)
    model.init_weights()
    return model


def test_the_folder_of_the_output_is_made(tmp_path):
    out = tmp_path / 'new' / 'folder' / 'vim.pth'
    write(dict(weight=torch.ones(3)), out)
    assert read_as_data(out, 'cpu')['weight'].sum() == 3
    assert [path.name for path in out.parent.iterdir()] == ['vim.pth']


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / 'vim.pth').write_text('the one before')

    def full(self, content):
        self.touch()
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(Path, 'write_bytes', full)
    with pytest.raises(OSError, match=r'vim\.pth cannot be written \(No space left on device\)'):
        write(dict(weight=torch.ones(3)), tmp_path / 'vim.pth')
    assert [path.read_text() for path in tmp_path.iterdir()] == ['the one before']
    gc.collect()  # the error's traceback holds what was being written


def test_a_classifier(tool, classifier, tmp_path, capsys):
    file, weights = classifier
    tool(file, tmp_path / 'out.pth')
    report = capsys.readouterr().out
    assert f'mapped: {len(weights)} weights of the file, to {len(weights)} of the model' in report
    assert 'resized: 0' in report and 'missing: 0' in report
    written = read_as_data(tmp_path / 'out.pth')
    assert {*written['state_dict']} == {
        k.replace('head.', 'head.fc.') if 'head' in k else f'backbone.{k}' for k in weights
    }
    assert written['meta']['converted_from']['file'] == 'vim.pth'


def test_the_backbone_starts_from_converted_and_from_unconverted_files(tool, classifier, tmp_path):
    """Under whatever prefix. The class token is taken out of the middle, or kept."""
    file, weights = classifier
    tool(file, tmp_path / 'out.pth')
    tool(file, tmp_path / 'bare.pth', '--part', 'backbone')
    patches = torch.cat([weights['pos_embed'][:, :8], weights['pos_embed'][:, 9:]], dim=1)
    for source, prefix in (
        (file, None),
        (file, 'model.'),
        (tmp_path / 'out.pth', None),
        (tmp_path / 'out.pth', 'backbone.'),
        (tmp_path / 'bare.pth', 'backbone'),
    ):
        model = backbone_from(source, init_cfg=dict(prefix=prefix))
        assert torch.equal(model.pos_embed, patches)
        assert torch.equal(model.layers[3].mixer.D_b, weights['layers.3.mixer.D_b'])
        assert model.loaded_switches['discretization_method'] == 'zoh'
    model = backbone_from(source, cls_token='middle')
    assert torch.equal(model.pos_embed, weights['pos_embed'])
    assert torch.equal(model.cls_token, weights['cls_token'])


def test_a_bare_backbone_is_one_for_plain_pytorch(tool, classifier, tmp_path, capsys):
    file, weights = classifier
    tool(file, tmp_path / 'bare.pth', '--part', 'backbone')
    assert '\ndropped, not of the backbone: 2\n' in capsys.readouterr().out
    state_dict = torch.load(tmp_path / 'bare.pth', weights_only=True)['state_dict']
    options = dict(cls_token='middle', out_feature='norm', out_type='cls_token')
    model = VisionMamba(ARCH, img_size=64, **options)
    model.load_state_dict(state_dict)
    assert torch.equal(model.norm_f.weight, weights['norm_f.weight'])


@pytest.mark.parametrize(
    ('option', 'expected'),
    [
        ('discretization_method=foh', "tells discretization_method = 'rk4', .*contradicts 'foh'"),
        ('out_type=featmap', "tells out_type = 'avg_featmap', .*contradicts 'featmap'"),
        ('discretisation_method=rk4', "no argument .*did you mean 'discretization_method'"),
        ('foo=1', "no argument 'foo'"),
    ],
)
def test_arguments_that_the_file_contradicts(option, expected, tool, tmp_path):
    model = VisionMamba(ARCH, discretization_method='rk4', out_type='avg_featmap')
    torch.save(model.state_dict(), tmp_path / 'in.pth')
    with pytest.raises(ConversionError, match=expected):
        tool(tmp_path / 'in.pth', tmp_path / 'out.pth', '--backbone', option)
    assert not (tmp_path / 'out.pth').exists()
    tool(tmp_path / 'in.pth', tmp_path / 'out.pth', '--backbone', 'discretization_method=rk4')


def test_arguments_that_agree_with_the_file_or_add_to_it():
    weights = VisionMamba(ARCH, ssm_cfg=dict(d_state=4)).state_dict()
    given = dict(arch=dict(ARCH), ssm_cfg=dict(d_state=4, dt_min=0.01))
    switches = convert_checkpoint(weights, switches=given).switches
    assert switches.all['ssm_cfg'] == given['ssm_cfg']
    with pytest.raises(ConversionError, match='contradicts'):
        convert_checkpoint(weights, switches=dict(ssm_cfg=dict(d_state=8)))


def test_what_is_missing_is_an_error_unless_it_is_allowed(tool, classifier, tmp_path, capsys):
    file, weights = classifier
    del weights['layers.2.mixer.A_b_log'], weights['head.bias']
    torch.save(released.as_classifier(weights), file)
    out = tmp_path / 'out.pth'
    with pytest.raises(ConversionError, match=r'out\.pth was not written: 2 weights are missing'):
        tool(file, out)
    assert not out.exists()
    report = capsys.readouterr().out
    assert 'missing: 2\n    backbone.layers.2.mixer.A_b_log\n    head.fc.bias\n' in report
    with pytest.raises(ConversionError, match='1 weights are missing'):
        tool(file, out, '--allow', 'head.')
    tool(file, out, '--allow', 'head.', 'backbone.layers.2.mixer.A_b')
    assert out.exists()


def test_a_weight_without_a_place_is_an_error(tool, classifier, tmp_path):
    file, weights = classifier
    torch.save(released.as_classifier(weights | {'adapter.weight': torch.ones(2)}), file)
    with pytest.raises(ConversionError, match='1 have no place in the model'):
        tool(file, tmp_path / 'out.pth')
    tool(file, tmp_path / 'out.pth', '--allow', 'adapter.')


def test_a_config_is_a_target_of_its_own(tool, classifier, segmentor, tmp_path, capsys):
    """A classifier for a segmentor of 96 x 64 pixels: without class token, resized, no heads."""
    file, _ = classifier
    _, config = segmentor
    config.write_text(SEGMENTOR.replace('img_size=64', 'img_size=(96, 64)'))
    out = tmp_path / 'out.pth'
    with pytest.raises(ConversionError, match='was not written'):
        tool(file, out, '--config', config)
    assert 'neck.upsample_4x.0.weight' in capsys.readouterr().out
    tool(file, out, '--config', config, '--part', 'backbone')
    report = capsys.readouterr().out
    assert 'backbone.pos_embed: 17 entries to 24, for 6x4 patches' in report
    assert 'has another backbone: trained with' in report
    state_dict = read_as_data(out)['state_dict']
    assert 'cls_token' not in state_dict and state_dict['pos_embed'].shape == (1, 24, WIDTH)
    model = registered.VisionMamba(ARCH, img_size=(96, 64))
    model.load_state_dict(state_dict)
    assert torch.equal(model.pos_embed, state_dict['pos_embed'])


@pytest.mark.parametrize('converted', [False, True])
def test_a_whole_segmentor_is_tested_as_it_was_trained(tool, segmentor, tmp_path, converted):
    file, config = segmentor
    checkpoint = tmp_path / 'out.pth' if converted else file
    if converted:
        tool(file, checkpoint)
    activate()  # for the base of the config
    cfg = Config.fromfile(config)
    model, loaded = load_model(cfg, checkpoint)
    weights = read_as_data(file)['state_dict']
    fpn = model.neck.upsample_4x[1].running_var.cpu()
    assert torch.equal(fpn, weights['backbone.fpn1.1.running_var'])
    assert torch.equal(model.neck.upsample_2x[0].bias.cpu(), weights['backbone.fpn2.0.bias'])
    assert check_switches(model, loaded, str(checkpoint), allow=False) == []
    cfg.model.backbone.discretization_method = 'foh'
    with pytest.raises(CheckpointMismatchError, match=r"discretization_method 'zoh', here 'foh'"):
        load_model(cfg, checkpoint)


@pytest.mark.slow
def test_another_architecture_ends_in_one_sentence(tmp_path):
    weights = {'layers.0.mixer.layernorm.weight': torch.ones(2)}
    torch.save(dict(state_dict=weights), tmp_path / 'fast.pth')
    log = run_tool('convert_checkpoint.py', 'fast.pth', 'out.pth', cwd=tmp_path, fails=True)
    assert log.splitlines()[-1] == (
        'convert_checkpoint.py: error: fast.pth cannot be converted: it is of another '
        'architecture than Vim: FastVim, which pools tokens inside of its layers'
    )
    assert not (tmp_path / 'out.pth').exists()
