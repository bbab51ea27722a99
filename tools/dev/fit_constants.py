"""Fits the polynomials of the native code and prints the header that has their coefficients:

    python tools/dev/fit_constants.py > csrc/methods/fitted.h

Each polynomial has the smallest possible maximum of its relative error on its interval. Then its
coefficients are rounded to float32 one after the other, beginning with the constant one, and those
that are left are fitted again each time, to make up for what rounding costs.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import NamedTuple

from _command_line import add_debug, end, parse_first


def parse_args() -> Namespace:
    parser = ArgumentParser(description='Print csrc/methods/fitted.h.')
    parser.add_argument('--errors', action='store_true', help='print a table of errors instead')
    add_debug(parser)
    return parser.parse_args()


# Above NumPy, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

import numpy as np
from mpmath import mp, mpf
from scipy.optimize import linprog

DIGITS = 40
NODES = (
    301  # Chebyshev's on an interval: a curve of at most nine extremes rises by 1e-4 between them
)


def phi(k: int) -> Callable[[mpf], mpf]:
    """(k-1)! times phi_k, z -> the sum over j of z^j / (j + k)!."""
    return lambda z: mp.hyp1f1(1, k + 1, z) / k


class Fit(NamedTuple):
    """A function of z, and the polynomial that stands for it from begin to end.

    A psi function comes from its polynomial where |bits| = |z| / ln(2) <= end, and elsewhere from
    e^z = 2^bits, as (e^z - the first K terms of its series) / z^K. There an error of e^z, 2^-22 on
    a GPU, counts the more the smaller |z| is. The ends are choices: where that has come down to
    about 1e-5 (half) or 5e-7 (full).
    """

    name: str  # of a template in fitted.h
    accuracy: str  # and its argument
    formula: str
    function: Callable[[mpf], mpf]
    terms: int
    begin: float
    end: float
    order: int = 0  # K of a psi function
    variable: str = 'bits'  # of the polynomial, or 'z'

    def nodes(self, count: int = NODES) -> np.ndarray:
        """Points in units of the interval's ends: bits of a psi function."""
        radius = (self.end - self.begin) / 2
        return self.begin + radius * (1 - np.cos(np.linspace(0, np.pi, count)))

    def powers(self, count: int = NODES) -> np.ndarray:
        """1, x, x^2, .. over the function at each node: times coefficients that is 1 + error."""
        with mp.workdps(DIGITS):
            unit = mp.log(2) if self.order else mpf(1)
            rows = []
            for node in map(mpf, self.nodes(count).tolist()):
                z = node * unit
                x = node if self.variable == 'bits' else z
                rows.append([mp.nstr(x**j / self.function(z), 25) for j in range(self.terms)])
            return np.array(rows).astype(np.longdouble)

    def closed_form_error(self) -> float:
        """What 2^-22 of e^z makes of a psi function's closed form at -end."""
        with mp.workdps(DIGITS):
            z = -self.end * mp.log(2)
            rest = mp.exp(z) - sum(z**j / mp.factorial(j) for j in range(self.order))
            return float(abs(mp.exp(z) / rest) / 2**22)


def root_of_phi_2(z: mpf) -> mpf:
    return mp.sqrt(phi(2)(z))


def root_of_twice_phi_3(z: mpf) -> mpf:
    return mp.cbrt(phi(3)(z))


def log1p(x: mpf) -> mpf:
    return mp.log1p(x) / x if x else mpf(1)


FITS = (
    Fit('RootOfPhi2', 'half', 'sqrt(phi_2)', root_of_phi_2, 3, -0.29, 0.29, 2),
    Fit('RootOfPhi2', 'full', 'sqrt(phi_2)', root_of_phi_2, 6, -1.4, 1.4, 2),
    Fit('TwicePhi3', 'half', '2 phi_3', phi(3), 4, -0.7, 0.7, 3),
    Fit('TwicePhi3', 'full', '2 phi_3', phi(3), 7, -1.8, 1.8, 3),
    Fit('SixPhi4', 'half', '6 phi_4', phi(4), 5, -1.2, 1.2, 4),
    Fit('SixPhi4', 'full', '6 phi_4', phi(4), 7, -2.0, 2.0, 4),
    Fit('RootOfTwicePhi3', 'half', 'cbrt(2 phi_3)', root_of_twice_phi_3, 4, -0.9, 0.9, 3),
    Fit('Phi2', 'half', 'phi_2', phi(2), 3, -0.255, 0.255, 2, 'z'),
    Fit('Log1p', 'half', 'log(1 + z) / z', log1p, 7, 0.0, 1.0, variable='z'),
)


def largest_error(powers: np.ndarray, coefficients: np.ndarray) -> float:
    """The largest relative error at the nodes."""
    return float(abs(powers @ coefficients - 1).max())


