import inspect

import pytest
import torch
import torch.nn.functional as F

from tests.models import vim_equations
from tests.models.small import DEPTH, images, small_backbone
from vim_mm.models import SimpleFPN, VisionMamba
from vim_mm.models.state_dict import describe_differences, wrong_entry
from vim_mm.models.vision_mamba import OUT_FEATURES, PatchEmbed


@pytest.mark.parametrize('if_rope', [False, True])
@pytest.mark.parametrize('out_feature', OUT_FEATURES)
@pytest.mark.parametrize('bimamba_type', ['v1', 'v2'])
def test_zoh_equals_vims_equations(bimamba_type, out_feature, if_rope):
    model = small_backbone(
        bimamba_type=bimamba_type,
        out_feature=out_feature,
        out_indices=range(DEPTH),
        if_rope=if_rope,
    )
    x = images()
    weights = {k: v.double() for k, v in model.state_dict().items()}
    expected = vim_equations.vim(
        x.double(), weights, bimamba_type, out_feature, DEPTH, rope=if_rope
    )
    for out, tokens in zip(model(x), expected, strict=True):
        tokens = vim_equations.as_map(tokens)
        torch.testing.assert_close(out.double(), tokens, rtol=1e-5, atol=1e-5)


def test_classification_features_equal_vims_equations():
    """Vim's classifier reads the normalized class token, which stands in the middle."""
    model = small_backbone(cls_token='middle', out_type='cls_token', out_feature='norm')
    x = images()
    weights = {k: v.double() for k, v in model.state_dict().items()}
    tokens = vim_equations.vim(x.double(), weights, 'v2', 'norm', DEPTH, middle_cls=True)[-1]
    torch.testing.assert_close(model(x)[0].double(), tokens[:, 8], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    'arch, backbone, with_head',
    [
        ('tiny', 6_955_008, 7_148_008),
        ('small', 25_411_584, 25_796_584),
        ('base', 96_829_440, 97_598_440),
    ],
)
def test_parameter_counts_are_the_published_ones(arch, backbone, with_head):
    with torch.device('meta'):
        model = VisionMamba(arch, cls_token='middle', out_type='cls_token', out_feature='norm')
    count = sum(p.numel() for p in model.parameters())
    assert count == backbone
    assert count + 1000 * (model.embed_dims + 1) == with_head
    assert f'{backbone:,}' in VisionMamba.__doc__ and f'{with_head:,}' in VisionMamba.__doc__
    assert len(model.layers) == 24


def test_parameter_names_are_vims():
    model = small_backbone(cls_token='middle', out_feature='norm', ssm_cfg=dict(d_state=4))
    outside_of_mixers = {k for k in model.state_dict() if '.mixer.' not in k}
    assert outside_of_mixers == {
        'cls_token',
        'pos_embed',
        'patch_embed.proj.weight',
        'patch_embed.proj.bias',
        'layers.0.norm.weight',
        'layers.1.norm.weight',
        'norm_f.weight',
    }
    double = small_backbone(cls_token='double')
    assert {'cls_token_head', 'cls_token_tail'} < set(double.state_dict())


@pytest.mark.parametrize(
    'out_type, cls_token, shape',
    [
        ('featmap', 'none', (2, 16, 4, 6)),
        ('featmap', 'double', (2, 16, 4, 6)),
        ('cls_token', 'middle', (2, 16)),
        ('cls_token', 'double', (2, 16)),
        ('avg_featmap', 'tail', (2, 16)),
        ('raw', 'none', (2, 24, 16)),
        ('raw', 'head', (2, 25, 16)),
        ('raw', 'double', (2, 26, 16)),
    ],
)
def test_shapes_of_each_out_type(out_type, cls_token, shape):
    (out,) = small_backbone(out_type=out_type, cls_token=cls_token)(images(32, 48))
    assert out.shape == shape


