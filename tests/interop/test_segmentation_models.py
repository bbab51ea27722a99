"""Decoders of segmentation_models_pytorch on Vim; nox -s adapters has it installed."""

import pytest
import torch

import vim_mm  # noqa: F401  registers the encoders with timm

smp = pytest.importorskip('segmentation_models_pytorch')

# Its encoders have a depth of their own, so that all 24 layers are made.
SMALL = dict(embed_dim=32, img_size=64, ssm_cfg=dict(d_state=4))


def train_a_step(model, height=64):
    logits = model(torch.randn(2, 3, height, height + 32))
    assert logits.shape == (2, 5, height, height + 32)
    torch.nn.functional.cross_entropy(logits, torch.randint(5, logits[:, 0].shape)).backward()
    mixers = [(n, w) for n, w in model.named_parameters() if '.mixer.' in n]
    assert len(mixers) > 20
    for name, weight in mixers:
        assert weight.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    'decoder', ['Unet', 'FPN', 'UPerNet', 'MAnet', 'DeepLabV3', 'DeepLabV3Plus', 'PAN']
)
def test_pyramids(decoder):
    model = getattr(smp, decoder)(
        'tu-vim_tiny_patch16_224_pyramid', encoder_weights=None, classes=5, pyramid_channels=16,
        discretization_method='bilinear', **SMALL,
    )  # fmt: skip
    assert model.encoder.out_channels == [3, 0, 16, 16, 16, 16]
    assert model.encoder.model.model.layers[0].mixer.discretization_method == 'bilinear'
    train_a_step(model, 128 if decoder == 'PAN' else 64)  # PAN pools stride 16 by eight


def test_fewer_levels():
    model = smp.Unet(
        'tu-vim_tiny_patch16_224_pyramid', encoder_weights=None, encoder_depth=4,
        decoder_channels=(32, 16, 16, 16), classes=5, pyramid_channels=16, **SMALL,
    )  # fmt: skip
    train_a_step(model)


def test_dpt_takes_layers():
    model = smp.DPT('tu-vim_tiny_patch16_224', encoder_weights=None, classes=5, **SMALL)
    train_a_step(model)
