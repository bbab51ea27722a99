"""States at both ends of a scan: a sequence in pieces, and several sequences in one row.

Each backend is held to itself without these arguments, which other tests hold to the reference.
"""

import functools
from itertools import pairwise

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from tests.ops.inputs import (
    grouped_inputs,
    inputs_in,
    make_inputs,
    results_and_gradients,
    worst_error,
)
from vim_mm.ops import selective_scan_dense_ref, selective_scan_fn, selective_scan_grouped_fn
from vim_mm.ops.discretization import METHODS

on_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device'),
]
# In a hurry test_derivatives speaks for those of Python.
BACKENDS = [
    pytest.param('native', 'cpu', id='native-cpu'),
    *(pytest.param(backend, 'cpu', id=f'{backend}-cpu', marks=pytest.mark.slow)
      for backend in ('torch', 'reference')),
    *(pytest.param(backend, 'cuda', id=f'{backend}-cuda', marks=on_gpu)
      for backend in ('native', 'triton', 'torch')),
]  # fmt: skip
each_backend = pytest.mark.parametrize(('backend', 'device'), BACKENDS)
each_method = pytest.mark.parametrize('method', METHODS)
both_directions = pytest.mark.parametrize('reverse', [False, True], ids=['forwards', 'reverse'])
# No backend has code for one method in one direction, so that in reverse one of the causal methods
# is enough, and the other.
WAYS = [*((method, False) for method in METHODS), ('zoh', True), ('poly', True)]
WAYS = [
    pytest.param(*way, id='-'.join((way[0], 'reverse' if way[1] else 'forwards'))) for way in WAYS
]
each_way = pytest.mark.parametrize(('method', 'reverse'), WAYS)
each_causal_way = pytest.mark.parametrize(
    ('method', 'reverse'), [way for way in WAYS if METHODS[way.values[0]].causal]
)
# Each type that a backend has kernels for; steps and states that go beyond a chunk of it: 64 KiB
# of states on the CPU, 256 steps in Triton, 64 in the others. What PyTorch does is the same on
# either device.
SCANS = [
    pytest.param(*scan, id='-'.join(map(str, scan)).replace('torch.', ''), marks=marks)
    for marks, scans in (
        ((), [
            ('native', 'cpu', torch.float32, 150, 256),
            ('native', 'cpu', torch.complex128, 150, 256),
        ]),
        (pytest.mark.slow, [
            ('native', 'cpu', torch.float64, 150, 256),
            ('native', 'cpu', torch.complex64, 150, 256),
            *((backend, 'cpu', dtype, 150, 16) for backend in ('torch', 'reference')
              for dtype in (torch.float32, torch.complex128)),
        ]),
        (on_gpu, [
            ('native', 'cuda', torch.float32, 150, 16),
            ('native', 'cuda', torch.complex64, 150, 16),
            ('triton', 'cuda', torch.float32, 300, 16),
        ]),
    )
    for scan in scans
]  # fmt: skip
each_scan = pytest.mark.parametrize(('backend', 'device', 'dtype', 'length', 'states'), SCANS)
# Relative to the largest entry. Some gradients are sums over all steps, or on a GPU over blocks of
# channels, in two orders.
BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-6}
SUMS = {torch.float64: 1e-12, torch.float32: 1e-5}


def inputs_of(dtype, device='cpu', **sizes):
    inputs = make_inputs(dtype=dtype.to_real(), is_complex=dtype.is_complex, **sizes)
    return {name: x.detach().to(device).requires_grad_() for name, x in inputs.items()}


def scan_by(backend, method, reverse):
    return functools.partial(
        selective_scan_fn, backend=backend, discretization_method=method, reverse=reverse,
        delta_softplus=True,
    )  # fmt: skip


def new_state(inputs):
    """A state for those inputs, (B, D, N) or (B, K, D, N)."""
    u, A = inputs['u'], inputs['A']
    return torch.randn(*u.shape[:-1], A.shape[-1], dtype=A.dtype, device=u.device).requires_grad_()


def has_steps(name, inputs):
    if name in ('B', 'C'):  # which can be constant
        return inputs[name].dim() >= inputs['u'].dim()
    return name in ('u', 'delta', 'z')


def part_of(inputs, rows, steps):
    """Some rows of the batch and some steps of inputs."""
    part = {n: x[rows, ..., steps] if has_steps(n, inputs) else x for n, x in inputs.items()}
    if 'initial_state' in part:
        part['initial_state'] = part['initial_state'][rows]
    return part


