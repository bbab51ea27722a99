"""The mathematics of every discretization in Triton: one pair of functions, forward and derivative.

The formulas are those of :mod:`vim_mm.ops.discretization`, in float32. ``METHOD`` is a method's
number, a constant of the compiled kernel, so that a kernel has the arithmetic of its method alone.

With ``e = e^z`` and ``psi_k = dt^k phi_k(z)``:

* near 0, ``psi_(K+1)`` comes from its Taylor series, the lower ones from
  ``psi_k = a psi_(k+1) + dt^k / k!``;
* elsewhere, from ``e`` upwards: ``psi_k = (psi_(k-1) - dt^(k-1) / (k-1)!) / a``.

What is not selected of either may be infinite or NaN: it is selected, never multiplied.
"""

import triton
import triton.language as tl

from vim_mm.ops.discretization import METHODS

ZOH = tl.constexpr(METHODS['zoh'].id)
FOH = tl.constexpr(METHODS['foh'].id)
BILINEAR = tl.constexpr(METHODS['bilinear'].id)
POLY = tl.constexpr(METHODS['poly'].id)
HIGHORDER = tl.constexpr(METHODS['highorder'].id)
RK4 = tl.constexpr(METHODS['rk4'].id)
ZOH_EXACT = tl.constexpr(METHODS['zoh_exact'].id)

LOG2E = tl.constexpr(1.4426950408889634)
# Beyond this |z| the recursion upwards loses no more than a few roundings, derivatives included;
# up to it the series of this many terms is exact to 1e-8.
NEAR = tl.constexpr(1.4)
TERMS = tl.constexpr(12)
# 1 / (TERMS + 1)!, of the last term of phi_2; phi_3 and phi_4 divide on.
LAST = tl.constexpr(1 / 6227020800)


@triton.jit
def exp(x):
    """e^x by the GPU's instruction for 2^x."""
    return tl.exp2(x * LOG2E)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + exp(-x))


@triton.jit
def softplus(x):
    """log(1 + e^x) without a threshold: log(1 + w) = 2 atanh(w / (2 + w)), whose series converges
    to 1e-8 in seven terms for w <= 1."""
    w = exp(-tl.abs(x))
    s = w / (w + 2.0)
    q = s * s
    series = q * (1.0 / 13.0) + 1.0 / 11.0
    series = series * q + 1.0 / 9.0
    series = series * q + 1.0 / 7.0
    series = series * q + 1.0 / 5.0
    series = series * q + 1.0 / 3.0
    series = series * q + 1.0
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def transition(dt, a):
    """e^(dt a). Rounding a log2(e) and its product with dt act like a relative change of a by
    2^-24."""
    return tl.exp2(dt * (a * LOG2E))


@triton.jit
def _phi_series(z, K: tl.constexpr):
    """phi_K(z) near 0, K from 2 to 4."""
    c = LAST
    for k in tl.static_range(2, K):
        c = c / (TERMS + k)
    total = tl.full(z.shape, c, tl.float32)
    for j in tl.static_range(TERMS - 1):
        c = c * (TERMS - 1 - j + K)
        total = total * z + c
    return total


@triton.jit
def _psi(dt, a, e, K: tl.constexpr):
    """(near, 1/a, psi_1, psi_2, psi_3, psi_4): those up to psi_K, and near 0 psi_(K+1) as well."""
    z = dt * a
    near = tl.abs(z) <= NEAR
    inverse = 1.0 / a
    square = dt * dt
    cube = square * dt
    psi_2 = tl.zeros_like(z)
    psi_3 = psi_2
    psi_4 = psi_2
    if K == 3:
        psi_4 = square * square * _phi_series(z, 4)
        psi_3 = a * psi_4 + cube * (1.0 / 6.0)
    if K == 2:
        psi_3 = cube * _phi_series(z, 3)
    if K == 1:
        psi_2 = square * _phi_series(z, 2)
    else:
        psi_2 = a * psi_3 + square * 0.5
    psi_1 = tl.where(near, a * psi_2 + dt, (e - 1.0) * inverse)
    if K >= 2:
        psi_2 = tl.where(near, psi_2, (psi_1 - dt) * inverse)
    if K >= 3:
        psi_3 = tl.where(near, psi_3, (psi_2 - square * 0.5) * inverse)
    return near, inverse, psi_1, psi_2, psi_3, psi_4


