"""Weights of modules that were wrapped when they were saved are read under their own names."""

from collections import OrderedDict

import pytest
import timm
import torch
from mmengine.config import Config
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from torch import nn

import vim_mm  # noqa: F401 registers timm's models
from tests.checkpoints.test_forms import small_segmentor
from tests.engine.toy import ToyModel, make_runner
from tests.models.small import small_backbone
from vim_mm import registered
from vim_mm.checkpoints import ConversionError, convert_checkpoint
from vim_mm.checkpoints.container import bare_name, without_wrappers
from vim_mm.checkpoints.pretrained import PretrainedPart
from vim_mm.engine import activate
from vim_mm.engine.cli import load_model

activate()


class Holder(nn.Module):
    """Of a module under a name, as Lightning's users have one."""

    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def __getattr__(self, name):  # as those of PyTorch
        own = self.__dict__.get('_modules') or {name: None}
        return super().__getattr__(name) if name in own else getattr(next(iter(own.values())), name)


def each_part(model):
    """Each child wrapped alone, as MMSeparateDistributedDataParallel does."""
    for name, child in [*model.named_children()]:
        model.add_module(name, Holder(module=child))
    return model


def each_layer(model):
    for i, layer in enumerate(model.backbone.layers):
        model.backbone.layers[i] = Holder(_checkpoint_wrapped_module=Holder(_orig_mod=layer))
    return model


WRAPPED = {
    'torch.compile': torch.compile,
    'data parallelism of each part': each_part,
    'of each layer': each_layer,
    'an average': lambda model: Holder(module=model),
    'Lightning': lambda model: Holder(model=model),
    'Lightning and torch.compile': lambda model: Holder(model=torch.compile(model)),
    'all of it': lambda model: Holder(module=Holder(_orig_mod=Holder(model=each_layer(model)))),
}
FILES = {
    'weights alone': lambda weights: weights,
    'state_dict': lambda weights: dict(
        state_dict=weights, epoch=3, global_step=7, optimizer_states=[], callbacks={}
    ),
    'module': lambda weights: dict(
        module=weights,
        optimizer=None,
        buffer_names=[],
        dp_world_size=8,
        ds_config={},
        ds_version='',
    ),
}


def saved(path, wrapped='torch.compile', file='weights alone', **backbone):
    """A file of a wrapped model, and the model's own weights."""
    model = ToyModel(**backbone)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    own = {name: weight.clone() for name, weight in model.state_dict().items()}
    weights = WRAPPED[wrapped](model).state_dict()
    assert own.keys() != weights.keys()
    torch.save(FILES[file](weights), path)
    return own


def assert_loaded(module, own, prefix=''):
    for name, weight in module.state_dict().items():
        assert torch.equal(weight, own[prefix + name]), name


def toy_config() -> Config:
    if 'ToyModel' not in MODELS:
        MODELS.register_module(module=ToyModel)
    return Config(dict(default_scope='mmengine', model=dict(type='ToyModel')))


@pytest.mark.parametrize('file', FILES)
@pytest.mark.parametrize('wrapped', WRAPPED)
def test_every_tool_reads_them(wrapped, file, tmp_path):
    """infer.py, stream.py, visualize.py and the exports; test.py; load_from; init_cfg."""
    path = tmp_path / 'wrapped.pth'
    own = saved(path, wrapped, file)
    model, loaded = load_model(toy_config(), path)
    assert_loaded(model.cpu(), own)
    assert {*loaded.get('state_dict', loaded)} == {*own}

    init_cfg = dict(type='Pretrained', checkpoint=str(path))
    model = ToyModel(init_cfg=init_cfg)
    model.init_weights()
    assert_loaded(model.backbone, own, 'backbone.')


@pytest.mark.parametrize('file', ['weights alone', 'module'])
def test_runs_read_them(file, tmp_path):
    own = saved(tmp_path / 'wrapped.pth', 'Lightning and torch.compile', file)
    runner = make_runner(tmp_path / 'test', load_from=str(tmp_path / 'wrapped.pth'))
    runner.test()
    assert_loaded(runner.model, own)
    runner = make_runner(tmp_path / 'train', load_from=str(tmp_path / 'wrapped.pth'))
    runner.load_or_resume()
    assert_loaded(runner.model, own)


