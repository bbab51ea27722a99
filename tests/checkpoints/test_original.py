"""Converted weights compute what hustvl/Vim's code computes with them: features and gradients."""

import pytest
import torch
from torch import nn

from tests.checkpoints import original, released
from vim_mm.checkpoints import convert_checkpoint, fit
from vim_mm.engine.converted_model import build_target
from vim_mm.models import VisionMamba
from vim_mm.models.tokens import rotary_table

WIDTH, DEPTH, SIDE = 32, released.DEPTH, 4
OUT = (5, 11, 17, 23)
BOUNDS = {torch.float32: 2e-6, torch.float64: 1e-12}
each_dtype = pytest.mark.parametrize(
    ('dtype', 'training'),
    [
        pytest.param(torch.float32, False, id='fp32', marks=pytest.mark.slow),
        pytest.param(torch.float64, True, id='fp64-training'),
    ],
)


def load_backbone(state_dict, dtype, **options):
    """A backbone with converted weights, by its own loading."""
    arch = dict(embed_dims=WIDTH, num_layers=DEPTH)
    model = VisionMamba(arch, img_size=16 * SIDE, **options).to(dtype)
    whole = nn.ModuleDict(dict(backbone=model))
    assert not whole.load_state_dict(state_dict, strict=False).missing_keys
    return model


class Kept(nn.Module):
    """Stochastic depth whose draw is given: what each sample is multiplied by."""

    def __init__(self, factors):
        super().__init__()
        self.factors = factors

    def forward(self, x):
        return x * self.factors[:, None, None]


def set_stochastic_depth(model, kept):
    for layer, factors in zip(model.layers, kept, strict=True):
        layer.drop_path = Kept(factors)


def draw_stochastic_depth(batch, dtype):
    """Some samples lose a layer, others have its output at 1 / 0.7."""
    return (torch.rand(DEPTH, batch) < 0.7).to(dtype) / 0.7


def relative(value, expected):
    return ((value - expected).norm() / expected.norm()).item()


def assert_same(model, outputs, expected, leaves, names, dtype):
    """Outputs, and the gradient of all weights under a random weighting of the outputs.

    In float32 the transcription's own gradient of a single weight, a sum that cancels, is up to
    3e-6 from that in float64. So the bound holds for the gradient as a whole, and five times the
    bound for each weight.
    """
    bound = BOUNDS[dtype]
    worst = max(relative(o, e) for o, e in zip(outputs, expected, strict=True))
    assert worst <= bound
    weighting = [torch.randn_like(o) for o in outputs]
    given = dict(model.named_parameters())
    ours = torch.autograd.grad(
        outputs, [given[n] for n in names.values()], weighting, materialize_grads=True
    )
    theirs = torch.autograd.grad(
        expected, [leaves[n] for n in names], weighting, materialize_grads=True
    )
    errors = {n: relative(a, b) for n, a, b in zip(names, ours, theirs, strict=True)}
    name = max(errors, key=errors.get)
    assert errors[name] <= (5 if dtype == torch.float32 else 1) * bound, (name, errors[name])
    assert relative(*(torch.cat([g.flatten() for g in grads]) for grads in (ours, theirs))) <= bound


def leaves_of(weights):
    """The weights as what gradients are taken of, and the tables and counters."""
    learned = {k: v for k, v in weights.items() if 'freqs' not in k and v.is_floating_point()}
    return weights | {k: v.clone().requires_grad_() for k, v in learned.items()}


@pytest.mark.parametrize('grid', [(4, 4), (14, 14), (32, 32), (64, 64)])
@pytest.mark.parametrize('width', [32, 192, 384])
def test_the_rotary_table_has_the_originals_bits(grid, width):
    theirs = released.rope_table(grid[0], width)
    cos, sin = rotary_table(grid, width, 14, 'none', torch.device('cpu'))
    assert torch.equal(cos[0], theirs['rope.freqs_cos'])
    assert torch.equal(sin[0], theirs['rope.freqs_sin'])


@each_dtype
def test_classification(dtype, training):
    tokens = SIDE * SIDE + 1
    weights = released.random_weights(released.classifier_shapes(WIDTH, 10, tokens=tokens), dtype)
    state_dict = convert_checkpoint(released.as_classifier(weights)).state_dict
    options = dict(cls_token='middle', out_type='cls_token', out_feature='norm')
    backbone = load_backbone(state_dict, dtype, **options)
    head = nn.Linear(WIDTH, 10).to(dtype)
    head.load_state_dict({k: state_dict[f'head.fc.{k}'] for k in ('weight', 'bias')})
    model = nn.ModuleDict(dict(backbone=backbone, head=head))
    kept = draw_stochastic_depth(2, dtype) if training else None
    if training:
        set_stochastic_depth(backbone, kept)

    x, leaves = torch.randn(2, 3, 16 * SIDE, 16 * SIDE, dtype=dtype), leaves_of(weights)
    (features,) = backbone(x)
    expected = original.classify(x, leaves, DEPTH, kept)
    names = {k: k if 'head' in k else f'backbone.{k}' for k in weights}
    assert_same(model, [features, head(features)], expected, leaves, names, dtype)


