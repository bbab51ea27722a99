import copy
import pickle

import pytest
import torch
from mmengine.model import BaseModel, ExponentialMovingAverage
from mmengine.optim import build_optim_wrapper
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tests.models.small import small_backbone
from vim_mm.engine.optimization import layer_decay  # noqa: F401  registers the constructor

LR, RATE, DECAY = 1.0, 0.5, 0.1


class Segmentor(BaseModel):
    def __init__(self):
        super().__init__()
        self.backbone = small_backbone(cls_token='middle', out_feature='norm', out_indices=(0, 1))
        self.decode_head = nn.Sequential(nn.Conv2d(16, 4, 1), nn.BatchNorm2d(4))

    def forward(self, inputs):
        return self.decode_head(self.backbone(inputs)[-1])


class Wrapper(nn.Module):
    """What DistributedDataParallel is to an optimizer constructor."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def build(model, **paramwise_cfg):
    return build_optim_wrapper(
        model,
        dict(
            type='OptimWrapper',
            optimizer=dict(type='AdamW', lr=LR, weight_decay=DECAY),
            constructor='LayerDecayOptimWrapperConstructor',
            paramwise_cfg=paramwise_cfg,
        ),
    )


def settings(model, optim_wrapper):
    """(lr, weight decay) of each parameter by name; every one is in exactly one group."""
    names = {param: name for name, param in model.named_parameters()}
    found = {}
    for group in optim_wrapper.optimizer.param_groups:
        for param in group['params']:
            assert names[param] not in found
            found[names[param]] = (group['lr'], group['weight_decay'])
    return found


def test_groups():
    model = Segmentor()
    optim_wrapper = build(model, layer_decay_rate=RATE)
    found = settings(model, optim_wrapper)
    for name, (lr, decay) in found.items():
        print(f'{name:45} lr {lr:.4f} weight decay {decay}')

    assert found.keys() == dict(model.named_parameters()).keys()
    undecayed = ('pos_embed', 'cls_token', 'A_log', 'A_b_log', '.D', '.D_b', '.bias', 'norm.weight')
    for name, (lr, decay) in found.items():
        if name.startswith('backbone.layers.'):
            power = {'0': 2, '1': 1}[name.split('.')[2]]
        elif name.startswith(('decode_head', 'backbone.norm')):
            power = 0
        else:
            power = 3
        assert lr == LR * RATE**power, name
        one_dimensional = dict(model.named_parameters())[name].dim() == 1
        assert decay == (0.0 if one_dimensional or name.endswith(undecayed) else DECAY), name
    assert found['decode_head.0.weight'] == (1.0, DECAY)
    assert found['decode_head.1.weight'] == (1.0, 0.0)
    assert found['backbone.layers.1.mixer.in_proj.weight'] == (0.5, DECAY)
    assert found['backbone.layers.0.mixer.A_b_log'] == (0.25, 0.0)
    assert found['backbone.pos_embed'] == (0.125, 0.0)

    # Four learning rates, with and without decay.
    assert len(optim_wrapper.optimizer.param_groups) == 8


def test_wrapped_model_has_the_same_groups():
    model = Segmentor()
    plain = settings(model, build(model, layer_decay_rate=RATE))
    assert settings(model, build(Wrapper(model), layer_decay_rate=RATE)) == plain


def as_copied(model):
    return copy.deepcopy(model)


def as_pickled(model):
    return pickle.loads(pickle.dumps(model))


def as_assigned(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    return model


def from_meta(model):
    return copy.deepcopy(model).to('meta').to_empty(device='cpu')


def with_new_parameters(model):
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def with_new_parameters_by_hand(model):
    for module in model.modules():
        for name, param in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(param.detach().clone(), param.requires_grad))
    return model


ROUTES = [
    as_copied,
    as_pickled,
    as_assigned,
    from_meta,
    with_new_parameters,
    with_new_parameters_by_hand,
    lambda model: AveragedModel(model).module,
    lambda model: ExponentialMovingAverage(model).module.requires_grad_(True),
]


@pytest.mark.parametrize('route', ROUTES)
def test_a_model_whose_parameters_are_new_has_the_same_groups(route):
    model = Segmentor()
    expected = settings(model, build(model, layer_decay_rate=RATE))
    names = model.backbone.no_weight_decay()
    assert {'pos_embed', 'cls_token', 'layers.0.mixer.A_log', 'layers.1.mixer.A_b_log'} < names
    model = route(model)
    assert settings(model, build(model, layer_decay_rate=RATE)) == expected
    assert model.backbone.no_weight_decay() == names


@pytest.mark.parametrize('wrapper', [Wrapper, nn.Sequential, torch.compile])
def test_a_wrapped_mixer_keeps_its_names(wrapper):
    model = Segmentor()
    plain = build(model).optimizer.param_groups
    layer = model.backbone.layers[0]
    layer.mixer = wrapper(layer.mixer)
    for group, expected in zip(build(model).optimizer.param_groups, plain, strict=True):
        assert group['weight_decay'] == expected['weight_decay']
        assert {*map(id, group['params'])} == {*map(id, expected['params'])}


def test_a_parametrized_matrix_is_not_decayed():
    model = Segmentor()
    nn.utils.parametrize.register_parametrization(model.backbone.layers[0].mixer, 'A_log', Same())
    nn.utils.parametrize.register_parametrization(model.backbone, 'pos_embed', Same())
    found = settings(model, build(model))
    for name in ('layers.0.mixer.parametrizations.A_log', 'parametrizations.pos_embed'):
        assert found[f'backbone.{name}.original'] == (LR, 0.0)


class Same(nn.Module):
    def forward(self, x):
        return x


class OfTimm(nn.Module):
    """Says what it does not decay as timm's models do, also of what it lacks."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(2, 2))
        self.weight = nn.Parameter(torch.ones(2, 2))

    def no_weight_decay(self):
        return {'table', 'dist_token'}