@pytest.mark.parametrize(
    'cls_token, indices', [('head', [0]), ('middle', [8]), ('double', [0, 17])]
)
def test_out_types_are_views_of_the_same_tokens(cls_token, indices):
    raw = small_backbone(cls_token=cls_token, out_type='raw')
    x = images()
    tokens = raw(x)[0]
    patches = tokens[:, [i for i in range(tokens.shape[1]) if i not in indices]]
    expected = {
        'cls_token': tokens[:, indices].mean(1),
        'avg_featmap': patches.mean(1),
        'featmap': patches.transpose(1, 2).reshape(2, 16, 4, 4),
    }
    for out_type, value in expected.items():
        other = small_backbone(cls_token=cls_token, out_type=out_type)
        other.load_state_dict(raw.state_dict())
        torch.testing.assert_close(other(x)[0], value)


@pytest.mark.parametrize('if_rope', [False, True])
@pytest.mark.parametrize('cls_token', ['none', 'middle'])
@pytest.mark.parametrize(
    'size, grid',
    [
        pytest.param((32, 32), (4, 4), id='as-built'),
        pytest.param((64, 16), (8, 2), id='non-square-same-count'),
        pytest.param((40, 24), (5, 3), id='odd-grid'),
        pytest.param((72, 80), (9, 10), id='larger'),
        pytest.param((8, 8), (1, 1), id='one-patch'),
        pytest.param((33, 31), (5, 4), id='odd-pixels'),
        pytest.param((3, 50), (1, 7), id='below-a-patch'),
    ],
)
def test_any_size(size, grid, cls_token, if_rope):
    model = small_backbone(cls_token=cls_token, if_rope=if_rope)
    (out,) = model(images(*size))
    assert out.shape == (2, 16, *grid)
    assert out.isfinite().all()


@pytest.mark.parametrize('called', [False, True])
@pytest.mark.parametrize(
    'options', [{}, dict(if_rope=True, cls_token='middle'), dict(bimamba_type='v1', with_cp=True)]
)
def test_an_empty_batch_has_empty_outputs_and_no_gradients(options, called):
    model = small_backbone(**options)
    if called:  # hooks keep the mixer from reading the weights of its modules
        for module in model.modules():
            module.register_forward_hook(lambda *_: None)
    x = images(32, 48, batch=0).requires_grad_()
    (out,) = model(x)
    assert out.shape == (0, 16, 4, 6)
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert not any(param.grad.any() for param in model.parameters())


def test_padding_is_zeros_at_the_right_and_bottom():
    model = small_backbone()
    x = images(27, 37)
    padded = torch.zeros(2, 3, 32, 40)
    padded[..., :27, :37] = x
    torch.testing.assert_close(model(x), model(padded))


def test_overlapping_patches():
    model = small_backbone(stride=4)
    assert model.grid == (7, 7)
    assert model(images())[0].shape == (2, 16, 7, 7)
    # 35 = 8 + 6.75 * 4: one more patch covers the rest.
    assert model(images(35, 32))[0].shape == (2, 16, 8, 7)


def test_a_stride_for_each_axis():
    model = small_backbone(stride=(8, 4))
    assert model.grid == (4, 7) and model.pos_embed.shape[1] == 28
    assert model(images())[0].shape == (2, 16, 4, 7)
    assert model(images(40, 35))[0].shape == (2, 16, 5, 8)
    # Every second column of patches is a patch of stride 8, and so is its token before the layers.
    whole = small_backbone()
    embed = model.patch_embed
    embed.load_state_dict(whole.patch_embed.state_dict())
    x = images()
    torch.testing.assert_close(embed(x)[..., ::2], whole.patch_embed(x))


