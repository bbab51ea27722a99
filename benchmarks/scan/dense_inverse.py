"""``bilinear`` as the project's seed notes computed it: diagonal matrices written out and inverted.

For ``tools/analysis/profile_discretization.py``, which measures what that costs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vim_mm.ops import selective_scan_dense_ref


def half_and_identity(steps: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """z/2 with z = dt diag(a), as matrices (..., N, N), and 1 as a matrix (N, N)."""
    half = torch.diag_embed(steps * A / 2)
    return half, torch.eye(half.shape[-1], dtype=half.dtype, device=half.device)


def dense_inverse(steps: Tensor, A: Tensor) -> Tensor:
    """(1 - z/2)^-1 as matrices (..., N, N)."""
    half, identity = half_and_identity(steps, A)
    return torch.linalg.inv(identity - half)


def dense_matrices(steps: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """(1 - z/2)^-1 (1 + z/2) and (1 - z/2)^-1, as matrices (..., N, N)."""
    half, identity = half_and_identity(steps, A)
    inverse = torch.linalg.inv(identity - half)
    return inverse @ (identity + half), inverse


def dense_coefficients(steps: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """A_bar and beta of ``bilinear``, from the diagonals of the dense matrices."""
    transition, inverse = dense_matrices(steps, A)
    return transition.diagonal(dim1=-2, dim2=-1), steps * inverse.diagonal(dim1=-2, dim2=-1)


def dense_scan(inputs: dict[str, Tensor]) -> Tensor:
    """The scan by ``bilinear`` with dense matrices at every step: B D L N^2 numbers, several times.

    As the seed notes' Python path had it, which took the matrices for an advantage.

    Args:
        inputs: As ``make_inputs`` returns them, B and C (B, 1, N, L).
    """
    u = inputs['u']
    steps = F.softplus(inputs['delta'] + inputs['delta_bias'][:, None])[..., None]
    transition, inverse = dense_matrices(steps, inputs['A'][:, None])
    B, C = (inputs[name].transpose(2, 3) for name in 'BC')  # (B, 1, L, N)
    drive = inverse @ (steps * B * u[..., None])[..., None]
    x = torch.zeros_like(drive[:, :, 0])
    y = []
    for transition_t, drive_t, C_t in zip(*(m.unbind(2) for m in (transition, drive, C))):
        x = transition_t @ x + drive_t
        y.append((C_t * x[..., 0]).sum(-1))
    return (torch.stack(y, dim=-1) + inputs['D'][:, None] * u) * F.silu(inputs['z'])


def dense_A_scan(inputs: dict[str, Tensor]) -> Tensor:
    """The scan that takes any matrices, of the diagonal ones."""
    matrices = torch.diag_embed(inputs['A'])
    return selective_scan_dense_ref(**(inputs | {'A': matrices}), delta_softplus=True)


# What zoh and bilinear need of a library, as the seed notes' profile has it, of (steps, A).
BARE = {
    ('zoh', 'torch.exp'): lambda steps, A: torch.exp(steps * A),
    ('bilinear', 'torch.linalg.inv'): dense_inverse,
}