def in_pieces(scan, edges, reverse):
    """``scan`` of a sequence that is cut at the edges; a piece has the state of the one before."""

    def run(initial_state=None, return_last_state=True, **inputs):
        pieces = [slice(*ends) for ends in pairwise(edges)]
        state, outs = initial_state, []
        for piece in reversed(pieces) if reverse else pieces:
            given = part_of(inputs, slice(None), piece)
            out, state = scan(**given, initial_state=state, return_last_state=True)
            outs.append(out)
        return torch.cat(outs[::-1] if reverse else outs, -1), state

    return run


def alone(scan, reset, reverse):
    """Each sequence of a packed row by ``scan``, which knows of no resets."""

    def run(return_last_state=True, **inputs):
        rows = []
        for b, flags in enumerate(reset.tolist()):
            edges = [0, *(t for t, flag in enumerate(flags) if flag and t > 0), len(flags)]
            pieces = [slice(*ends) for ends in pairwise(edges)]
            outs, states = [], []
            for piece in pieces:
                given = part_of(inputs, slice(b, b + 1), piece)
                # The state that is given stands before the first step in scan order.
                first = piece.stop == len(flags) if reverse else piece.start == 0 and not flags[0]
                if not first:
                    given.pop('initial_state', None)
                out, state = scan(**given, return_last_state=True)
                outs.append(out)
                states.append(state)
            rows.append((torch.cat(outs, -1), states[0 if reverse else -1]))
        out, last_state = (torch.cat(x) for x in zip(*rows, strict=True))
        unused = [x.sum() * 0 for x in inputs.values()]  # each input has a gradient
        return out + sum(torch.real(x) for x in unused).to(out.dtype), last_state

    return run


def compare(packed, whole, inputs, rounded=None):
    """Two functions of the same inputs: outputs and every gradient."""
    found = results_and_gradients(packed, inputs)
    expected = results_and_gradients(whole, inputs)
    for name, value in found.items():
        assert value.isfinite().all(), name
        of = name.removeprefix('grad_')
        is_entry = of == 'initial_state' or has_steps(of, inputs)
        is_sum = of in inputs and (value.is_cuda or not is_entry)
        bounds = rounded or (SUMS if is_sum else BOUNDS)
        bound = bounds[value.dtype.to_real() if value.is_complex() else value.dtype]
        error = worst_error(value, expected[name])
        assert error <= bound, f'{name} is off by {error:.1e}'


@each_scan
@each_causal_way
def test_pieces_equal_the_whole(backend, device, dtype, length, states, method, reverse):
    scan = scan_by(backend, method, reverse)
    inputs = inputs_of(dtype, device, batch=2, channels=4, length=length, states=states)
    compare(in_pieces(scan, (0, 1, 64, 64, 67, 140, length), reverse), scan, inputs)


@each_backend
@both_directions
def test_pieces_of_groups(backend, device, reverse):
    """States and masks of any strides."""
    inputs = grouped_inputs(2, batch=2, channels=4, length=70, states=3, dtype=torch.float32)
    inputs = {name: x.detach().to(device).requires_grad_() for name, x in inputs.items()}
    inputs['initial_state'] = torch.randn(3, 4, 2, 2, device=device).permute(3, 2, 1, 0)
    inputs['initial_state'].requires_grad_()
    scan = functools.partial(
        selective_scan_grouped_fn, backend=backend, reverse=(reverse,) * 2, delta_softplus=True
    )
    compare(in_pieces(scan, (0, 33, 70), reverse), scan, inputs)
    reset = random_reset(1, 140)[:, ::2].to(device).expand(2, -1)
    packed = functools.partial(scan, reset=reset)
    compare(packed, functools.partial(scan, reset=reset.contiguous()), inputs)
    compare(packed, alone(scan, reset, reverse), inputs)


@each_scan
@each_way
def test_packed_equals_alone(backend, device, dtype, length, states, method, reverse):
    """With a state to begin with, where there is one, in one of two rows before a reset."""
    scan = scan_by(backend, method, reverse)
    inputs = inputs_of(dtype, device, batch=2, channels=9, length=length, states=states)
    if METHODS[method].causal:
        inputs['initial_state'] = new_state(inputs)
    reset = random_reset(2, length)
    reset[0, 0] = True
    packed = functools.partial(scan, reset=reset.to(device))
    compare(packed, alone(scan, reset, reverse), inputs)


def random_reset(batch, length):
    """Short sequences and long ones, of which one has a single step."""
    reset = torch.rand(batch, length) < torch.linspace(0, 0.3, length)
    reset[:, 1 : 3 * (length > 3)] = True
    return reset


