"""The curves of the pictures of methods are what they are called, and every method is in them."""

import cv2
import numpy as np
import pytest
import torch
from matplotlib.contour import QuadContourSet
from matplotlib.figure import Figure

from benchmarks.pictures.methods import (
    METHOD_NAMES,
    STYLES,
    plot_errors,
    plot_stability,
    simulate,
    transfer,
)
from tests.scripts import TOOLS, load
from vim_mm.ops import METHODS, selective_scan_ref

SINE = 2.0  # rad per unit of time


def error(method, dt, a=-1.0):
    """Largest error of the states of x' = a x + sin(SINE t) between t = 5 and 15."""
    t = dt * np.arange(1, round(20 / dt) + 1)
    x = simulate(method, dt, a, np.sin(SINE * t))
    exact = np.imag(np.exp(1j * SINE * t) / (1j * SINE - a))
    exact += SINE / (SINE**2 + a**2) * np.exp(a * t)
    inside = (t > 5) & (t < 15)
    return np.abs(x - exact)[inside].max()


def test_every_method_has_a_line_of_its_own():
    assert [*METHODS] == METHOD_NAMES
    for key in ('color', 'linestyle'):
        assert len({style[key] for style in STYLES.values()}) == len(STYLES)


@pytest.mark.parametrize('method', METHODS)
def test_states_are_those_of_the_scan(method):
    u = np.random.default_rng(0).standard_normal(20)
    ones = torch.ones(1, 1, 20).double()
    expected = selective_scan_ref(
        torch.from_numpy(u)[None, None],
        0.3 * ones,
        torch.tensor([[-1.7]], dtype=torch.float64),
        ones,
        ones,
        discretization_method=method,
    )
    np.testing.assert_allclose(simulate(method, 0.3, -1.7, u), expected[0, 0], rtol=1e-12)


def test_a_constant_input_is_held_exactly_by_one_method():
    t = 0.5 * np.arange(1, 13)
    errors = {m: simulate(m, 0.5, -1.0, np.ones(12)) - (1 - np.exp(-t)) for m in STYLES}
    assert np.abs(errors.pop('zoh_exact')).max() < 1e-14
    assert min(np.abs(e).max() for e in errors.values()) > 1e-5


ORDERS = dict.fromkeys(METHODS, 1) | dict(foh=0, poly=0, mamba3=2)


@pytest.mark.parametrize('method, order', ORDERS.items())
def test_orders(method, order):
    ratio = error(method, 0.02) / error(method, 0.01)
    assert ratio == pytest.approx(2**order, rel=0.05)


@pytest.mark.parametrize('method', STYLES)
def test_frequency_response_is_that_of_the_recurrence(method):
    dt, a, omega = 0.5, -1.0, 2.2
    t = dt * np.arange(1, 401)
    x = simulate(method, dt, a, np.cos(omega * t)) + 1j * simulate(method, dt, a, np.sin(omega * t))
    response = transfer(method, dt, a, np.array([omega]))[0]
    np.testing.assert_allclose(x[200] / np.exp(1j * omega * t[200]), response, rtol=1e-9)
    if method == 'poly':
        assert abs(response.imag) < 1e-12  # no phase: it looks as far ahead as back


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    figures = []
    monkeypatch.setattr(Figure, 'savefig', lambda figure, path: figures.append(figure))
    return figures


def contours(axes):
    """Levels of each set of lines, and the points z on them."""
    for lines in axes.collections:
        if isinstance(lines, QuadContourSet) and not lines.filled:
            paths = zip(lines.levels, lines.get_paths(), strict=True)
            yield {level: path.vertices @ (1, 1j) for level, path in paths}


def test_contours_are_those_of_their_titles(drawn):
    plot_stability(None)
    left, middle, right = drawn[0].axes
    exponential, runge_kutta = contours(left)
    (bilinear,) = contours(middle)
    assert len(exponential) == len(bilinear) == 8
    for level, z in exponential.items():
        np.testing.assert_allclose(np.abs(np.exp(z)), level, rtol=0.01)
    for level, z in bilinear.items():
        near_pole = np.abs(z - 2) < 0.3  # where lines lie closer than points of the grid
        found = np.abs((1 + z / 2) / (1 - z / 2))
        np.testing.assert_allclose(found[~near_pole], level, rtol=0.02)
    (boundary,) = runge_kutta.values()
    steps = 1 + boundary + boundary**2 / 2 + boundary**3 / 6 + boundary**4 / 24
    np.testing.assert_allclose(np.abs(steps), 1, atol=0.01)
    exact, tustin, _ = right.lines
    np.testing.assert_allclose(exact.get_ydata(), np.exp(exact.get_xdata()))
    z = tustin.get_xdata()
    np.testing.assert_allclose(tustin.get_ydata(), (1 + z / 2) / (1 - z / 2))


def test_errors_are_relative_differences(drawn):
    plot_errors(None)
    left, right, errors, scaled = drawn[0].axes
    for axes in (left, right):
        lines = dict(zip([name for name in METHOD_NAMES if name != 'zoh_exact'], axes.lines))
        z = -lines['zoh'].get_xdata()
        hold = np.expm1(z) / z  # over dt
        truths = {'zoh': 1 / hold - 1, 'bilinear': 1 / (1 - z / 2) / hold - 1}
        for method, truth in truths.items():
            found = lines[method].get_ydata()
            np.testing.assert_allclose(found, np.abs(truth), rtol=1e-6, atol=1e-9)
    by_method = dict(zip(STYLES, errors.lines))
    steps = by_method['zoh'].get_xdata()
    assert steps[0] == 0.5 and steps[-1] == 2.0**-9
    for method, line in zip([m for m in STYLES if m not in ('foh', 'poly')], scaled.lines):
        np.testing.assert_allclose(line.get_ydata(), by_method[method].get_ydata() / steps)
    # Relative to the amplitude of the settled state.
    amplitude = 1 / np.hypot(1, SINE)
    found = by_method['zoh'].get_ydata()[5]
    assert found == pytest.approx(error('zoh', steps[5]) / amplitude, rel=0.02)


@pytest.mark.slowest
def test_all_pictures_are_drawn(tmp_path):
    load('analysis/verify_discretization.py')['draw'](tmp_path / 'pictures')
    names = {path.stem for path in (tmp_path / 'pictures').iterdir()}
    kinds = ('inputs', 'stability', 'errors', 'responses', 'differences')
    assert names == {f'methods_{kind}' for kind in kinds}
    for path in (tmp_path / 'pictures').iterdir():
        picture = cv2.imread(str(path))
        assert picture.std() > 20 and path.stat().st_size < 250_000
        committed = cv2.imread(str(TOOLS.parent / 'docs/images' / path.name))
        # Another version of Matplotlib may set a letter a pixel further.
        sides = zip(committed.shape, picture.shape, strict=True)
        assert all(abs(a - b) <= 2 for a, b in sides), f'{path.name}: draw docs/images again'
