"""Errors of states against the exact solution over the step length: nothing is trained.

The system is x' = a x + u, x(0) = 0, and the states are those of ``selective_scan_fn`` in float64.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from studies.discretization.known_answer.signals import INPUTS, Held, Noisy, Smooth
from vim_mm.ops import selective_scan_fn

RATES = (-1.0, -4.0, -16.0)  # a: the ends of Mamba's range, and between
STEPS = tuple(2.0**-k for k in range(9))  # dt, of which the largest is 1
END = 32  # of the time that is simulated
EXACT = 1e-13  # an error below this is rounding


def signal_of(name: str, seed: int) -> Smooth | Held | Noisy:
    """The input of a seed. A held one changes at whole instants, which every dt divides."""
    rng = np.random.default_rng((seed, INPUTS.index(name)))
    if name == 'smooth':
        return Smooth(rng, 1)
    if name == 'noisy':
        return Noisy(rng, 1, END)
    ends = np.arange(1.0, END + 1)[None]
    return Held(ends, rng.standard_normal(ends.shape))


def states(method: str, dt: float, u: np.ndarray, rates: Sequence[float] = RATES) -> np.ndarray:
    """x at dt, 2 dt ... by a method, (n, rates, L), of the samples u (n, L) at these instants."""
    A = torch.tensor(rates).double()[:, None]
    samples = torch.from_numpy(u)[:, None].expand(-1, len(rates), -1).contiguous()
    one = torch.ones_like(A)
    steps = torch.full_like(samples, dt)
    x = selective_scan_fn(samples, steps, A, one, one, discretization_method=method)
    return cast(torch.Tensor, x).numpy()


def errors(x: np.ndarray, exact: np.ndarray) -> dict[str, list[float]]:
    """How far states are from the exact ones, both (n, rates, L), for each rate.

    Returns:
        dict: ``error``, the root mean square of the difference over that of the exact states;
        ``gain``, the factor on x that makes it least; ``error_after_gain``, what is then left.
    """

    def mean(product: np.ndarray) -> np.ndarray:
        return product.mean(axis=(0, 2))

    size = mean(exact * exact)
    gain = mean(x * exact) / mean(x * x)
    left = mean((gain[:, None] * x - exact) ** 2)
    return {
        'error': np.sqrt(mean((x - exact) ** 2) / size).tolist(),
        'gain': gain.tolist(),
        'error_after_gain': np.sqrt(left / size).tolist(),
    }


def order(errors: Sequence[float], last: int = 4) -> float:
    """The power of dt that the errors at the last steps of ``STEPS`` follow; NaN if rounding."""
    if min(errors[-last:]) < EXACT:
        return float('nan')
    return float(np.polyfit(np.log(STEPS[-last:]), np.log(errors[-last:]), 1)[0])


def measure(
    name: str, dt: float, methods: Sequence[str], seeds: Sequence[int]
) -> dict[tuple[str, float], dict[str, float]]:
    """Errors at one step length on one kind of input, as :func:`errors`, by method and rate."""
    t = dt * np.arange(1, round(END / dt) + 1)[None]
    signals = [signal_of(name, seed) for seed in seeds]
    u = np.concatenate([signal.sampled(t) for signal in signals])
    exact = np.concatenate(
        [np.stack([signal.solution(a, t) for a in RATES], axis=1) for signal in signals]
    )
    found = {}
    for method in methods:
        figures = errors(states(method, dt, u), exact)
        for i, a in enumerate(RATES):
            found[method, a] = {key: values[i] for key, values in figures.items()}
    return found
