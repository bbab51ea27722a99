"""Rules of two samples: against three-term recurrences written out, and against what is known."""

from itertools import product

import numpy as np
import pytest
import torch
from scipy import integrate, signal

from studies.discretization.models.two_sample import RULES, two_sample_scan
from tests.studies.discretization.two_sample_ref import two_sample_ref
from vim_mm.ops import selective_scan_grouped_fn

TOLERANCE = dict(rtol=1e-12, atol=1e-12)
OPTIONS = [
    {},
    dict(is_complex=True),
    dict(constant=('B',)),
    dict(constant=('B', 'C')),
    dict(gated=True),
    dict(softplus=True),
    dict(gated=True, softplus=True, is_complex=True, constant=('C',)),
    dict(length=1),
]


def inputs(length=7, is_complex=False, constant=(), gated=False, softplus=False, stiff=1.0):
    """(B, K, D, N) = (2, 3, 4, 5), by two steps per channel of about 0.001 to 1 in size."""
    rng = np.random.default_rng(0)
    batch, groups, channels, states = 2, 3, 4, 5

    def normal(*shape, of_states=False):
        values = rng.standard_normal(shape)
        if of_states and is_complex:
            values = values + 1j * rng.standard_normal(shape)
        return torch.tensor(values)

    sequence = (batch, groups, channels, length)
    size = np.exp(rng.uniform(np.log(1e-3), 0, sequence))
    A = -stiff * torch.tensor(rng.uniform(0.5, 16, (groups, channels, states)))
    if is_complex:
        A = torch.complex(A / 4, torch.tensor(rng.uniform(-3, 3, A.shape)))
    matrices = {
        name: normal(groups, channels, states, of_states=True)
        if name in constant
        else normal(batch, groups, states, length, of_states=True)
        for name in 'BC'
    }
    bias = torch.tensor(rng.uniform(-0.3, 0.3, (groups, channels))) if softplus else None
    return dict(
        u=normal(*sequence),
        delta=torch.tensor(np.log(np.expm1(size)) if softplus else size),
        A=A,
        **matrices,
        D=normal(groups, channels) if gated else None,
        z=normal(*sequence) if gated else None,
        delta_bias=bias,
        delta_softplus=softplus,
    )


def by_hand(rule, reverse, u, delta, A, B, C, D, z, delta_bias, delta_softplus, weight=0.5):
    """The recurrence of each state in Python's numbers, phi by their closed forms."""
    dt = delta + (0 if delta_bias is None else delta_bias[..., None])
    dt = (torch.log1p(torch.exp(dt)) if delta_softplus else dt).numpy()
    weight = np.broadcast_to(np.asarray(weight), dt.shape)
    out = np.zeros(u.shape)
    batch, groups, channels, length = u.shape
    for b, k, d, n in product(range(batch), range(groups), range(channels), range(A.shape[2])):
        row = [M[k, d, n].expand(length) if M.dim() == 3 else M[b, k, n] for M in (B, C)]
        Bs, Cs = (M.numpy() for M in row)
        a, x, v_before = A[k, d, n].item(), 0.0, 0.0
        for t in range(length)[:: -1 if reverse[k] else 1]:
            h, w = dt[b, k, d, t], weight[b, k, d, t]
            v = Bs[t] * u[b, k, d, t].item()
            e = np.exp(h * a)
            phi_1 = np.expm1(h * a) / (h * a)
            phi_2 = (phi_1 - 1) / (h * a)
            if rule == 'exp_trapezoidal':
                x = e * x + (1 - w) * h * e * v_before + w * h * v
            else:
                x = e * x + h * (phi_1 - phi_2) * v_before + h * phi_2 * v
            v_before = v
            y = Cs[t] * x
            out[b, k, d, t] += 2 * y.real if A.is_complex() else y
    out = torch.tensor(out)
    if D is not None:
        out = (out + D[..., None] * u) * z * torch.sigmoid(z)
    return out


