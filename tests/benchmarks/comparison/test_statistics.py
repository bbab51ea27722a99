"""Statistics of paired runs: against SciPy, and against data whose answer is known."""

import numpy as np
import pytest
from scipy import stats

from benchmarks.comparison.statistics import (
    DRAWS,
    MAX_EXACT,
    RESAMPLES,
    bootstrap_interval,
    compare,
    detectable_effect,
    holm,
    interquartile_mean,
    probability_of_improvement,
    sign_flip_p,
)


def _sample(count, mean=0.0, seed=0):
    return np.random.default_rng(seed).normal(mean, 1, count)


@pytest.mark.parametrize('count', [2, 5, 12])
@pytest.mark.parametrize('mean', [0.0, 0.7])
def test_sign_flip_is_scipys_permutation_test(count, mean):
    values = _sample(count, mean, seed=count)
    truth = stats.permutation_test(
        (values, np.zeros(count)),
        lambda a, b, axis: np.mean(a - b, axis=axis),
        permutation_type='samples',
        n_resamples=np.inf,
        vectorized=True,
    )
    assert sign_flip_p(values) == pytest.approx(truth.pvalue, abs=1e-12)


def test_sign_flip_of_known_answers():
    assert sign_flip_p([1.0] * 12) == 2 / 4096
    assert sign_flip_p([3.0]) == 1.0
    assert sign_flip_p([1.0, -1.0]) == 1.0
    assert sign_flip_p([0.0] * 5) == 1.0
    assert sign_flip_p([1.0, 2.0, 3.0]) == sign_flip_p([-1.0, -2.0, -3.0]) == 0.25
    # Ties that rounding would part: 0.1 + 0.2 is not 0.3.
    assert sign_flip_p([0.3, 0.1, 0.2, -0.6]) == 1.0
    # And SciPy's bound, a part of the observed mean, is too narrow where large ones cancel.
    assert sign_flip_p([12.3, -12.1, 0.1, 0.2, -0.4, -0.1]) == 1.0
    with pytest.raises(ValueError, match='there are no differences'):
        sign_flip_p([])


@pytest.mark.parametrize('mean', [0.0, 0.4])
def test_sign_flip_of_many_pairs_is_estimated(mean):
    """29 pairs, which the protocol names: close to the t test, whose data are normal here."""
    values = _sample(29, mean, seed=3)
    p = sign_flip_p(values)
    assert p == sign_flip_p(values) > 0
    assert p == pytest.approx(stats.ttest_1samp(values, 0).pvalue, rel=0.15, abs=2e-3)
    # The observed pattern is one of them, so p is not 0.
    assert sign_flip_p([1.0] * 60) == 1 / (DRAWS + 1)


def test_sign_flip_is_exact_up_to_its_bound():
    assert sign_flip_p([1.0] * MAX_EXACT) == 2 / 2**MAX_EXACT and MAX_EXACT == 20


def test_bootstrap_is_scipys():
    values = _sample(12, 0.5)
    truth = stats.bootstrap(
        (values,), np.mean, n_resamples=RESAMPLES, method='percentile', rng=np.random.default_rng(0)
    ).confidence_interval
    assert bootstrap_interval(values) == (truth.low, truth.high)


def test_interquartile_mean():
    assert interquartile_mean([-100, 1, 2, 3, 4, 5, 6, 900]) == 3.5
    assert interquartile_mean([7.0, 9.0]) == 8.0


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([2 / 4096] * 6) == pytest.approx([12 / 4096] * 6)


def test_improvement():
    assert probability_of_improvement([1, -1, 2, 0]) == 0.625


def test_detectable_effect_has_its_power():
    """By simulation of the t test: four of five, give or take three standard errors."""
    effect = detectable_effect(12, 0.05 / 6)
    draws = np.random.default_rng(0).normal(effect, 1, (4000, 12))
    p = stats.ttest_1samp(draws, 0, axis=1).pvalue
    assert np.mean(p < 0.05 / 6) == pytest.approx(0.8, abs=0.02)
    assert detectable_effect(1, 0.05) == float('inf')


def test_false_positives_under_no_difference():
    """A family of six against one control, no difference: at most 5 % of studies find one."""
    rng = np.random.default_rng(0)
    studies, found, single = 300, 0, 0
    for _ in range(studies):
        seeds = rng.normal(0, 1, 10)  # what a seed gives to all methods
        control = seeds + rng.normal(0, 0.5, 10)
        ps = [sign_flip_p(seeds + rng.normal(0, 0.5, 10) - control) for _ in range(6)]
        found += min(holm(ps)) < 0.05
        single += ps[0] < 0.05
    limit = stats.binom.ppf(0.999, studies, 0.05) / studies
    assert found / studies <= limit
    # One uncorrected test keeps its level as well, and does not fall far below it.
    assert stats.binom.ppf(0.001, studies, 0.05) / studies <= single / studies <= limit


def test_a_difference_is_found():
    """Half a point under noise of a seed that pairing takes away."""
    rng = np.random.default_rng(0)
    seeds = rng.normal(90, 2, 12)
    a, b = seeds + 0.5 + rng.normal(0, 0.2, 12), seeds + rng.normal(0, 0.2, 12)
    found = compare(a, b)
    assert found.count == 12 and found.p < 0.05 / 6 and found.improvement > 0.9
    assert found.low < 0.5 < found.high and found.low > 0.2
    assert stats.ttest_ind(a, b).pvalue > 0.1  # unpaired it would not be
    back = compare(b, a)
    assert (back.mean, back.p, back.improvement) == (
        -found.mean,
        found.p,
        pytest.approx(1 - found.improvement),
    )
    with pytest.raises(ValueError, match='two pairs or more, got 3 and 2 values'):
        compare([1, 2, 3], [1, 2])
    with pytest.raises(ValueError, match='must be finite'):
        compare([1.0, float('nan')], [1.0, 2.0])
