"""What timm's own tests of its models assert, of ours. TorchScript and FX are left out."""

import copy
import math
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import group_parameters
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from timm.utils import ModelEmaV3

from tests.models.small import scramble
from vim_mm.models import VisionMamba
from vim_mm.models.tokens import CLS_TOKENS, resize_pos_embed
from vim_mm.ops import METHODS
from vim_mm.timm_models import VisionMambaClassifier, checkpoint_filter_fn

NAMES = timm.list_models('vim_*')
WIDTH, DEPTH, CLASSES = 16, 4, 5
SMALL = dict(
    embed_dim=WIDTH, depth=DEPTH, img_size=32, patch_size=8, num_classes=CLASSES,
    ssm_cfg=dict(d_state=4),
)  # fmt: skip


def create(name='vim_tiny_patch16_224', **kwargs):
    return scramble(timm.create_model(name, **(SMALL | kwargs))).eval()


def images(height=32, width=32, channels=3):
    return torch.randn(2, channels, height, width)


def test_models_are_listed_and_published_names_lead_to_them():
    plain = [
        'vim_base_patch16_224',
        'vim_small_patch16_224',
        'vim_small_patch16_stride8_224',
        'vim_tiny_patch16_224',
        'vim_tiny_patch16_stride8_224',
    ]
    methods = [f'{name}_{method}' for name in plain for method in METHODS if method != 'zoh']
    pyramids = [f'{name}_pyramid' for name in plain if 'stride8' not in name]
    assert {*NAMES} == {*plain, *methods, *pyramids}
    with torch.device('meta'), pytest.warns(UserWarning, match='vim_tiny_patch16_224'):
        model = timm.create_model(
            'vim_tiny_patch16_224_bimambav2_final_pool_mean_abs_pos_embed_with_midclstok_div2'
        )
    assert isinstance(model, VisionMambaClassifier)


@pytest.mark.parametrize(
    'name, width, stride, parameters',
    [
        ('vim_tiny_patch16_224', 192, 16, 7_148_008),
        ('vim_tiny_patch16_stride8_224', 192, 8, 7_148_008 + (27 * 27 - 14 * 14) * 192),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ('vim_small_patch16_224', 384, 16, 25_796_584),
                ('vim_small_patch16_stride8_224', 384, 8, 25_796_584 + (27 * 27 - 14 * 14) * 384),
                ('vim_base_patch16_224', 768, 16, 97_598_440),
            )
        ),
    ],
)
def test_default_configs(name, width, stride, parameters):
    """On the device that computes shapes only; 7,148,008 and so on are the published counts."""
    with torch.device('meta'):
        model = timm.create_model(name, pretrained=False)
        assert model.default_cfg['input_size'] == (3, 224, 224)
        x = torch.randn(1, 3, 64, 64)
    assert sum(p.numel() for p in model.parameters()) == parameters
    model.layers = model.layers[:1]  # they are all of one shape
    assert (model.num_classes, model.num_features, model.head_hidden_size) == (1000, width, width)
    weights = model.state_dict()
    for part in ('classifier', 'first_conv'):
        assert model.default_cfg[part] + '.weight' in weights
    assert model.default_cfg['architecture'] == name

    features = model.forward_features(x)
    grid = (64 - 16) // stride + 1
    assert features.shape == (1, 1 + grid * grid, width)
    assert model.forward_head(features, pre_logits=True).shape == (1, width)
    assert model(x).shape == (1, 1000)
    assert {level['reduction'] for level in model.feature_info} == {stride}
    model.reset_classifier(0)
    assert model.num_classes == 0
    assert model(x).shape == (1, width)


def test_the_registered_size_runs():
    model = timm.create_model('vim_tiny_patch16_224', depth=2, drop_rate=0.1, drop_path_rate=0.1)
    out = model.train()(torch.randn(2, 3, 224, 224))
    assert out.shape == (2, 1000) and out.isfinite().all()


