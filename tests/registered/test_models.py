"""The registered classes are the plain ones with what is MMEngine's."""

import inspect

import pytest
import torch
from mmengine.model import BaseModule
from mmengine.registry import MODELS

import vim_mm
from tests.models.small import small_backbone
from vim_mm import models, registered

CLASSES = [(models.VisionMamba, registered.VisionMamba), (models.SimpleFPN, registered.SimpleFPN)]


@pytest.mark.parametrize(('plain', 'shell'), CLASSES)
def test_plain_class_knows_no_mmengine_and_the_registered_one_is_both(plain, shell):
    assert MODELS.get(plain.__name__) is shell
    assert issubclass(shell, plain) and issubclass(shell, BaseModule)
    assert not issubclass(plain, BaseModule)
    assert 'init_cfg' not in inspect.signature(plain).parameters


def test_public_names_are_the_plain_classes():
    assert vim_mm.VisionMamba is models.VisionMamba
    assert vim_mm.Mamba is models.Mamba


def test_state_dicts_are_the_same_and_load_into_each_other():
    plain, shell = small_backbone(), small_backbone(registered.VisionMamba)
    assert [*plain.state_dict()] == [*shell.state_dict()]
    shell.load_state_dict(plain.state_dict())
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(shell(x)[0], plain(x)[0])


def test_init_cfg_is_kept_as_a_copy_and_only_there():
    init_cfg = dict(type='Constant', val=1.0, layer='Conv2d')
    shell = small_backbone(registered.VisionMamba, init_cfg=init_cfg)
    assert shell.init_cfg == init_cfg and shell.init_cfg is not init_cfg
    neck = MODELS.build(dict(type='SimpleFPN', in_channels=8, init_cfg=init_cfg))
    neck.init_weights()
    assert (neck.lateral[0][0].weight == 1).all()
    with pytest.raises(TypeError, match='init_cfg'):
        small_backbone(init_cfg=init_cfg)


@pytest.mark.parametrize('arch', models.arguments.ARCHS)
def test_short_forms(arch):
    with torch.device('meta'):
        model = getattr(vim_mm, f'vim_{arch}')(img_size=64, cls_token='middle')
        expected = vim_mm.VisionMamba(arch=arch, img_size=64, cls_token='middle')
    assert type(model) is vim_mm.VisionMamba
    assert str(model) == str(expected)
    assert model.pos_embed.shape == (1, 17, models.arguments.ARCHS[arch]['embed_dims'])
