"""What training asks of the backbone: gradients, freezing, recomputation, initialization."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from tests.models.small import DEPTH, compute_gradients, images, small_backbone, total
from vim_mm import registered
from vim_mm.models.vision_mamba import OUT_FEATURES, OUT_TYPES


@pytest.mark.parametrize('out_feature', OUT_FEATURES)
@pytest.mark.parametrize('cls_token', ['none', 'head', 'middle', 'tail', 'double'])
@pytest.mark.parametrize('out_type', OUT_TYPES)
def test_every_parameter_gets_a_gradient(out_type, cls_token, out_feature):
    if out_type == 'cls_token' and cls_token == 'none':
        with pytest.raises(ValueError, match="needs a cls_token, got cls_token 'none'"):
            small_backbone(out_type=out_type, cls_token=cls_token)
        return
    model = small_backbone(out_type=out_type, cls_token=cls_token, out_feature=out_feature)
    gradients = compute_gradients(model, images())
    untouched = [n for n, _ in model.named_parameters() if n not in gradients]
    assert untouched == []
    # A token that a direction starts at has no state to decay yet.
    start = {'head': ['layers.1.mixer.A_log'], 'tail': ['layers.1.mixer.A_b_log']}
    expected = start.get(cls_token, []) if out_type == 'cls_token' else []
    assert [n for n, g in gradients.items() if not g.any()] == expected


@pytest.mark.parametrize('out_indices', [0, (0,), (0, 1), -2, (-2, -1)])
def test_every_parameter_gets_a_gradient_for_each_choice_of_layers(out_indices):
    model = small_backbone(out_indices=out_indices, out_feature='norm')
    gradients = compute_gradients(model, images())
    assert gradients.keys() == dict(model.named_parameters()).keys()


def test_native_and_reference_backend_agree():
    default = small_backbone(out_indices=(0, 1))
    reference = small_backbone(out_indices=(0, 1), ssm_cfg=dict(d_state=4, use_cuda_kernel=False))
    reference.load_state_dict(default.state_dict())
    x = images(40, 24)
    torch.testing.assert_close(default(x), reference(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        compute_gradients(default, x), compute_gradients(reference, x), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize('frozen_stages', [-1, 0, 1, 2])
def test_frozen_stages(frozen_stages):
    model = small_backbone(
        frozen_stages=frozen_stages, cls_token='middle', out_feature='residual', drop_path_rate=0.1
    )
    model.train()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    expected = set()
    if frozen_stages >= 0:
        expected = {n for n, _ in model.named_parameters() if not n.startswith('layers.')}
    for i in range(max(frozen_stages, 0)):
        expected |= {n for n, _ in model.named_parameters() if n.startswith(f'layers.{i}.')}
    assert frozen == expected
    assert [layer.training for layer in model.layers] == [i >= frozen_stages for i in range(DEPTH)]
    if frozen_stages < DEPTH:
        gradients = compute_gradients(model, images())
        assert gradients.keys() == dict(model.named_parameters()).keys() - frozen


def test_norms_of_frozen_layers_are_frozen():
    def frozen(frozen_stages):
        model = small_backbone(
            frozen_stages=frozen_stages, out_feature='norm', out_indices=(0, 1)
        ).train()
        norms = (model.norm0, model.norm_f)
        assert [n.weight.requires_grad for n in norms] == [n.training for n in norms]
        return [not n.training for n in norms]

    assert [frozen(n) for n in (0, 1, 2)] == [[False, False], [True, False], [True, True]]


@pytest.mark.parametrize('if_rope', [False, True])
def test_with_cp_changes_nothing_but_memory(if_rope):
    config = dict(out_indices=(0, 1), drop_path_rate=0.3, if_rope=if_rope)
    plain = small_backbone(**config)
    saving = small_backbone(**config, with_cp=True)
    saving.load_state_dict(plain.state_dict())
    x = images(40, 24)
    torch.manual_seed(1)
    expected, gradients = plain(x), compute_gradients(plain, x)
    torch.manual_seed(1)
    torch.testing.assert_close(saving(x), expected)
    torch.testing.assert_close(compute_gradients(saving, x), gradients)


class Dropped(nn.Module):
    def forward(self, weight):
        return F.dropout(weight, 0.5)


def add_adapter(layer):
    layer.mixer.out_proj = nn.Sequential(layer.mixer.out_proj, nn.Dropout(0.5))


def parametrize_projection(layer):
    register_parametrization(layer.mixer.in_proj, 'weight', Dropped())


def parametrize_mixer(layer):
    register_parametrization(layer.mixer, 'D', Dropped())


def parametrize_norm(layer):
    register_parametrization(layer.norm, 'weight', Dropped())


def add_hook(layer):
    layer.register_forward_pre_hook(lambda _, args: (F.dropout(args[0], 0.5), *args[1:]))


@pytest.mark.parametrize(
    'change',
    [add_adapter, parametrize_projection, parametrize_mixer, parametrize_norm, add_hook],
)
def test_with_cp_draws_the_random_numbers_of_others_once(change):
    """What a user put into a layer may draw random numbers; the recomputation has the same."""
    plain = small_backbone(out_indices=(0, 1))
    for layer in plain.layers:
        change(layer)
    saving = copy.deepcopy(plain)
    saving.with_cp = True
    x = images(40, 24)
    gradients = []
    for model in (plain, saving):
        torch.manual_seed(1)
        gradients.append(compute_gradients(model, x))
    torch.testing.assert_close(gradients[1], gradients[0])


def test_with_cp_recomputes(monkeypatch):
    model = small_backbone(with_cp=True)
    calls = []
    model.layers[0].register_forward_pre_hook(lambda *_: calls.append('forward'))
    total(model(images())).backward()
    assert len(calls) == 2


def test_stochastic_depth_grows_linearly():
    model = small_backbone(arch=dict(embed_dims=16, num_layers=5), drop_path_rate=0.4)
    rates = [layer.drop_path.drop_prob for layer in model.layers]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])


def test_stochastic_depth_drops_whole_samples_in_training_only():
    arch = dict(embed_dims=16, num_layers=3)
    options = dict(drop_path_rate=0.9, out_feature='residual', out_indices=(0, 1))
    model = small_backbone(arch=arch, **options)
    x = images(batch=1).expand(16, -1, -1, -1)
    model.train()
    before, after = model(x)
    unchanged = (before == after).flatten(1).all(1)
    assert 0 < unchanged.sum() < 16
    kept = after[~unchanged]
    torch.testing.assert_close(kept, kept[:1].expand_as(kept))
    model.eval()
    assert not (torch.eq(*model(x))).flatten(1).all(1).any()


def test_the_last_layers_output_is_not_dropped_from_the_stream_that_is_returned():
    """As in Vim's released detector."""
    model = small_backbone(drop_path_rate=0.9, out_feature='residual')
    x = images(batch=1).expand(16, -1, -1, -1)
    assert torch.equal(model.train()(x)[0], model.eval()(x)[0])


