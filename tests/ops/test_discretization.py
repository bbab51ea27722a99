"""Every implementation of the method table against mpmath, values and derivatives."""

import functools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from mpmath import mp

from benchmarks.scan.coefficients import by_kernel, by_python, points
from benchmarks.scan.exact import AVERAGED, DIGITS, EXACT, QUANTITIES, kummer, truth
from vim_mm.ops import discretization, selective_scan_fn
from vim_mm.ops.discretization import METHODS, discretize, method_id, phi

each_method = pytest.mark.parametrize('method', METHODS)
IMPLEMENTATIONS = [
    pytest.param(by_python, id='python'),
    pytest.param(by_kernel, id='native'),
]


@functools.cache
def exact(method, dtype, is_complex):
    """Where the implementations are compared, and the exact values and scales there."""
    where = points(method, dtype, is_complex)
    return where, truth(method, *where)


@each_method
@pytest.mark.parametrize('implementation', IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ('dtype', 'tolerance', 'tiny'),
    [
        pytest.param(torch.float64, 1e-12, 1e-300, id='fp64'),
        pytest.param(torch.float32, 1e-6, torch.finfo(torch.float32).tiny, id='fp32'),
    ],
)
@pytest.mark.parametrize('is_complex', [False, True], ids=['real', 'complex'])
def test_values_and_derivatives(implementation, method, dtype, tolerance, tiny, is_complex):
    (delta, A), (expected, scale) = exact(method, dtype, is_complex)
    results = implementation(delta, A, method)
    for column, (name, result) in enumerate(zip(QUANTITIES, results, strict=True)):
        assert result.dtype == A.dtype, name
        error = np.abs(result.numpy() - expected[:, column])
        excess = error / (tolerance * scale[:, column] + tiny)
        worst = excess.argmax()  # a NaN counts as the largest
        assert excess[worst] <= 1, (
            f'{name} at dt={delta[worst]}, a={A[worst]}: {result[worst]}, '
            f'expected {expected[worst, column]}, {excess[worst]:.2g} times the tolerance'
        )


@pytest.mark.parametrize('m', range(4))
@pytest.mark.parametrize('k', range(4))
def test_phi_and_its_higher_derivatives(k, m):
    """On the real axis every one of them is positive, so the error is relative to the value."""
    numbers = [*np.linspace(-5, 5, 101).tolist(), -1e4, -999.7, -30.1, -1e-20, 20.0]
    z = torch.tensor(numbers, dtype=torch.float64)
    with mp.workdps(DIGITS):
        expected = torch.tensor([float(kummer(mp.mpf(x), k, m)) for x in numbers], dtype=z.dtype)
    torch.testing.assert_close(phi(z, k, m), expected, rtol=1e-13, atol=1e-300)


@each_method
def test_limit_of_small_steps(method):
    """beta / dt -> 1, for foh beta / dt^2 -> 1/2."""
    dt = torch.tensor([1e-30, 1e-9, 1e-6], dtype=torch.float64)[:, None]
    a = torch.tensor([-100.0, -1.0, 0.0, 1.0], dtype=torch.float64)
    _, beta = discretize(dt, a, method)
    ratio, limit = (beta / dt**2, 0.5) if method == 'foh' else (beta / dt, 1.0)
    assert ((ratio - limit).abs() <= dt * (1 + a.abs()) + 1e-15).all()


@each_method
@pytest.mark.parametrize('imaginary', [0.0, 40.0])
def test_decaying_systems_stay_decaying(method, imaginary):
    a = -torch.logspace(-2, 4, 25, dtype=torch.float64)
    if imaginary:
        a = torch.complex(a, torch.full_like(a, imaginary))
    dt = torch.logspace(-6, 1, 29, dtype=torch.float64)[:, None]
    A_bar, _ = discretize(dt, a, method)
    assert (A_bar.abs() < 1).all()


