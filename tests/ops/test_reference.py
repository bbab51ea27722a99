"""selective_scan_ref against the golden vectors, finite differences and its own symmetries."""

import math
from itertools import combinations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from tests.ops import golden
from vim_mm.ops.discretization import METHODS
from vim_mm.ops.reference import selective_scan_ref

BATCH, CHANNELS, LENGTH, STATES = 2, 4, 6, 3
each_method = pytest.mark.parametrize('method', METHODS)
real_and_complex = pytest.mark.parametrize(
    'is_complex', [pytest.param(False, id='real'), pytest.param(True, id='complex')]
)
# In a hurry: the same code with more numbers.
mostly_real = pytest.mark.parametrize(
    'is_complex',
    [
        pytest.param(False, id='real'),
        pytest.param(True, id='complex', marks=pytest.mark.slow),
    ],
)


def make_inputs(is_complex=False, batch=BATCH, channels=CHANNELS, length=LENGTH, states=STATES):
    """Every input in float64, requiring grad; A in the left half plane, delta of both signs."""
    dtype = torch.complex128 if is_complex else torch.float64
    inputs = {
        'u': torch.randn(batch, channels, length, dtype=torch.float64),
        'delta': torch.randn(batch, channels, length, dtype=torch.float64),
        'A': torch.randn(channels, states, dtype=dtype) - 1,
        'B': torch.randn(batch, states, length, dtype=dtype),
        'C': torch.randn(batch, states, length, dtype=dtype),
        'D': torch.randn(channels, dtype=torch.float64),
        'z': torch.randn(batch, channels, length, dtype=torch.float64),
        'delta_bias': torch.randn(channels, dtype=torch.float64),
    }
    return {name: tensor.requires_grad_() for name, tensor in inputs.items()}


def flip_time(inputs):
    return {name: t.flip(-1) if t.dim() == 3 else t for name, t in inputs.items()}


def detach(inputs):
    return {name: t.detach() for name, t in inputs.items()}


@pytest.mark.parametrize('case', golden.CASES)
@pytest.mark.parametrize(('dtype', 'tolerance'), golden.TOLERANCES)
def test_golden_vectors(case, dtype, tolerance):
    golden.assert_reproduced(selective_scan_ref, case, dtype, tolerance)


@each_method
@mostly_real
def test_first_and_second_derivatives(method, is_complex):
    inputs = make_inputs(is_complex, batch=1, channels=2, length=2, states=1)

    def scan(*tensors):
        return selective_scan_ref(
            **dict(zip(inputs, tensors, strict=True)),
            delta_softplus=True,
            return_last_state=True,
            discretization_method=method,
        )

    assert gradcheck(scan, tuple(inputs.values()))
    assert gradgradcheck(scan, tuple(inputs.values()))


@each_method
@real_and_complex
def test_reverse_is_flip_scan_flip(method, is_complex):
    inputs = detach(make_inputs(is_complex))
    options = {'discretization_method': method, 'return_last_state': True}
    out, last_state = selective_scan_ref(**inputs, **options, reverse=True)
    flipped_out, flipped_last_state = selective_scan_ref(**flip_time(inputs), **options)
    torch.testing.assert_close(out, flipped_out.flip(-1), rtol=0, atol=0)
    torch.testing.assert_close(last_state, flipped_last_state, rtol=0, atol=0)


@each_method
def test_only_noncausal_methods_look_ahead(method):
    inputs = detach(make_inputs())
    changed = inputs | {'u': inputs['u'].clone()}
    changed['u'][..., -1] += 1
    before, after = (
        selective_scan_ref(**i, discretization_method=method)[..., :-1] for i in (inputs, changed)
    )
    assert torch.equal(before, after) == METHODS[method].causal


def test_poly_of_reversed_is_reversed_poly():
    inputs = detach(make_inputs())
    out = selective_scan_ref(**inputs, discretization_method='poly')
    flipped = selective_scan_ref(**flip_time(inputs), discretization_method='poly')
    torch.testing.assert_close(out, flipped.flip(-1), rtol=1e-13, atol=1e-13)


def test_methods_differ_pairwise():
    inputs = detach(make_inputs())
    outs = {m: selective_scan_ref(**inputs, discretization_method=m) for m in METHODS}
    for one, other in combinations(METHODS, 2):
        difference = (outs[one] - outs[other]).abs().max() / outs[one].abs().max()
        assert difference > 1e-3, f'{one} and {other}'