@pytest.mark.parametrize('pool', ['token', 'avg'])
@pytest.mark.parametrize('class_token', CLS_TOKENS)
def test_every_parameter_gets_a_gradient(class_token, pool):
    if class_token == 'none' and pool == 'token':
        with pytest.raises(ValueError, match=r"global_pool 'token'.*'none'"):
            create(class_token=class_token, global_pool=pool)
        return
    model = create(class_token=class_token, global_pool=pool, num_classes=42).train()
    out = model(images())
    assert out.shape == (2, 42) and out.isfinite().all()
    out.square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize('class_token', [name for name in CLS_TOKENS if name != 'none'])
def test_the_head_reads_what_vim_pools(class_token):
    """The class token where it stands, the mean of two, or that of the patches."""
    model = create(class_token=class_token)
    x = images(40, 24)
    for pool, out_type in (('token', 'cls_token'), ('avg', 'avg_featmap')):
        backbone = VisionMamba(
            arch=dict(embed_dims=WIDTH, num_layers=DEPTH), img_size=32, patch_size=8,
            cls_token=class_token, out_feature='norm', out_type=out_type, ssm_cfg=dict(d_state=4),
        )  # fmt: skip
        backbone.load_state_dict(
            {k: v for k, v in model.state_dict().items() if not k.startswith('head.')}
        )
        model.reset_classifier(CLASSES, pool)
        expected = backbone(x)[0]
        features = model.forward_features(x)
        torch.testing.assert_close(model.forward_head(features, pre_logits=True), expected)
        torch.testing.assert_close(model(x), model.get_classifier()(expected))
        assert model.num_prefix_tokens == len(CLS_TOKENS[class_token](0))
    tokens = features[:, model.num_prefix_tokens :]
    torch.testing.assert_close(tokens.mean(1), expected)


@pytest.mark.parametrize('class_token', ['none', 'middle', 'double'])
def test_classifier_can_be_replaced_and_removed(class_token):
    model = create(class_token=class_token, global_pool='avg')
    x = images()
    logits, features = model(x), model.forward_features(x)
    assert logits.shape == (2, CLASSES)
    model.reset_classifier(7)
    assert model(x).shape == (2, 7) and model.get_classifier().out_features == 7
    assert model.get_classifier().bias.eq(0).all()
    model.reset_classifier(0)
    pooled = model.forward_head(features, pre_logits=True)
    assert (model.num_classes, [*model.get_classifier().parameters()]) == (0, [])
    torch.testing.assert_close(model(x), pooled)
    model.reset_classifier(0, '')
    torch.testing.assert_close(model(x), features)
    bare = create(class_token=class_token, num_classes=0, global_pool='')
    assert bare(x).shape == features.shape == (2, 16 + model.num_prefix_tokens, WIDTH)
    with pytest.raises(ValueError, match=r"global_pool.*'map'"):
        model.reset_classifier(3, 'map')


@pytest.mark.parametrize('norm', [False, True])
def test_intermediates(norm):
    model = create()
    x = images(40, 24)
    final, maps = model.forward_intermediates(x, norm=norm)
    info = timm.models.FeatureInfo(model.feature_info, len(model.feature_info))
    assert len(maps) == len(info.channels()) == DEPTH >= 3
    for channels, reduction, out in zip(info.channels(), info.reduction(), maps):
        assert out.shape == (2, channels, math.ceil(40 / reduction), math.ceil(24 / reduction))
        assert out.isfinite().all()
    torch.testing.assert_close(final, model.forward_features(x))

    backbone = VisionMamba(
        arch=dict(embed_dims=WIDTH, num_layers=DEPTH), img_size=32, patch_size=8,
        out_indices=range(DEPTH), cls_token='middle', ssm_cfg=dict(d_state=4),
        out_feature='norm' if norm else 'residual',
    )  # fmt: skip
    own = {k: v for k, v in model.state_dict().items() if not k.startswith('head.')}
    shared = {f'norm{i}.weight': own['norm_f.weight'] for i in range(DEPTH - 1)} if norm else {}
    backbone.load_state_dict(own | shared, strict=norm)
    torch.testing.assert_close(maps, [*backbone(x)])

    tokens, prefix = zip(
        *model.forward_intermediates(
            x, norm=norm, output_fmt='NLC', return_prefix_tokens=True, intermediates_only=True
        )
    )
    torch.testing.assert_close([t.mT.unflatten(2, (5, 3)) for t in tokens], maps)
    if norm:
        torch.testing.assert_close(torch.cat([prefix[-1], tokens[-1]], 1), final)
    named = model.forward_intermediates(x, norm=norm, output_dict=True)
    assert [*named] == ['image_intermediates', 'image_features']
    torch.testing.assert_close(named['image_features'], final)


