"""The scan as an export to ONNX takes it: the recurrence as one operator, which becomes ``Scan``.

Everything around it is the torch backend's, :mod:`vim_mm.ops.chunked`, and becomes standard
operators as it is. Coefficients are computed for all steps at once, because each operator inside of
a loop is called at every step: memory is O(L B D N). ``vim_mm/export`` has the translation.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from vim_mm.errors import UserTypeError
from vim_mm.ops.discretization import get_method


def are_open(*sizes: int) -> bool:
    """Whether a graph that is being exported leaves one of the sizes open.

    Nothing may then depend on their values: the graph would hold for images of the example's kind.
    """
    return any(isinstance(n, torch.SymInt) for n in sizes)


_exporting = False


def exporting_to_onnx() -> bool:
    """Whether :func:`vim_mm.export.export_onnx` is calling, which translates what is here."""
    return _exporting


@contextmanager
def export_to_onnx() -> Iterator[None]:
    """Models that are called meanwhile are those of :func:`exporting_to_onnx`.

    ``torch.onnx.is_in_onnx_export`` does not know the current exporter in torch 2.7 and before.
    """
    global _exporting
    _exporting = True
    try:
        yield
    finally:
        _exporting = False


@torch.library.custom_op('vim_mm::recurrence', mutates_args=())
def recurrence(A_bar: Tensor, drive: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """x_t = A_bar_t x_{t-1} + drive_t from x = 0, and y_t = x_t C_t.

    An operator of its own, so that a trace holds it whole, whatever the length. It has no gradient.

    Args:
        A_bar, drive: (L, B, G, H, N), real.
        C: (L, B, G, N, K).

    Returns:
        y (L, B, G, H, K) and the last x (B, G, H, N).
    """
    x = torch.zeros_like(drive[0])
    y = drive.new_empty((*drive.shape[:-1], C.shape[-1]))
    for t in range(len(y)):
        x = A_bar[t] * x + drive[t]
        y[t] = x @ C[t]
    return y, x


@recurrence.register_fake
def _(A_bar: Tensor, drive: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    return drive.new_empty((*drive.shape[:-1], C.shape[-1])), drive.new_empty(drive.shape[1:])


def exported_scan(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, method: str
) -> tuple[Tensor, Tensor]:
    """y (L, B, G, H) and the last state (B, G, H, N), everything in scan order.

    Args:
        u, dt: (L, B, G, H), in the dtype of A.
        A: (G, H, N), real.
        B, C: (L, B, G, 1, N) or (1, 1, G, H, N).
        method: A name in ``METHODS``.

    Raises:
        TypeError: A is complex, which ONNX is not.
    """
    if A.is_complex():
        raise UserTypeError(f'A: ONNX has no complex numbers, expected a real A, got {A.dtype}')
    discretization = get_method(method)
    A_bar, beta = discretization.coefficients(*torch.broadcast_tensors(dt[..., None], A))
    series = [A_bar, beta * (B * u[..., None]), _matrices(C, u, A)]
    if discretization.causal:
        y, last_state = recurrence(*series)
        return _output(y, C), last_state
    # Both directions as one batch: a step of the loop costs little more.
    y, last_state = recurrence(*(torch.cat([x, x.flip(0)], dim=1) for x in series))
    batch = u.shape[1]  # chunk() becomes a sequence, which the exporter cannot fold
    ahead, back = y[:, :batch], y[:, batch:]
    return _output((ahead + back.flip(0)) / 2, C), last_state[:batch]


def _matrices(C: Tensor, u: Tensor, A: Tensor) -> Tensor:
    """C as :func:`recurrence` takes it, (L, B, G, N, K)."""
    if C.shape[-2] == 1:
        return C.mT
    # A row for each channel is no matrix. The states come out, and _output sums them.
    return torch.eye(A.shape[-1], dtype=A.dtype).expand(*u.shape[:3], -1, -1)


def _output(y: Tensor, C: Tensor) -> Tensor:
    """(L, B, G, H) of what :func:`recurrence` gives, (L, B, G, H, K)."""
    return y.squeeze(-1) if C.shape[-2] == 1 else (C * y).sum(-1)
