"""The recurrence as an export to ONNX takes it: one loop operator, which becomes ONNX's ``Scan``.

Everything around the loop is the torch backend's, :mod:`vim_mm.ops.chunked`, and becomes standard
operators as it is. Coefficients are computed for all steps at once, because a loop calls each
operator in it for each step: memory is O(L B D N).
"""

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan as loop  # prototype, the only one that exports

from vim_mm.ops.discretization import get_method


def are_open(*sizes: int) -> bool:
    """Whether a graph that is being exported leaves one of the sizes open.

    Nothing may then depend on their values: the graph would hold for images of the example's kind.
    """
    return any(isinstance(n, torch.SymInt) for n in sizes)


def exporting_to_onnx() -> bool:
    """Whether ``torch.onnx.export`` with ``dynamo=True`` is calling."""
    # The first is asked at every call of a layer and costs little, the second imports.
    return torch.compiler.is_compiling() and torch.onnx.is_in_onnx_export()


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
        raise TypeError(f'A: ONNX has no complex numbers, expected a real A, got {A.dtype}')
    steps, a = torch.broadcast_tensors(dt[..., None], A)
    A_bar, beta = get_method(method).coefficients(steps, a)
    drive = beta * (B * u[..., None])
    C = C.expand(u.shape[0], -1, -1, -1, -1)  # len() would fix the length in the graph
    last_state, y = loop(_step, drive.new_zeros(drive.shape[1:]), (A_bar, drive, C))
    return y, last_state


def _step(x: Tensor, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    A_bar, drive, C = inputs
    x = A_bar * x + drive
    return x, (C * x).sum(-1)