@pytest.mark.parametrize(
    'indices, taken', [(2, [2, 3]), ([1], [1]), ([-1, 0], [0, 3]), (None, [0, 1, 2, 3])]
)
def test_intermediates_of_some_layers(indices, taken):
    model = create()
    x = images()
    _, every = model.forward_intermediates(x)
    for stop_early in (False, True):
        final, some = model.forward_intermediates(x, indices, stop_early=stop_early)
        torch.testing.assert_close(some, [every[i] for i in taken])
    assert model.prune_intermediate_layers(indices) == taken
    assert len(model.layers) == taken[-1] + 1 and model.num_classes == 0
    torch.testing.assert_close(model.forward_features(x), final)
    torch.testing.assert_close(model.forward_intermediates(x)[1], every[: taken[-1] + 1])
    assert 'norm_f' in {path.name for path in model.paths()}  # asks for its layer's mixer


@pytest.mark.parametrize('indices', [DEPTH + 1, 0, [DEPTH], [-DEPTH - 1], []])
def test_layers_that_are_not_there(indices):
    with pytest.raises(ValueError, match=f'indices .* of {DEPTH} features, got'):
        create().forward_intermediates(images(), indices)


def test_features_only():
    torch.manual_seed(0)
    whole = create()
    for options in ({}, dict(feature_cls='getter', out_indices=(0, 2)), dict(out_indices=(-1,))):
        torch.manual_seed(0)
        model = create(features_only=True, **options)
        outputs = model(images(48, 32))
        indices = model.out_indices
        assert model.feature_info.channels() == [WIDTH] * len(outputs)
        assert model.feature_info.reduction() == [8] * len(outputs)
        assert [tuple(out.shape) for out in outputs] == [(2, WIDTH, 6, 4)] * len(indices)
        assert 'head.weight' not in model.state_dict()
        model.model.load_state_dict(
            {k: v for k, v in whole.state_dict().items() if k in model.model.state_dict()}
        )
        x = images()
        torch.testing.assert_close(
            model(x), whole.forward_intermediates(x, indices, intermediates_only=True)
        )
    assert len(create(features_only=True)(images())) == 3


def test_recomputing_layers_changes_no_output_and_no_gradient():
    model = create().train()
    x = images()
    results = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        assert model.with_cp is enable
        out = model(x)
        results.append((out, *torch.autograd.grad(out.sum(), [*model.parameters()])))
        results[-1] += tuple(model.forward_intermediates(x)[1])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('class_token', ['middle', 'double'])
def test_groups_of_parameters(class_token):
    model = create(class_token=class_token)
    names = set(model.cls_names) | {'pos_embed'}
    assert names < model.no_weight_decay()
    assert {f'layers.0.mixer.{n}' for n in ('A_log', 'A_b_log')} < model.no_weight_decay()
    for groups in (
        param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay()),
        param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.75),
    ):
        group_of = {id(p): group for group in groups for p in group['params']}
        undecayed = {n for n, p in model.named_parameters() if not group_of[id(p)]['weight_decay']}
        assert model.no_weight_decay() <= undecayed
        decayed = {n for n, p in model.named_parameters() if group_of[id(p)]['weight_decay']}
        assert {'head.weight', 'patch_embed.proj.weight', 'layers.3.mixer.in_proj.weight'} < decayed
    layers = group_parameters(model, model.group_matcher(coarse=False), reverse=True)
    stem = {layers[name] for name in (*names, 'patch_embed.proj.weight')}
    assert stem == {0}
    assert [layers[f'layers.{i}.mixer.D'] for i in range(DEPTH)] == [1, 2, 3, 4]
    assert layers['norm_f.weight'] == 4 and layers['head.weight'] == 5
    scales = {group['lr_scale'] for group in groups}
    assert scales == {0.75**i for i in range(6)}


