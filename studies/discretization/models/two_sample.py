"""Two rules whose step reads two samples of the input, from scans that read one.

With z = dt a, v_t = B_t u_t, and t - 1 the step before t in scan order (v is 0 before the first):

    exp_trapezoidal   x_t = e^z x_{t-1} + (1 - w_t) dt_t e^z v_{t-1} + w_t dt_t v_t
    foh_two_sample    x_t = e^z x_{t-1} + dt_t (phi_1 - phi_2) v_{t-1} + dt_t phi_2 v_t

The first is the rule of Mamba-3 (arXiv 2603.15569), whose weight w, its lambda, is 1/2 or learned.
The second is the first-order hold of control textbooks: exact where v is linear between samples.
:func:`two_sample_scan` computes them by the compiled scans, with their gradients. Tests hold it to
these lines, step by step.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vim_mm.ops import selective_scan_grouped_fn
from vim_mm.ops.reference import real_dtype, skip_and_gate, step_sizes

RULES = ('exp_trapezoidal', 'foh_two_sample')
_LEAST = 1e-30  # of |dt|, by which the input is divided


def check_rule(rule: str, weight: Tensor | float = 0.5) -> None:
    """ValueError if there is no such rule, or it has no weight and one is given."""
    if rule not in RULES:
        raise ValueError(f'rule must be one of {[*RULES]}, got {rule!r}')
    if rule != 'exp_trapezoidal' and not (isinstance(weight, float) and weight == 0.5):
        raise ValueError(f'weight is for exp_trapezoidal alone, got one with {rule}')


def two_sample_scan(
    rule: str,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    reverse: Sequence[bool] = (False, True),
    *,
    weight: Tensor | float = 0.5,
    **options: Any,
) -> Tensor:
    """Scans of K groups by a rule of two samples.

    A sample enters a state twice, at its own step and at the next. Of ``exp_trapezoidal`` both
    times with the decay of the steps between, so it may enter once with the sum of the two
    coefficients. What it brought too early is taken out of the output of its own step:

        y = scan_zoh(u c / dt) - (1 - w_{t+1}) dt_{t+1} (C_t . B_t) u_t
        c_t = w_t dt_t + (1 - w_{t+1}) dt_{t+1}

    ``foh_two_sample`` is the sum of a scan by ``zoh_exact`` of the samples before, and of one by
    ``foh``, whose coefficient is dt^2 phi_2, of the slopes (v_t - v_{t-1}) / dt.

    Args:
        rule (str): A name in ``RULES``.
        u, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse: As in
            ``selective_scan_grouped_fn``. A step size that is closer to 0 than 1e-30 counts as
            1e-30, and gets no gradient.
        weight (Tensor | float): w, which broadcasts to (B, K, D, L); of ``exp_trapezoidal``.
        options: ``use_cuda_kernel`` and ``backend`` of the scans.

    Returns:
        Tensor: (B, K, D, L) in u's dtype, computed in float64 if u is, else in float32.

    Raises:
        ValueError: An unknown rule, or a weight for one that has none.
    """
    check_rule(rule, weight)
    signal = u.to(real_dtype(u))
    dt = step_sizes(delta, delta_bias, delta_softplus, signal.dtype)
    dt = dt.masked_fill(dt.abs() < _LEAST, _LEAST)
    # One dtype for all, as the kernels have it at their fastest.
    B, C = (M if M.is_complex() else M.to(signal.dtype) for M in (B, C))
    if rule == 'exp_trapezoidal':
        later = _from_next((1 - weight) * dt, reverse)
        entering = signal * (weight + later / dt)
        y = selective_scan_grouped_fn(
            entering, dt, A, B, C, discretization_method='zoh', reverse=reverse, **options
        )
        y = y - later * _products(B, C) * signal
    else:
        before = [not flag for flag in reverse]
        last, last_B = (M if M.dim() == 3 else _from_next(M, before) for M in (signal, B))
        y = selective_scan_grouped_fn(
            last, dt, A, last_B, C, discretization_method='zoh_exact', reverse=reverse, **options
        )
        twice = selective_scan_grouped_fn(
            torch.cat([signal / dt, -last / dt], 1),
            torch.cat([dt, dt], 1),
            torch.cat([A, A]),
            torch.cat([B, last_B], B.dim() - 3),
            torch.cat([C, C], C.dim() - 3),
            discretization_method='foh',
            reverse=[*reverse, *reverse],
            **options,
        )
        y = y + twice.unflatten(1, (2, -1)).sum(1)
    return skip_and_gate(y, signal, D, z).to(u.dtype)


def _from_next(x: Tensor, reverse: Sequence[bool]) -> Tensor:
    """x (B, K, .., L) of the step after each in scan order, 0 at the last.

    With every flag inverted, of the step before.
    """
    return torch.stack(
        [F.pad(x[:, k], (1, -1) if flag else (-1, 1)) for k, flag in enumerate(reverse)], dim=1
    )


def _products(B: Tensor, C: Tensor) -> Tensor:
    """C_t . B_t, (B or 1, K, D or 1, L or 1), of complex ones twice the real part."""
    products = torch.mul(*(_for_channels(M) for M in (B, C))).sum(-2)
    return 2 * products.real if products.is_complex() else products


def _for_channels(M: Tensor) -> Tensor:
    """B or C, (B, K, N, L) or (K, D, N), as (B or 1, K, D or 1, N, L or 1)."""
    return M.unsqueeze(2) if M.dim() == 4 else M[None, ..., None]
