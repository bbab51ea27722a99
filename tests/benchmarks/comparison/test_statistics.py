"""Statistics of paired runs: against SciPy, and against data whose answer is known."""

import numpy as np
import pytest
from scipy import stats

from benchmarks.comparison.statistics import (
    DRAWS,
    MAX_EXACT,
    compare,
    detectable_effect,
    equivalence_p,
    holm,
    interquartile_mean,
    probability_of_improvement,
    sign_flip_interval,
    sign_flip_p,
    simultaneous_interval,
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


@pytest.mark.slowest
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


@pytest.mark.parametrize('count', [6, 9])
@pytest.mark.parametrize('confidence', [0.95, 0.9])
def test_the_interval_inverts_the_test(count, confidence):
    """SciPy's test of shifted differences rejects outside of the interval, and not inside."""
    values = _sample(count, 0.4, seed=count)
    low, high = sign_flip_interval(values, confidence)
    near = [end + side for end in (low, high) for side in (-1e-6, 1e-6)]
    for x in [*np.linspace(low - 1, high + 1, 30), *near]:
        p = stats.permutation_test(
            (values - x, np.zeros(count)),
            lambda a, b, axis: np.mean(a - b, axis=axis),
            permutation_type='samples',
            n_resamples=np.inf,
            vectorized=True,
        ).pvalue
        assert (p > 1 - confidence + 1e-12) == (low < x < high), x


def test_intervals_of_known_answers():
    """Six pairs: the least p, 2/64, is below 0.05, so one other pattern has to be as extreme."""
    assert sign_flip_interval([1.0, 2, 3, 4, 5, 6]) == (1.0, 6.0)
    assert sign_flip_interval([7.0] * 8) == (7.0, 7.0)
    assert sign_flip_interval([1.0, 2, 3, 4, 5]) == (-np.inf, np.inf)  # 2/32 is above 0.05


def test_the_interval_of_many_pairs_is_estimated():
    values = _sample(29, 0.4, seed=3)
    assert sign_flip_interval(values) == sign_flip_interval(values)
    truth = stats.ttest_1samp(values, 0).confidence_interval()
    assert sign_flip_interval(values) == pytest.approx((truth.low, truth.high), abs=0.02)
    assert sign_flip_p(values - sign_flip_interval(values)[0]) == pytest.approx(0.05, abs=1e-3)


@pytest.mark.slowest
def test_intervals_cover():
    """95 % of samples, and of six comparisons with one control all together in 95 %."""
    rng = np.random.default_rng(0)
    single, together, studies = 0, 0, 600
    for _ in range(studies):
        control = rng.normal(0, 0.5, 10)
        six = [rng.normal(0, 1, 10) - control for _ in range(6)]
        low, high = sign_flip_interval(six[0])
        single += low <= 0 <= high
        bounds = [simultaneous_interval(each, 6) for each in six]
        together += all(low <= 0 <= high for low, high in bounds)
    least = stats.binom.ppf(0.001, studies, 0.95) / studies
    most = stats.binom.ppf(0.999, studies, 0.95) / studies
    assert least <= single / studies <= most
    assert least <= together / studies  # Bonferroni's bound is no equality


def test_simultaneous_bounds_are_scipys_t_interval():
    values = _sample(12, 0.3)
    truth = stats.ttest_1samp(values, 0).confidence_interval(1 - 0.05 / 6)
    assert simultaneous_interval(values, 6) == pytest.approx((truth.low, truth.high))
    assert simultaneous_interval([2.0] * 12, 6) == (2.0, 2.0)


@pytest.mark.parametrize('count', [6, 12])
def test_one_sided_sign_flip_is_scipys(count):
    for mean in (-0.6, 0.0, 0.6):
        values = _sample(count, mean, seed=count)
        truth = stats.permutation_test(
            (values, np.zeros(count)),
            lambda a, b, axis: np.mean(a - b, axis=axis),
            permutation_type='samples',
            n_resamples=np.inf,
            vectorized=True,
            alternative='greater',
        )
        assert sign_flip_p(values, greater=True) == pytest.approx(truth.pvalue, abs=1e-12)
    many = _sample(29, 0.3, seed=1)
    assert sign_flip_p(many, greater=True) == pytest.approx(
        stats.ttest_1samp(many, 0, alternative='greater').pvalue, rel=0.15, abs=2e-3
    )


def test_equivalence():
    """Near the t tests' answer; not found where the mean lies at the margin or beyond."""
    values = _sample(12, 0.05, seed=2) / 4
    truth = max(
        stats.ttest_1samp(values, -0.2, alternative='greater').pvalue,
        stats.ttest_1samp(values, 0.2, alternative='less').pvalue,
    )
    assert equivalence_p(values, 0.2) == pytest.approx(truth, rel=0.3, abs=2e-3)
    assert equivalence_p([0.1, -0.1] * 6, 5.0) == 1 / 4096
    assert equivalence_p(values - values.mean() + 0.5, 0.5) > 0.4
    assert equivalence_p(values + 3, 0.5) == 1.0
    assert equivalence_p(values, 0.5) == equivalence_p(-values, 0.5)


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


@pytest.mark.slowest
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
