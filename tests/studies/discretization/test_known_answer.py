"""The regression with a known answer: orders, training, and what its pictures take."""

import json

import cv2
import numpy as np
import pytest
import torch

from studies.discretization.known_answer import convergence, recovery
from studies.discretization.known_answer.tables import all_tables, pictures
from tests.scripts import ROOT
from tests.tools.conftest import run_tool
from vim_mm.ops import METHODS

RESULTS = ROOT / 'studies/discretization/known_answer/runs.json'
TOOL = 'studies/discretization/run_known_answer.py'


@pytest.fixture(scope='module')
def measured():
    """Errors of part A over all steps, by input, method and rate; one seed."""
    found = {}
    for name in convergence.INPUTS:
        for dt in convergence.STEPS:
            for key, figures in convergence.measure(name, dt, [*METHODS], [0]).items():
                for figure, value in figures.items():
                    found.setdefault((name, *key, figure), []).append(value)
    return found


@pytest.mark.parametrize('a', convergence.RATES)
def test_the_hold_is_exact_on_held_inputs(measured, a):
    assert max(measured['held', 'zoh_exact', a, 'error']) < 1e-12
    assert np.isnan(convergence.order(measured['held', 'zoh_exact', a, 'error']))


@pytest.mark.parametrize(
    ('name', 'method', 'expected'),
    [
        *(('smooth', method, 1) for method in ('zoh', 'bilinear', 'highorder', 'rk4', 'zoh_exact')),
        ('held', 'zoh', 1),
        ('held', 'highorder', 1),
        ('held', 'bilinear', 2),
        ('held', 'rk4', 4),
        ('smooth', 'foh', 0),
        ('smooth', 'poly', 0),
    ],
)
def test_orders_of_convergence(measured, name, method, expected):
    order = convergence.order(measured[name, method, -4.0, 'error'])
    assert order == pytest.approx(expected, abs=0.05)


def test_noise_halves_the_order(measured):
    order = convergence.order(measured['noisy', 'zoh_exact', -16.0, 'error'])
    assert order == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize('name', convergence.INPUTS)
@pytest.mark.parametrize('a', convergence.RATES)
def test_a_gain_makes_the_methods_of_the_same_decay_one(measured, name, a):
    truth = measured[name, 'zoh_exact', a, 'error_after_gain']
    for method in ('zoh', 'foh', 'highorder', 'rk4'):
        errors = measured[name, method, a, 'error_after_gain']
        np.testing.assert_allclose(errors, truth, rtol=1e-6, atol=1e-12)
    for method in ('bilinear', 'poly'):
        errors = measured[name, method, a, 'error_after_gain']
        assert not np.allclose(errors, truth, rtol=1e-3, atol=1e-12)


def test_gain_is_the_best_one():
    rng = np.random.default_rng(0)
    exact, x = rng.standard_normal((2, 3, 2, 50))
    found = convergence.errors(x, exact)
    for i, gain in enumerate(found['gain']):
        for other in (gain, gain - 0.01, gain + 0.01):
            errors = convergence.errors(other * x, exact)
            assert found['error_after_gain'][i] <= errors['error'][i] + 1e-15
    (best,) = {*np.round(found['error_after_gain'], 12)} & {
        *np.round(convergence.errors(found['gain'][0] * x, exact)['error'], 12)
    }
    assert best == pytest.approx(found['error_after_gain'][0])


def test_batches_follow_from_their_seed():
    """Of any number of seeds; other splits, seeds and inputs have other numbers."""
    both, one = (recovery.draw_batch('held', seeds, 2) for seeds in ([3, 4], [4]))
    for many, few in zip(vars(both).values(), vars(one).values()):
        assert torch.equal(many[:, len(recovery.RATES) :], few)
    assert not torch.equal(one.dt, recovery.draw_batch('held', [4], 2, split=1).dt)
    assert not torch.equal(one.dt, recovery.draw_batch('smooth', [4], 2).dt)


@pytest.mark.parametrize('scale', recovery.RANGES.values())
def test_steps_are_log_uniform_over_a_decade(scale):
    dt = recovery.draw_steps(np.random.default_rng(0), 200, scale) / (scale * recovery.SHORTEST)
    assert dt.min() > 0.9 and dt.max() < 10.5
    assert np.log10(dt).mean() == pytest.approx(0.5, abs=0.02)


def test_a_held_input_changes_as_often_in_time():
    rates = []
    for scale in recovery.RANGES.values():
        batch = recovery.draw_batch('held', [0], 100, scale)
        changes = (batch.u[:, 0].diff() != 0).double().sum()
        rates.append((changes / batch.dt[:, 0].sum()).item())
    np.testing.assert_allclose(rates, rates[0], rtol=0.1)


