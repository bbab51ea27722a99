"""How far a path's outputs and gradients are from what is expected."""

import math

import torch
from torch import Tensor

from benchmarks.scan.paths import Path


def relative_error(value: Tensor, exact: Tensor) -> float:
    """The largest error relative to the largest entry (absolute if that is 0)."""
    return (value - exact).abs().max().item() / (exact.abs().max().item() or 1.0)


def largest(errors: dict) -> tuple:
    """The key and the size of the largest of several errors, where a NaN is the largest of all."""
    return max(errors.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])


def random_weights(u: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """Of out and last_state in the loss whose gradients are compared: fp64, of bfloat16's values.

    Args:
        u: (B, D, L).
        A: (D, N).
    """
    generator = torch.Generator().manual_seed(2)
    shapes = (u.shape, (u.shape[0], *A.shape))
    return tuple(torch.randn(s, generator=generator).bfloat16().double() for s in shapes)


def outputs_and_gradients(
    path: Path,
    inputs: dict[str, Tensor],
    method: str,
    weights: tuple[Tensor, Tensor],
    reverse: bool = False,
) -> dict[str, Tensor]:
    """out, last_state and every gradient of a scan with softplus, by name and on the CPU.

    Args:
        path: What computes them, on the device of ``inputs``.
        inputs: Tensors among the arguments of ``selective_scan_fn``.
        method: The discretization.
        weights: Of out and last_state (its real part) in the loss, as from ``random_weights``.
        reverse: Whether steps are taken from the last one on.
    """
    inputs = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    results = path.scan(
        inputs, method, delta_softplus=True, return_last_state=True, reverse=reverse
    )
    weights = [weight.to(x) for weight, x in zip(weights, results, strict=True)]
    grads = torch.autograd.grad(results, list(inputs.values()), weights)
    named = dict(zip(('out', 'last_state'), results, strict=True))
    named |= {f'grad_{name}': grad for name, grad in zip(inputs, grads, strict=True)}
    return {name: x.detach().cpu() for name, x in named.items()}


def errors_of(results: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """By name, the relative error."""
    return {name: relative_error(results[name], exact) for name, exact in expected.items()}
