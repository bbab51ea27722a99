"""What a scan takes, and selective_scan_ref: the sequential loop that every kernel is held to."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from vim_mm.ops.discretization import discretize, get_method, method_name


class ScanInputs(NamedTuple):
    """What a scan takes, in the order of the operators (csrc/ops.cpp): ``operator(*inputs)``.

    The shapes are those of the grouped form; the public functions check others before they are
    grouped. A further input is a field here, in ``TENSORS`` and in ``SCHEMA``.

    Attributes:
        u, delta, z: (B, G, H, L).
        A: (G, H, N), real or complex.
        B, C: (B, G, N, L) or (G, H, N).
        D, delta_bias: (G, H).
        initial_state: (B, G, H, N), the state before the first step in scan order; None is 0.
        reset: (B, L), bool: no state passes between steps t - 1 and t, in either direction.
        delta_softplus: Whether softplus is applied to ``delta + delta_bias``.
        method: The number of the discretization.
        reverse: A flag per group.
    """

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    delta_bias: Tensor | None
    initial_state: Tensor | None
    reset: Tensor | None
    delta_softplus: bool
    method: int
    reverse: Sequence[int]

    def tensors(self) -> tuple[Any, ...]:
        """Those of ``TENSORS``, in order."""
        return tuple(self[: len(TENSORS)])

    def options(self) -> tuple[Any, ...]:
        """The others."""
        return tuple(self[len(TENSORS) :])

    def of_groups(self, first: int, last: int) -> 'ScanInputs':
        """The inputs of some groups, of which those that vary in time have a batch before them."""
        part: list[Any] = [
            None if x is None else x[:, first:last] if x.dim() == 4 else x[first:last]
            for x in self._replace(reset=None).tensors()
        ]
        part[TENSORS.index('reset')] = self.reset  # which all groups share
        options: tuple[Any, ...] = (self.delta_softplus, self.method, self.reverse[first:last])
        return ScanInputs(*part, *options)


TENSORS = ('u', 'delta', 'A', 'B', 'C', 'D', 'z', 'delta_bias', 'initial_state', 'reset')
DIFFERENTIABLE = TENSORS[:-1]  # of which an operator for the backward pass returns the gradients
# What the operators of a scan take, in the schemas of those that csrc/ops.cpp does not define.
SCHEMA = (
    'Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, '
    'Tensor? delta_bias, Tensor? initial_state, Tensor? reset, bool delta_softplus, int method, '
    'int[] reverse'
)


def state_dtype(u: Tensor, A: Tensor) -> torch.dtype:
    """dtype of the state: the precision of the computation, float64 if u's, and complex if A is."""
    if A.is_complex():
        return torch.complex128 if u.dtype == torch.float64 else torch.complex64
    return real_dtype(u)


def real_dtype(u: Tensor) -> torch.dtype:
    """dtype of the computation: float64 if u's, else float32."""
    return torch.float64 if u.dtype == torch.float64 else torch.float32


def step_sizes(
    delta: Tensor, delta_bias: Tensor | None, delta_softplus: bool, dtype: torch.dtype
) -> Tensor:
    """The lengths of the steps (.., L) in a dtype: with the bias, and softplus where asked."""
    steps = delta.to(dtype)
    if delta_bias is not None:
        steps = steps + delta_bias.to(dtype)[..., None]
    # The default threshold, 20, is off by 2e-9 there.
    return F.softplus(steps, threshold=40) if delta_softplus else steps


