"""The selective scan in PyTorch operators, chunk by chunk: where there is no kernel.

Coefficients of a chunk are computed at once, for real A in the precision of the state, by the table
of :mod:`vim_mm.ops.discretization`; its steps are one operator each, in place, and everything else
is one operator for a chunk. Backward computes the states of a chunk anew and the adjoints step by
step, and has autograd differentiate the coefficients alone. There is no second derivative.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vim_mm.ops.discretization import get_method, method_name
from vim_mm.ops.reference import (
    ScanInputs,
    real_dtype,
    skip_and_gate,
    starts,
    state_dtype,
    step_sizes,
)

# Entries of a chunk, steps times B G H N: some tensors of that size stay in a processor's cache.
_CHUNK_ENTRIES = 1 << 17
_MAX_CHUNK = 64


def chunked_scan(
    inputs: ScanInputs, scan: Callable[..., tuple[Tensor, Tensor]] | None = None
) -> tuple[Tensor, Tensor]:
    """out (B, G, H, L) in u's dtype, and last_state (B, G, H, N), of any dtypes and device.

    Args:
        inputs: See :class:`ScanInputs`.
        scan: Of everything in scan order, (u, dt, A, B, C, method) to y and the last state; None is
            the one of this module, which alone takes an initial state and resets.
    """
    u, A, reverse = inputs.u, inputs.A, inputs.reverse
    state = state_dtype(u, A)
    signal = u.to(real_dtype(u))
    steps = step_sizes(inputs.delta, inputs.delta_bias, inputs.delta_softplus, signal.dtype)
    turned = torch.tensor([bool(flag) for flag in reverse], device=u.device)
    first = [_in_scan_order(x, turned, reverse) for x in (signal, steps)]
    matrices = [_matrix(M.to(state), turned, reverse) for M in (inputs.B, inputs.C)]
    given = (*first, A.to(state), *matrices)
    method = method_name(inputs.method)
    if scan is None:
        states = (inputs.initial_state, _starts(inputs))
        y, last_state = _both_ways(*given, *states, method)
    else:
        y, last_state = scan(*given, method)
    y = _in_scan_order(y.movedim(0, -1), turned, reverse).movedim(0, -1)
    return skip_and_gate(y, signal, inputs.D, inputs.z).to(u.dtype), last_state


def _in_scan_order(x: Tensor, turned: Tensor, reverse: Sequence[bool]) -> Tensor:
    """(B, G, .., L) to (L, B, G, ..), the steps of turned groups from the last to the first."""
    if all(reverse):
        x = x.flip(-1)
    elif any(reverse):
        x = torch.where(turned.view(-1, *[1] * (x.dim() - 2)), x.flip(-1), x)
    return x.movedim(-1, 0)


def _starts(inputs: ScanInputs) -> Tensor | None:
    """The steps before which the state is 0, in scan order: (L, B, G, 1, 1)."""
    if inputs.reset is None:
        return None
    ahead, back = (starts(inputs.reset, reverse) for reverse in (False, True))
    of_groups = [back.flip(-1) if flag else ahead for flag in inputs.reverse]
    return torch.stack(of_groups, 1).movedim(-1, 0)[..., None, None]


def _matrix(M: Tensor, turned: Tensor, reverse: Sequence[bool]) -> Tensor:
    """B or C in scan order, (L, B, G, 1, N), or (1, 1, G, H, N) where it is constant."""
    if M.dim() == 3:
        return M[None, None]
    return _in_scan_order(M, turned, reverse).unsqueeze(3)


def _ranges(shape: Sequence[int], states: int) -> list[tuple[int, int]]:
    """Begin and end of each chunk, of a sequence (L, B, G, H)."""
    length, entries = shape[0], max(shape[1] * shape[2] * shape[3] * states, 1)
    size = max(1, min(_MAX_CHUNK, _CHUNK_ENTRIES // entries))
    return [(first, min(first + size, length)) for first in range(0, length, size)]


def _of(M: Tensor, first: int, last: int) -> Tensor:
    return M if len(M) == 1 else M[first:last]


def _both_ways(u, dt, A, B, C, initial_state, begins, method: str) -> tuple[Tensor, Tensor]:
    """y, of a method that is not causal the average over both directions, and the last state."""
    y, last_state = _scan(u, dt, A, B, C, initial_state, begins, method)
    if not get_method(method).causal:
        turned = [M.flip(0) if len(M) > 1 else M for M in (B, C)]
        if begins is not None:  # where one direction leaves a sequence, the other enters it
            begins = begins.roll(-1, 0).flip(0)
        back, _ = _scan(u.flip(0), dt.flip(0), A, *turned, None, begins, method)
        y = (y + back.flip(0)) / 2
    return y, last_state


def _states(A_bar: Tensor, drive: Tensor, x: Tensor, begins: Sequence[Tensor] | None) -> Tensor:
    """x_t = A_bar_t x_{t-1} + drive_t of a chunk, in the place of drive."""
    for t, (A_t, x_t) in enumerate(zip(A_bar.unbind(0), drive.unbind(0), strict=True)):
        if begins is not None:
            x = x.masked_fill(begins[t], 0)
        x = torch.addcmul(x_t, A_t, x, out=x_t)
    return drive


@torch.compiler.allow_in_graph  # of which torch.compile need not follow every step
def _scan(u, dt, A, B, C, initial_state, begins, method: str) -> tuple[Tensor, Tensor]:
    return _Scan.apply(u, dt, A, B, C, initial_state, begins, method)


class _Scan(torch.autograd.Function):
    """(u, dt, A, B, C, initial_state, begins) to y and the last state, all in scan order.

    u, dt, y: (L, B, G, H), real. A: (G, H, N). B, C: (L, B, G, 1, N) or (1, 1, G, H, N).
    initial_state: (B, G, H, N), or None for 0. begins: (L, B, G, 1, 1), where the state before the
    step is 0, or None.
    """

    @staticmethod
    def forward(ctx: Any, u, dt, A, B, C, initial_state, begins, method):
        coefficients = get_method(method).coefficients
        x = initial_state
        if x is None:
            x = A.new_zeros((*u.shape[1:], A.shape[-1]))
        elif len(u) == 0:
            x = x.clone()
        y, edges = torch.empty_like(u, memory_format=torch.contiguous_format), []
        for first, last in _ranges(u.shape, A.shape[-1]):
            edges.append(x)
            A_bar, beta = _expanded(coefficients, dt[first:last], A)
            drive = beta * (_of(B, first, last) * u[first:last, ..., None])
            states = _states(A_bar, drive, x, None if begins is None else begins[first:last])
            x = states[-1].clone()
            y[first:last] = _output(_of(C, first, last), states)
        ctx.method = method
        ctx.continued = initial_state is not None
        ctx.save_for_backward(u, dt, A, B, C, begins, *edges)
        return y, x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y, grad_last):
        u, dt, A, B, C, begins, *edges = ctx.saved_tensors
        coefficients = get_method(ctx.method).coefficients
        scale = 2 if A.is_complex() else 1
        grad_u, grad_dt = torch.empty_like(u), torch.empty_like(dt)
        grad_A, grad_B, grad_C = torch.zeros_like(A), torch.zeros_like(B), torch.zeros_like(C)
        carried = grad_last.to(A.dtype)  # the adjoint of the state after a chunk
        for (first, last), edge in zip(
            reversed(_ranges(u.shape, A.shape[-1])), reversed(edges), strict=True
        ):
            B_t, C_t = _of(B, first, last), _of(C, first, last)
            signal, grad_out = u[first:last, ..., None], scale * grad_y[first:last, ..., None]
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in (dt[first:last], A)]
                A_bar, beta = _expanded(coefficients, *leaves)
            values = A_bar.detach(), beta.detach()
            input_t = B_t * signal
            begin = None if begins is None else begins[first:last]
            states = _states(values[0], values[1] * input_t, edge, begin)
            before = torch.cat([edge[None], states[:-1]])
            if begin is not None:
                before = before.masked_fill(begin, 0)
            adjoints = (grad_out * C_t.conj()).expand_as(states).contiguous()
            transposed = values[0].conj().resolve_conj()
            for t in range(last - first - 1, -1, -1):
                adjoints[t] += carried
                carried = transposed[t] * adjoints[t]
                if begin is not None:
                    carried = carried.masked_fill(begin[t], 0)
            by_input = adjoints * values[1].conj()
            grad_u[first:last] = torch.real(by_input * B_t.conj()).sum(-1)
            _add(grad_B, first, last, by_input * signal)
            _add(grad_C, first, last, grad_out * states.conj())
            by_dt, by_A = torch.autograd.grad(
                (A_bar, beta), leaves, (adjoints * before.conj(), adjoints * input_t.conj())
            )
            grad_dt[first:last] = by_dt
            grad_A += by_A
        of_state = carried if ctx.continued else None
        return grad_u, grad_dt, grad_A, grad_B, grad_C, of_state, None, None


def _expanded(coefficients, dt: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """A_bar and beta (T, B, G, H, N) of dt (T, B, G, H) and A (G, H, N)."""
    dt, a = torch.broadcast_tensors(dt[..., None], A)
    if a.is_complex():  # in single precision e^z - 1 would cancel where z is close to 2 pi i
        dt, a = dt.double(), a.to(torch.complex128)
    A_bar, beta = coefficients(dt, a)
    return A_bar.to(A.dtype), beta.to(A.dtype)


def _output(C: Tensor, states: Tensor) -> Tensor:
    y = (C * states).sum(-1)
    return 2 * y.real if y.is_complex() else y


def _add(total: Tensor, first: int, last: int, part: Tensor) -> None:
    """Add a chunk's gradient of B or C, summed over what they do not depend on."""
    if len(total) == 1:
        total += part.sum_to_size(total.shape)
    else:
        total[first:last] = part.sum_to_size(total[first:last].shape)