def test_init_weights_gives_the_same_distribution_as_the_constructor():
    arch = dict(embed_dims=64, num_layers=4)
    model = registered.VisionMamba(arch=arch, cls_token='middle')
    for stage in ('constructor', 'init_weights'):
        assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.1), stage
        assert model.cls_token.std().item() == pytest.approx(0.02, rel=0.3), stage
        assert (model.patch_embed.proj.bias == 0).all(), stage
        fan_in = 3 * 16 * 16
        std = model.patch_embed.proj.weight.std().item()
        assert std == pytest.approx(fan_in**-0.5, rel=0.05), stage
        # Uniform in +-fan_in^-0.5, over the square root of the number of layers.
        for layer in model.layers:
            bound = 128**-0.5 / math.sqrt(4)
            assert 0.99 * bound < layer.mixer.out_proj.weight.abs().max() <= bound, stage
        nn.init.constant_(model.pos_embed, 7.0)
        nn.init.constant_(model.cls_token, 7.0)
        nn.init.constant_(model.layers[0].mixer.out_proj.weight, 7.0)
        nn.init.constant_(model.patch_embed.proj.weight, 7.0)
        model.init_weights()


def test_init_cfg_has_the_last_word():
    init_cfg = dict(type='Constant', val=0.5, bias=0.25, layer='Conv2d')
    model = small_backbone(registered.VisionMamba, init_cfg=init_cfg)
    model.init_weights()
    assert (model.patch_embed.proj.weight == 0.5).all()
    assert (model.patch_embed.proj.bias == 0.25).all()
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.3)


def test_get_layer_depth():
    model = small_backbone(cls_token='middle', out_feature='norm', out_indices=(0, 1))
    depths = {
        name: model.get_layer_depth(f'backbone.{name}', 'backbone.')[0]
        for name, _ in model.named_parameters()
    }
    for name, depth in depths.items():
        if name.startswith('layers.'):
            assert depth == int(name.split('.')[1]) + 1
    others = {name: d for name, d in depths.items() if not name.startswith('layers.')}
    assert others == {
        'cls_token': 0,
        'pos_embed': 0,
        'patch_embed.proj.weight': 0,
        'patch_embed.proj.bias': 0,
        'norm0.weight': 3,
        'norm_f.weight': 3,
    }
    assert model.get_layer_depth('decode_head.conv_seg.weight', 'backbone.') == (3, 4)
    assert model.get_layer_depth('layers.1.norm.weight') == (2, 4)


@pytest.mark.parametrize('prefix', ['', 'backbone.'])
def test_layer_depths_are_those_of_mmpretrains_transformer(prefix):
    backbones = pytest.importorskip('mmpretrain.models.backbones', reason='needs mmpretrain')
    arch = dict(embed_dims=16, num_layers=2, num_heads=1, feedforward_channels=16)
    theirs = backbones.VisionTransformer(arch, img_size=32, patch_size=8)
    ours = small_backbone(cls_token='middle')
    own = [
        'cls_token', 'pos_embed', 'patch_embed.proj.weight', 'patch_embed.proj.bias',
        'layers.0.norm.weight', 'layers.1.mixer.A_log', 'norm_f.weight', 'pre_norm.weight',
        'head.weight', 'register_tokens',
    ]  # fmt: skip
    others = ['head.fc.weight', 'decode_head.conv.weight', 'neck.layers.0.weight']
    for name in (*own, *(f'backbone.{name}' for name in own), *others):
        expected = theirs.get_layer_depth(name, prefix)
        assert ours.get_layer_depth(name, prefix) == expected, name


def test_no_weight_decay_of_the_embeddings():
    model = small_backbone(cls_token='double')
    assert {n for n in model.no_weight_decay() if '.mixer.' not in n} == {
        'pos_embed',
        'cls_token_head',
        'cls_token_tail',
    }


def test_autocast_is_close_to_fp32_and_trains():
    model = small_backbone(out_indices=(0, 1))
    x = images()
    expected = model(x)
    with torch.autocast('cpu', torch.bfloat16):
        out = model(x)
        loss = total(out)
    for o, e in zip(out, expected, strict=True):
        assert (o.float() - e).norm() / e.norm() < 0.03
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert all(p.grad.isfinite().all() for p in model.parameters())