def test_a_pair_of_equal_strides_is_one_stride():
    """In what a checkpoint notes, too: its switches are as before."""
    pair, one = small_backbone(stride=(4, 4)), small_backbone(stride=4)
    assert pair.patch_embed.stride == one.patch_embed.stride == 4
    assert pair.state_dict()._metadata[''] == one.state_dict()._metadata['']
    wide = small_backbone(stride=[4, 8])
    assert wide.state_dict()._metadata['']['stride'] == (4, 8)
    assert wrong_entry({'stride': [4, 8]}) is None
    for wrong in ([4], [4, 8, 2], [4, 0], 'four', [4, True], 0):
        assert wrong_entry({'stride': wrong}) == 'stride'


def test_weights_of_another_pair_of_strides_are_told(tmp_path):
    saved, model = small_backbone(stride=(8, 4)), small_backbone(stride=(4, 8))
    torch.save(saved.state_dict(), tmp_path / 'weights.pth')
    model.load_state_dict(torch.load(tmp_path / 'weights.pth'))
    noted = saved.state_dict()._metadata['']
    assert describe_differences(noted, model) == ['stride [8, 4], here [4, 8]']
    assert model.pos_embed.shape[1] == 28  # resized from 4 x 7 to 7 x 4


@pytest.mark.parametrize('stride', [8, 4, 5, 11, (4, 11)])
@pytest.mark.parametrize('size', [(32, 48), (27, 37), (3, 8)])
def test_patches_are_embedded_by_a_convolution(size, stride):
    embed = PatchEmbed(3, 16, 8, stride).double()
    x = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    leaves = (x, *embed.parameters())
    steps = stride if isinstance(stride, tuple) else (stride, stride)
    bottom, right = (-(s - 8) % step if s > 8 else 8 - s for s, step in zip(size, steps))
    expected = F.conv2d(F.pad(x, (0, right, 0, bottom)), *embed.parameters(), stride)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(embed(x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(embed(x), leaves, grad),
        torch.autograd.grad(expected, leaves, grad),
        rtol=1e-12,
        atol=1e-12,
    )


def test_patches_are_embedded_in_the_dtype_of_autocast():
    embed, x = PatchEmbed(3, 16, 8, 8), images(27, 37)
    rounded = PatchEmbed(3, 16, 8, 8)
    rounded.load_state_dict({k: v.bfloat16() for k, v in embed.state_dict().items()})
    expected = rounded(x.bfloat16().float())
    with torch.autocast('cpu', torch.bfloat16):
        out = embed(x)
        assert embed.double()(x.double()).dtype == torch.float64
    assert out.dtype == torch.bfloat16
    # Products of rounded factors, summed in float32 and rounded once: half a unit of 8 bits.
    torch.testing.assert_close(out.float(), expected, rtol=2**-8, atol=1e-5)


def test_non_square_img_size_makes_a_non_square_grid():
    model = small_backbone(img_size=(16, 48))
    assert model.pos_embed.shape == (1, 12, 16)
    assert model(images(16, 48))[0].shape == (2, 16, 2, 6)


def test_image_is_read_in_row_major_order():
    """With one direction only, a patch changes itself and what comes after it, row by row."""
    model = small_backbone(bimamba_type='none').eval()
    x = images(batch=1)
    changed = x.clone()
    changed[..., 8:16, 16:24] += 1  # patch (1, 2) of 4x4
    difference = (model(changed)[0] - model(x)[0]).abs().amax(1).flatten()
    assert (difference[:6] == 0).all() and (difference[6:] > 0).all()


def test_position_embedding_is_optional():
    model = small_backbone(if_abs_pos_embed=False)
    assert 'pos_embed' not in model.state_dict()
    assert model(images(40, 24))[0].shape == (2, 16, 5, 3)


@pytest.mark.parametrize(
    'arguments, message',
    [
        pytest.param(dict(arch='huge'), "arch.*tiny.*'huge'", id='arch-name'),
        pytest.param(dict(arch=dict(embed_dims=8)), 'arch.*num_layers', id='arch-dict'),
        pytest.param(dict(arch=7), 'arch.* 7', id='arch-type'),
        pytest.param(dict(out_indices=(0, 2)), r'out_indices.*\[-2, 2\).*\(0, 2\)', id='too-large'),
        pytest.param(dict(out_indices=-3), 'out_indices.* -3', id='too-small'),
        pytest.param(dict(out_indices=(1, 0)), 'ascending', id='order'),
        pytest.param(dict(out_indices=()), 'out_indices', id='empty'),
        pytest.param(dict(out_type='map'), "out_type.*'map'", id='out_type'),
        pytest.param(dict(out_feature='hidden'), "out_feature.*'hidden'", id='out_feature'),
        pytest.param(dict(cls_token='end'), "cls_token.*'end'", id='cls_token'),
        pytest.param(dict(frozen_stages=3), r'frozen_stages.*\[-1, 2\], got 3', id='frozen_stages'),
        pytest.param(
            dict(arch=dict(embed_dims=18, num_layers=2), if_rope=True), 'embed_dims.* 18', id='rope'
        ),
        pytest.param(dict(discretization_method='euler'), "'euler'.*zoh", id='method'),
        pytest.param(dict(bimamba_type='v3'), "bimamba_type.*'v3'", id='bimamba_type'),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        small_backbone(**arguments)


def test_method_and_ssm_cfg_reach_every_mixer():
    model = small_backbone(discretization_method='foh', ssm_cfg=dict(d_state=3, expand=1))
    for layer in model.layers:
        assert layer.mixer.discretization_method == 'foh'
        assert layer.mixer.A_b_log.shape == (16, 3)


def test_the_method_changes_the_output():
    zoh, bilinear = small_backbone(), small_backbone(discretization_method='bilinear')
    bilinear.load_state_dict(zoh.state_dict())
    x = images()
    assert not torch.allclose(zoh(x)[0], bilinear(x)[0])


def test_autocast_keeps_the_residual_stream_in_fp32():
    for residual_in_fp32, pos_embed, dtype in (
        (True, True, torch.float32),
        (True, False, torch.float32),
        (False, False, torch.bfloat16),
    ):
        model = small_backbone(
            out_feature='residual',
            residual_in_fp32=residual_in_fp32,
            if_abs_pos_embed=pos_embed,
        )
        with torch.autocast('cpu', torch.bfloat16):
            (out,) = model(images())
        assert out.dtype == dtype


@pytest.mark.parametrize('out_feature', ['mixer', 'norm'])
def test_autocast_gives_features_its_dtype(out_feature):
    with torch.autocast('cpu', torch.bfloat16):
        (out,) = small_backbone(out_feature=out_feature)(images())
    assert out.dtype == torch.bfloat16


def test_weights_in_bf16():
    model = small_backbone()
    x = images()
    expected = model(x)[0]
    out = model.bfloat16()(x.bfloat16())[0]
    assert out.dtype == torch.bfloat16
    assert (out.float() - expected).norm() / expected.norm() < 0.05


def test_everything_happens_on_the_device_of_the_weights():
    """The meta device stands in for an accelerator: it refuses to be mixed with the CPU."""
    with torch.device('meta'):
        model = small_backbone(cls_token='double', if_rope=True, drop_path_rate=0.1)
    (out,) = model(images(40, 24).to('meta'))
    assert (out.device.type, out.shape) == ('meta', (2, 16, 5, 3))


@pytest.mark.parametrize(
    ('kind', 'expected'),
    [
        (
            VisionMamba,
            'arch img_size patch_size stride in_channels out_indices out_type out_feature '
            'cls_token bimamba_type if_divide_out discretization_method ssm_cfg if_abs_pos_embed '
            'if_rope rope_grid residual_in_fp32 drop_path_rate frozen_stages with_cp',
        ),
        (SimpleFPN, 'in_channels out_channels num_outs'),
    ],
)
def test_arguments_by_position_are_those_of_the_first_release(kind, expected):
    """Later arguments go by name alone, so that calls which were right stay right."""
    parameters = inspect.signature(kind).parameters.values()
    assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == expected.split()