def test_a_copy_names_the_same_parameters():
    model = create()
    names = model.no_weight_decay()
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    for other in (model, copy.deepcopy(model), ModelEmaV3(model).module):
        assert other.no_weight_decay() == names
        groups = param_groups_weight_decay(other, 0.05, no_weight_decay_list=names)
        undecayed = {
            id(p) for group in groups if not group['weight_decay'] for p in group['params']
        }
        assert {id(p) for n, p in other.named_parameters() if n in names} <= undecayed


@pytest.mark.parametrize('features_only', [False, True])
def test_device_and_dtype(features_only):
    given = dict(SMALL, patch_size=16, features_only=features_only, device='meta')
    model = timm.create_model('vim_tiny_patch16_224_pyramid', dtype=torch.float64, **given)
    tensors = [*model.parameters(), *model.buffers()]
    assert {(x.device.type, x.dtype) for x in tensors} == {('meta', torch.float64)}
    with pytest.raises(TypeError, match='int32'):
        timm.create_model('vim_tiny_patch16_224', dtype=torch.int32, **given)

    weights = create().state_dict()
    model = load(weights, device='cpu', dtype=torch.bfloat16)
    assert torch.equal(model.layers[1].mixer.D, weights['layers.1.mixer.D'].bfloat16())
    assert model(images().bfloat16()).dtype == torch.bfloat16


def test_what_is_replaced_stays_frozen_and_evaluated():
    model = create().requires_grad_(False)
    model.reset_classifier(0)
    model.set_input_size(img_size=64, patch_size=4)
    assert not any(weight.requires_grad for weight in model.parameters())
    model.reset_classifier(2)
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize('class_token', ['none', 'middle'])
def test_set_input_size(class_token):
    model = create(class_token=class_token, global_pool='avg')
    x, old = images(24, 48), model.pos_embed.detach()
    resized_at_every_call = model(x)
    model.set_input_size(img_size=(24, 48))
    assert model.grid == (3, 6)
    assert torch.equal(model.pos_embed, resize_pos_embed(old, (4, 4), (3, 6), class_token))
    assert 'pos_embed' in model.no_weight_decay()
    torch.testing.assert_close(model(x), resized_at_every_call)

    model.set_input_size(patch_size=4)
    assert model.grid == (6, 12) and model.feature_info[0]['reduction'] == 4
    assert model.patch_embed.proj.weight.shape == (WIDTH, 3, 4, 4)
    assert model.forward_intermediates(x)[1][0].shape == (2, WIDTH, 6, 12)
    overlapping = create(stride=4)
    overlapping.set_input_size(patch_size=4)
    assert overlapping.grid == (8, 8)
    with pytest.raises(ValueError, match='patch_size must be square'):
        model.set_input_size(patch_size=(4, 8))


def load(state_dict, **kwargs):
    """As users load a checkpoint of their own: by timm's loader."""
    overlay = dict(state_dict=state_dict, num_classes=CLASSES)
    return timm.create_model(
        'vim_tiny_patch16_224', pretrained=True, pretrained_cfg_overlay=overlay, **(SMALL | kwargs)
    ).eval()


def as_mmpretrain(weights):
    return {
        k.replace('head.', 'head.fc.') if k.startswith('head.') else f'backbone.{k}': v
        for k, v in weights.items()
    }


@pytest.mark.parametrize(
    'form', [dict, as_mmpretrain, lambda w: dict(model=dict(w)), lambda w: dict(state_dict=dict(w))]
)
def test_checkpoints_load(form):
    model = create()
    x = images()
    torch.testing.assert_close(load(form(model.state_dict()))(x), model(x))


