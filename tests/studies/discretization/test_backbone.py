"""The backbone with a rule of two samples in a config of MMSegmentation."""

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS

from studies.discretization.models.backbone import TwoSampleVisionMamba
from tests.scripts import ROOT
from tests.studies.discretization.two_sample_ref import two_sample_ref
from vim_mm.models.state_dict import describe_differences

SMALL = dict(arch=dict(embed_dims=16, num_layers=2), img_size=32, patch_size=8)


@pytest.mark.parametrize('weight', ['half', 'token'])
def test_it_trains_and_its_mixers_scan_by_the_rule(weight):
    model = MODELS.build(
        dict(
            type='TwoSampleVisionMamba',
            discretization_method='exp_trapezoidal',
            weight=weight,
            **SMALL,
        )
    )
    model.init_weights()
    (out,) = model(torch.randn(2, 3, 32, 32))
    assert out.shape == (2, 16, 4, 4)
    out.square().sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    mixer, x = model.layers[0].mixer, torch.randn(2, 9, 16)
    given = mixer.scan_arguments(x)
    assert given.pop('discretization_method') == 'exp_trapezoidal'
    del given['use_cuda_kernel'], given['backend']
    y = two_sample_ref('exp_trapezoidal', **given, reverse=mixer.reverse)
    torch.testing.assert_close(mixer(x), mixer.out_proj(y.mean(1).transpose(1, 2)))
    assert 'fused is False' in {path.reason for path in model.paths('cuda')}


def test_a_checkpoint_tells_the_rule():
    model, zoh = (
        MODELS.build(dict(type=kind, **SMALL, **rule))
        for kind, rule in (
            ('TwoSampleVisionMamba', dict(discretization_method='foh_two_sample')),
            ('VisionMamba', {}),
        )
    )
    noted = model.state_dict()._metadata['']
    assert describe_differences(noted, zoh) == [
        "discretization_method 'foh_two_sample', here 'zoh'"
    ]


@pytest.mark.parametrize(
    ('wrong', 'sentence'),
    [
        (dict(discretization_method='foh'), 'rule must be one of'),
        (
            dict(discretization_method='foh_two_sample', weight='token'),
            'weight is for exp_trapezoidal alone',
        ),
        (
            dict(discretization_method='exp_trapezoidal', weight='half a one'),
            'weight must be one of',
        ),
    ],
)
def test_mistakes(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        TwoSampleVisionMamba(**SMALL, **wrong)


def test_the_config_builds_it():
    file = ROOT / 'studies/discretization/configs/seg/upernet_vim_fashion_two_sample.py'
    cfg = Config.fromfile(file)
    backbone = MODELS.build(cfg.model.backbone)
    assert isinstance(backbone, TwoSampleVisionMamba)
    assert {layer.mixer.rule for layer in backbone.layers} == {'exp_trapezoidal'}
