"""The Python home of the mathematics: the method table, which the op and its reference read.

A step ``dt`` and a diagonal entry ``a`` become, with ``z = dt a``, a pair ``(A_bar, beta)``:

    x_t = A_bar_t x_{t-1} + beta_t B_t u_t

    name        A_bar               beta                                    scan
    zoh         e^z                 dt                                      causal
    foh         e^z                 psi_2                                   causal
    bilinear    (1+z/2)/(1-z/2)     dt / (1-z/2)                            causal
    poly        e^z                 psi_1 + psi_2 / 2                       both ways, averaged
    highorder   e^z                 psi_1 + psi_2 + psi_3 / 2               causal
    rk4         e^z                 dt (1 + z/2 + z^2/6 + z^3/24)           causal
    zoh_exact   e^z                 psi_1                                   causal (the control)

    psi_k = dt^k phi_k(z)           phi_k(z) = sum over j >= 0 of z^j / (j + k)!

phi functions as in Hochbruck & Ostermann, Exponential integrators, Acta Numerica 19 (2010). Nothing
is truncated: where ``|z|`` is small phi_k is its series, elsewhere its closed form, and every
derivative of either is exact as well, so that autograd through this module, to any order, is as
accurate as the values.

Six methods are compared with one another; ``zoh_exact`` is the control. It is the true zero-order
hold, which Mamba's ``zoh`` simplifies to beta = dt. A method that beats ``zoh`` may do so because
its input is integrated exactly, whatever it assumes of the input; the control tells the two apart.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import factorial
from typing import Any

import torch
from torch import Tensor

from vim_mm.errors import UserTypeError, UserValueError, did_you_mean

# Up to this |z| the series is used. Beyond it, dividing by z in the recursion amplifies no error.
_SERIES_RADIUS = 2.0
# 2^30 / 30! is 4e-24 and 2^16 / 16! is 3e-9: below half an ulp of every phi_k^(m) in fp64 and fp32.
_SERIES_TERMS = {torch.float32: 16, torch.complex64: 16}
_MOST_SERIES_TERMS = 30


def _expm1(z: Tensor) -> Tensor:
    """e^z - 1 without cancellation; torch.expm1 takes no complex numbers."""
    if not z.is_complex():
        return torch.expm1(z)
    x, y = z.real, z.imag
    real = torch.expm1(x) * torch.cos(y) - 2 * torch.sin(y / 2) ** 2
    return torch.complex(real, torch.exp(x) * torch.sin(y))


def _phi_series(z: Tensor, k: int, m: int) -> Tensor:
    total = torch.zeros_like(z)
    for j in reversed(range(_SERIES_TERMS.get(z.dtype, _MOST_SERIES_TERMS))):
        total = total * z + factorial(j + m) / (factorial(j) * factorial(j + m + k))
    return total


def _phi_closed(z: Tensor, k: int, m: int) -> Tensor:
    if k == 0:
        return torch.exp(z)
    if m > 0:  # z phi_k = phi_{k-1} - 1/(k-1)!, differentiated m times
        return (_phi_closed(z, k - 1, m) - m * _phi_closed(z, k, m - 1)) / z
    if k == 1:
        return _expm1(z) / z
    return (_phi_closed(z, k - 1, 0) - 1 / factorial(k - 1)) / z


def phi(z: Tensor, k: int, m: int = 0) -> Tensor:
    """Value of the m-th derivative of phi_k, for every z.

    Not for autograd, which would divide by zero in the branch that ``where`` discards:
    differentiate :func:`psi`.

    Args:
        z: Real or complex, float64 or complex128 for the accuracy stated in this module.
        k: Index of the phi function, >= 0; phi_0 is the exponential.
        m: Order of the derivative, >= 0.
    """
    small = z.abs() <= _SERIES_RADIUS
    return torch.where(small, _phi_series(z, k, m), _phi_closed(z, k, m))


class _WithDerivatives(torch.autograd.Function):
    """A function of (dt, a) that is given together with its two partial derivatives.

    The derivatives are themselves differentiable functions of (dt, a), so every order is exact;
    autograd's product rule would cancel for large |z|.
    """

    @staticmethod
    def forward(ctx, dt, a, value, d_dt, d_a):
        ctx.save_for_backward(dt, a)
        ctx.derivatives = d_dt, d_a
        return value(dt, a)

    @staticmethod
    def backward(ctx, grad):
        dt, a = ctx.saved_tensors
        d_dt, d_a = ctx.derivatives
        # torch.real: dt is real where a is complex.
        grad_dt = torch.real(grad * d_dt(dt, a).conj()) if ctx.needs_input_grad[0] else None
        grad_a = grad * d_a(dt, a).conj() if ctx.needs_input_grad[1] else None
        return grad_dt, grad_a, None, None, None


def psi(dt: Tensor, a: Tensor, k: int, m: int = 0) -> Tensor:
    """dt^(k+m) phi_k^(m)(dt a): the m-th derivative in a of the k-fold integral in dt of e^(dt a).

    So d/d dt lowers k and d/d a raises m, and the family is closed under differentiation.

    Args:
        dt: Real, any shape.
        a: Real or complex, the same shape.
        k: Index of the phi function, >= 0.
        m: Order of the derivative in a, >= 0.
    """
    if k == 0:
        return dt**m * torch.exp(dt * a)
    return _WithDerivatives.apply(
        dt,
        a,
        lambda dt, a: dt ** (k + m) * phi(dt * a, k, m),
        lambda dt, a: psi(dt, a, k - 1, m),
        lambda dt, a: psi(dt, a, k, m + 1),
    )


def _resolvent(dt: Tensor, a: Tensor) -> Tensor:
    return 1 / (1 - dt * a / 2)


def _zoh(dt, a):
    return psi(dt, a, 0), dt


def _foh(dt, a):
    return psi(dt, a, 0), psi(dt, a, 2)


def _bilinear(dt, a):
    # 2 r - 1 is (1+z/2)/(1-z/2), written so that its derivatives, 2 r', do not cancel either.
    A_bar = 2 * _resolvent(dt, a) - 1
    beta = _WithDerivatives.apply(
        dt,
        a,
        lambda dt, a: dt * _resolvent(dt, a),
        lambda dt, a: _resolvent(dt, a) ** 2,
        lambda dt, a: (dt * _resolvent(dt, a)) ** 2 / 2,
    )
    return A_bar, beta


def _poly(dt, a):
    return psi(dt, a, 0), psi(dt, a, 1) + psi(dt, a, 2) / 2


def _highorder(dt, a):
    return psi(dt, a, 0), psi(dt, a, 1) + psi(dt, a, 2) + psi(dt, a, 3) / 2


def _rk4(dt, a):
    z = dt * a
    return psi(dt, a, 0), dt * (1 + z / 2 * (1 + z / 3 * (1 + z / 4)))


def _zoh_exact(dt, a):
    return psi(dt, a, 0), psi(dt, a, 1)


@dataclass(frozen=True)
class Method:
    """One discretization.

    Args:
        name: The word users write.
        id: The number the native operators take.
        coefficients: (dt, a) of one shape -> (A_bar, beta), in their dtype: double precision from
            :func:`discretize`, down to float32 from scans in chunks and exported ones.
        causal: False if the output is the average of the scans in both directions.
        control: True if it is there for the others to be compared with, not to be compared itself.
            ``run_all_methods.sh`` leaves it out unless told otherwise.
    """

    name: str
    id: int
    coefficients: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    causal: bool = True
    control: bool = False


METHODS = {
    method.name: method
    for method in (
        Method('zoh', 0, _zoh),
        Method('foh', 1, _foh),
        Method('bilinear', 2, _bilinear),
        Method('poly', 3, _poly, causal=False),
        Method('highorder', 4, _highorder),
        Method('rk4', 5, _rk4),
        Method('zoh_exact', 6, _zoh_exact, control=True),
    )
}
# By the native operators' number.
IS_CAUSAL = {method.id: method.causal for method in METHODS.values()}


_NAMES = {method.id: name for name, method in METHODS.items()}


def get_method(name: str, argument: str = 'discretization_method') -> Method:
    """The method called ``name``; ValueError for any other word, never a default.

    The error names the ``argument``, and the method that is most like the word.
    """
    if isinstance(name, str) and name in METHODS:
        return METHODS[name]
    hint = did_you_mean(name.lower(), METHODS) if isinstance(name, str) else ''
    raise UserValueError(
        f'{argument}: unknown discretization method {name!r}, expected one of {[*METHODS]}{hint}'
    )


def method_name(number: int) -> str:
    """The name of the method that operators know by that number."""
    return _NAMES[number]


def method_id(name: str) -> int:
    """The native operators' number of the method called ``name``; errors as :func:`get_method`."""
    return get_method(name).id


