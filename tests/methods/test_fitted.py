"""csrc/methods/fitted.h is as exact as tools/dev/fit_constants.py finds possible."""

import re

import numpy as np
import pytest

from tests.scripts import ROOT, load

pytestmark = pytest.mark.slowest  # fits every polynomial anew, for seconds
SCRIPT = load('dev/fit_constants.py')
FITS = SCRIPT['FITS']
each_fit = pytest.mark.parametrize('fit', FITS, ids=lambda fit: f'{fit.name}-{fit.accuracy}')


def committed() -> dict[tuple[str, str], tuple[float, np.ndarray]]:
    """By name and accuracy: where a polynomial of the header ends, and its coefficients."""
    text = (ROOT / 'csrc/methods/fitted.h').read_text()
    found = re.findall(
        r'struct (\w+)<Accuracy::(\w+)> {\s*static constexpr float end = ([\d.]+)f;'
        r'\s*static constexpr int terms = (\d+);[^{]*{\s*constexpr float c\[\] = {([^}]*)};',
        text,
    )
    polynomials = {}
    for name, accuracy, end, terms, numbers in found:
        coefficients = np.float32(numbers.replace('f', '').split(','))
        assert len(coefficients) == int(terms)
        polynomials[name, accuracy] = float(end), coefficients
    assert len(polynomials) == text.count('constexpr float c[]'), 'not all of the header was read'
    return polynomials


def test_the_header_has_what_the_script_fits():
    assert committed().keys() == {(fit.name, fit.accuracy) for fit in FITS}


@each_fit
def test_errors(fit):
    """Between the nodes of the fit, too."""
    end, coefficients = committed()[fit.name, fit.accuracy]
    assert (end, len(coefficients)) == (fit.end, fit.terms)
    best = SCRIPT['largest_error'](fit.powers(), SCRIPT['rounded'](fit.powers()))
    error = SCRIPT['largest_error'](fit.powers(2 * SCRIPT['NODES']), coefficients)
    assert error <= 1.05 * best


@each_fit
def test_the_optimum_is_one(fit):
    """An error that takes its largest size with both signs in turn, once more than there are
    coefficients, cannot be smaller everywhere (Chebyshev)."""
    powers = fit.powers()
    error = powers @ SCRIPT['optimum'](powers) - 1
    signs = np.sign(error[abs(error) > 0.999 * abs(error).max()])
    assert 1 + np.count_nonzero(np.diff(signs)) > fit.terms