def test_models_of_other_libraries_say_what_they_do_not_decay():
    model = nn.ModuleDict(dict(ours=Segmentor(), theirs=OfTimm(), marked=nn.Linear(2, 2)))
    model['marked'].weight._no_weight_decay = True  # as mamba_ssm does
    found = settings(model, build(model))
    assert found['theirs.table'] == found['marked.weight'] == (LR, 0.0)
    assert found['theirs.weight'] == (LR, DECAY)
    assert found['ours.backbone.pos_embed'] == (LR, 0.0)


def test_without_a_rate_all_learn_at_the_full_one():
    model = Segmentor()
    found = settings(model, build(model))
    assert {lr for lr, _ in found.values()} == {LR}
    assert found['backbone.pos_embed'] == (LR, 0.0)


def test_mmengines_options_still_hold():
    model = Segmentor()
    custom_keys = {'decode_head': dict(lr_mult=10.0), 'layers.0': dict(lr_mult=0.0)}
    found = settings(model, build(model, layer_decay_rate=RATE, custom_keys=custom_keys))
    assert found['decode_head.0.weight'] == (10.0, DECAY)
    assert found['backbone.layers.0.mixer.in_proj.weight'] == (0.0, DECAY)
    assert found['backbone.layers.0.mixer.A_log'] == (0.0, 0.0)
    assert found['backbone.layers.1.mixer.in_proj.weight'] == (0.5, DECAY)


def test_frozen_parameters_are_left_out():
    model = Segmentor()
    model.backbone.patch_embed.requires_grad_(False)
    found = settings(model, build(model, layer_decay_rate=RATE))
    assert not any(name.startswith('backbone.patch_embed') for name in found)


def test_a_step_moves_layers_by_their_rates():
    model = Segmentor()
    optim_wrapper = build(model, layer_decay_rate=RATE)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optim_wrapper.update_params(model(torch.randn(2, 3, 32, 32)).square().sum())
    for name, power in (('backbone.pos_embed', 3), ('backbone.layers.1.mixer.D', 1)):
        # AdamW's first step is the learning rate times the gradient's sign.
        step = (dict(model.named_parameters())[name] - before[name]).abs().median().item()
        assert step == pytest.approx(RATE**power, rel=1e-2)


@pytest.mark.parametrize('rate', [0.0, 1.5])
def test_bad_rate(rate):
    with pytest.raises(ValueError, match=rf'layer_decay_rate must lie in \(0, 1\], got {rate}'):
        build(Segmentor(), layer_decay_rate=rate)


def test_model_without_layer_depths():
    with pytest.raises(TypeError, match=r'Sequential\.backbone must have get_layer_depth'):
        build(nn.Sequential(nn.Linear(2, 2)), layer_decay_rate=RATE)


def test_a_rate_of_one_needs_no_layer_depths():
    model = nn.Sequential(nn.Linear(2, 2))
    assert settings(model, build(model)) == {'0.weight': (LR, DECAY), '0.bias': (LR, 0.0)}


def test_optimizer_without_lr():
    with pytest.raises(ValueError, match="must have a 'lr'"):
        build_optim_wrapper(
            Segmentor(),
            dict(optimizer=dict(type='AdamW'), constructor='LayerDecayOptimWrapperConstructor'),
        )