def check_tensor(name: str, x: Any) -> None:
    """Keep what has no strides from operators, whose errors would not name it.

    Raises:
        TypeError: The argument is no tensor, or a sparse, nested or packed one.
    """
    if not isinstance(x, Tensor):
        raise UserTypeError(f'{name}: expected a tensor, got {type(x).__name__}')
    if x.layout != torch.strided or x.is_nested:
        kind = 'a nested one' if x.is_nested else f'one of layout {x.layout}'
        raise UserTypeError(f'{name}: expected a dense tensor, got {kind}')


def check_device(name: str, x: Tensor, first: str, other: Tensor) -> None:
    """ValueError if the tensor is not where the argument called ``first`` is."""
    if x.device != other.device:
        raise UserValueError(
            f'{name}: expected on {other.device}, where {first} is, got {x.device}'
        )


def check_reset(reset: Any, rows: tuple[int, int], first: str, other: Tensor) -> None:
    """TypeError or ValueError if ``reset`` is no bool of the shape ``rows``, (B, L)."""
    check_tensor('reset', reset)
    check_device('reset', reset, first, other)
    if reset.dtype != torch.bool:
        raise UserTypeError(f'reset: expected torch.bool, got {reset.dtype}')
    if tuple(reset.shape) != rows:
        raise UserValueError(f'reset: expected shape (B, L) = {rows}, got {(*reset.shape,)}')


