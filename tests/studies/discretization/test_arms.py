"""The arms of the study: what they share, and that the variants are what the protocol says."""

import math

import pytest
import torch

from benchmarks.comparison.results import CONTROL, FAMILY
from studies.discretization import study
from studies.discretization.models.arms import (
    ARMS,
    PUBLISHED,
    ROUND_ONE,
    Size,
    StudyMamba,
    at_spacing,
    make_net,
    width_at,
)
from studies.discretization.models.other_models import PEERS
from tests.studies.discretization.two_sample_ref import two_sample_ref
from vim_mm.models.mamba import Mamba
from vim_mm.models.weight_decay import undecayed_parameters
from vim_mm.ops import METHODS

SIZE = Size(28, 2, 10, channels=16, layers=2)


def _net(arm):
    return make_net(ARMS[arm], SIZE, False, 3, (1e-3, 0.1), 0.1)


def test_every_arm_is_a_method_and_in_the_tables():
    assert {arm.method for arm in ARMS.values()} == {*METHODS}
    assert (*ROUND_ONE,) == study.ARMS and [*ARMS][: len(ROUND_ONE)] == [*ROUND_ONE]
    assert (*PEERS,) == study.PEERS
    assert CONTROL == 'zoh_exact' and len(FAMILY) == 6


@pytest.mark.parametrize('arm', [*ARMS])
def test_same_seed_same_weights(arm):
    """All arms begin with the bits of zoh, but for what their names say. No weight is random."""
    truth, net = _net('zoh').state_dict(), _net(arm).state_dict()
    learned = {name for name in net if 'mixer.weight' in name}
    assert truth.keys() == net.keys() - learned
    assert bool(learned) == (ARMS[arm].weight != 'half') and not any(net[n].any() for n in learned)
    own = {'foh_matched': 'x_proj'} | {f'{name}_published': 'dt_proj' for name in PUBLISHED}
    for name in truth:
        if own.get(arm, 'nothing') not in name:
            assert torch.equal(net[name], truth[name]), name


@pytest.mark.parametrize('method', PUBLISHED)
def test_published_ranges(method):
    """Step sizes at initialization, and the factor on the weights that make them."""
    least, largest, scale = PUBLISHED[method]
    for plain, other in zip(_net('zoh').mixers(), _net(f'{method}_published').mixers()):
        weights = (mixer.dt_proj.weight for mixer in (other, plain))
        torch.testing.assert_close(next(weights), scale * next(weights))
        dt = torch.nn.functional.softplus(other.dt_proj.bias)
        assert least * 0.99 <= dt.min() and dt.max() <= largest * 1.01
        assert dt.max() / dt.min() > (largest / least) ** 0.6


def test_matched_scales_the_rows_of_B():
    """By the mean of dt over the mean of dt²/2, here from a million draws."""
    dt = torch.empty(1_000_000).uniform_(math.log(1e-3), math.log(0.1)).exp()
    factor = (dt.mean() / (dt**2 / 2).mean()).item()
    assert factor == pytest.approx(39.6, rel=0.01)
    for plain, matched in zip(_net('foh').mixers(), _net('foh_matched').mixers()):
        rank, states = plain.dt_rank, plain.d_state
        for a, b in zip(plain._each('x_proj', 'weight'), matched._each('x_proj', 'weight')):
            rows = slice(rank, rank + states)
            torch.testing.assert_close(b[rows], factor * a[rows], rtol=0.01, atol=0)
            assert torch.equal(a[:rank], b[:rank])
            assert torch.equal(a[rank + states :], b[rank + states :])


def _pair(method, **attributes):
    mixer = Mamba(16, discretization_method=method).double()
    other = Mamba(16, discretization_method=method).double()
    other.load_state_dict(mixer.state_dict())
    other.__class__ = StudyMamba
    for name, value in attributes.items():
        setattr(other, name, value)
    return mixer, other


@pytest.mark.parametrize('method', METHODS)
def test_plain_study_mixer_is_the_mixer(method):
    mixer, other = _pair(method)
    x = torch.randn(2, 9, 16, dtype=torch.double)
    torch.testing.assert_close(other(x), mixer(x), rtol=1e-5, atol=1e-7)  # its dt is float32


