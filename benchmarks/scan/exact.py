"""The truth at 60 digits, by mpmath: what every method computes of a step, and whole small scans.

Tests and ``tools/analysis/verify_discretization.py`` hold every implementation to it; it shares no
code with them.
"""

from functools import cache, partial

import numpy as np
import torch
from mpmath import mp
from torch import Tensor

DIGITS = 60
# A_bar and beta, and their derivatives where the other of dt and a is fixed.
QUANTITIES = ('A_bar', 'beta', 'dA_bar/ddt', 'dA_bar/da', 'dbeta/ddt', 'dbeta/da')
# Methods whose output is the average of the scans in both directions.
AVERAGED = ('poly',)
# What is complex of a scan where A is.
_COMPLEX = ('last_state', 'grad_A', 'grad_B', 'grad_C')
# Step of the central differences: their error is its square, and rounding is 1e-40 of the value.
_STEP = '1e-20'

# A number is an object array [value, scale]: scale is the sum of the absolute values of the terms
# that the value is a sum of, so what rounding errors are relative to.


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
    'zoh_exact': lambda dt, a: (exact_psi(dt, a, 0), exact_psi(dt, a, 1)),
}


def truth(method, dt, a):
    """What a method computes at the points dt and a, tensors (points,).

    Returns:
        Values, complex, and scales, to which errors are relative: arrays (points, 6) in the order
        of QUANTITIES.
    """
    rows = []
    with mp.workdps(DIGITS):
        for point in zip(dt.tolist(), a.tolist(), strict=True):
            A_bar, beta = EXACT[method](*map(mp.mpmathify, point))
            rows.append([A_bar[0], beta[0], A_bar[1], A_bar[2], beta[1], beta[2]])
        table = np.array(rows)
        return table[..., 0].astype(complex), table[..., 1].astype(float)


# Scans: arrays of mpmath's numbers, in the shapes of selective_scan_fn.

_to_mp = np.frompyfunc(mp.mpmathify, 1, 1)
_real = np.frompyfunc(mp.re, 1, 1)
_softplus = np.frompyfunc(lambda x: mp.log(1 + mp.exp(x)), 1, 1)
_silu = np.frompyfunc(lambda x: x / (1 + mp.exp(-x)), 1, 1)


@cache
def _coefficients(method, dt, a):
    A_bar, beta = EXACT[method](dt, a)
    return A_bar[0, 0], beta[0, 0]


def _recur(A_bar, drive, C, reverse):
    """(B, D, L, N) each -> y (B, D, L) and the last state (B, D, N)."""
    x = 0 * drive[:, :, 0]
    y = np.empty(drive.shape[:3], object)
    for t in reversed(range(drive.shape[2])) if reverse else range(drive.shape[2]):
        x = A_bar[:, :, t] * x + drive[:, :, t]
        y[:, :, t] = (C[:, :, t] * x).sum(-1)
    return y, x


def _scan(inputs, method, reverse, is_complex):
    u = inputs['u']
    steps = _softplus(inputs['delta'] + inputs['delta_bias'][:, None])
    coefficients = np.frompyfunc(partial(_coefficients, method), 2, 2)
    A_bar, beta = coefficients(steps[..., None], inputs['A'][:, None])
    B, C = (
        np.repeat(inputs[name], u.shape[1] // inputs[name].shape[1], axis=1).swapaxes(2, 3)
        for name in 'BC'
    )
    drive = beta * B * u[..., None]
    y, last_state = _recur(A_bar, drive, C, reverse)
    if method in AVERAGED:
        y = (y + _recur(A_bar, drive, C, not reverse)[0]) / 2
    if is_complex:
        y = 2 * _real(y)
    return (y + inputs['D'][:, None] * u) * _silu(inputs['z']), last_state


def exact_scan(
    inputs: dict[str, Tensor],
    method: str,
    weights: tuple[Tensor, Tensor],
    reverse: bool = False,
) -> dict[str, Tensor]:
    """Results of a scan with softplus and its gradients, each rounded once, to double precision.

    The loss is sum(out w) + Re sum(last_state w'); its gradients are central differences, so the
    cost is the number of inputs times B D L N: a second for a hundred and a hundred.

    Args:
        inputs: Keyword arguments of ``selective_scan_fn``, all of them; B and C (B, G, N, L).
        method: A name in ``EXACT``.
        weights: w (B, D, L) and w' (B, D, N), real.
        reverse: Scan from the last step to the first.

    Returns:
        out, last_state and grad_NAME of each input; complex as PyTorch has it, dL/dRe + i dL/dIm.
    """
    with mp.workdps(DIGITS):
        arrays = {name: _to_mp(x.detach().numpy()) for name, x in inputs.items()}
        w_out, w_state = (_to_mp(w.numpy()) for w in weights)
        scan = partial(_scan, method=method, reverse=reverse, is_complex=inputs['A'].is_complex())

        def loss():
            out, last_state = scan(arrays)
            return (out * w_out).sum() + _real(last_state * w_state).sum()

        def slope(array, index, direction):
            value, h = array[index], mp.mpf(_STEP)
            array[index] = value + h * direction
            above = loss()
            array[index] = value - h * direction
            below = loss()
            array[index] = value
            return (above - below) / (2 * h)

        results = dict(zip(('out', 'last_state'), scan(arrays), strict=True))
        for name, array in arrays.items():
            grad = np.empty_like(array)
            for index in np.ndindex(array.shape):
                grad[index] = slope(array, index, 1)
                if inputs[name].is_complex():
                    grad[index] += mp.j * slope(array, index, mp.j)
            results[f'grad_{name}'] = grad
        complex_ones = _COMPLEX if inputs['A'].is_complex() else ()
        return {
            name: torch.from_numpy(x.astype(complex if name in complex_ones else float))
            for name, x in results.items()
        }