@real_and_complex
def test_forms_of_b_and_c_agree(is_complex):
    inputs = detach(make_inputs(is_complex))
    constant = {name: inputs[name][0, :, 0].expand(CHANNELS, STATES) for name in 'BC'}
    varying = {name: m[0, :, None].expand(BATCH, STATES, LENGTH) for name, m in constant.items()}
    torch.testing.assert_close(
        selective_scan_ref(**inputs | constant), selective_scan_ref(**inputs | varying)
    )

    one_group = {name: inputs[name].unsqueeze(1) for name in 'BC'}
    torch.testing.assert_close(
        selective_scan_ref(**inputs), selective_scan_ref(**inputs | one_group)
    )

    groups = {name: torch.stack([inputs[name], -2 * inputs[name]], dim=1) for name in 'BC'}
    grouped = selective_scan_ref(**inputs | groups)
    for group, channels in enumerate([slice(0, CHANNELS // 2), slice(CHANNELS // 2, CHANNELS)]):
        part = {name: inputs[name][:, channels] for name in ('u', 'delta', 'z')}
        part |= {name: inputs[name][channels] for name in ('A', 'D', 'delta_bias')}
        part |= {name: groups[name][:, group] for name in 'BC'}
        torch.testing.assert_close(grouped[:, channels], selective_scan_ref(**part))


@pytest.mark.parametrize('grouped', [False, True])
def test_interleaved_b_and_c_are_complex_ones(grouped):
    inputs = detach(make_inputs(is_complex=True))
    complex_form = {name: inputs[name].unsqueeze(1) if grouped else inputs[name] for name in 'BC'}
    interleaved = {name: torch.view_as_real(m).flatten(-2) for name, m in complex_form.items()}
    torch.testing.assert_close(
        selective_scan_ref(**inputs | interleaved), selective_scan_ref(**inputs | complex_form)
    )


def test_softplus_is_exact_beyond_twenty():
    """With A = 0 and all else 1 the output is the running sum of the steps."""
    delta = torch.tensor([[[-700.0, -30.0, 0.0, 20.5, 25.0, 39.0, 41.0]]], dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    out = selective_scan_ref(torch.ones_like(delta), delta, 0 * one, one, one, delta_softplus=True)
    exact = [max(x, 0.0) + math.log1p(math.exp(-abs(x))) for x in delta.flatten().tolist()]
    expected = torch.tensor(exact, dtype=torch.float64).cumsum(0)
    torch.testing.assert_close(out.flatten(), expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize('u_dtype', [torch.float32, torch.bfloat16, torch.float16])
@real_and_complex
def test_low_precision_inputs_are_computed_in_fp32(u_dtype, is_complex):
    inputs = {
        name: t.to(torch.complex64 if t.is_complex() else torch.float32)
        for name, t in detach(make_inputs(is_complex)).items()
    }
    inputs |= {name: inputs[name].to(u_dtype) for name in ('u', 'delta', 'z')}
    out, last_state = selective_scan_ref(**inputs, return_last_state=True)
    assert out.dtype == u_dtype
    assert last_state.dtype == (torch.complex64 if is_complex else torch.float32)

    exact = {
        n: t.to(torch.complex128 if t.is_complex() else torch.double) for n, t in inputs.items()
    }
    expected, expected_state = selective_scan_ref(**exact, return_last_state=True)
    largest_error = (out - expected).abs().max() / expected.abs().max()
    assert largest_error < 2 * torch.finfo(u_dtype).eps
    torch.testing.assert_close(last_state, expected_state.to(last_state.dtype))


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=['fp32', 'fp64'])
def test_precision_is_that_of_u(dtype):
    inputs = detach(make_inputs())
    inputs['u'] = inputs['u'].to(dtype)
    out, last_state = selective_scan_ref(**inputs, return_last_state=True)
    assert out.dtype == last_state.dtype == dtype


@each_method
@pytest.mark.parametrize('form', ['real', 'complex', 'interleaved'])
@pytest.mark.parametrize('empty', ['batch', 'length'])
def test_empty_inputs_give_empty_results_and_zero_gradients(method, form, empty):
    inputs = make_inputs(form != 'real', **{empty: 0})
    given = dict(inputs)
    if form == 'interleaved':
        given |= {name: torch.view_as_real(inputs[name]).flatten(-2) for name in 'BC'}
    out, last_state = selective_scan_ref(
        **given, return_last_state=True, discretization_method=method
    )
    assert out.shape == inputs['u'].shape
    assert last_state.shape == (inputs['u'].shape[0], CHANNELS, STATES)
    assert not last_state.any()
    (out.sum() + last_state.abs().sum()).backward()
    for name, tensor in inputs.items():
        assert tensor.grad.shape == tensor.shape, name
        assert not tensor.grad.any(), name


@pytest.mark.slow
@mostly_real
def test_compiles_without_graph_break(is_complex):
    inputs = detach(make_inputs(is_complex))
    options = {'discretization_method': 'highorder', 'delta_softplus': True}
    compiled = torch.compile(selective_scan_ref, fullgraph=True, backend='aot_eager')
    torch.testing.assert_close(
        compiled(**inputs, **options), selective_scan_ref(**inputs, **options), rtol=0, atol=1e-12
    )


def test_unknown_method_raises():
    with pytest.raises(ValueError, match=r"'tustin'.*zoh.*foh.*bilinear.*poly.*highorder.*rk4"):
        selective_scan_ref(**make_inputs(), discretization_method='tustin')