@each_method
def test_fixed_point_of_a_constant_input(method):
    """beta / (1 - A_bar) -> -1/a as dt -> 0, for foh -> 0; bilinear, zoh_exact: always."""
    a = torch.tensor([-40.0, -1.0, -0.2, 0.3], dtype=torch.float64)
    dt = torch.tensor([[1e-6], [0.1], [5.0]], dtype=torch.float64)
    A_bar, beta = discretize(dt, a, method)
    gain = -a * beta / (1 - A_bar)
    small_steps = torch.full_like(gain[0], 0.0 if method == 'foh' else 1.0)
    torch.testing.assert_close(gain[0], small_steps, rtol=0, atol=1e-4)
    if method in ('bilinear', 'zoh_exact'):
        torch.testing.assert_close(gain, torch.ones_like(gain), rtol=1e-9, atol=0)


def test_exact_where_truncated_expansions_change_sign():
    _, beta = discretize(torch.ones(1).double(), torch.tensor([-16.0]).double(), 'foh')
    assert beta.item() == pytest.approx((np.exp(-16) + 15) / 256, rel=1e-15)


@pytest.mark.parametrize(
    ('delta_dtype', 'A_dtype', 'expected'),
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float16, torch.complex64, torch.complex64),
        (torch.float64, torch.complex64, torch.complex128),
    ],
)
@each_method
def test_broadcasting_and_dtypes(method, delta_dtype, A_dtype, expected):
    delta = torch.rand(2, 3, 1, 1).to(delta_dtype).requires_grad_()
    A = (-torch.rand(3, 1, 4)).to(A_dtype).requires_grad_()
    for coefficient in discretize(delta, A, method):
        assert coefficient.shape == (2, 3, 1, 4)
        assert coefficient.dtype == expected
    coefficient.abs().sum().backward()
    assert delta.grad.shape == delta.shape
    assert delta.grad.dtype == delta_dtype
    if method != 'zoh':  # whose beta does not depend on A
        assert A.grad.shape == A.shape
        assert A.grad.dtype == A_dtype


def test_overflow_of_half_precision_is_inf():
    one = torch.ones((), dtype=torch.float16)
    _, beta = discretize(one, -1e3 * one, 'rk4')
    assert beta == -torch.inf


def test_names_and_numbers_are_fixed():
    """In order: checkpoints and configs have the names, compiled libraries the numbers."""
    names = ('zoh', 'foh', 'bilinear', 'poly', 'highorder', 'rk4', 'zoh_exact')
    assert [*METHODS] == [*names], 'a name or an order changed, or a new name is not listed here'
    assert [method_id(name) for name in names] == [*range(len(names))]
    assert tuple(name for name in names if METHODS[name].control) == ('zoh_exact',)
    assert tuple(name for name in names if not METHODS[name].causal) == ('poly',)


def test_every_method_has_its_truth():
    assert EXACT.keys() == METHODS.keys()
    assert {name for name in METHODS if not METHODS[name].causal} == {*AVERAGED}


@each_method
def test_every_method_is_named_where_users_and_developers_read(method):
    header = Path(__file__).parents[2] / 'csrc/methods/discretization.h'
    assert re.search(rf'^    {method}  +\S', discretization.__doc__, re.M)
    assert re.search(rf'^//   {method}  +\S', header.read_text(), re.M)
    assert f"'{method}'" in selective_scan_fn.__doc__


@pytest.mark.parametrize('name', ['ZOH', 'tustin', '', None, 2])
@pytest.mark.parametrize('use', [method_id, lambda n: discretize(torch.ones(1), torch.ones(1), n)])
def test_unknown_names_raise(use, name):
    with pytest.raises(ValueError, match=f'{name!r}.*{".*".join(METHODS)}'):
        use(name)


@pytest.mark.parametrize(
    ('delta', 'A', 'message'),
    [
        (torch.ones(1, dtype=torch.long), torch.ones(1), 'delta .* torch.int64'),
        (torch.ones(1, dtype=torch.complex64), torch.ones(1), 'delta .* torch.complex64'),
        (torch.ones(1), torch.ones(1, dtype=torch.long), 'A .* torch.int64'),
    ],
)
def test_wrong_dtypes_raise(delta, A, message):
    with pytest.raises(TypeError, match=message):
        discretize(delta, A, 'zoh')
