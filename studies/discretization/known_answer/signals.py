"""Inputs u(t) of x' = a x + u, x(0) = 0, whose exact solutions are known.

Letters: n inputs of one kind, L instants. Times are in units of the system's time; all that are
asked for are multiples of ``FINE``, so that they and their sums are exact numbers.
"""

import math

import numpy as np
from scipy.signal import lfilter

INPUTS = ('smooth', 'held', 'noisy')  # the names of Smooth, Held and Noisy
SINES = 4  # of a smooth input
FREQUENCIES = 0.5, 3.0  # radians per unit of time, log-uniform
NOISE = 0.5  # standard deviation; the smooth input has a mean square of 1
FINE = 2.0**-10  # between two values of a noisy input


class Smooth:
    """A sum of sines with a mean square of 1.

    Args:
        rng (Generator): What frequencies and phases are drawn from.
        count (int): n.
    """

    def __init__(self, rng: np.random.Generator, count: int):
        shape = (count, SINES, 1)
        self.omega = np.exp(rng.uniform(math.log(FREQUENCIES[0]), math.log(FREQUENCIES[1]), shape))
        self.start = np.exp(2j * np.pi * rng.random(shape))
        self.amplitude = math.sqrt(2 / SINES)

    def sampled(self, t: np.ndarray) -> np.ndarray:
        """u at the instants t, both (n, L)."""
        waves = self.start * np.exp(1j * self.omega * t[:, None])
        return self.amplitude * waves.imag.sum(1)

    def solution(self, a: float, t: np.ndarray) -> np.ndarray:
        """x at the instants t, both (n, L)."""
        waves = np.exp(1j * self.omega * t[:, None]) - np.exp(a * t[:, None])
        return self.amplitude * (self.start * waves / (1j * self.omega - a)).imag.sum(1)


class Held:
    """A piecewise constant input, each value up to and with the end of its piece.

    Args:
        ends (ndarray): (n, P), ends of the pieces, rising.
        values (ndarray): (n, P), of the input.
    """

    def __init__(self, ends: np.ndarray, values: np.ndarray):
        self.ends, self.values = ends, values

    def _pieces(self, t: np.ndarray) -> np.ndarray:
        """Index of the piece of each instant, (n, L)."""
        found = [np.searchsorted(ends, row, side='left') for ends, row in zip(self.ends, t)]
        return np.stack(found)

    def sampled(self, t: np.ndarray) -> np.ndarray:
        """u at the instants t, both (n, L)."""
        return np.take_along_axis(self.values, self._pieces(t), axis=1)

    def solution(self, a: float, t: np.ndarray) -> np.ndarray:
        """x at the instants t, both (n, L)."""
        count = len(self.ends)
        starts = np.concatenate([np.zeros((count, 1)), self.ends], axis=1)
        states = np.zeros_like(starts)
        for piece, length in enumerate(np.diff(starts).T):
            grown = np.expm1(a * length)
            states[:, piece + 1] = (1 + grown) * states[:, piece] + (
                self.values[:, piece] * grown / a
            )
        pieces = self._pieces(t)
        grown = np.expm1(a * (t - np.take_along_axis(starts, pieces, axis=1)))
        before = np.take_along_axis(states, pieces, axis=1)
        return (1 + grown) * before + self.sampled(t) * grown / a


class Noisy:
    """A smooth input with white noise: known every ``FINE``, and linear in between.

    Args:
        rng (Generator): What the smooth input and the noise are drawn from.
        count (int): n.
        end (float): Last instant that may be asked for.
    """

    def __init__(self, rng: np.random.Generator, count: int, end: float):
        smooth = Smooth(rng, count)
        t = FINE * np.arange(round(end / FINE) + 1)
        noise = NOISE * rng.standard_normal((count, len(t)))
        self.values = smooth.sampled(np.broadcast_to(t, noise.shape)) + noise

    def _at(self, t: np.ndarray) -> np.ndarray:
        """Index among the fine instants, (n, L)."""
        return np.rint(t / FINE).astype(int)

    def sampled(self, t: np.ndarray) -> np.ndarray:
        """u at the instants t, both (n, L)."""
        return np.take_along_axis(self.values, self._at(t), axis=1)

    def solution(self, a: float, t: np.ndarray) -> np.ndarray:
        """x at the instants t, both (n, L)."""
        z = a * FINE
        phi_1 = math.expm1(z) / z
        phi_2 = _phi_2(z)
        # Over a step: e^z x + FINE (phi_1 - phi_2) u at its start + FINE phi_2 u at its end.
        weights = FINE * phi_2, FINE * (phi_1 - phi_2)
        before = -weights[0] * self.values[:, :1]  # so that x is 0 at the first instant
        x, _ = lfilter(weights, (1, -math.exp(z)), self.values, zi=before)
        return np.take_along_axis(x, self._at(t), axis=1)


def _phi_2(z: float) -> float:
    """(e^z - 1 - z) / z², by its series: for ``|z|`` below 1."""
    return sum(z**j / math.factorial(j + 2) for j in range(20))
