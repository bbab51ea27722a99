"""The selective scan with dense state matrices: ``bilinear`` by solving a system at every step.

For research on systems that are not diagonal. It keeps several N x N matrices for every step and
takes about N^2 times the arithmetic of the diagonal scan, and there is no kernel: it is not meant
for training at size.
"""

import torch
from torch import Tensor

from vim_mm.errors import UserValueError
from vim_mm.ops.discretization import check_tensor, method_id
from vim_mm.ops.reference import (
    ScanInputs,
    per_channel,
    real_dtype,
    sequential_scan,
    skip_and_gate,
    state_dtype,
    step_sizes,
)
from vim_mm.ops.selective_scan import check_bool, check_shapes, check_state_matrices


def selective_scan_dense_ref(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    reverse: bool = False,
    *,
    initial_state: Tensor | None = None,
    reset: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Selective scan by the trapezoidal rule (``bilinear``) where A is a matrix per channel.

        x_t = (I - dt_t A / 2)^-1 ((I + dt_t A / 2) x_{t-1} + dt_t B_t u_t)
        y_t = sum over n of C_t x_t                   complex A: twice the real part
        out_t = (y_t + D u_t) * silu(z_t)

    In plain PyTorch on any device: one batched ``torch.linalg.solve`` for all steps, then a loop.
    Memory is O(B D L N^2). Differentiable any number of times. Where every A is diagonal this is
    ``selective_scan_fn(..., discretization_method='bilinear')`` on the diagonals.

    Args:
        u, delta, z, B, C, D, delta_bias, delta_softplus, return_last_state, reverse: As in
            ``selective_scan_fn``, B and C not interleaved.
        initial_state, reset: As in ``selective_scan_fn``.
        A: (D, N, N), real or complex. I - dt A / 2 must be regular, as it is for every dt > 0 where
            all eigenvalues have a real part of at most 0.

    Returns:
        As ``selective_scan_fn``: out (B, D, L) in u's dtype, or (out, last_state) with last_state
        (B, D, N). Computed in float64 if u is, else in float32.

    Raises:
        TypeError, ValueError: An argument has another type, dtype, device or shape.
        torch.linalg.LinAlgError: I - dt A / 2 is singular.
    """
    check_tensor('A', A)
    if A.dim() != 3 or A.shape[1] != A.shape[2]:
        raise UserValueError(f'A: expected shape (D, N, N), got {(*A.shape,)}')
    like_A = A.diagonal(dim1=1, dim2=2)
    inputs = ScanInputs(
        u, delta, like_A, B, C, D, z, delta_bias, initial_state, reset, delta_softplus,
        method_id('bilinear'), [reverse],
    )  # fmt: skip
    check_shapes(inputs, 'D')
    check_state_matrices(inputs)
    check_bool('delta_softplus', delta_softplus)
    check_bool('return_last_state', return_last_state)
    check_bool('reverse', reverse)

    state = state_dtype(u, A)
    signal = u.to(real_dtype(u))
    steps = step_sizes(delta, delta_bias, delta_softplus, signal.dtype)[..., None]
    half = steps[..., None] / 2 * A.to(state)[:, None]  # (B, D, L, N, N)
    identity = torch.eye(A.shape[-1], dtype=state, device=A.device)
    drive = steps * per_channel(B, signal, state) * signal[..., None]
    right = torch.cat([identity + half, drive[..., None]], dim=-1)
    solved = torch.linalg.solve(identity - half, right)

    y, last_state = sequential_scan(
        solved[..., :-1],
        solved[..., -1],
        per_channel(C, signal, state),
        initial_state,
        reset,
        reverse,
        lambda M, x: (M @ x[..., None])[..., 0],
    )
    out = skip_and_gate(y, signal, D, z).to(u.dtype)
    return (out, last_state) if return_last_state else out