def refit(powers: np.ndarray, coefficients: np.ndarray, first: int = 0) -> np.ndarray:
    """The coefficients of least maximal error; those before `first` stay.

    A linear program for the change of each, in units of the error that there is: so its tolerance
    is relative to that. The second one begins where the first has ended.
    """
    coefficients = coefficients.copy()
    free = powers[:, first:]
    if not free.shape[1]:
        return coefficients
    scale = abs(free).max(axis=0)
    columns = (free / scale).astype(float)
    bound = np.ones((len(powers), 1))
    sides = np.block([[columns, -bound], [-columns, -bound]])
    goal = np.append(np.zeros(len(scale)), 1)
    for _ in range(2):
        error = powers @ coefficients - 1
        unit = abs(error).max()
        limits = np.concatenate([-error, error]).astype(float) / float(unit)
        solved = linprog(goal, A_ub=sides, b_ub=limits, bounds=(None, None), method='highs')
        if not solved.success:
            raise RuntimeError(solved.message)
        coefficients[first:] += solved.x[:-1] * unit / scale
    return coefficients


def optimum(powers: np.ndarray) -> np.ndarray:
    """The best coefficients of any number of digits."""
    start, *_ = np.linalg.lstsq(powers.astype(float), np.ones(len(powers)), rcond=None)
    return refit(powers, start.astype(np.longdouble))


def rounded(powers: np.ndarray) -> np.ndarray:
    """The coefficients as float32: each goes to that neighbour which leaves the smaller error."""
    coefficients = optimum(powers)
    for i in range(len(coefficients)):
        near = np.float32(coefficients[i])
        beyond = np.nextafter(near, np.float32(np.copysign(np.inf, coefficients[i] - near)))
        tried = []
        for value in (near, beyond):
            fixed = coefficients.copy()
            fixed[i] = value
            tried.append(refit(powers, fixed, i + 1))
        coefficients = min(tried, key=lambda each: largest_error(powers, each))
    return coefficients.astype(np.float32)


def literal(value: np.float32) -> str:
    """The shortest literal that is this float32."""
    text = min(
        np.format_float_positional(value, trim='0'), np.format_float_scientific(value), key=len
    )
    return f'{text}f'


HEADER = """\
// Coefficients of polynomials, with the least maximal relative error on their intervals.
// Printed by tools/dev/fit_constants.py, which says how; change that and print it anew.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "accuracy.h"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// The sum over j < terms of at(j) x^j, where x is bits = z / ln(2) or z, stands for a function of
// z where |bits|, or z of log(1 + z), is at most `end`. Behind colons: the largest relative error.
// clang-format off

"""
FOOTER = """\
// clang-format on

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
"""


def declaration(fit: Fit, coefficients: np.ndarray) -> str:
    error = largest_error(fit.powers(), coefficients)
    numbers = ', '.join(map(literal, coefficients))
    return (
        f'// {fit.formula}, in {fit.variable}: {error:.1e}\n'
        'template <>\n'
        f'struct {fit.name}<Accuracy::{fit.accuracy}> {{\n'
        f'  static constexpr float end = {literal(np.float32(fit.end))};\n'
        f'  static constexpr int terms = {fit.terms};\n'
        '  static VIM_MM_INLINE constexpr float at(int j) {\n'
        f'    constexpr float c[] = {{{numbers}}};\n'
        '    return c[j];\n'
        '  }\n'
        '};\n'
    )


def header() -> str:
    """The text of fitted.h."""
    text = HEADER
    for name in dict.fromkeys(fit.name for fit in FITS):
        text += f'template <Accuracy>\nstruct {name};\n\n'
        text += ''.join(declaration(fit, rounded(fit.powers())) for fit in FITS if fit.name == name)
        text += '\n'
    return text + FOOTER


def table() -> str:
    """Errors of each polynomial: as it is printed, unrounded, and of the closed form beyond."""
    lines = ['| polynomial | accuracy | terms | end | error | unrounded | closed form at the end |']
    lines.append('|---|---|---|---|---|---|---|')
    for fit in FITS:
        powers = fit.powers()
        errors = [largest_error(powers, solve(powers)) for solve in (rounded, optimum)]
        beyond = f'{fit.closed_form_error():.1e}' if fit.order else ''
        lines.append(
            f'| {fit.formula} | {fit.accuracy} | {fit.terms} | {fit.end:g} '
            f'| {errors[0]:.2e} | {errors[1]:.2e} | {beyond} |'
        )
    return '\n'.join(lines)


def main(args: Namespace) -> None:
    print(f'{table()}\n' if args.errors else header(), end='')


if __name__ == '__main__':
    end(main, ARGUMENTS)