def test_notes_follow_their_weights(tmp_path):
    """Another method is refused whatever wrapped the model that was trained by it."""
    path = tmp_path / 'wrapped.pth'
    for wrapped in WRAPPED:
        saved(path, wrapped, discretization_method='rk4')
        with pytest.raises(ValueError, match=r"wrapped\.pth was trained with .*method 'rk4', here"):
            load_model(toy_config(), path)
        with pytest.raises(ValueError, match=r"was trained with .*method 'rk4', here"):
            make_runner(tmp_path / 'run', load_from=str(path)).test()
        init_cfg = dict(type='Pretrained', checkpoint=str(path))
        model = ToyModel(init_cfg=init_cfg)
        model.init_weights()
        assert model.backbone.loaded_switches['discretization_method'] == 'rk4'


def test_two_weights_of_one_name_are_refused(tmp_path):
    weights = saved(tmp_path / 'a.pth')
    name = 'backbone.patch_embed.proj.bias'
    for other in (
        f'module.{name}',
        f'model._orig_mod.{name}',
        'backbone.model.patch_embed.proj.bias',
    ):
        both = OrderedDict(weights | {other: weights[name]})
        torch.save(both, tmp_path / 'both.pth')
        said = rf'both\.pth: {name} and {other} are both {name}, without the names of wrappers'
        for read in (
            lambda: load_model(toy_config(), tmp_path / 'both.pth'),
            lambda: make_runner(tmp_path / 'run', load_from=str(tmp_path / 'both.pth')).test(),
            lambda: ToyModel(
                init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'both.pth'))
            ).init_weights(),
        ):
            with pytest.raises(ConversionError, match=said):
                read()
        with pytest.raises(ConversionError, match=f'{other} are both'):
            convert_checkpoint(both)


def test_a_part_of_a_model_may_be_called_as_a_wrapper():
    own = ['head.model.0.weight', 'head.model.1.weight', 'norm.weight', 'model.module.weight']
    file = OrderedDict.fromkeys(own, 0)
    assert without_wrappers(file, own) is file
    wrapped = OrderedDict((f'_orig_mod.{name}', k) for k, name in enumerate(own))
    assert without_wrappers(wrapped, own) == {name: k for k, name in enumerate(own)}
    # Unless two of its own parts differ in nothing else: then it is as it is in the file.
    assert [*without_wrappers({'model.x': 0, 'x': 1}, ['model.x', 'x'])] == ['model.x', 'x']
    assert bare_name('a.module.b.models') == 'a.b.models'


def test_parts_of_other_modules(tmp_path):
    class Part(BaseModule):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.model = nn.Linear(2, 2)

    other = Part()
    weights = {f'_orig_mod.neck.{k}': v for k, v in other.state_dict().items()}
    torch.save(dict(state_dict=weights), tmp_path / 'part.pth')
    checkpoint = str(tmp_path / 'part.pth')
    PretrainedPart(checkpoint, prefix='neck')(part := Part())
    assert_loaded(part, other.state_dict())


def test_the_prefix_of_init_cfg_may_have_the_wrappers_or_not(tmp_path):
    student, teacher = small_backbone(), small_backbone()
    model = torch.compile(Holder(model=Holder(student=student, teacher=teacher)))
    torch.save(model.state_dict(), tmp_path / 'two.pth')
    for prefix in ('teacher', '_orig_mod.model.teacher.', 'model.teacher'):
        init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'two.pth'), prefix=prefix)
        loaded = small_backbone(registered.VisionMamba, init_cfg=init_cfg)
        loaded.init_weights()
        assert_loaded(loaded, teacher.state_dict())


@pytest.mark.parametrize('file', FILES)
def test_timm_reads_them(file, tmp_path):
    sizes = dict(embed_dim=8, depth=1, img_size=8, patch_size=4, num_classes=3)
    model = timm.create_model('vim_tiny_patch16_224', **sizes)
    torch.save(FILES[file](torch.compile(model).state_dict()), tmp_path / 'timm.pth')
    overlay = dict(pretrained_cfg_overlay=dict(file=str(tmp_path / 'timm.pth'), num_classes=3))
    loaded = timm.create_model('vim_tiny_patch16_224', pretrained=True, **sizes, **overlay)
    assert_loaded(loaded, model.state_dict())
    with pytest.raises(ValueError, match=r"were trained with .*method 'zoh'"):
        timm.create_model(
            'vim_tiny_patch16_224', pretrained=True, discretization_method='rk4', **sizes, **overlay
        )


def test_a_file_of_whole_vims_own_form_is_converted(tmp_path):
    """With wrappers in its names as well."""
    weights = small_segmentor()
    plain = convert_checkpoint(dict(state_dict=weights)).state_dict
    wrapped = {f'model._orig_mod.{name}': weight for name, weight in weights.items()}
    found = convert_checkpoint(dict(state_dict=wrapped)).state_dict
    assert found.keys() == plain.keys()
