"""Five ways to compute x_t = a_t x_{t-1} + b_t for all t, in a few lines of PyTorch each.

Two steps make one: after (a, b) and then (a', b') the state is a' a x + (a' b + b'). This product
is associative, so that steps can be combined in any bracketing, many at a time. The forms differ in
the bracketing alone. ``docs/scan_benchmarks.md`` says what each costs, and why the kernels
take another way.

Each takes a and b (B, D, L, N), L >= 1, and returns the states x of that shape; x before the first
step is 0.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from vim_mm.ops import discretize
from vim_mm.ops.discretization import get_method
from vim_mm.ops.reference import (
    per_channel,
    real_dtype,
    skip_and_gate,
    state_dtype,
    step_sizes,
)

CHUNK = 64  # steps of a chunk


def sequential(a: Tensor, b: Tensor) -> Tensor:
    """One step after the other: L dependent operations, L multiplications."""
    x, states = torch.zeros_like(b[:, :, 0]), []
    for a_t, b_t in zip(a.unbind(2), b.unbind(2)):
        x = a_t * x + b_t
        states.append(x)
    return torch.stack(states, dim=2)


def hillis_steele(a: Tensor, b: Tensor) -> Tensor:
    """Every step with the one 1, 2, 4 ... before it: log2 L and 2 L log2 L of them."""
    distance = 1
    while distance < b.shape[2]:
        earlier_a, earlier_b = a[:, :, :-distance], b[:, :, :-distance]
        later_a, later_b = a[:, :, distance:], b[:, :, distance:]
        b = torch.cat([b[:, :, :distance], later_a * earlier_b + later_b], dim=2)
        a = torch.cat([a[:, :, :distance], later_a * earlier_a], dim=2)
        distance *= 2
    return b


def blelloch(a: Tensor, b: Tensor) -> Tensor:
    """Pairs, then pairs of pairs, and back down: 2 log2 L and 3 L of them."""
    length = b.shape[2]
    if length == 1:
        return b
    first, second = slice(0, length - 1, 2), slice(1, None, 2)
    # Up: a pair is one step. Its states are those after its second step.
    pair_a = a[:, :, second] * a[:, :, first]
    pair_b = a[:, :, second] * b[:, :, first] + b[:, :, second]
    after_pairs = blelloch(pair_a, pair_b)
    # Down: the first step of a pair follows the pair before.
    before = torch.cat([torch.zeros_like(b[:, :, :1]), after_pairs], dim=2)
    before = before[:, :, : (length + 1) // 2]
    after_first = a[:, :, ::2] * before + b[:, :, ::2]
    x = torch.empty_like(b)
    x[:, :, ::2], x[:, :, 1::2] = after_first, after_pairs
    return x


def chunked(a: Tensor, b: Tensor) -> Tensor:
    """Chunks side by side, then their ends one after the other: CHUNK + L / CHUNK and 3 L of them.

    The form of most GPU scans, the backward pass of this package's among them.
    """
    length = b.shape[2]
    padding = (0, 0, 0, -length % CHUNK)
    a, b = (torch.nn.functional.pad(m, padding).unflatten(2, (-1, CHUNK)) for m in (a, b))
    x, products = [b[:, :, :, 0]], [a[:, :, :, 0]]
    for t in range(1, CHUNK):
        x.append(a[:, :, :, t] * x[-1] + b[:, :, :, t])
        products.append(a[:, :, :, t] * products[-1])
    entering = [torch.zeros_like(x[0][:, :, 0])]
    for k in range(b.shape[2] - 1):
        entering.append(products[-1][:, :, k] * entering[-1] + x[-1][:, :, k])
    x, products = (torch.stack(m, dim=3) for m in (x, products))
    x = x + products * torch.stack(entering, dim=2)[:, :, :, None]
    return x.flatten(2, 3)[:, :, :length]


def cumulative_sum(a: Tensor, b: Tensor) -> Tensor:
    """x_t = p_t sum over s <= t of b_s / p_s, with p_t = a_1 ... a_t.

    Only for short sequences of mild decay: p underflows, and 0 / 0 follows. With dt = 0.1 and
    a = -16 float32 ends after 55 steps.
    """
    products = torch.cumprod(a, dim=2)
    return products * torch.cumsum(b / products, dim=2)


FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    'sequential': sequential,
    'Hillis-Steele': hillis_steele,
    'Blelloch': blelloch,
    'chunked': chunked,
    'cumulative sum': cumulative_sum,
}


def selective_scan_by(
    form: str,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    discretization_method: str = 'zoh',
) -> Tensor:
    """``selective_scan_ref`` with its loop replaced by one of ``FORMS``; L >= 1.

    Raises:
        ValueError: The method is not causal: ``poly`` averages two recurrences.
    """
    if not get_method(discretization_method).causal:
        raise ValueError(
            f'{discretization_method} is not causal: it averages the scans in both directions'
        )
    state = state_dtype(u, A)
    signal = u.to(real_dtype(u))
    steps = step_sizes(delta, delta_bias, delta_softplus, signal.dtype)
    A_bar, beta = discretize(steps[..., None], A.to(state)[:, None], discretization_method)
    drive = beta * per_channel(B, signal, state) * signal[..., None]
    states = FORMS[form](A_bar, drive)
    y = (per_channel(C, signal, state) * states).sum(-1)
    return skip_and_gate(y, signal, D, z).to(u.dtype)
