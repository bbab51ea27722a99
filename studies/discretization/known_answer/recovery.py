"""A system is learned from its exact states, sampled at irregular instants, through the scan.

The system is x' = a x + u, x(0) = 0. Learned are log(-a), the logarithm of the steady gain -b/a,
and in some arms that of a factor on all steps. Letters: S seeds, R rates, D = S R channels of the
scan, n sequences, L steps. All channels learn at once and independently of each other: each has its
own parameters, the loss is the sum of theirs, and Adam looks at each parameter alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from studies.discretization.known_answer.signals import FINE, INPUTS, Held, Noisy, Smooth
from vim_mm.ops import METHODS, selective_scan_fn

RATES = (-1.0, -2.0, -4.0, -8.0, -16.0)  # a, Mamba's range
SHORTEST = 2.0**-5  # dt is log-uniform from this to ten times this
DECADE = 10
RANGES = {'as trained': 1.0, 'half': 0.5, 'twice': 2.0}  # factors on the range of dt
CHANGE = 0.25  # a held input changes at this share of the instants in the range of training
LENGTH = 128
TRAIN, TEST = 4, 16  # sequences
OFF = math.log(2)  # the start is up to this away from its centre, in logarithms
GRID = np.geomspace(0.1, 30, 80)  # of a over the truth, to see whether training finds the best
LEARNING_RATE, BETAS, ITERATIONS = 0.1, (0.9, 0.99), 1500


@dataclass(frozen=True)
class Arm:
    """What learns: a method, and whether it also learns a factor on the steps."""

    method: str
    factor: bool = False


ARMS = {name: Arm(name) for name in METHODS} | {
    'poly, factor': Arm('poly', factor=True),
    'highorder, factor': Arm('highorder', factor=True),
}


@dataclass(frozen=True)
class Batch:
    """Sequences for all channels: input, steps and exact states, each (n, D, L), float64."""

    u: Tensor
    dt: Tensor
    x: Tensor


def draw_steps(rng: np.random.Generator, count: int, scale: float) -> np.ndarray:
    """Steps (n, L), log-uniform over a decade, multiples of ``FINE``."""
    logs = np.log(scale * SHORTEST) + np.log(DECADE) * rng.random((count, LENGTH))
    return FINE * np.rint(np.exp(logs) / FINE)


def draw_signal(
    name: str, rng: np.random.Generator, t: np.ndarray, scale: float
) -> Smooth | Held | Noisy:
    """An input for the instants t (n, L). A held one changes only there, as often at any scale."""
    if name == 'smooth':
        return Smooth(rng, len(t))
    if name == 'noisy':
        return Noisy(rng, len(t), t.max())
    changes = rng.random(t.shape) < CHANGE * scale
    changes[:, 0] = True
    values = rng.standard_normal(t.shape)
    piece = np.maximum.accumulate(np.where(changes, np.arange(t.shape[1]), 0), axis=1)
    return Held(t, np.take_along_axis(values, piece, axis=1))


def draw_batch(
    name: str, seeds: Sequence[int], count: int, scale: float = 1.0, split: int = 0
) -> Batch:
    """Sequences of a kind of input for all seeds and rates.

    Args:
        name (str): In ``INPUTS``.
        seeds (Sequence[int]): From each follow its inputs and steps, the same for all rates.
        count (int): n.
        scale (float): Multiplies the range of steps.
        split (int): 0 to train, others to test: draws that have nothing in common.
    """
    parts = []
    for seed in seeds:
        rng = np.random.default_rng((seed, INPUTS.index(name), split))
        dt = draw_steps(rng, count, scale)
        t = dt.cumsum(axis=1)
        signal = draw_signal(name, rng, t, scale)
        u = signal.sampled(t)
        parts += [(u, dt, signal.solution(a, t)) for a in RATES]
    return Batch(*(torch.from_numpy(np.stack(each, axis=1)) for each in zip(*parts)))


class Learner(nn.Module):
    """The systems of all channels. They start off the truth, by what follows from the seeds alone.

    The first gain is 1; :meth:`match_gain` makes it that of the method.

    Attributes:
        log_rate, log_gain, log_factor (Tensor): (D,), of -a, -b/a and the factor on dt.
    """

    def __init__(self, arm: Arm, seeds: Sequence[int]):
        super().__init__()
        self.method = arm.method
        off = np.stack([np.random.default_rng(seed).uniform(-OFF, OFF, 2) for seed in seeds])
        rate, gain = torch.from_numpy(off).repeat_interleave(len(RATES), 0).T
        self.off = gain
        self.log_rate = nn.Parameter(log_rates(len(seeds)) + rate)
        self.log_gain = nn.Parameter(-self.log_rate.detach())
        self.log_factor = nn.Parameter(torch.zeros_like(rate), requires_grad=arm.factor)

    def forward(self, u: Tensor, dt: Tensor) -> Tensor:
        """States (n, D, L) of inputs and steps of that shape."""
        # b alone would have to follow a wherever a moves: the steady gain is learned sooner.
        A, B = -self.log_rate.exp()[:, None], (self.log_gain + self.log_rate).exp()[:, None]
        delta = dt * self.log_factor.exp()[:, None]
        one = torch.ones_like(A)
        x = selective_scan_fn(u, delta, A, B, one, discretization_method=self.method)
        return cast(Tensor, x)

    @torch.no_grad()
    def match_gain(self, batch: Batch) -> None:
        """Start with the size of the gain that is best at the first a, off by the seed's factor.

        From one gain for all, `foh` would start some 100 times too low, and lose stiff systems.
        """
        x = self(batch.u, batch.dt)
        best = (x * batch.x).sum((0, 2)) / x.square().sum((0, 2))
        self.log_gain.add_(best.abs().log() + self.off)


def log_rates(seeds: int) -> Tensor:
    """log(-a) of all channels, (D,)."""
    return torch.tensor(RATES).double().neg().log().repeat(seeds)


def relative_error(x: Tensor, exact: Tensor) -> Tensor:
    """Root mean square of the difference over that of the exact states, (D,), of (n, D, L)."""
    return ((x - exact).square().sum((0, 2)) / exact.square().sum((0, 2))).sqrt()


def learn(arm: Arm, seeds: Sequence[int], batch: Batch, iterations: int = ITERATIONS) -> Learner:
    """Train on the whole batch: Adam, a learning rate that falls to 0 as half a cosine."""
    learner = Learner(arm, seeds)
    learner.match_gain(batch)
    params = [p for p in learner.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(params, lr=LEARNING_RATE, betas=BETAS)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)
    for _ in range(iterations):
        optimizer.zero_grad()
        loss = relative_error(learner(batch.u, batch.dt), batch.x).square().sum()
        loss.backward()
        optimizer.step()
        schedule.step()
    return learner


@torch.no_grad()
def best_of_grid(method: str, seeds: Sequence[int], batch: Batch) -> Tensor:
    """The least error over ``GRID``, each with its best gain above 0: (D,)."""
    learner = Learner(Arm(method), seeds)
    best = torch.full_like(learner.log_rate, math.inf)
    for ratio in GRID:
        learner.log_rate.copy_(log_rates(len(seeds)) + math.log(ratio))
        x = learner(batch.u, batch.dt)
        gain = (x * batch.x).sum((0, 2)) / x.square().sum((0, 2))
        error = relative_error(gain[:, None] * x, batch.x)
        best = torch.where(gain > 0, torch.minimum(best, error), best)
    return best


def measure(
    name: str, arm: str, seeds: Sequence[int], iterations: int = ITERATIONS
) -> list[dict[str, Any]]:
    """Train an arm on a kind of input and test it in each range: a record for each seed.

    Lists are by rate. ``errors`` has them by range; ``a`` and ``steady_gain`` are what was learned,
    over the truth; ``factor`` is 1 where it is not learned. ``over_grid`` is the error in training
    over :func:`best_of_grid`.
    """
    trained = draw_batch(name, seeds, TRAIN)
    learner = learn(ARMS[arm], seeds, trained, iterations)
    found = {}
    with torch.no_grad():
        error = relative_error(learner(trained.u, trained.dt), trained.x)
        over_grid = error / best_of_grid(ARMS[arm].method, seeds, trained)
        for split, (title, scale) in enumerate(RANGES.items(), start=1):
            batch = draw_batch(name, seeds, TEST, scale, split)
            found[title] = relative_error(learner(batch.u, batch.dt), batch.x)
        truth = log_rates(len(seeds))
        learned = {
            'a': learner.log_rate - truth,
            'steady_gain': learner.log_gain + truth,
            'factor': learner.log_factor,
        }
    shape = len(seeds), len(RATES)
    errors = {title: error.view(shape).tolist() for title, error in found.items()}
    ratios = {key: log.exp().view(shape).tolist() for key, log in learned.items()}
    ratios['over_grid'] = over_grid.view(shape).tolist()
    return [
        {
            'input': name,
            'arm': arm,
            'seed': seed,
            'errors': {title: values[i] for title, values in errors.items()},
            **{key: values[i] for key, values in ratios.items()},
        }
        for i, seed in enumerate(seeds)
    ]