def discretize(delta: Tensor, A: Tensor, method: str) -> tuple[Tensor, Tensor]:
    """Discretize the diagonal system x' = A x + B u over steps of length ``delta``.

    Any real step and any A are legal, zero included. The computation runs in double precision
    whatever the inputs and is rounded once at the end: rounding z = delta A to float32 would
    already cost ``|z|`` ulps of e^z. Differentiable any number of times.

    Args:
        delta: Real floating point, the step lengths.
        A: Real or complex floating point, any shape that broadcasts with ``delta``.
        method: A name in ``METHODS``.

    Returns:
        A_bar and beta (B_bar = beta * B), both of the broadcast shape and of the dtype that
        ``delta`` and ``A`` promote to.

    Raises:
        ValueError: ``method`` is unknown, or the tensors are on two devices.
        TypeError: ``delta`` is not real floating point, or ``A`` is neither that nor complex, or
            one of them is no dense tensor.
    """
    coefficients = get_method(method, 'method').coefficients
    check_tensor('delta', delta)
    check_tensor('A', A)
    check_device('A', A, 'delta', delta)
    if not delta.is_floating_point():
        raise UserTypeError(f'delta must be real floating point, got {delta.dtype}')
    if not (A.is_floating_point() or A.is_complex()):
        raise UserTypeError(f'A must be floating point or complex, got {A.dtype}')
    dtype = torch.promote_types(delta.dtype, A.dtype)
    dt, a = torch.broadcast_tensors(
        delta.double(), A.to(torch.complex128 if A.is_complex() else torch.float64)
    )
    A_bar, beta = coefficients(dt, a)
    return A_bar.to(dtype), beta.to(dtype)