@pytest.mark.parametrize('form', [lambda w: w, lambda w: dict(state_dict=w, meta={})])
@pytest.mark.parametrize('prefix', ['', 'backbone'])
def test_weights_of_another_method_are_refused(form, prefix, tmp_path):
    weights = create(discretization_method='foh').state_dict()
    if prefix:
        notes = {prefix: weights._metadata['']}
        weights = OrderedDict(as_mmpretrain(weights))
        weights._metadata = notes
    torch.save(weights, tmp_path / 'vim.pth')
    weights = torch.load(tmp_path / 'vim.pth', weights_only=True)
    message = "trained with discretization_method 'foh', here 'zoh'"
    with pytest.raises(ValueError, match=message):
        load(form(weights))
    with pytest.raises(ValueError, match=message):
        load(form(weights), features_only=True)
    loaded = load(form(weights), discretization_method='foh')
    assert torch.equal(loaded.layers[3].mixer.D, weights[f'{prefix}.layers.3.mixer.D'.lstrip('.')])
    load(form(dict(weights)))


@pytest.mark.parametrize('name', ['vim.pth', 'vim.safetensors'])
def test_files_load_as_data(name, tmp_path):
    """As Vim publishes them: with arguments of the training, and an average, which is not taken."""
    model, x = create(), images()
    weights = model.state_dict()
    if name == 'vim.pth':
        average = {k: v + 1 for k, v in weights.items()}
        whole = dict(model=weights, model_ema=average, args=Namespace(lr=1e-3), epoch=300)
        torch.save(whole, tmp_path / name)
    else:
        save_file(weights, tmp_path / name)
    overlay = dict(file=str(tmp_path / name), num_classes=CLASSES)
    loaded = timm.create_model(
        'vim_tiny_patch16_224', pretrained=True, pretrained_cfg_overlay=overlay, **SMALL
    ).eval()
    torch.testing.assert_close(loaded(x), model(x))


def test_checkpoints_of_another_size_are_resized():
    model = create()
    loaded = load(dict(model.state_dict()), img_size=48)
    expected = resize_pos_embed(model.pos_embed, (4, 4), (6, 6), 'middle')
    assert torch.equal(loaded.pos_embed, expected)
    model.set_input_size(32, 4)
    torch.testing.assert_close(load(dict(create().state_dict()), patch_size=4).grid, (8, 8))
    filtered = checkpoint_filter_fn(create().state_dict(), model)
    assert filtered['patch_embed.proj.weight'].shape == (WIDTH, 3, 4, 4)


@pytest.mark.parametrize('in_chans', [1, 4])
def test_checkpoints_load_with_other_channels_and_classes(in_chans):
    model = create(num_classes=CLASSES)
    for num_classes in (7, 0):
        loaded = load(dict(model.state_dict()), in_chans=in_chans, num_classes=num_classes)
        assert loaded(images(channels=in_chans)).shape == (2, num_classes or WIDTH)
        assert torch.equal(loaded.layers[3].mixer.D, model.layers[3].mixer.D)
    features = load(dict(model.state_dict()), features_only=True)
    assert torch.equal(features.model.layers[3].mixer.D, model.layers[3].mixer.D)


def test_incomplete_checkpoints_do_not_load():
    weights = dict(create().state_dict())
    for name, message in (('head.weight', 'head.weight'), ('layers.1.mixer.D', 'lacks 1 .*D$')):
        with pytest.raises(RuntimeError, match=message):
            load({k: v for k, v in weights.items() if k != name})


def test_methods_and_other_arguments_reach_the_backbone():
    x, outputs = images(), []
    weights = create().state_dict()
    for method in ('zoh', 'bilinear', 'poly'):
        model = create(discretization_method=method)
        model.load_state_dict(weights)
        outputs.append(model(x))
    assert not any(torch.allclose(outputs[0], out) for out in outputs[1:])
    assert 'pos_embed' not in create(if_abs_pos_embed=False, if_rope=True).state_dict()


