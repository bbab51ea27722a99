"""The CUDA scan with an initial state and resets where there is no GPU."""

import functools

import pytest
import torch

from tests.emulation.test_emulation import (  # noqa: F401  a fixture and marks
    compare,
    each_method,
    emulated,
    pytestmark,
)
from tests.ops import test_states as states
from tests.ops.inputs import grouped_inputs, inputs_in, make_inputs, strided_copies
from vim_mm.ops import selective_scan_fn, selective_scan_grouped_fn
from vim_mm.ops.discretization import METHODS

both_directions = pytest.mark.parametrize('reverse', [False, True])


def scan_by(method, **options):
    options |= dict(delta_softplus=True, discretization_method=method)
    return functools.partial(selective_scan_fn, **options)


def cuts_of(batch, length, *steps):
    """Resets at these steps of every other row, and at the mirrored ones of the others."""
    reset = torch.zeros(batch, length, dtype=torch.bool)
    for step in steps:
        if step < length:
            reset[::2, step] = reset[1::2, length - 1 - step] = True
    return reset


# Of float32, where a GPU's ex2 is played by one that is always off by 2^-22, up or down.
ROUNDED = {torch.float32: 5e-6}
# At both ends of segments of 8 steps, of pieces of 16, of chunks of 64 and amid them; two in a row.
STEPS = (0, 1, 7, 8, 63, 64, 65, 79, 100, 127, 191)


def bounded(inputs, method, steps=STEPS):
    """Inputs and options of a scan that has both, where the method takes both."""
    if METHODS[method].causal:
        inputs = inputs | {'initial_state': states.new_state(inputs)}
    batch, length = inputs['u'].shape[0], inputs['u'].shape[-1]
    return inputs, dict(discretization_method=method, reset=cuts_of(batch, length, *steps))


@states.each_way
@pytest.mark.parametrize(
    ('dtype', 'length', 'count'),
    [
        (torch.float32, 132, 16),
        (torch.float16, 70, 5),
        (torch.bfloat16, 192, 16),
        (torch.bfloat16, 3, 16),
    ],
)
def test_resets(method, dtype, length, count, reverse):
    inputs = inputs_in(dtype, channels=9, length=length, states=count)
    inputs, options = bounded(inputs, method)
    compare(inputs, reverse=reverse, **options)


@states.each_causal_way
def test_initial_state_alone(method, reverse):
    inputs = inputs_in(torch.bfloat16, channels=9, length=132, states=16)
    inputs['initial_state'] = states.new_state(inputs)
    compare(inputs, discretization_method=method, reverse=reverse)


@states.each_way
@pytest.mark.parametrize('form', ['shared', 'constant_B_grouped_C', 'interleaved'])
def test_general_path(method, form, reverse):
    inputs = make_inputs(channels=18, length=70, states=20, form=form, dtype=torch.float32)
    inputs, options = bounded(inputs, method)
    compare(inputs, reverse=reverse, **options)


@pytest.mark.parametrize('method', ['zoh', 'poly'])
def test_any_strides(method):
    inputs = make_inputs(channels=9, length=70, states=16, dtype=torch.float32)
    inputs, options = bounded(inputs, method)
    inputs = strided_copies(inputs)
    options['reset'] = torch.stack([options['reset']] * 2, dim=-1)[..., 0]
    compare(inputs, **options)


# So many rows and channels that blocks share chunks, and that other scans have other kernels.
@pytest.mark.parametrize(
    ('method', 'batch', 'channels', 'length'),
    [('foh', 1, 200, 70), ('bilinear', 15, 70, 64), ('zoh', 2, 12, 712), ('poly', 1, 130, 70)],
)
def test_rows(method, batch, channels, length):
    inputs = inputs_in(torch.bfloat16, batch=batch, channels=channels, length=length, states=16)
    inputs, options = bounded(inputs, method, (*STEPS, 196, 392, 448))
    compare(inputs, **options)


