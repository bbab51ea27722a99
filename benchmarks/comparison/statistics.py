"""Statistics of paired runs, as studies/discretization/protocol.md has them.

Differences are d = a - b of the same seed, in points. SciPy has the same tests; here they are a few
lines of NumPy, and ``tests/benchmarks/comparison/test_statistics.py`` holds them to SciPy's. Its
permutation test takes ten times as long, and takes means that rounding parts for different ones.
Its bootstrap draws other samples by the same seed, and the study's intervals are of these.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy import optimize, stats

RESAMPLES = 10_000
MAX_EXACT = 20  # pairs of which all 2^n signs are tried; of more, DRAWS patterns of signs
DRAWS = 100_000


def interquartile_mean(values: Sequence[float]) -> float:
    """Mean without the lowest and highest quarter, whole values of them."""
    return float(stats.trim_mean(values, 0.25))


def bootstrap_interval(
    values: Sequence[float], confidence: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean, over resampled seeds."""
    values = np.asarray(values, float)
    picks = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    tail = (1 - confidence) / 2
    low, high = np.quantile(values[picks].mean(axis=1), (tail, 1 - tail))
    return float(low), float(high)


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p of the mean: the share of all sign patterns whose mean is as far from 0.

    Exact for up to ``MAX_EXACT`` pairs. For more it is estimated from ``DRAWS`` random patterns and
    the observed one, always the same ones.

    Raises:
        ValueError: There are no differences.
    """
    differences = np.asarray(differences, float)
    count = len(differences)
    if not count:
        raise ValueError('there are no differences')
    # Sums that are equal but for rounding count as equal.
    least = abs(differences.sum()) - 1e-9 * max(1.0, np.abs(differences).sum())
    if count > MAX_EXACT:
        signs = np.random.default_rng(0).choice((-1.0, 1.0), (DRAWS, count))
        extreme = np.count_nonzero(np.abs(signs @ differences) >= least)
        return (extreme + 1) / (DRAWS + 1)
    # By symmetry the first sign can stay.
    signs = np.array([*product((1, -1), repeat=count - 1)]).reshape(2 ** (count - 1), count - 1)
    return float(np.mean(np.abs(differences[0] + signs @ differences[1:]) >= least))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction: adjusted p in the order given, which hold for the family."""
    order = np.argsort(p_values)
    adjusted = np.empty(len(order))
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted.tolist()


def probability_of_improvement(differences: Sequence[float]) -> float:
    """P(A > B): the share of pairs that A wins, ties count half."""
    differences = np.asarray(differences, float)
    return float(np.mean((differences > 0) + 0.5 * (differences == 0)))


def detectable_effect(count: int, level: float, power: float = 0.8) -> float:
    """The mean difference, in standard deviations of the differences, that is found so often.

    Of the paired t test at that two-sided level, which the sign-flip test comes close to. Infinite
    for fewer than two pairs.
    """
    if count < 2:
        return float('inf')
    critical = stats.t.ppf(1 - level / 2, count - 1)

    def missing(effect: float) -> float:
        return power - stats.nct.sf(critical, count - 1, effect * np.sqrt(count))

    return float(optimize.brentq(missing, 1e-6, 2 * critical))


@dataclass(frozen=True)
class Comparison:
    """A against B over the same seeds, in points; ``p`` is not corrected."""

    differences: tuple[float, ...]  # by seed
    mean: float
    deviation: float  # standard deviation of the differences
    low: float
    high: float
    p: float
    improvement: float

    @property
    def count(self) -> int:
        """How many pairs there are."""
        return len(self.differences)


def compare(a: Sequence[float], b: Sequence[float]) -> Comparison:
    """A against B, paired by position; at least two pairs.

    Raises:
        ValueError: They are of different length, or of fewer than two pairs, or not finite.
    """
    if len(a) != len(b) or len(a) < 2:
        raise ValueError(f'a and b must be two pairs or more, got {len(a)} and {len(b)} values')
    differences = np.subtract(a, b)
    if not np.isfinite(differences).all():
        raise ValueError(f'a and b must be finite, got {[*a]} and {[*b]}')
    low, high = bootstrap_interval(differences)
    return Comparison(
        differences=tuple(differences.tolist()),
        mean=float(differences.mean()),
        deviation=float(differences.std(ddof=1)),
        low=low,
        high=high,
        p=sign_flip_p(differences),
        improvement=probability_of_improvement(differences),
    )
