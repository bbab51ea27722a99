"""Statistics of paired runs, as studies/discretization/protocol.md has them.

Differences are d = a - b of the same seed, in points. SciPy has the sign-flip test too; here it is
a few lines of NumPy, and ``tests/benchmarks/comparison/test_statistics.py`` holds them to SciPy's.
Its test takes ten times as long, and takes means that rounding parts for different ones; and it has
no interval that inverts the test.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
from scipy import optimize, stats

MAX_EXACT = 20  # pairs of which all 2^n signs are tried; of more, DRAWS patterns of signs
DRAWS = 100_000


def interquartile_mean(values: Sequence[float]) -> float:
    """Mean without the lowest and highest quarter, whole values of them."""
    return float(stats.trim_mean(values, 0.25))


@lru_cache(maxsize=1)  # the tables of a page are of one count
def _sign_patterns(count: int) -> np.ndarray:
    """(patterns, count) of 1 and -1: all that begin with 1, of many pairs ``DRAWS`` random ones."""
    if count > MAX_EXACT:
        return np.random.default_rng(0).choice((-1.0, 1.0), (DRAWS, count))
    # Those that begin with -1 are these negated.
    signs = np.array([*product((1.0, -1.0), repeat=count - 1)]).reshape(2 ** (count - 1), count - 1)
    return np.hstack([np.ones((len(signs), 1)), signs])


def sign_flip_p(differences: Sequence[float], greater: bool = False) -> float:
    """p of the mean by the share of sign patterns whose mean is as far from 0.

    Exact for up to ``MAX_EXACT`` pairs. For more it is estimated from ``DRAWS`` random patterns and
    the observed one, always the same ones.

    Args:
        differences (Sequence[float]): d of each pair.
        greater (bool): Test against a mean above 0 alone; else two-sided.

    Raises:
        ValueError: There are no differences.
    """
    differences = np.asarray(differences, float)
    if not len(differences):
        raise ValueError('there are no differences')
    total, signs = differences.sum(), _sign_patterns(len(differences))
    sums = signs @ differences
    # Sums that are equal but for rounding count as equal.
    rounding = 1e-9 * max(1.0, np.abs(differences).sum())
    if len(differences) > MAX_EXACT:
        extreme = sums if greater else np.abs(sums)
        least = (total if greater else abs(total)) - rounding
        return (np.count_nonzero(extreme >= least) + 1) / (DRAWS + 1)
    if greater:
        return float(np.mean([sums >= total - rounding, -sums >= total - rounding]))
    return float(np.mean(np.abs(sums) >= abs(total) - rounding))


def sign_flip_interval(
    differences: Sequence[float], confidence: float = 0.95
) -> tuple[float, float]:
    """The true mean differences that the two-sided sign-flip test does not reject.

    That is each x for which the p of d - x is above 1 - ``confidence``. A pattern that flips the
    pairs S is as extreme as the observed one exactly if x lies between the mean of d over S and
    that over the others. So the ends are order statistics of these means, and no search is needed.
    Infinite where the pairs are too few to reject anything.
    """
    differences = np.asarray(differences, float)
    count, level = len(differences), 1 - confidence
    flipped = _sign_patterns(count) < 0
    parts = np.stack([flipped, ~flipped]).astype(float)
    with np.errstate(invalid='ignore'):
        means = (parts @ differences) / parts.sum(2)
    # The pattern that flips none, or all, is always as extreme.
    low = np.sort(np.where(np.isnan(means).any(0), -np.inf, means.min(0)))
    high = np.sort(np.where(np.isnan(means).any(0), np.inf, means.max(0)))
    # p is above the level where more than level times the patterns are as extreme. Of random
    # patterns the observed one is one more. A share such as 0.05 is not exact in binary.
    most = level * (DRAWS + 1) - 1 if count > MAX_EXACT else level * len(flipped)
    rank = int(np.floor(most + 1e-9))
    if rank >= len(low) or rank < 0:
        return -np.inf, np.inf
    return float(low[rank]), float(high[-1 - rank])


def simultaneous_interval(
    differences: Sequence[float], comparisons: int, confidence: float = 0.95
) -> tuple[float, float]:
    """An interval of the mean that holds for all of so many comparisons together.

    By Bonferroni's correction and Student's t: the sign-flip test has few patterns left at so high
    a confidence. Its length follows from the standard deviation alone.
    """
    mean, tail = float(np.mean(differences)), (1 - confidence) / comparisons / 2
    reach = stats.t.isf(tail, len(differences) - 1) * stats.sem(differences)
    return mean - float(reach), mean + float(reach)


def equivalence_p(differences: Sequence[float], margin: float) -> float:
    """p of two one-sided sign-flip tests (TOST) against a mean that lies beyond +- ``margin``."""
    differences = np.asarray(differences, float)
    tests = (margin + differences, margin - differences)
    return max(sign_flip_p(shifted, greater=True) for shifted in tests)


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
    """A against B over the same seeds, in points; ``p`` and the interval are not corrected."""

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
    low, high = sign_flip_interval(differences)
    return Comparison(
        differences=tuple(differences.tolist()),
        mean=float(differences.mean()),
        deviation=float(differences.std(ddof=1)),
        low=low,
        high=high,
        p=sign_flip_p(differences),
        improvement=probability_of_improvement(differences),
    )