@pytest.mark.parametrize('reverse', [(False, True, False), (True, True, True)])
@pytest.mark.parametrize('options', OPTIONS, ids=str)
@pytest.mark.parametrize('rule', RULES)
def test_reference_and_scan_are_the_recurrence(rule, options, reverse):
    given = inputs(**options)
    truth = by_hand(rule, reverse, **given)
    exact = two_sample_ref(rule, **given, reverse=reverse)
    torch.testing.assert_close(exact, truth, **TOLERANCE)
    for backend in ('native', 'torch', 'reference'):
        found = two_sample_scan(rule, **given, reverse=reverse, backend=backend)
        torch.testing.assert_close(found, exact, **TOLERANCE)


@pytest.mark.parametrize('shape', [(2, 3, 4, 7), (3, 4, 1), (2, 3, 1, 7)])
def test_a_weight_a_channel_or_a_token(shape):
    """1/2 in another form is 1/2; any other is the recurrence's."""
    given, reverse = inputs(gated=True), (False, True, False)
    weight = torch.tensor(np.random.default_rng(1).uniform(0, 1, shape))
    truth = by_hand('exp_trapezoidal', reverse, **given, weight=weight)
    for compute in (two_sample_scan, two_sample_ref):
        found = compute('exp_trapezoidal', **given, reverse=reverse, weight=weight)
        torch.testing.assert_close(found, truth, **TOLERANCE)
        half = compute('exp_trapezoidal', **given, reverse=reverse, weight=0 * weight + 0.5)
        torch.testing.assert_close(
            half, compute('exp_trapezoidal', **given, reverse=reverse), **TOLERANCE
        )


def test_a_weight_of_1_is_zoh():
    given = inputs(gated=True, softplus=True)
    zoh = selective_scan_grouped_fn(**given, reverse=(False, True, True))
    found = two_sample_scan('exp_trapezoidal', **given, reverse=(False, True, True), weight=1.0)
    torch.testing.assert_close(found, zoh, **TOLERANCE)


@pytest.mark.parametrize('stiff', [100.0, 1e-8])
@pytest.mark.parametrize('rule', RULES)
def test_stiff_and_slow_states(rule, stiff):
    """|z| from 1e-11 to 1,600, where other forms of these sums overflow or cancel."""
    given, reverse = inputs(stiff=stiff), (False, True, False)
    torch.testing.assert_close(
        two_sample_scan(rule, **given, reverse=reverse),
        two_sample_ref(rule, **given, reverse=reverse),
        **TOLERANCE,
    )


@pytest.mark.parametrize('a', [-0.5, -3 + 2j])
def test_the_hold_is_scipys(a):
    """scipy's first-order hold has states shifted by its input term: C x + D u is the same."""
    dt, length = 0.3, 20
    u = np.random.default_rng(0).standard_normal(length)
    u[0] = 0  # both begin at rest, and the input rises from 0
    matrix = np.array([[a]]), np.array([[1.0]]), np.array([[1.0]]), np.array([[0.0]])
    Ad, Bd, Cd, Dd, _ = signal.cont2discrete(matrix, dt, method='foh')
    states = np.zeros(length + 1, complex)
    for t in range(length):
        states[t + 1] = (Ad * states[t] + Bd * u[t]).item()
    truth = (Cd * states[:-1] + Dd * u).ravel()
    found = two_sample_scan('foh_two_sample', **single(u, np.full(length, dt), a), reverse=[False])
    torch.testing.assert_close(found.ravel(), torch.tensor(2 * truth.real), **TOLERANCE)


def single(u, dt, a):
    """One state, complex so that the real part stands for a pair."""
    one = torch.ones(1, 1, 1, dtype=torch.complex128)
    return dict(
        u=torch.tensor(u).view(1, 1, 1, -1),
        delta=torch.tensor(dt).view(1, 1, 1, -1),
        A=torch.full((1, 1, 1), a, dtype=torch.complex128),
        B=one,
        C=one,
    )


def test_the_hold_is_exact_for_an_input_that_is_linear_between_samples():
    """At irregular instants, by quadrature of the convolution."""
    rng, a = np.random.default_rng(0), -1.5 + 4j
    dt = rng.uniform(0.05, 0.6, 12)
    instants, values = np.cumsum(dt), rng.standard_normal(12)
    values[0] = 0
    found = two_sample_scan('foh_two_sample', **single(values, dt, a), reverse=[False]).ravel()
    for k in (3, 11):
        end = instants[k]

        def course(s, end=end):
            return (np.exp(a * (end - s)) * np.interp(s, instants, values)).real

        integral, _ = integrate.quad(course, 0, end, points=instants[:k], limit=200)
        assert found[k].item() == pytest.approx(2 * integral, abs=1e-9)


