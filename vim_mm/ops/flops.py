"""Operations of the scan and the fused mixer, for torch's flop counter and for MMEngine's.

Everything here counts multiply-adds. ``torch.utils.flop_counter`` counts two operations for each,
MMEngine's ``FlopAnalyzer`` one. In a scan each of these is one: a multiply-add, a multiplication or
addition by itself, a division, an exponential. As in both counters, activations (softplus, silu,
the gate), norms, biases and casts are not counted. docs/measuring.md derives the table.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch.utils.flop_counter import register_flop_formula

from vim_mm.ops import counted, library, triton  # noqa: F401, which define their operators
from vim_mm.ops.discretization import method_name
from vim_mm.ops.mixer_parameters import count_sets, sizes_of
from vim_mm.ops.reference import ScanInputs


class PerState(NamedTuple):
    """Multiply-adds of one method, for one state and step.

    Attributes:
        coefficients (int): A_bar and beta of dt and a.
        inputs (int): beta B u; one where beta does not depend on a.
        scans (int): Recurrences and sums over states, of which each takes two.
    """

    coefficients: int
    inputs: int = 2
    scans: int = 1

    def total(self) -> int:
        return self.coefficients + self.inputs + 2 * self.scans


# z and e^z are two, each phi_k of the one before it two more, the sum of them one a term.
PER_STATE = {
    'zoh': PerState(2, inputs=1),  # beta = dt: dt u is one for all states
    'foh': PerState(2 + 4 + 1),
    'bilinear': PerState(5),  # z, 1 - z / 2, its reciprocal, A_bar, beta
    'poly': PerState(2 + 4 + 2, scans=2),
    'highorder': PerState(2 + 6 + 3),
    'rk4': PerState(2 + 3 + 1),  # a cubic polynomial by Horner's rule, times dt
    'zoh_exact': PerState(2 + 2 + 1),
}
PER_CHANNEL = 2  # dt u and D u, for one channel and step
# The backward pass computes the states once more, and two products for each of the forward pass.
BACKWARD = 3


def scan_multiply_adds(
    shape: Sequence[int], states: int, method: str, complex_A: bool = False
) -> int:
    """Of a scan's forward pass.

    Args:
        shape: Of u: (B, .., L), such as (B, D, L) or (B, G, H, L).
        states: N.
        method: A name in ``METHODS``.
        complex_A: With complex states, each multiply-add is four.
    """
    per_state = PER_STATE[method].total() * (4 if complex_A else 1)
    return prod(shape) * (states * per_state + PER_CHANNEL)


class MixerProducts(NamedTuple):
    """Multiply-adds of the products of a mixer, of all directions."""

    in_proj: int
    conv1d: int
    x_proj: int
    dt_proj: int
    out_proj: int


def mixer_products(tokens: int, outer: int, sizes: Sequence[int], sets: int) -> MixerProducts:
    """Given B L, C, (H, N, R, W) and the sets of convolutions and projections, one or two."""
    channels, states, rank, taps = sizes
    return MixerProducts(
        in_proj=tokens * outer * 2 * channels,
        conv1d=sets * tokens * channels * taps,
        x_proj=sets * tokens * channels * (rank + 2 * states),
        dt_proj=sets * tokens * rank * channels,
        out_proj=tokens * channels * outer,
    )


def _scan_fwd(*arguments, **_) -> int:
    inputs = ScanInputs(*arguments)
    method, A = method_name(inputs.method), inputs.A
    return 2 * scan_multiply_adds(inputs.u.shape, A.shape[-1], method, A.is_complex())


def _scan_bwd(grad_out, grad_last_state, edges, *arguments, **_) -> int:
    return BACKWARD * _scan_fwd(*arguments)


def _mixer_fwd(
    x, update, norm, eps, dtype, parameters, method, reverse, scale, keep, *_, **__
) -> int:
    batch, length, outer = x.shape
    sizes, sets = sizes_of(parameters), count_sets(len(parameters), len(reverse))
    scan = scan_multiply_adds(
        (batch, len(reverse), sizes[0], length), sizes[1], method_name(method)
    )
    return 2 * (sum(mixer_products(batch * length, outer, sizes, sets)) + scan)


def _mixer_bwd(
    grad_out, grad_sum, x, norm, saved, sizes, types, with_update, method, reverse, scale, *_, **__
) -> int:
    batch, length, outer = x.shape
    sets = count_sets(len(types), len(reverse))
    products = mixer_products(batch * length, outer, sizes, sets)
    scan = scan_multiply_adds(
        (batch, len(reverse), sizes[0], length), sizes[1], method_name(method)
    )
    recomputed = products.conv1d + products.dt_proj
    return 2 * (2 * sum(products) + recomputed + BACKWARD * scan)


SCANS_OF_PYTHON = ('triton', 'torch', 'reference')  # whose operators need no compiler
_FORMULAS = {
    _scan_fwd: ('selective_scan_fwd', *(f'{name}_scan_fwd' for name in SCANS_OF_PYTHON)),
    _scan_bwd: ('selective_scan_bwd', *(f'{name}_scan_bwd' for name in SCANS_OF_PYTHON)),
    _mixer_fwd: ('mixer_fwd', 'triton_mixer_fwd'),
    _mixer_bwd: ('mixer_bwd', 'triton_mixer_bwd'),
}
for _formula, _names in _FORMULAS.items():
    for _name in _names if library.MISSING is None else _names[1:]:
        register_flop_formula(getattr(torch.ops.vim_mm, _name), get_raw=True)(_formula)