@each_method
def test_groups_of_different_directions(method):
    inputs = grouped_inputs(
        groups=2, shared=('u',), channels=9, length=70, states=16, dtype=torch.float32
    )
    inputs, options = bounded(inputs, method)
    compare(
        inputs,
        selective_scan_grouped_fn,
        functools.partial(selective_scan_grouped_fn, use_cuda_kernel=False),
        reverse=(False, True),
        **options,
    )


@states.each_way
@pytest.mark.parametrize('dtype', [torch.float32, torch.complex64])
def test_packed_equals_alone(method, dtype, reverse):
    scan = scan_by(method, reverse=reverse)
    inputs = states.inputs_of(dtype, channels=9, length=150, states=16)
    inputs, options = bounded(inputs, method)
    reset = options['reset']
    packed = functools.partial(scan, reset=reset)
    states.compare(packed, states.alone(scan, reset, reverse), inputs, ROUNDED)


@states.each_causal_way
def test_pieces_equal_the_whole(method, reverse):
    scan = scan_by(method, reverse=reverse)
    inputs = states.inputs_of(torch.float32, channels=9, length=150, states=16)
    edges = (0, 1, 64, 64, 67, 140, 150)
    states.compare(states.in_pieces(scan, edges, reverse), scan, inputs, ROUNDED)


@both_directions
@pytest.mark.parametrize('given', [False, True])
def test_no_steps_hand_the_state_through(given, reverse):
    inputs = {'u': torch.rand(2, 3, 0), 'delta': torch.rand(2, 3, 0), 'A': -torch.rand(3, 4)}
    inputs |= {'B': torch.rand(2, 4, 0), 'C': torch.rand(2, 4, 0)}
    state = states.new_state(inputs)
    out, last_state = selective_scan_fn(
        **inputs, initial_state=state, reset=torch.zeros(2, 0, dtype=torch.bool), reverse=reverse,
        return_last_state=True,
    )  # fmt: skip
    assert torch.equal(last_state, state)
    weight = torch.rand_like(state)
    results = (last_state, weight) if given else (out, torch.empty_like(out))
    (grad,) = torch.autograd.grad(results[0], state, results[1])
    assert torch.equal(grad, weight if given else torch.zeros_like(weight))


@states.each_way
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('count', [4, 20])
def test_what_overflows_stays_in_its_sequence(method, dtype, count, reverse):
    """Steps 30 to 59 grow beyond float32, by several steps and by one; those beside them have the
    values and the gradients of a scan in which nothing grows."""
    inputs = inputs_in(dtype, batch=1, channels=3, length=90, states=count)
    del inputs['z'], inputs['delta_bias']
    quiet = {name: x.detach().clone() for name, x in inputs.items()}
    quiet['A'].fill_(0.1)
    quiet['delta'].fill_(0.01)
    loud = {name: x.clone() for name, x in quiet.items()}
    loud['delta'][..., 30:60] = 400.0
    loud['delta'][..., [30, 59]] = 1000.0
    loud['u'][..., 30:60] = 1e30
    reset = cuts_of(1, 90, 30, 60)
    keep = [*range(30), *range(60, 90)]
    timed = ('u', 'delta', 'B', 'C')

    def run(inputs):
        inputs = {name: x.requires_grad_() for name, x in inputs.items()}
        out = selective_scan_fn(
            **inputs, reset=reset, discretization_method=method, reverse=reverse
        )
        return out, torch.autograd.grad(out[..., keep].sum(), [inputs[name] for name in timed])

    out, grads = run(loud)
    expected, wanted = run(quiet)
    assert method == 'bilinear' or not out[..., 30:60].isfinite().all()
    for value, truth in zip((out, *grads), (expected, *wanted), strict=True):
        assert torch.equal(value[..., keep], truth[..., keep])


@pytest.mark.parametrize('method', ['zoh', 'poly'])
def test_the_same_bits_every_time(method):
    inputs = make_inputs(channels=200, length=132, states=16, dtype=torch.float32)
    inputs, options = bounded(inputs, method)
    once, again = (compare(inputs, **options) for _ in range(2))
    for name, value in once.items():
        assert torch.equal(value, again[name]), name