@triton.jit
def discretize(dt, a, METHOD: tl.constexpr):
    """(A_bar, beta) of a step.

    Args:
        dt: Step sizes, float32.
        a: Diagonal entries, float32, of a shape that broadcasts to dt's.
        METHOD: Number of the discretization.
    """
    if METHOD == BILINEAR:
        half = dt * (0.5 * a)
        q = 1.0 / (1.0 - half)
        a_bar = (1.0 + half) * q
        beta = dt * q
    else:
        a_bar = transition(dt, a)
        if METHOD == ZOH:
            beta = dt
        elif METHOD == RK4:
            z = dt * a
            beta = dt * (1.0 + z * (0.5 + z * (1.0 / 6.0 + z * (1.0 / 24.0))))
        elif METHOD == FOH:
            _, _, _, beta, _, _ = _psi(dt, a, a_bar, 2)
        elif METHOD == POLY:
            _, _, psi_1, psi_2, _, _ = _psi(dt, a, a_bar, 2)
            beta = psi_1 + 0.5 * psi_2
        elif METHOD == HIGHORDER:
            _, _, psi_1, psi_2, psi_3, _ = _psi(dt, a, a_bar, 3)
            beta = psi_1 + psi_2 + 0.5 * psi_3
        else:
            tl.static_assert(METHOD == ZOH_EXACT)
            _, _, beta, _, _, _ = _psi(dt, a, a_bar, 1)
    return a_bar, beta


@triton.jit
def differentiate(dt, a, METHOD: tl.constexpr):
    """(A_bar, beta, dA_bar/dz, dbeta/ddt, dbeta/da) of a step, arguments as in ``discretize``.

    A_bar is a function of z alone: its derivatives are a and dt times that by z.
    """
    if METHOD == BILINEAR:
        half = dt * (0.5 * a)
        q = 1.0 / (1.0 - half)
        a_bar = (1.0 + half) * q
        beta = dt * q
        slope = q * q
        beta_dt = slope
        beta_a = 0.5 * (beta * beta)
    else:
        a_bar = transition(dt, a)
        slope = a_bar
        if METHOD == ZOH:
            beta = dt
            beta_dt = tl.full(dt.shape, 1.0, tl.float32)
            beta_a = tl.zeros_like(dt)
        elif METHOD == RK4:
            z = dt * a
            beta = dt * (1.0 + z * (0.5 + z * (1.0 / 6.0 + z * (1.0 / 24.0))))
            beta_dt = 1.0 + z * (1.0 + z * (0.5 + z * (1.0 / 6.0)))
            beta_a = dt * dt * (0.5 + z * (1.0 / 3.0 + z * 0.125))
        elif METHOD == FOH:
            near, inverse, psi_1, psi_2, psi_3, _ = _psi(dt, a, a_bar, 2)
            beta = psi_2
            beta_dt = psi_1
            beta_a = tl.where(near, dt * psi_2 - 2.0 * psi_3, (dt * psi_1 - 2.0 * psi_2) * inverse)
        elif METHOD == POLY:
            near, inverse, psi_1, psi_2, psi_3, _ = _psi(dt, a, a_bar, 2)
            beta = psi_1 + 0.5 * psi_2
            beta_dt = a_bar + 0.5 * psi_1
            beta_a = tl.where(
                near,
                dt * beta - (psi_2 + psi_3),
                (dt * beta_dt - (psi_1 + psi_2)) * inverse,
            )
        elif METHOD == HIGHORDER:
            near, inverse, psi_1, psi_2, psi_3, psi_4 = _psi(dt, a, a_bar, 3)
            beta = psi_1 + psi_2 + 0.5 * psi_3
            beta_dt = a_bar + psi_1 + 0.5 * psi_2
            beta_a = tl.where(
                near,
                dt * beta - (psi_2 + 2.0 * psi_3 + 1.5 * psi_4),
                (dt * beta_dt - (psi_1 + 2.0 * psi_2 + 1.5 * psi_3)) * inverse,
            )
        else:
            tl.static_assert(METHOD == ZOH_EXACT)
            near, inverse, psi_1, psi_2, _, _ = _psi(dt, a, a_bar, 1)
            beta = psi_1
            beta_dt = a_bar
            beta_a = tl.where(near, dt * psi_1 - psi_2, (dt * a_bar - psi_1) * inverse)
    return a_bar, beta, slope, beta_dt, beta_a