def test_averaging_poly_changes_nothing():
    """poly is the mean of both orders already."""
    mixer, other = _pair('poly', averaged=True)
    x = torch.randn(2, 9, 16, dtype=torch.double)
    torch.testing.assert_close(other(x), mixer(x), rtol=1e-5, atol=1e-7)


def test_averaged_is_the_mean_of_both_orders():
    """The other order by hand: every direction scanned the other way on the same input."""
    mixer, other = _pair('zoh_exact', averaged=True)
    _, swapped = _pair('zoh_exact')
    swapped.load_state_dict(mixer.state_dict())
    # On a palindrome with a symmetric kernel, the other order is the output read backwards.
    for net in (mixer, other, swapped):
        with torch.no_grad():
            for conv in net._each('conv1d'):
                conv.weight[:, :, :-1] = 0  # sees its own step only
    half = torch.randn(2, 5, 16, dtype=torch.double)
    x = torch.cat([half, half.flip(1)], dim=1)
    y = swapped(x)
    torch.testing.assert_close(other(x), (y + y.flip(1)) / 2, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(y, y.flip(1))


def test_dt_divisor_divides_the_step_sizes():
    """A divided dt of zoh equals A and B divided: beta is dt, and A_bar is exp(dt a)."""
    mixer, other = _pair('zoh', dt_divisor=2.0)
    with torch.no_grad():
        for A_log in mixer._all_A_log():
            A_log -= math.log(2)
        for weight in mixer._each('x_proj', 'weight'):
            weight[mixer.dt_rank : mixer.dt_rank + mixer.d_state] /= 2
    x = torch.randn(2, 9, 16, dtype=torch.double)
    torch.testing.assert_close(other(x), mixer(x), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('arm', ['exp_trapezoidal', 'exp_trapezoidal_token', 'foh_two_sample'])
def test_a_rule_takes_the_place_of_the_method(arm):
    """The mixer's output is that of the reference on the mixer's own inputs of the scan."""
    mixer = _net(arm).double().mixers()[0]
    x = torch.randn(2, 9, 16, dtype=torch.double)
    given = mixer.scan_arguments(x)
    for name in ('discretization_method', 'use_cuda_kernel', 'backend'):
        del given[name]
    y = two_sample_ref(ARMS[arm].rule, **given, reverse=mixer.reverse)
    truth = mixer.out_proj(y.mean(1).transpose(1, 2))
    torch.testing.assert_close(mixer(x), truth, rtol=1e-10, atol=1e-12)
    mixer.dt_divisor = 2.0
    dt = torch.nn.functional.softplus(given['delta'] + given['delta_bias'][..., None]) / 2
    given |= dict(delta=dt, delta_bias=None, delta_softplus=False)
    y = two_sample_ref(ARMS[arm].rule, **given, reverse=mixer.reverse)
    truth = mixer.out_proj(y.mean(1).transpose(1, 2))
    torch.testing.assert_close(mixer(x), truth, rtol=1e-5, atol=1e-7)  # its dt is float32


@pytest.mark.slowest
@pytest.mark.parametrize('arm', ['exp_trapezoidal', 'foh_two_sample'])
def test_a_compiled_rule_is_the_rule(arm):
    """In training; what is tested at other sizes is not compiled."""
    images = torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    found = []
    for compiled in (False, True):
        net = make_net(ARMS[arm], SIZE, False, 3, (1e-3, 0.1), 0.0)
        for mixer in net.mixers():
            mixer.compiled = compiled
        torch.compiler.reset()
        with torch._dynamo.config.patch(error_on_recompile=True):
            outputs = net(images)
            outputs.square().sum().backward()
            net.eval()(images[:1])
        found.append([outputs, *(p.grad for p in net.parameters())])
    for ours, truth in zip(*found, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('each', ['channel', 'token'])
def test_a_learned_weight(each):
    """It starts at 1/2, has a gradient, and a value for each channel or token."""
    net = _net(f'exp_trapezoidal_{each}')
    images = torch.randn(2, 1, 28, 28)
    torch.testing.assert_close(net.eval()(images), _net('exp_trapezoidal').eval()(images))
    net(images).square().sum().backward()
    learned = [(n, p) for n, p in net.named_parameters() if 'mixer.weight' in n]
    assert learned and all(p.grad.abs().min() > 0 for _, p in learned)
    undecayed = undecayed_parameters(net)
    assert {n.rpartition('_')[2] for n, p in learned if p in undecayed} == (
        {'logit'} if each == 'channel' else {'bias'}
    )
    mixer, u = net.mixers()[0], torch.randn(2, 2, 32, 5)
    with torch.no_grad():
        for name, param in mixer.named_parameters():
            if name.startswith('weight'):
                param.normal_(std=0.1)
    weight = mixer.weight(u)
    assert weight.shape == ((2, 32, 1) if each == 'channel' else (2, 2, 1, 5))
    assert weight.min() > 0 and weight.max() < 1
    assert len(weight.unique()) == weight.numel()


def test_the_plain_control_is_the_control():
    images = torch.randn(2, 1, 28, 28)
    nets = [_net(arm).eval() for arm in ('zoh_exact', 'zoh_exact_again', 'zoh_exact_plain')]
    for net in nets[1:]:
        torch.testing.assert_close(net(images), nets[0](images))
    assert isinstance(nets[2].mixers()[0], StudyMamba) and type(nets[1].mixers()[0]) is Mamba


def _spaced(method='zoh_exact', side=16):
    net = make_net(ARMS[method], Size(side, 4, 16, channels=16, layers=2), True, 0, (0.01, 1), 0.0)
    return net.double().eval()


def test_the_spacing_of_training_changes_nothing():
    net, images = _spaced(), torch.randn(2, 1, 16, 16, dtype=torch.double)
    torch.testing.assert_close(at_spacing(net, 4).double()(images), net(images))


@pytest.mark.parametrize(('stride', 'columns'), [(2, 8), (8, 2), (1, 16), (16, 1)])
def test_places_of_patches(stride, columns):
    """A patch has the embedding of its place: where there was one in training, that."""
    net = _spaced()
    other = at_spacing(net, stride).double()
    size = net.size
    images = torch.randn(2, 1, 16, width_at(size, stride), dtype=torch.double)
    assert other(images).shape == (2, 4 * columns, 16)
    assert other.backbone.grid == (4, columns)
    old, new = (n.backbone.pos_embed.unflatten(1, n.backbone.grid)[0] for n in (net, other))
    common, kept = max(1, 4 // stride), max(1, stride // 4)
    torch.testing.assert_close(new[:, ::common], old[:, ::kept].double())
    # Before the layers, tokens of the same patch are equal.
    embed = other.backbone.patch_embed(images)[..., ::common]
    truth = net.backbone.patch_embed(images[..., : width_at(size, 16 if stride == 16 else 4)])
    torch.testing.assert_close(embed[..., : truth.shape[3]], truth[..., ::kept][..., :columns])


def test_embedding_between_places_is_bicubic():
    """Halfway between four places: -0.09375 of the outer two, 0.59375 of the inner two."""
    net = _spaced()
    old = net.backbone.pos_embed.unflatten(1, (4, 4))[0].double()
    new = at_spacing(net, 2).backbone.pos_embed.unflatten(1, (4, 8))[0].double()
    truth = 0.59375 * (old[:, 1] + old[:, 2]) - 0.09375 * (old[:, 0] + old[:, 3])
    torch.testing.assert_close(new[:, 3], truth, rtol=1e-5, atol=1e-7)


def test_dilated_convolutions_see_the_same_tokens():
    """On a sequence with other tokens between, which then have no part in these."""
    mixer, other = _pair('zoh_exact')
    mixer.__class__ = StudyMamba
    other.dilate(2)
    x = torch.randn(2, 16, 9, dtype=torch.double)
    between = torch.randn(2, 16, 18, dtype=torch.double)
    between[..., ::2] = x
    conv, dilated = mixer.conv1d, other.conv1d
    pad = torch.nn.functional.pad
    x, between = x.repeat(1, 2, 1), between.repeat(1, 2, 1)
    torch.testing.assert_close(dilated(pad(between, (6, 0)))[..., ::2], conv(pad(x, (3, 0))))
    # In the mixer, at steps of half the size and nothing between: only D and the convolution stay.
    assert other(torch.randn(2, 8, 16, dtype=torch.double)).shape == (2, 8, 16)
    assert other.d_conv == 7