@pytest.mark.parametrize('name', recovery.INPUTS)
def test_the_truth_is_where_the_hold_finds_it(name):
    """On held inputs the true system has no error, and on others little."""
    batch = recovery.draw_batch(name, [0], 2)
    learner = recovery.Learner(recovery.ARMS['zoh_exact'], [0])
    with torch.no_grad():
        learner.log_rate.copy_(recovery.log_rates(1))
        learner.log_gain.copy_(-recovery.log_rates(1))
        error = recovery.relative_error(learner(batch.u, batch.dt), batch.x).max()
    assert error < {'held': 1e-12, 'smooth': 0.25, 'noisy': 1}[name]


@pytest.mark.parametrize('method', METHODS)
def test_a_factor_is_new_for_methods_of_mixed_units_alone(method):
    """For the others a factor on dt equals one on a, and for foh one more on the gain."""
    batch = recovery.draw_batch('smooth', [0], 1)
    scaled, moved = (recovery.Learner(recovery.Arm(method), [0]) for _ in range(2))
    with torch.no_grad():
        scaled.log_factor.fill_(np.log(0.5))
        moved.log_rate += np.log(0.5)
        if method == 'foh':
            moved.log_gain += np.log(0.5)
        same = torch.allclose(scaled(batch.u, batch.dt), moved(batch.u, batch.dt), rtol=1e-9)
    assert same == (method not in ('poly', 'highorder'))


def test_with_a_fixed_step_all_causal_methods_are_one():
    """Each has an a of the same decay, and a gain does the rest: the reason for irregular steps."""
    dt, decay = 0.125, np.exp(-0.5)
    u = np.random.default_rng(0).standard_normal((1, 100))
    found = []
    for name, method in METHODS.items():
        if method.causal:
            a = 2 * (decay - 1) / (decay + 1) if name == 'bilinear' else np.log(decay)
            x = convergence.states(name, dt, u, [a / dt])
            found.append(x / x[..., :1])
    assert len(found) == 6
    for x in found:
        np.testing.assert_allclose(x, found[0], rtol=1e-9)


def test_seeds_learn_independently_and_again():
    both = recovery.measure('noisy', 'bilinear', [3, 4], 5)
    (one,) = recovery.measure('noisy', 'bilinear', [4], 5)
    (again,) = recovery.measure('noisy', 'bilinear', [4], 5)
    assert one == again and one['seed'] == both[1]['seed'] == 4
    for key in ('a', 'steady_gain'):
        np.testing.assert_allclose(both[1][key], one[key], rtol=1e-9)


@pytest.mark.slowest
def test_the_hold_finds_held_systems():
    (record,) = recovery.measure('held', 'zoh_exact', [0], 300)
    for errors in record['errors'].values():
        assert max(errors) < 1e-3
    np.testing.assert_allclose(record['a'], 1, rtol=1e-3)
    np.testing.assert_allclose(record['steady_gain'], 1, rtol=1e-3)
    assert record['factor'] == [1] * len(recovery.RATES)


@pytest.mark.slowest
def test_the_tool_writes_results(tmp_path):
    """Of which tables and pictures can be made; two seeds are too few for p."""
    out = tmp_path / 'new/results.json'
    run_tool(TOOL, '--seeds', '0,1', '--iterations', '2', '--out', out, cwd=tmp_path)
    results = json.loads(out.read_text())
    assert {record['seed'] for record in results['recovery']} == {0, 1}
    assert str(tmp_path) not in out.read_text()
    assert 'p' not in all_tables(results)['smooth: control'][0]


def test_results_that_lack_a_seed():
    """The tables have the seeds that all arms have."""
    results = json.loads(RESULTS.read_text())
    lost = next(r for r in results['recovery'] if (r['arm'], r['seed']) == ('poly, factor', 11))
    whole = all_tables(results)
    results['recovery'].remove(lost)
    few = all_tables(results)
    name = f'{lost["input"]}: control'
    assert [row['method'] for row in few[name]] == [row['method'] for row in whole[name]]
    assert few[name] != whole[name] and few['orders'] == whole['orders']


@pytest.mark.slowest
def test_the_pictures_of_the_results(tmp_path):
    results = json.loads(RESULTS.read_text())
    for name, draw in pictures(results).items():
        draw(tmp_path / name)
        assert cv2.imread(str(tmp_path / name)).std() > 10
        assert (RESULTS.parent / name).exists()


def test_no_iterations_are_not_those_of_the_protocol(tmp_path):
    printed = run_tool(TOOL, '--iterations', 0, cwd=tmp_path, fails=True)
    assert printed.splitlines()[-1].endswith(
        "--iterations: expected a whole number from 1, got '0'"
    )
