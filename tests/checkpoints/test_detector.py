"""Converted detectors compute what detectron2's pyramid and heads compute with the weights."""

import pytest
import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d

from tests.checkpoints import released
from tests.checkpoints.test_original import build_on_cpu, relative
from vim_mm.checkpoints import convert_checkpoint

WIDTH, CHANNELS, CLASSES = 16, 8, 3


@pytest.fixture(scope='module')
def detector():
    """A cascade with weights of detectron2's names, and those weights."""
    shapes = released.detector_shapes(WIDTH, CLASSES, CHANNELS, fc=12, depth=4, tokens=16)
    weights = released.random_weights(shapes, torch.float64)
    model = build_on_cpu(convert_checkpoint(released.as_detector(weights)))
    for module in model.modules():
        if isinstance(module, LayerNorm2d):
            module.eps = 1e-6  # detectron2's
    return model, weights


def layer_norm(x, w, name):
    mean = x.mean(1, keepdim=True)
    scaled = (x - mean) / torch.sqrt((x - mean).square().mean(1, keepdim=True) + 1e-6)
    return scaled * w[f'{name}.weight'][:, None, None] + w[f'{name}.bias'][:, None, None]


def convolve(x, w, name):
    """A convolution with a norm and no bias."""
    weight = w[f'{name}.weight']
    return layer_norm(F.conv2d(x, weight, padding=weight.shape[-1] // 2), w, f'{name}.norm')


def biased(x, w, name):
    weight = w[f'{name}.weight']
    return F.conv2d(x, weight, w[f'{name}.bias'], padding=weight.shape[-1] // 2)


def up(x, w, name):
    return F.conv_transpose2d(x, w[f'{name}.weight'], w[f'{name}.bias'], stride=2)


def pyramid(x, w):
    fine = layer_norm(up(x, w, 'backbone.simfp_2.0'), w, 'backbone.simfp_2.1')
    maps = {
        2: (up(F.gelu(fine), w, 'backbone.simfp_2.3'), 4),
        3: (up(x, w, 'backbone.simfp_3.0'), 1),
        4: (x, 0),
        5: (F.max_pool2d(x, 2), 1),
    }
    return [
        convolve(convolve(m, w, f'backbone.simfp_{k}.{i}'), w, f'backbone.simfp_{k}.{i + 1}')
        for k, (m, i) in maps.items()
    ]


def test_pyramid(detector):
    model, w = detector
    x = torch.randn(1, WIDTH, 4, 4, dtype=torch.float64)
    outputs = model.neck((x,))
    for ours, theirs in zip(outputs[:4], pyramid(x, w), strict=True):
        assert relative(ours, theirs) <= 1e-12
    assert torch.equal(outputs[4], outputs[3][:, :, ::2, ::2])


def test_proposals(detector):
    model, w = detector
    x = torch.randn(1, CHANNELS, 6, 6, dtype=torch.float64)
    name = 'proposal_generator.rpn_head'
    hidden = x
    for k in range(2):
        hidden = biased(hidden, w, f'{name}.conv.conv{k}').relu()
    expected = [biased(hidden, w, f'{name}.{k}') for k in ('objectness_logits', 'anchor_deltas')]
    for ours, theirs in zip(model.rpn_head.forward_single(x), expected, strict=True):
        assert relative(ours, theirs) <= 1e-12


@pytest.mark.parametrize('stage', range(3))
def test_box_heads(detector, stage):
    model, w = detector
    x = torch.randn(5, CHANNELS, 7, 7, dtype=torch.float64)
    head, predictor = f'roi_heads.box_head.{stage}', f'roi_heads.box_predictor.{stage}'
    hidden = x
    for k in range(1, 5):
        hidden = convolve(hidden, w, f'{head}.conv{k}').relu()
    hidden = F.linear(hidden.flatten(1), w[f'{head}.fc1.weight'], w[f'{head}.fc1.bias']).relu()
    expected = [
        F.linear(hidden, w[f'{predictor}.{k}.weight'], w[f'{predictor}.{k}.bias'])
        for k in ('cls_score', 'bbox_pred')
    ]
    for ours, theirs in zip(model.roi_head.bbox_head[stage](x), expected, strict=True):
        assert relative(ours, theirs) <= 1e-12


@pytest.mark.parametrize('stage', range(3))
def test_each_stage_has_the_one_mask_head(detector, stage):
    model, w = detector
    x = torch.randn(2, CHANNELS, 14, 14, dtype=torch.float64)
    hidden = x
    for k in range(1, 5):
        hidden = convolve(hidden, w, f'roi_heads.mask_head.mask_fcn{k}').relu()
    hidden = up(hidden, w, 'roi_heads.mask_head.deconv').relu()
    expected = biased(hidden, w, 'roi_heads.mask_head.predictor')
    assert relative(model.roi_head.mask_head[stage](x), expected) <= 1e-12
