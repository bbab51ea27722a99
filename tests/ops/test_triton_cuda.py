"""The Triton scan on a GPU: golden vectors, the reference in fp64, and itself; CUDA's bounds."""

import functools

import pytest
import torch

from tests.graphs import assert_replays_eager_bits
from tests.ops import golden
from tests.ops.coefficients import check_coefficients, check_step_sizes
from tests.ops.inputs import (
    grouped_inputs,
    inputs_in,
    make_inputs,
    results_and_gradients,
    strided_copies,
)
from tests.ops.test_selective_scan_cuda import assert_close, in_fp64, on_cuda
from vim_mm.ops import selective_scan_fn, selective_scan_grouped_fn, selective_scan_ref
from vim_mm.ops.discretization import METHODS

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device'),
]
each_method = pytest.mark.parametrize('method', METHODS)
triton_scan = functools.partial(selective_scan_fn, backend='triton')


def compare(inputs, scan=triton_scan, reference=selective_scan_ref, **options):
    """Outputs and gradients against the reference in fp64, and the same bits again."""
    given = on_cuda(inputs)
    results = results_and_gradients(scan, given, **options)
    wide = {name: x.requires_grad_() for name, x in in_fp64(inputs).items()}
    assert_close(results, results_and_gradients(reference, wide, **options))
    for name, value in results_and_gradients(scan, given, **options).items():
        assert torch.equal(value, results[name]), name
    return results


@pytest.mark.parametrize('case', [case for case in golden.CASES if 'complex' not in case])
def test_golden_vectors(case):
    def scan(**arguments):
        moved = {k: x.cuda() if torch.is_tensor(x) else x for k, x in arguments.items()}
        out, last_state = triton_scan(**moved)
        return out.cpu(), last_state.cpu()

    golden.assert_reproduced(scan, case, torch.float32, 1e-5)


@each_method
@pytest.mark.parametrize(
    ('dtype', 'reverse'),
    [(torch.float32, False), (torch.bfloat16, True)],
    ids=['fp32', 'reverse-bf16'],
)
def test_lengths(method, dtype, reverse):
    """One chunk and several, aligned rows and others; many rows and few."""
    for batch, channels, length in ((2, 20, 1), (2, 20, 17), (2, 20, 1024), (150, 16, 272)):
        inputs = inputs_in(dtype, batch=batch, channels=channels, length=length, states=16)
        compare(inputs, delta_softplus=True, discretization_method=method, reverse=reverse)
    inputs = inputs_in(dtype, batch=130, channels=18, length=197, states=3)
    compare(inputs, delta_softplus=True, discretization_method=method, reverse=reverse)


@pytest.mark.parametrize('method', ['zoh', 'poly'])
def test_float16_and_many_states(method):
    inputs = inputs_in(torch.float16, channels=6, length=70, states=16)
    compare(inputs, delta_softplus=True, discretization_method=method)
    inputs = make_inputs(channels=3, length=33, states=256, dtype=torch.float32)
    compare(inputs, delta_softplus=True, discretization_method=method)


@pytest.mark.parametrize('method', ['foh', 'poly'])
@pytest.mark.parametrize('form', ['constant', 'grouped', 'constant_B_grouped_C'])
def test_every_form_of_B_and_C(method, form):
    inputs = make_inputs(channels=6, length=19, states=3, form=form, dtype=torch.float32)
    compare(inputs, discretization_method=method)


@pytest.mark.parametrize('method', ['bilinear', 'poly'])
def test_groups_of_both_directions_and_any_strides(method):
    scan = functools.partial(selective_scan_grouped_fn, backend='triton')
    reference = functools.partial(selective_scan_grouped_fn, backend='reference')
    inputs = grouped_inputs(2, shared=('u', 'z', 'D'), length=300, dtype=torch.float32)
    compare(inputs, scan, reference, discretization_method=method, delta_softplus=True)
    inputs = strided_copies(make_inputs(length=300, dtype=torch.float32))
    compare(inputs, delta_softplus=True, discretization_method=method)


@each_method
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=['fp32', 'bf16'])
def test_coefficients_of_a_scan(method, dtype):
    check_coefficients(triton_scan, method, dtype, 'cuda')


def test_step_sizes():
    for dtype in (torch.float16, torch.bfloat16):
        check_step_sizes(triton_scan, dtype, 'cuda')


@pytest.mark.parametrize('method', ['zoh', 'poly'])
def test_graph_capture_and_replay(method):
    inputs = on_cuda(inputs_in(torch.bfloat16, channels=16, length=300, states=16))

    def run():
        results = results_and_gradients(
            triton_scan, inputs, delta_softplus=True, discretization_method=method
        )
        return [*results.values()]

    def no_generator():
        out = triton_scan(**inputs, delta_softplus=True, discretization_method=method)
        return [out.detach(), *torch.autograd.grad(out.float().sum(), [*inputs.values()])]

    run()
    assert_replays_eager_bits(no_generator, inputs['u'])


def test_compile_in_one_graph():
    torch._dynamo.reset()
    scan = functools.partial(triton_scan, delta_softplus=True)
    compiled = torch.compile(scan, fullgraph=True)
    inputs = on_cuda(make_inputs(length=33, dtype=torch.float32))
    for form in (scan, compiled):
        out = form(**inputs)
        grads = torch.autograd.grad(out.sum(), [*inputs.values()])
        if form is scan:
            expected = (out, *grads)
    for value, truth in zip((out, *grads), expected, strict=True):
        torch.testing.assert_close(value, truth)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason='needs two CUDA devices')
@pytest.mark.parametrize('method', ['zoh', 'poly'])
def test_on_another_device_than_the_current_one(method):
    options = {'delta_softplus': True, 'discretization_method': method}
    here = on_cuda(make_inputs(dtype=torch.float32, length=40))
    there = {name: x.detach().to('cuda:1').requires_grad_() for name, x in here.items()}
    expected = results_and_gradients(triton_scan, here, **options)
    for name, value in results_and_gradients(triton_scan, there, **options).items():
        assert value.device == torch.device('cuda:1')
        assert torch.equal(value.cpu(), expected[name].cpu()), name
    assert torch.cuda.current_device() == 0
