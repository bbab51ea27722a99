"""Every implementation of the method table against mpmath, values and derivatives."""

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from mpmath import mp

from vim_mm.ops import library
from vim_mm.ops.discretization import METHODS, discretize, method_id, phi

each_method = pytest.mark.parametrize('method', METHODS)
QUANTITIES = ('A_bar', 'beta', 'dA_bar/ddt', 'dA_bar/da', 'dbeta/ddt', 'dbeta/da')


# The truth. A number is an object array [value, scale]: scale is the sum of the absolute values of
# the terms that the value is a sum of, so what rounding errors are relative to.


def exact(value, scale=None):
    return np.array([value, abs(value) if scale is None else scale], dtype=object)


def kummer(z, k, m):
    """The m-th derivative of phi_k(z) = M(1, k + 1, z) / k!, Kummer's function."""
    return mp.hyp1f1(m + 1, k + m + 1, z) * mp.factorial(m) / mp.factorial(k + m)


@cache
def exact_phi(z, k, m=0):
    """phi_k, m = 0, or its derivative, m = 1.

    The terms are those of the power series or those of the closed form
    z^-k (e^z - sum over j < k of z^j / j!), whichever have the smaller sum.
    """
    if k == 0:
        return exact(mp.exp(z))
    size = abs(z)
    scale = kummer(size, k, m)
    if size > 0:
        closed = (1 + m * k / size) * abs(mp.exp(z))
        closed += sum(((k - j) / size) ** m * size**j / mp.factorial(j) for j in range(k))
        scale = min(scale, closed / size**k)
    return exact(kummer(z, k, m), scale)


# Functions of (dt, a): three rows, the value and the derivatives in dt and in a.


def exact_psi(dt, a, k):
    """dt^k phi_k."""
    z = dt * a
    d_dt = dt ** (k - 1) * exact_phi(z, k - 1) if k else exact(a * mp.exp(z))
    return np.array([dt**k * exact_phi(z, k), d_dt, dt ** (k + 1) * exact_phi(z, k, m=min(k, 1))])


def exact_resolvents(dt, a):
    """The Cayley transform (1 + z/2) / (1 - z/2) and dt / (1 - z/2)."""
    z = dt * a
    r = 1 / (1 - z / 2)
    A_bar = [exact((1 + z / 2) * r, (1 + abs(z) / 2) * abs(r)), exact(a * r**2), exact(dt * r**2)]
    return np.array(A_bar), np.array([exact(dt * r), exact(r**2), exact(dt**2 * r**2 / 2)])


def exact_rk4_beta(dt, a):
    """dt p(z) with p = 1 + z/2 + z^2/6 + z^3/24."""
    z = np.array([dt * a, abs(dt * a)], dtype=object)
    p = sum(z**j / mp.factorial(j + 1) for j in range(4))
    p_prime = sum(j * z ** (j - 1) / mp.factorial(j + 1) for j in range(1, 4))
    return np.array([dt * p, p + z * p_prime, dt**2 * p_prime])


EXACT = {
    'zoh': lambda dt, a: (
        exact_psi(dt, a, 0),
        np.array([exact(dt), exact(mp.one), exact(mp.zero)]),
    ),
    'foh': lambda dt, a: (exact_psi(dt, a, 0), exact_psi(dt, a, 2)),
    'bilinear': exact_resolvents,
    'poly': lambda dt, a: (exact_psi(dt, a, 0), exact_psi(dt, a, 1) + exact_psi(dt, a, 2) / 2),
    'highorder': lambda dt, a: (
        exact_psi(dt, a, 0),
        exact_psi(dt, a, 1) + exact_psi(dt, a, 2) + exact_psi(dt, a, 3) / 2,
    ),
    'rk4': lambda dt, a: (exact_psi(dt, a, 0), exact_rk4_beta(dt, a)),
}


def truth(method, dt, a):
    """Values and scales, each (points, 6) in the order of QUANTITIES."""
    rows = []
    with mp.workdps(60):
        for point in zip(dt.tolist(), a.tolist(), strict=True):
            A_bar, beta = EXACT[method](*map(mp.mpmathify, point))
            rows.append([A_bar[0], beta[0], A_bar[1], A_bar[2], beta[1], beta[2]])
        table = np.array(rows)
        return table[..., 0].astype(complex), table[..., 1].astype(float)


# The implementations: (delta, A, method) -> the six QUANTITIES, derivatives not conjugated.


def gradients(value, delta, A, weight):
    return torch.autograd.grad(
        value, (delta, A), torch.full_like(value, weight), retain_graph=True, materialize_grads=True
    )


def python_table(delta, A, method):
    delta, A = delta.requires_grad_(), A.requires_grad_()
    values = discretize(delta, A, method)
    derivatives = []
    for value in values:
        d_dt, d_a = gradients(value, delta, A, 1)
        if A.is_complex():  # dt is real: its derivative comes one half at a time
            d_dt = torch.complex(d_dt, gradients(value, delta, A, 1j)[0])
        derivatives += [d_dt, torch.conj_physical(d_a)]
    return [*values, *derivatives]


