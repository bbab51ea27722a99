"""The forms of the scan agree with the reference, one of them only where the decay is mild."""

import pytest
import torch

from benchmarks.scan.parallel import CHUNK, FORMS, selective_scan_by
from tests.ops.inputs import make_inputs
from vim_mm.ops import METHODS, selective_scan_ref

CAUSAL = [name for name, method in METHODS.items() if method.causal]


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('method', CAUSAL)
def test_every_form_is_the_scan(method, form):
    for length, is_complex in ((1, False), (2, False), (7, True), (CHUNK + 5, False)):
        inputs = make_inputs(length=length, is_complex=is_complex, form='grouped')
        options = dict(delta_softplus=True, discretization_method=method)
        values = [
            scan(**inputs, **options)
            for scan in (selective_scan_ref, lambda **kwargs: selective_scan_by(form, **kwargs))
        ]
        grads = [
            torch.autograd.grad(y.square().sum(), [*inputs.values()], materialize_grads=True)
            for y in values
        ]
        # Quotients of products of up to 69 factors.
        tolerance = 1e-7 if form == 'cumulative sum' else 1e-10
        torch.testing.assert_close(*values, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(*grads, rtol=tolerance, atol=tolerance)


def test_what_is_not_causal_is_refused():
    assert [name for name in METHODS if name not in CAUSAL] == ['poly']
    with pytest.raises(ValueError, match='poly is not causal'):
        selective_scan_by('Blelloch', **make_inputs(), discretization_method='poly')


@pytest.mark.parametrize('form', FORMS)
def test_decay_that_ends_the_cumulative_sum(form):
    """dt = 0.1 and a = -16, as at Mamba's initialization: e^-1.6 a step."""
    a = torch.full((1, 1, 200, 1), -1.6).exp()
    b = torch.randn(1, 1, 200, 1, generator=torch.Generator().manual_seed(0))
    x, expected = FORMS[form](a, b), FORMS['sequential'](a, b)
    good = (x - expected).abs() < 1e-5
    assert good[:, :, :40].all()
    assert good.all() == (form != 'cumulative sum')
    if form == 'cumulative sum':
        assert 50 < good.flatten().int().argmin() <= 60  # float32 holds e^-87, no less