@each_backend
@pytest.mark.parametrize('form', ['constant', 'grouped', 'constant_B_grouped_C'])
@pytest.mark.parametrize('method', ['foh', 'poly'])
def test_forms_of_B_and_C(backend, device, form, method):
    scan = functools.partial(
        selective_scan_fn, backend=backend, discretization_method=method, delta_softplus=True
    )
    inputs = inputs_of(torch.float32, device, channels=6, length=70, form=form)
    if method != 'poly':
        inputs['initial_state'] = new_state(inputs)
    reset = random_reset(2, 70)
    compare(functools.partial(scan, reset=reset.to(device)), alone(scan, reset, False), inputs)


HALVES = [
    *(pytest.param(*way.values, torch.bfloat16, id=f'{way.id}-bf16') for way in WAYS),
    pytest.param('foh', False, torch.float16, id='foh-forwards-fp16'),
]
# Triton computes in float32 whatever it reads, so that there three speak for all.
HALVES_OF_TRITON = [
    way
    for way in HALVES
    if way.id in ('zoh-forwards-bf16', 'poly-reverse-bf16', 'foh-forwards-fp16')
]


@pytest.mark.parametrize(
    ('backend', 'device', 'method', 'reverse', 'dtype'),
    [
        pytest.param(backend, device, *way.values, id=f'{way.id}-{backend}-{device}', marks=marks)
        for backend, device, ways, marks in (
            ('native', 'cpu', HALVES, ()),
            ('native', 'cuda', HALVES, on_gpu),
            ('triton', 'cuda', HALVES_OF_TRITON, on_gpu),
        )
        for way in ways
    ],
)
def test_half_precision(backend, device, method, reverse, dtype):
    """Half precision has kernels of its own on a GPU. Results are rounded, so that they may differ
    by one unit of the dtype, and sums by their order."""
    scan = scan_by(backend, method, reverse)
    inputs = inputs_in(dtype, channels=16, length=200, states=16)
    inputs = {name: x.detach().to(device).requires_grad_() for name, x in inputs.items()}
    if METHODS[method].causal:
        inputs['initial_state'] = new_state(inputs)
    reset = random_reset(2, 200)
    bounds = {
        torch.float32: 2e-5 if device == 'cpu' else 1e-3,
        torch.float16: 2e-3,
        torch.bfloat16: 1.6e-2,
    }
    packed = functools.partial(scan, reset=reset.to(device))
    compare(packed, alone(scan, reset, reverse), inputs, bounds)


@pytest.mark.parametrize(
    ('backend', 'device', 'method'),
    [
        pytest.param(*backend.values, method, id=f'{backend.id}-{method}', marks=backend.marks)
        for backend in BACKENDS
        # Directions are the same for all methods, and Triton compiles kernels for each.
        for method in (('foh', 'poly') if 'triton' in backend.values else METHODS)
    ],
)
def test_groups(backend, device, method):
    """Each in its direction, all with one mask, equals single scans; of these other tests hold the
    ways above to sequences alone."""
    flags = (False, True, True)
    inputs = grouped_inputs(
        3, shared=('z',), batch=2, channels=4, length=70, states=3, dtype=torch.float32
    )
    # A copy on another device would have no z that groups share.
    inputs = {
        name: x[:, :1].detach().to(device).expand_as(x) if name == 'z' else x.detach().to(device)
        for name, x in inputs.items()
    }
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    if METHODS[method].causal:
        inputs['initial_state'] = new_state(inputs)
    reset = random_reset(2, 70)
    options = dict(
        backend=backend, discretization_method=method, delta_softplus=True, reset=reset.to(device)
    )

    def one_by_one(return_last_state=True, **given):
        results = []
        for k, reverse in enumerate(flags):
            of_group = {
                name: x[k] if name in ('A', 'D', 'delta_bias') else x[:, k]
                for name, x in given.items()
            }
            results.append(
                selective_scan_fn(**of_group, **options, reverse=reverse, return_last_state=True)
            )
        return tuple(torch.stack(x, 1) for x in zip(*results, strict=True))

    packed = functools.partial(selective_scan_grouped_fn, **options, reverse=flags)
    compare(packed, one_by_one, inputs)


@each_backend
@both_directions
def test_no_steps_hand_the_state_through(backend, device, reverse):
    options = dict(backend=backend, reverse=reverse, return_last_state=True)
    inputs = inputs_of(torch.float32, device, length=0)
    state = new_state(inputs)
    reset = torch.zeros(2, 0, dtype=torch.bool, device=device)
    out, last_state = selective_scan_fn(**inputs, initial_state=state, reset=reset, **options)
    assert out.shape == inputs['u'].shape
    assert torch.equal(last_state, state)
    weight = torch.randn_like(state)
    leaves = [state, *inputs.values()]
    grads = torch.autograd.grad((last_state * weight).sum(), leaves, materialize_grads=True)
    assert torch.equal(grads[0], weight)
    assert not any(grad.any() for grad in grads[1:])


