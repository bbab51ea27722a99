"""``two_sample_scan`` step by step, as the first lines of its module have the two rules."""

from collections.abc import Sequence

import torch
from torch import Tensor

from studies.discretization.models.two_sample import check_rule
from vim_mm.ops.discretization import psi
from vim_mm.ops.reference import real_dtype, skip_and_gate, state_dtype, step_sizes


def two_sample_ref(
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
) -> Tensor:
    """The same function; any step size is legal, 0 too. Memory is O(B K D L N)."""
    check_rule(rule, weight)
    state, signal = state_dtype(u, A), u.to(real_dtype(u))
    dt = step_sizes(delta, delta_bias, delta_softplus, signal.dtype)
    w = torch.as_tensor(weight, dtype=dt.dtype, device=dt.device).expand_as(dt)[..., None]
    z_of_step = dt[..., None] * A.to(state)[:, :, None]  # (B, K, D, L, N)
    v = _each_state(B, state) * signal[..., None]
    readout = _each_state(C, state).expand_as(v)
    # psi with a step of 1 is phi, with derivatives.
    phi_0, phi_1, phi_2 = (psi(torch.ones_like(z_of_step.real), z_of_step, k) for k in range(3))
    if rule == 'exp_trapezoidal':
        old, new = (1 - w) * phi_0, w
    else:
        old, new = phi_1 - phi_2, phi_2
    outputs = []
    for k, flag in enumerate(reverse):
        x = last = torch.zeros_like(v[:, k, :, 0])
        y: dict[int, Tensor] = {}
        for t in reversed(range(u.shape[3])) if flag else range(u.shape[3]):
            at, step = (slice(None), k, slice(None), t), dt[:, k, :, t, None]
            x = phi_0[at] * x + step * (old[at] * last + new[at] * v[at])
            last = v[at]
            y[t] = (readout[at] * x).sum(-1)
        outputs.append(torch.stack([y[t] for t in sorted(y)], dim=-1))
    y = torch.stack(outputs, dim=1)
    return skip_and_gate(y, signal, D, z).to(u.dtype)


def _each_state(M: Tensor, dtype: torch.dtype) -> Tensor:
    """B or C, (B, K, N, L) or (K, D, N), as (B or 1, K, D or 1, L or 1, N)."""
    M = M.unsqueeze(2) if M.dim() == 4 else M[None, ..., None]
    return M.transpose(3, 4).to(dtype)