def skip_and_gate(y: Tensor, signal: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """(y + D u) silu(z), (.., L), where complex y stands for conjugate pairs."""
    if y.is_complex():
        y = 2 * y.real
    if D is not None:
        y = y + D.to(signal.dtype)[..., None] * signal
    return y if z is None else y * F.silu(z.to(signal.dtype))


def per_channel(M: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Bring any form of B or C to (B, D, L, N) and the state's dtype, for ``like`` (B, D, L)."""
    if dtype.is_complex and not M.is_complex():
        M = M.to(like.dtype)
        M = torch.complex(M[..., ::2], M[..., 1::2])
    M = M.to(dtype)
    batch, channels, length = like.shape
    if M.dim() == 2:
        return repeat(M, 'd n -> b d l n', b=batch, l=length)
    if M.dim() == 3:
        M = rearrange(M, 'b n l -> b 1 n l')
    return repeat(M, 'b g n l -> b (g d) l n', d=channels // M.shape[1])


def starts(reset: Tensor, reverse: bool) -> Tensor:
    """The steps (B, L) before which the state of a scan in that direction is 0, given ``reset``.

    A sequence that begins at step t ends at t - 1, where a scan in reverse enters it.
    """
    return F.pad(reset, (0, 1))[:, 1:] if reverse else reset


def sequential_scan(
    A_bar: Tensor,
    drive: Tensor,
    C: Tensor,
    initial_state: Tensor | None,
    reset: Tensor | None,
    reverse: bool,
    product: Callable[[Tensor, Tensor], Tensor] = torch.mul,
) -> tuple[Tensor, Tensor]:
    """x_t = A_bar_t x_{t-1} + drive_t, y_t = C_t . x_t: three (B, D, L, N) -> y (B, D, L), x.

    ``product`` is that of A_bar and the state; A_bar may be what else it takes.
    """
    # Sums of nothing: zeros of the right shape and dtype, differentiable even when L = 0.
    nothing = product(A_bar[:, :, :0], drive[:, :, :0]) * C[:, :, :0]
    x = nothing.sum(2) if initial_state is None else nothing.sum(2) + initial_state
    y = []
    series: list[Sequence] = [A_bar.unbind(2), drive.unbind(2), C.unbind(2)]
    if reset is None:
        series.append((None,) * drive.shape[2])
    else:
        series.append(starts(reset, reverse)[:, None, :, None].unbind(2))
    steps = [*zip(*series, strict=True)]
    for A_bar_t, drive_t, C_t, begins_t in reversed(steps) if reverse else steps:
        if begins_t is not None:
            x = x.masked_fill(begins_t, 0)  # whatever it was: 0 times what is infinite is NaN
        x = product(A_bar_t, x) + drive_t
        y.append((C_t * x).sum(-1))
    if not y:
        return nothing.sum(-1), x
    return torch.stack(y[::-1] if reverse else y, dim=-1), x


def selective_scan_ref(
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
    discretization_method: str = 'zoh',
    reverse: bool = False,
    *,
    initial_state: Tensor | None = None,
    reset: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Selective scan, step by step; differentiable any number of times.

    With (A_bar, beta) from :func:`~vim_mm.ops.discretization.discretize` and t in scan order:

        x_t = A_bar_t x_{t-1} + beta_t B_t u_t        x before the first step is 0, or given
        y_t = sum over n of C_t x_t                   complex A: twice the real part
        out_t = (y_t + D u_t) * silu(z_t)

    Memory is O(B D L N). Arguments, dtypes and results are those of
    :func:`~vim_mm.ops.selective_scan_fn`, which checks them; here they are taken as valid.
    """
    state = state_dtype(u, A)
    signal = u.to(real_dtype(u))
    steps = step_sizes(delta, delta_bias, delta_softplus, signal.dtype)
    A_bar, beta = discretize(steps[..., None], A.to(state)[:, None], discretization_method)
    drive = beta * per_channel(B, signal, state) * signal[..., None]
    C = per_channel(C, signal, state)

    y, last_state = sequential_scan(A_bar, drive, C, initial_state, reset, reverse)
    if not get_method(discretization_method).causal:
        y = (y + sequential_scan(A_bar, drive, C, None, reset, not reverse)[0]) / 2
    out = skip_and_gate(y, signal, D, z).to(u.dtype)
    return (out, last_state) if return_last_state else out


def grouped_scan_ref(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """:func:`selective_scan_ref` of each group: out (B, G, H, L) and last_state (B, G, H, N)."""
    method, results = method_name(inputs.method), []
    for k, flag in enumerate(inputs.reverse):
        one = inputs.of_groups(k, k + 1)
        tensors: list[Any] = [
            None if x is None else x.squeeze(int(x.dim() == 4))
            for x in one._replace(reset=None).tensors()
        ]
        *tensors, initial_state, _ = tensors
        options: tuple[Any, ...] = (inputs.delta_softplus, True, method, flag)
        states = dict(initial_state=initial_state, reset=inputs.reset)
        results.append(selective_scan_ref(*tensors, *options, **states))
    out, last_state = (torch.stack(x, dim=1) for x in zip(*results, strict=True))
    return out, last_state
