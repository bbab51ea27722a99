"""Inputs with known answers: their exact states against quadrature and against theory."""

import numpy as np
import pytest
from scipy.integrate import quad

from studies.discretization.known_answer.signals import FINE, Held, Noisy, Smooth

END = 1.0
T = np.array([[0.125, 0.5, 0.75, END]])


def _smooth():
    return Smooth(np.random.default_rng(0), 1)


def _held():
    return Held(np.array([[0.25, 0.5, END]]), np.array([[1.0, -2.0, 0.3]]))


def _noisy():
    return Noisy(np.random.default_rng(0), 1, END)


@pytest.mark.parametrize('a', [-1.0, -16.0])
def test_smooth_states(a):
    signal = _smooth()

    def kernel(s, t):
        return np.exp(a * (t - s)) * signal.sampled(np.array([[s]]))[0, 0]

    truth = [quad(kernel, 0, t, args=(t,), epsabs=1e-12)[0] for t in T[0]]
    np.testing.assert_allclose(signal.solution(a, T)[0], truth, rtol=1e-9)


@pytest.mark.parametrize('a', [-1.0, -16.0])
def test_held_states(a):
    """Against a sum over the pieces of what each has left."""
    signal = _held()
    starts, ends, values = [0, 0.25, 0.5], signal.ends[0], signal.values[0]
    truth = []
    for t in T[0]:
        parts = [
            u * (np.exp(a * (t - min(end, t))) - np.exp(a * (t - start))) / -a
            for start, end, u in zip(starts, ends, values)
            if start < t
        ]
        truth.append(sum(parts))
    np.testing.assert_allclose(signal.solution(a, T)[0], truth, rtol=1e-12)


def test_a_held_value_ends_with_its_piece():
    assert _held().sampled(np.array([[0.125, 0.25, 0.375, 0.5, 1.0]])).tolist() == [
        [1.0, 1.0, -2.0, -2.0, 0.3]
    ]


@pytest.mark.parametrize('a', [-1.0, -16.0])
def test_noisy_states(a):
    """Against Gauss's quadrature of each fine step, where the input is a line."""
    signal = _noisy()
    nodes, weights = np.polynomial.legendre.leggauss(8)
    fine = FINE * np.arange(signal.values.shape[1])
    truth = []
    for t in T[0]:
        s = FINE * (np.arange(round(t / FINE))[:, None] + (nodes + 1) / 2)
        u = np.interp(s, fine, signal.values[0])
        truth.append((np.exp(a * (t - s)) * u * weights * FINE / 2).sum())
    np.testing.assert_allclose(signal.solution(a, T)[0], truth, rtol=1e-9)


def test_noise_and_sines_have_the_size_that_the_protocol_says():
    t = np.broadcast_to(np.arange(1, 2000) / 8, (50, 1999))
    assert np.mean(Smooth(np.random.default_rng(1), 50).sampled(t) ** 2) == pytest.approx(
        1, rel=0.05
    )
    noise = np.diff(_noisy().values)  # the sines change little over a fine step
    assert noise.std() / np.sqrt(2) == pytest.approx(0.5, rel=0.05)
