"""A step's coefficients and their derivatives by each implementation, and points to compare at.

For tests and ``tools/analysis/verify_discretization.py``, which hold them to
:mod:`benchmarks.scan.exact`.
"""

from itertools import product

import numpy as np
import torch
from torch import Tensor

from vim_mm.ops import discretize
from vim_mm.ops.discretization import method_id


def _gradients(value: Tensor, delta: Tensor, A: Tensor, weight: complex) -> tuple[Tensor, ...]:
    return torch.autograd.grad(
        value, (delta, A), torch.full_like(value, weight), retain_graph=True, materialize_grads=True
    )


def by_python(delta: Tensor, A: Tensor, method: str) -> list[Tensor]:
    """The six of ``exact.QUANTITIES`` by the Python table and autograd, derivatives not conjugated.

    Args:
        delta: (points,) real.
        A: (points,) real or complex.
        method: A name in ``METHODS``.
    """
    delta, A = (x.detach().requires_grad_() for x in (delta, A))
    values = discretize(delta, A, method)
    derivatives = []
    for value in values:
        d_dt, d_a = _gradients(value, delta, A, 1)
        if A.is_complex():  # dt is real: its derivative comes one half at a time
            d_dt = torch.complex(d_dt, _gradients(value, delta, A, 1j)[0])
        derivatives += [d_dt, torch.conj_physical(d_a)]
    return [x.detach() for x in (*values, *derivatives)]


def by_kernel(delta: Tensor, A: Tensor, method: str) -> list[Tensor]:
    """The same by the compiled kernel of the device that the tensors are on."""
    return [*torch.ops.vim_mm.discretize(delta, A, method_id(method))]


def points(method: str, dtype: torch.dtype, is_complex: bool) -> tuple[Tensor, Tensor]:
    """Steps and rates (dt, a), (points,) each, of either sign, tiny, stiff and zero.

    dt is in [0, 10]; real z = dt a from -1e4 (float64) or -1e3 (float32) to 20 (``bilinear``, which
    has a pole at 2: to 1); complex z has Re z <= 1 and abs(Im z) <= 50.

    Args:
        method: A name in ``METHODS``.
        dtype: Of dt: float64 or float32.
        is_complex: Whether a is complex.
    """
    z_min = -1e4 if dtype == torch.float64 else -1e3
    if is_complex:
        steps, rates = _complex_points(z_min)
        dtype_a = dtype.to_complex()
    else:
        steps, rates = _real_points(z_min, z_max=1 if method == 'bilinear' else 20)
        dtype_a = dtype
    return torch.tensor(steps, dtype=dtype), torch.tensor(rates, dtype=dtype_a)


def _real_points(z_min: float, z_max: float) -> zip:
    steps = [0, 1e-30, 1e-8, 1e-4, 1e-3, 0.011, 0.1, 0.7, 1, 3.3, 10]
    rates = [-1e4, -999, -300, -74.3, -16, -5.1, -2, -1, -0.3, -1e-3, -1e-30, 0, 1e-10, 0.5, 1.2, 2]
    pairs = list(product(steps, rates))
    # Around every place where a series could give way to a closed form, and where e^z is subnormal.
    pairs += [(1.7, z / 1.7) for z in np.linspace(-3.2, 3.2, 65)]
    pairs += [(1.3, z / 1.3) for z in np.linspace(-750, -700, 11)]
    return zip(*((dt, a) for dt, a in pairs if z_min <= dt * a <= z_max), strict=True)


def _complex_points(z_min: float) -> zip:
    real = [z_min, -100, -16, -3, -2, -1, -0.4, -1e-3, 0, 0.3, 1]
    imaginary = [-50, -25, -2 * np.pi, -1.1, -1e-4, 0, 0.5, 1.7, 2, 3.2, 11]
    pairs = [(10, 0), (0, 0), (0, -1 + 1j), (1e-30, -1e4 + 50j), (1e-8, 2j)]
    for index, (x, y) in enumerate(product(real, imaginary)):
        dt = (1e-3, 0.3, 7)[index % 3]
        pairs.append((dt, complex(x, y) / dt))
    return zip(*pairs, strict=True)