@each_backend
@both_directions
def test_a_state_alone_is_used(backend, device, reverse):
    """Of out alone and of the last state; a reset at the first step drops what came before."""
    scan = functools.partial(
        selective_scan_fn, backend=backend, reverse=reverse, return_last_state=True
    )
    inputs = {name: x.detach() for name, x in inputs_of(torch.float32, device).items()}
    state = new_state(inputs)
    reset = torch.zeros(2, 6, dtype=torch.bool, device=device)
    reset[0, 0] = True
    for result in scan(**inputs, initial_state=state, reset=reset):
        (grad,) = torch.autograd.grad(result.sum(), state, retain_graph=True)
        assert grad[1].all()
        assert grad[0].all() if reverse else not grad[0].any()


@each_backend
@each_way
def test_what_overflows_stays_in_its_sequence(backend, device, method, reverse):
    """inf times 0 is NaN: neither values nor gradients of the sequences beside it may have that."""
    scan = functools.partial(
        selective_scan_fn, backend=backend, discretization_method=method, reverse=reverse
    )
    inputs = inputs_of(torch.float32, device, batch=1, channels=2, length=90, states=4)
    del inputs['z'], inputs['delta_bias']
    with torch.no_grad():
        inputs['A'].fill_(16.0)
        inputs['delta'].fill_(0.001)
        inputs['delta'][..., 30:60] = 1.0  # e^16 a step: no float32 after six of them
        if method == 'bilinear':
            inputs['delta'][..., 30:60] = 0.12
            inputs['A'].fill_(16.6)
    reset = torch.zeros(1, 90, dtype=torch.bool)
    reset[0, [30, 60]] = True
    out = scan(**inputs, reset=reset.to(device))
    assert not out[..., 30:60].isfinite().all()
    keep = [*range(30), *range(60, 90)]
    outer = out[..., keep]
    (grad,) = torch.autograd.grad(outer.sum(), inputs['u'])
    expected = alone(scan, reset, reverse)(**inputs)[0]
    (wanted,) = torch.autograd.grad(expected[..., keep].sum(), inputs['u'])
    assert worst_error(outer, expected[..., keep]) <= 1e-6
    assert worst_error(grad[..., keep], wanted[..., keep]) <= 1e-6


@each_method
@pytest.mark.parametrize(
    'is_complex', [False, pytest.param(True, marks=pytest.mark.slow)], ids=['real', 'complex']
)
@pytest.mark.parametrize('backend', ['native', 'torch', 'reference'])
def test_derivatives(method, is_complex, backend):
    inputs = make_inputs(batch=1, channels=2, length=3, states=1, is_complex=is_complex)
    if METHODS[method].causal:
        inputs['initial_state'] = new_state(inputs)
    reset = torch.tensor([[False, False, True]])

    def scan(*tensors):
        return selective_scan_fn(
            **dict(zip(inputs, tensors, strict=True)), reset=reset, delta_softplus=True,
            return_last_state=True, discretization_method=method, backend=backend,
        )  # fmt: skip

    assert gradcheck(scan, tuple(inputs.values()))
    if backend == 'reference' and method in ('zoh', 'poly'):
        assert gradgradcheck(scan, tuple(inputs.values()))


@pytest.mark.slow
@pytest.mark.usefixtures('nondeterministic')
@each_backend
def test_compile_in_one_graph(backend, device):
    torch.compiler.reset()
    if backend == 'reference':
        pytest.skip('its loop is compiled nowhere else either')
    scan = functools.partial(selective_scan_fn, backend=backend, return_last_state=True)
    compiled = torch.compile(scan, fullgraph=True, backend='aot_eager')
    for length in (9, 17):
        inputs = inputs_of(torch.float32, device, length=length)
        inputs['initial_state'] = new_state(inputs)
        reset = random_reset(2, length).to(device)
        expected = results_and_gradients(scan, inputs, reset=reset)
        for name, value in results_and_gradients(compiled, inputs, reset=reset).items():
            torch.testing.assert_close(value, expected[name])


@both_directions
@pytest.mark.parametrize('is_complex', [False, True], ids=['real', 'complex'])
def test_dense(is_complex, reverse):
    """Diagonal matrices are `bilinear`."""
    inputs = make_inputs(length=9, is_complex=is_complex)
    inputs['initial_state'] = new_state(inputs)
    options = dict(reset=random_reset(2, 9), reverse=reverse, return_last_state=True)
    matrices = inputs | {'A': torch.diag_embed(inputs['A'])}
    diagonal = selective_scan_fn(**inputs, discretization_method='bilinear', **options)
    for value, truth in zip(selective_scan_dense_ref(**matrices, **options), diagonal, strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-12, atol=1e-12)