@pytest.mark.parametrize('class_token', ['middle', 'head', 'tail', 'double'])
def test_the_recipe_for_grad_cam_puts_a_patch_in_its_place(class_token):
    """Of docs/other_libraries.md: what a layer gives changes most where the image does."""
    model = create(img_size=40, class_token=class_token)
    page = (Path(__file__).parents[1] / 'docs/other_libraries.md').read_text()
    recipe = (
        page.partition('## Grad-CAM')[2].partition('```python')[2].partition('from pytorch_')[0]
    )
    scope = dict(model=model)
    exec(recipe, scope)
    given = []
    model.layers[-1].norm.register_forward_hook(lambda _, __, tokens: given.append(tokens))
    dark = torch.zeros(1, 3, 40, 40)
    for row, column in ((0, 3), (2, 2), (4, 1)):
        bright = dark.clone()
        bright[..., 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = 3
        with torch.no_grad():
            model(dark), model(bright)
        before, after = (scope['patches_in_place'](x, 5, 5) for x in given[-2:])
        change = (after - before).norm(dim=1)[0]
        assert divmod(int(change.argmax()), 5) == (row, column)


def test_a_name_has_its_method_and_no_other():
    assert create().layers[0].mixer.discretization_method == 'zoh'
    for method in METHODS:
        if method != 'zoh':
            model = create(f'vim_tiny_patch16_224_{method}')
            assert model.layers[-1].mixer.discretization_method == method
    with pytest.raises(ValueError, match='vim_tiny_patch16_224_foh has discretization_method'):
        create('vim_tiny_patch16_224_foh', discretization_method='rk4')


def test_a_pyramid_has_features_of_four_strides():
    small = {k: v for k, v in SMALL.items() if k != 'patch_size'} | dict(features_only=True)
    name = 'vim_tiny_patch16_224_pyramid'
    model = timm.create_model(name, **small, pyramid_channels=8).eval()
    assert model.feature_info.reduction() == [4, 8, 16, 32]
    assert model.feature_info.channels() == [8, 8, 8, 8]
    x = images(64, 96)
    maps = model(x)
    assert [tuple(m.shape[1:]) for m in maps] == [(8, 16, 24), (8, 8, 12), (8, 4, 6), (8, 2, 3)]
    patches = model.model.forward_features(x)[:, 1:].transpose(1, 2).unflatten(2, (4, 6))
    for level, expected in zip(maps, model.model.pyramid([patches])):
        torch.testing.assert_close(level, expected)
    two = timm.create_model(name, **small, out_indices=(1, -1)).eval()
    assert [m.shape[2] for m in two(x)] == [8, 2] and two.feature_info.reduction() == [8, 32]
    for output_stride, reductions in ((16, [4, 8, 16, 16]), (8, [4, 8, 8, 8])):
        dilated = timm.create_model(name, **small, output_stride=output_stride).eval()
        assert dilated.feature_info.reduction() == reductions
        assert [64 // m.shape[2] for m in dilated(x)] == reductions
    finer = timm.create_model(name, **small, patch_size=8, output_stride=8).eval()
    assert [64 // m.shape[2] for m in finer(x)] == finer.feature_info.reduction() == [2, 4, 8, 8]
    with pytest.raises(ValueError, match='indices must name some of 4 features'):
        model.model.forward_intermediates(x, [4])
    plain = create(name)  # the classifier of that size
    assert plain(images()).shape == (2, CLASSES) and not hasattr(plain, 'pyramid')


def test_a_pyramid_takes_the_weights_of_a_classifier():
    small = {k: v for k, v in SMALL.items() if k != 'patch_size'} | dict(img_size=64)
    weights = scramble(timm.create_model('vim_tiny_patch16_224', **small)).state_dict()
    model = timm.create_model(
        'vim_tiny_patch16_224_pyramid', features_only=True, pretrained=True,
        pretrained_cfg_overlay=dict(state_dict=weights), **small,
    )  # fmt: skip
    for name, value in model.model.state_dict().items():
        if not name.startswith('pyramid'):
            assert torch.equal(value, weights[name]), name
