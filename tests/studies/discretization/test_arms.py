"""The arms of the study: what they share, and that the variants are what the protocol says."""

import math

import pytest
import torch

from benchmarks.comparison.results import CONTROL, FAMILY
from studies.discretization import study
from studies.discretization.arms import ARMS, Size, StudyMamba, make_net
from studies.discretization.other_models import PEERS
from vim_mm.models.mamba import Mamba
from vim_mm.ops import METHODS

SIZE = Size(28, 2, 10, channels=16, layers=2)


def _net(arm):
    return make_net(ARMS[arm], SIZE, False, 3, (1e-3, 0.1), 0.1)


def test_every_arm_is_a_method_and_in_the_tables():
    assert {arm.method for arm in ARMS.values()} == {*METHODS}
    assert (*ARMS,) == study.ARMS and (*PEERS,) == study.PEERS
    assert CONTROL == 'zoh_exact' and len(FAMILY) == 6


@pytest.mark.parametrize('arm', [*ARMS])
def test_same_seed_same_weights(arm):
    """All arms begin with the bits of zoh, but for B of the matched variant."""
    truth, net = _net('zoh').state_dict(), _net(arm).state_dict()
    assert truth.keys() == net.keys()
    for name, weight in net.items():
        if not (arm == 'foh_matched' and 'x_proj' in name):
            assert torch.equal(weight, truth[name]), name


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