def native_op(delta, A, method):
    assert library.MISSING is None, library.MISSING
    return torch.ops.vim_mm.discretize(delta, A, method_id(method))


IMPLEMENTATIONS = [
    pytest.param(python_table, id='python'),
    pytest.param(native_op, id='native'),
]


# The points: dt in [0, 10]; real a in [-1e4, 2]; complex z with Re z <= 1 and |Im z| <= 50.


def real_points(z_min, z_max):
    steps = [0, 1e-30, 1e-8, 1e-4, 1e-3, 0.011, 0.1, 0.7, 1, 3.3, 10]
    rates = [-1e4, -999, -300, -74.3, -16, -5.1, -2, -1, -0.3, -1e-3, -1e-30, 0, 1e-10, 0.5, 1.2, 2]
    points = list(product(steps, rates))
    # Around every place where a series could give way to a closed form, and where e^z is subnormal.
    points += [(1.7, z / 1.7) for z in np.linspace(-3.2, 3.2, 65)]
    points += [(1.3, z / 1.3) for z in np.linspace(-750, -700, 11)]
    points = [(dt, a) for dt, a in points if z_min <= dt * a <= z_max]
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*points, strict=True)]


def complex_points(z_min):
    real = [z_min, -100, -16, -3, -2, -1, -0.4, -1e-3, 0, 0.3, 1]
    imaginary = [-50, -25, -2 * np.pi, -1.1, -1e-4, 0, 0.5, 1.7, 2, 3.2, 11]
    points = [(10, 0), (0, 0), (0, -1 + 1j), (1e-30, -1e4 + 50j), (1e-8, 2j)]
    for index, (x, y) in enumerate(product(real, imaginary)):
        dt = (1e-3, 0.3, 7)[index % 3]
        points.append((dt, complex(x, y) / dt))
    dt, a = zip(*points, strict=True)
    return torch.tensor(dt, dtype=torch.float64), torch.tensor(a, dtype=torch.complex128)


@each_method
@pytest.mark.parametrize('implementation', IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ('double', 'z_min', 'tolerance', 'tiny'),
    [
        pytest.param(True, -1e4, 1e-12, 1e-300, id='fp64'),
        pytest.param(False, -1e3, 1e-6, torch.finfo(torch.float32).tiny, id='fp32'),
    ],
)
@pytest.mark.parametrize('is_complex', [False, True], ids=['real', 'complex'])
def test_values_and_derivatives(implementation, method, double, z_min, tolerance, tiny, is_complex):
    z_max = 1 if method == 'bilinear' else 20
    delta, A = complex_points(z_min) if is_complex else real_points(z_min, z_max)
    if not double:
        delta, A = delta.float(), A.to(torch.complex64 if is_complex else torch.float32)
    results = implementation(delta, A, method)
    expected, scale = truth(method, delta, A)
    for column, (name, result) in enumerate(zip(QUANTITIES, results, strict=True)):
        assert result.dtype == A.dtype, name
        error = np.abs(result.detach().numpy() - expected[:, column])
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
    points = [*np.linspace(-5, 5, 101).tolist(), -1e4, -999.7, -30.1, -1e-20, 20.0]
    z = torch.tensor(points, dtype=torch.float64)
    with mp.workdps(60):
        expected = torch.tensor([float(kummer(mp.mpf(x), k, m)) for x in points], dtype=z.dtype)
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
    """beta / (1 - A_bar) -> -1/a as dt -> 0, for foh -> 0; bilinear has -1/a at every step."""
    a = torch.tensor([-40.0, -1.0, -0.2, 0.3], dtype=torch.float64)
    dt = torch.tensor([[1e-6], [0.1], [5.0]], dtype=torch.float64)
    A_bar, beta = discretize(dt, a, method)
    gain = -a * beta / (1 - A_bar)
    small_steps = torch.full_like(gain[0], 0.0 if method == 'foh' else 1.0)
    torch.testing.assert_close(gain[0], small_steps, rtol=0, atol=1e-4)
    if method == 'bilinear':
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
    numbers = {'zoh': 0, 'foh': 1, 'bilinear': 2, 'poly': 3, 'highorder': 4, 'rk4': 5}
    assert {name: method_id(name) for name in numbers} == numbers
    assert [method.id for method in METHODS.values()] == list(range(len(METHODS)))
    assert list(METHODS)[: len(numbers)] == list(numbers)
    assert EXACT.keys() == METHODS.keys(), 'a method without its truth'
    assert [name for name in numbers if not METHODS[name].causal] == ['poly']


@pytest.mark.parametrize('name', ['ZOH', 'tustin', '', None, 2])
@pytest.mark.parametrize('use', [method_id, lambda n: discretize(torch.ones(1), torch.ones(1), n)])
def test_unknown_names_raise(use, name):
    with pytest.raises(ValueError, match=f'{name!r}.*zoh.*foh.*bilinear.*poly.*highorder.*rk4'):
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