SEGMENTORS = {
    'tiny': (dict(out_feature='mixer'), dict(residual=False, divide=True, rope='')),
    'small': (
        dict(
            out_feature='residual', if_divide_out=False, if_rope=True, if_rope_residual=True
        ),
        dict(residual=True, divide=False, rope='residual'),
    ),
    'hidden': (
        dict(out_feature='residual', if_rope=True), dict(residual=True, divide=True, rope='hidden')
    ),
}  # fmt: skip


@each_dtype
@pytest.mark.parametrize('size', SEGMENTORS)
def test_taps_of_segmentation(size, training, dtype):
    ours, theirs = SEGMENTORS[size]
    shapes = released.segmentor_shapes(WIDTH, 5, 6, tokens=SIDE * SIDE)
    weights = released.random_weights(shapes, dtype)
    if theirs['rope']:
        weights |= {f'backbone.{k}': v for k, v in released.rope_table(SIDE, WIDTH).items()}
    state_dict = convert_checkpoint(released.as_segmentor(weights)).state_dict
    backbone = load_backbone(state_dict, dtype, out_indices=OUT, **ours)
    kept = draw_stochastic_depth(2, dtype) if training else None
    if training:
        set_stochastic_depth(backbone, kept)

    x = torch.randn(2, 3, 16 * SIDE, 16 * SIDE, dtype=dtype)
    leaves = {
        k.removeprefix('backbone.'): v
        for k, v in leaves_of(weights).items()
        if k.startswith('backbone.') and 'fpn' not in k
    }
    expected = original.taps_of_segmentation(x, leaves, DEPTH, OUT, **theirs, kept=kept)
    names = {k: k for k, _ in backbone.named_parameters()}
    assert_same(backbone, backbone(x), expected, leaves, names, dtype)


@each_dtype
def test_tap_of_detection(training, dtype):
    shapes = released.vim_shapes(WIDTH, tokens=SIDE * SIDE, cls=False, norm_f=False)
    weights = released.random_weights(shapes, dtype) | released.rope_table(SIDE, WIDTH)
    named = {f'backbone.net.{k}': v for k, v in weights.items()}
    state_dict = convert_checkpoint(released.as_detector(named)).state_dict
    backbone = load_backbone(
        state_dict, dtype, out_feature='residual', if_divide_out=False, if_rope=True,
        if_rope_residual=True,
    )  # fmt: skip
    kept = draw_stochastic_depth(2, dtype) if training else None
    if training:
        set_stochastic_depth(backbone, kept)
    x, leaves = torch.randn(2, 3, 16 * SIDE, 16 * SIDE, dtype=dtype), leaves_of(weights)
    expected = original.tap_of_detection(x, leaves, DEPTH, False, 'residual', kept)
    names = {k: k for k, _ in backbone.named_parameters()}
    assert_same(backbone, backbone(x), [expected], leaves, names, dtype)


def pyramid(taps, w):
    """fpn1 to fpn4 of the segmentor, at test: up by 4, up by 2, as it is, down by 2."""

    def up(x, name):
        return nn.functional.conv_transpose2d(x, w[f'{name}.weight'], w[f'{name}.bias'], stride=2)

    x = up(taps[0], 'fpn1.0')
    mean, var, weight, bias = (
        w[f'fpn1.1.{k}'][:, None, None] for k in ('running_mean', 'running_var', 'weight', 'bias')
    )
    x = (x - mean) / torch.sqrt(var + 1e-5) * weight + bias
    x = x * (1 + torch.erf(x / 2**0.5)) / 2
    return [
        up(x, 'fpn1.3'),
        up(taps[1], 'fpn2.0'),
        taps[2],
        taps[3].unfold(2, 2, 2).unfold(3, 2, 2).amax((4, 5)),
    ]


def build_on_cpu(conversion):
    """The inferred whole model with the converted weights, which it needs all."""
    model = build_target(conversion)
    assert fit(conversion, model).complete
    model = model.to_empty(device='cpu').double()
    missing = model.load_state_dict(conversion.state_dict)
    assert not missing.missing_keys and not missing.unexpected_keys
    return model.eval()


def test_pyramid_of_segmentation():
    shapes = released.segmentor_shapes(WIDTH, 5, 6, tokens=SIDE * SIDE)
    weights = released.random_weights(shapes, torch.float64)
    model = build_on_cpu(convert_checkpoint(released.as_segmentor(weights)))
    x = torch.randn(1, 3, 16 * SIDE, 16 * SIDE, dtype=torch.float64)
    w = {k.removeprefix('backbone.'): v for k, v in weights.items()}
    taps = original.taps_of_segmentation(x, w, DEPTH, OUT, False, True, '')
    for ours, theirs in zip(model.extract_feat(x), pyramid(taps, w), strict=True):
        assert relative(ours, theirs) <= 1e-12