@pytest.mark.parametrize(
    ('rule', 'order'), [('exp_trapezoidal', 2), ('foh_two_sample', 2), ('zoh_exact', 1)]
)
def test_orders(rule, order):
    """Of x' = -x + sin(2 t): half the step, a quarter of the error; of one sample half of it."""
    errors = []
    for steps in (200, 400):
        dt = 10 / steps
        t = dt * np.arange(1, steps + 1)
        given = single(np.sin(2 * t), np.full(steps, dt), -1.0)
        if rule == 'zoh_exact':
            found = selective_scan_grouped_fn(
                **given, reverse=[False], discretization_method='zoh_exact'
            )
        else:
            found = two_sample_scan(rule, **given, reverse=[False])
        truth = (np.sin(2 * t) - 2 * np.cos(2 * t) + 2 * np.exp(-t)) / 5
        errors.append(np.abs(found.ravel().numpy() / 2 - truth)[steps // 2 :].max())
    assert np.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.05)


@pytest.mark.slowest
@pytest.mark.parametrize('is_complex', [False, True])
@pytest.mark.parametrize('rule', RULES)
def test_gradients(rule, is_complex):
    """Of the compiled path by differences, and equal to those of the reference."""
    given = inputs(length=4, is_complex=is_complex, gated=True, softplus=True)
    flag = given.pop('delta_softplus')
    names = [*given]
    leaves = [x.requires_grad_() for x in given.values()]
    extra = [torch.full((3, 4, 1), 0.3, dtype=torch.float64, requires_grad=True)]
    leaves += extra if rule == 'exp_trapezoidal' else []

    def compute(function, *tensors):
        weight = tensors[len(names)] if len(tensors) > len(names) else 0.5
        return function(
            rule,
            **dict(zip(names, tensors)),
            delta_softplus=flag,
            reverse=(False, True, False),
            weight=weight,
        )

    assert torch.autograd.gradcheck(lambda *x: compute(two_sample_scan, *x), leaves)
    grad = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    found, truth = (
        torch.autograd.grad(compute(function, *leaves), leaves, grad)
        for function in (two_sample_scan, two_sample_ref)
    )
    for ours, exact in zip(found, truth, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize('rule', RULES)
def test_a_step_that_underflows(rule):
    """The softplus of -200 is 0 in float32: values are right, and all gradients finite."""
    given = {
        k: x.float() if isinstance(x, torch.Tensor) else x for k, x in inputs(softplus=True).items()
    }
    given['delta'][:, :, :, 2] = -200.0
    leaf = given['delta'].requires_grad_()
    reverse = (False, True, False)
    found = two_sample_scan(rule, **given, reverse=reverse)
    torch.testing.assert_close(found, two_sample_ref(rule, **given, reverse=reverse))
    (grad,) = torch.autograd.grad(found.sum(), leaf)
    assert grad.isfinite().all() and grad[..., 2].abs().max() == 0


@pytest.mark.parametrize('rule', RULES)
def test_16_bits_are_computed_in_32(rule):
    given = {
        k: x.bfloat16() if isinstance(x, torch.Tensor) and k != 'A' else x
        for k, x in inputs(gated=True).items()
    }
    given['A'] = given['A'].float()
    found = two_sample_scan(rule, **given, reverse=(False, True, False))
    wide = {k: x.float() if isinstance(x, torch.Tensor) else x for k, x in given.items()}
    truth = two_sample_ref(rule, **wide, reverse=(False, True, False))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), truth, rtol=2**-7, atol=1e-4)


def test_mistakes():
    given = inputs()
    with pytest.raises(ValueError, match=r"rule must be one of .*, got 'foh'"):
        two_sample_scan('foh', **given)
    with pytest.raises(ValueError, match='weight is for exp_trapezoidal alone'):
        two_sample_ref('foh_two_sample', **given, weight=torch.ones(()))
