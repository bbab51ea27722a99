"""One small scan per method against exact values: whether this installation computes.

``exact.json``, shipped with the package, holds what tools/dev/make_selftest.py computes in
mpmath with 60 digits.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from vim_mm.ops import selective_scan_fn

VALUES = Path(__file__).with_name('exact.json')
QUANTITIES = ('out', 'grad_delta', 'grad_A')
# Relative to the largest value of a quantity; float32 gives about 1e-7.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}


def make_inputs() -> dict[str, Tensor]:
    """Keyword arguments of ``selective_scan_fn``: B = 1, D = 2, L = 5, N = 2, float64.

    Multiples of 1/16, so that float32 and bfloat16 have the same numbers.
    """

    def ramp(*shape: int, start: int, step: int) -> Tensor:
        n = torch.Size(shape).numel()
        return ((torch.arange(n) * step + start) % 32 - 16).double().view(shape) / 16

    return dict(
        u=ramp(1, 2, 5, start=3, step=7),
        delta=ramp(1, 2, 5, start=9, step=5),
        A=-0.25 - ramp(2, 2, start=5, step=9).abs(),
        B=ramp(1, 1, 2, 5, start=14, step=11),
        C=ramp(1, 1, 2, 5, start=7, step=13),
        D=ramp(2, start=20, step=6),
        z=ramp(1, 2, 5, start=1, step=3),
        delta_bias=ramp(2, start=12, step=3),
    )


def weights() -> Tensor:
    """Of the outputs in the loss whose gradients are compared, (B, D, L)."""
    return torch.linspace(-1, 2, 10, dtype=torch.float64).view(1, 2, 5)


def exact_values() -> dict[str, dict[str, list[float]]]:
    """By method and quantity, flattened."""
    return json.loads(VALUES.read_text())


def worst_error(method: str, device: str, dtype: torch.dtype) -> float:
    """The largest error of outputs and gradients, relative to the largest value of each.

    Raises:
        KeyError: There are no exact values of the method.
    """
    exact = exact_values()[method]
    inputs = make_inputs()
    # A stays float32 or better, as in a model.
    leaves = {
        name: x.to(device, torch.promote_types(dtype, torch.float32) if name == 'A' else dtype)
        for name, x in inputs.items()
    }
    for x in leaves.values():
        x.requires_grad_()
    out = selective_scan_fn(**leaves, delta_softplus=True, discretization_method=method)
    (out.double() * weights().to(device)).sum().backward()
    found = dict(out=out.detach(), grad_delta=leaves['delta'].grad, grad_A=leaves['A'].grad)
    worst = 0.0
    for name in QUANTITIES:
        truth = torch.tensor(exact[name], dtype=torch.float64)
        error = (found[name].double().cpu().flatten() - truth).abs().max() / truth.abs().max()
        worst = max(worst, error.nan_to_num(float('inf')).item())
    return worst
