"""Tests of the Triton backend for Triton's interpreter; tests/ops/test_triton.py runs them.

By hand: ``TRITON_INTERPRET=1 python -m pytest tests/ops/interpreted.py``.
"""

import copy
import functools
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton.runtime.interpreter as interpreter

from tests.models.small import scramble
from tests.ops import test_states
from tests.ops.inputs import grouped_inputs, make_inputs, results_and_gradients, worst_error
from vim_mm.models import Mamba
from vim_mm.models.fused import fused_arguments
from vim_mm.ops import selective_scan_fn, selective_scan_grouped_fn
from vim_mm.ops.block import fused_block
from vim_mm.ops.discretization import METHODS
from vim_mm.ops.triton import block, scan

assert os.environ.get('TRITON_INTERPRET') == '1', 'set TRITON_INTERPRET=1'
triton_scan = functools.partial(selective_scan_fn, backend='triton')
BOUND = 2e-5  # as on CUDA, relative to the largest entry


def scan_by_slices(self, inputs):
    """The interpreter's scan goes by single entries, some thousand times more slowly than this."""
    data = [np.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
    results = [np.array(x) for x in data]
    for t in range(1, len(data[0])):
        before = [self.to_tensor(r[t - 1], x.dtype) for r, x in zip(results, inputs)]
        here = [self.to_tensor(d[t], x.dtype) for d, x in zip(data, inputs)]
        for result, value in zip(results, self.combine_fn.fn(*before, *here), strict=True):
            result[t] = value.handle.data
    moved = [np.moveaxis(r, 0, self.axis) for r in results]
    return [self.to_tensor(r, x.dtype) for r, x in zip(moved, inputs)]


def splat(self, kind, scalar, splat=interpreter.InterpreterBuilder.create_splat):
    """A comparison of scalars stays one: Triton 3.9 refuses integers as masks."""
    block = splat(self, kind, scalar)
    block.data = block.data.astype(scalar.data.dtype)
    return block


def patch_tensor(tensor, scope, patch=interpreter._patch_lang_tensor):
    """Triton 3.6 takes the `int` of an array of one entry, which NumPy 2.5 refuses."""
    patch(tensor, scope)
    scope.set_attr(tensor, '__index__', lambda self: self.handle.data.item())


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Two channels, and chunks of 16 and 8 steps: few programs, and several chunks each."""
    monkeypatch.setattr(interpreter.ScanOps, 'generic_scan', scan_by_slices)
    monkeypatch.setattr(interpreter.InterpreterBuilder, 'create_splat', splat)
    monkeypatch.setattr(interpreter, '_patch_lang_tensor', patch_tensor)
    monkeypatch.setattr(scan, 'forward_tile', lambda *_: scan.Tile(2, 1, 2, 8, 1))
    monkeypatch.setattr(scan, 'backward_tile', lambda *_: scan.Tile(1, 2, 2, 4, 4))
    monkeypatch.setattr(block, '_BLOCK', 16)
    monkeypatch.setattr(block, '_norm_tile', lambda channels: dict(BLOCK_R=4, BLOCK_C=8))
    # What is infinite or NaN and not selected is no mistake.
    with np.errstate(all='ignore'):
        yield


def compare(inputs, function=triton_scan, reference=None, **options):
    """Outputs and gradients against the reference in fp64."""
    reference = reference or functools.partial(selective_scan_fn, backend='reference')
    results = results_and_gradients(function, inputs, **options)
    wide = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    expected = results_and_gradients(reference, wide, **options)
    for name, value in results.items():
        assert torch.isfinite(value).all(), name
        error = worst_error(value, expected[name])
        assert error <= BOUND, f'{name} is off by {error:.1e}'


def test_two_chunks():
    """The fast one: a psi method, whose backward pass has everything, in a part of a tile."""
    inputs = make_inputs(batch=1, channels=1, length=17, states=2, dtype=torch.float32)
    compare(inputs, delta_softplus=True, discretization_method='foh')


@pytest.mark.slow
@pytest.mark.parametrize(('method', 'reverse'), [('zoh', True), ('foh', False), ('poly', False)])
def test_states_at_both_ends(method, reverse):
    inputs = make_inputs(batch=2, channels=2, length=19, states=1, dtype=torch.float32)
    if METHODS[method].causal:
        inputs['initial_state'] = torch.randn(2, 2, 1, requires_grad=True)
    reset = torch.rand(2, 19) < 0.2
    both = (
        functools.partial(selective_scan_fn, backend=backend, reset=reset)
        for backend in ('triton', 'reference')
    )
    compare(inputs, *both, delta_softplus=True, discretization_method=method, reverse=reverse)


@pytest.mark.slow
def test_states_as_on_a_gpu():
    """The test of overflow takes a minute for each direction."""
    test_states.test_no_steps_hand_the_state_through('triton', 'cpu', False)
    test_states.test_what_overflows_stays_in_its_sequence('triton', 'cpu', 'zoh', True)


@pytest.mark.slow
@pytest.mark.parametrize('reverse', [False, True])
def test_one_step_that_overflows_stays_in_its_sequence(reverse, monkeypatch):
    """A sequence begins amid the steps of a lane between others, and then A_bar is infinite."""
    monkeypatch.setattr(scan, 'backward_tile', lambda *_: scan.Tile(1, 1, 4, 4, 1))
    inputs = make_inputs(batch=1, channels=2, length=19, states=1, dtype=torch.float32)
    del inputs['z'], inputs['delta_bias']
    quiet = {name: x.detach().clone() for name, x in inputs.items()}
    quiet['A'].fill_(0.1)
    quiet['delta'].fill_(0.01)
    loud = {name: x.clone() for name, x in quiet.items()}
    loud['delta'][..., 5:14] = 1000.0
    reset = torch.zeros(1, 19, dtype=torch.bool)
    reset[0, [5, 14]] = True
    keep = [*range(5), *range(14, 19)]
    found = []
    for given in (loud, quiet):
        leaves = {name: x.requires_grad_() for name, x in given.items()}
        out = triton_scan(**leaves, reset=reset, reverse=reverse)
        timed = [leaves[name] for name in ('u', 'delta', 'B', 'C')]
        found.append((out, *torch.autograd.grad(out[..., keep].sum(), timed)))
    assert not found[0][0][..., 5:14].isfinite().all()
    for value, truth in zip(*found, strict=True):
        assert torch.equal(value[..., keep], truth[..., keep])


@pytest.mark.slow
def test_more_groups_than_a_launch_takes_directions_of(monkeypatch):
    """Here a launch takes two: the interpreter is slow. B is constant, and has no batch."""
    monkeypatch.setattr('vim_mm.ops.triton.MAX_MIXED_GROUPS', 2)
    inputs = grouped_inputs(3, batch=1, channels=1, length=3, states=1, dtype=torch.float32)
    inputs['B'] = torch.randn(3, 1, 1, requires_grad=True)
    both, reference = (
        functools.partial(selective_scan_grouped_fn, backend=backend, reverse=(False, True, True))
        for backend in ('triton', 'reference')
    )
    compare(inputs, both, reference)


# What a method does depends neither on the direction nor on the form of B and C. So a causal method
# and the other one meet every form, in one direction.
FORMS = [
    ('shared', 11, True),
    ('grouped', 8, True),
    ('constant', 3, False),
    ('constant_B_grouped_C', 19, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ('method', 'form', 'length', 'reverse'),
    [
        *((method, 'shared', 11, False) for method in METHODS),
        *((method, *form) for method in ('foh', 'poly') for form in FORMS),
    ],
)
def test_every_form(method, form, length, reverse):
    inputs = make_inputs(
        batch=1, channels=4, states=2, form=form, length=length, dtype=torch.float32
    )
    options = dict(discretization_method=method, reverse=reverse, delta_softplus=length > 8)
    compare(inputs, **options)


@pytest.mark.slow
@pytest.mark.parametrize('method', ['foh', 'poly'])
def test_two_groups(method):
    inputs = grouped_inputs(
        2, shared=('u', 'z'), batch=1, channels=4, length=11, states=2, dtype=torch.float32
    )
    both, reference = (
        functools.partial(selective_scan_grouped_fn, backend=backend)
        for backend in ('triton', 'reference')
    )
    compare(inputs, both, reference, discretization_method=method)


@pytest.mark.slow
@pytest.mark.parametrize(
    'options',
    [
        dict(bias=True, d_conv=3),
        dict(bimamba_type='none'),
        dict(bimamba_type='v1', conv_bias=False, if_divide_out=False),
    ],
    ids=['v2', 'none', 'v1'],
)
def test_the_block(options):
    """Norm, mixer and all gradients against plain PyTorch in fp64."""
    module = scramble(Mamba(6, d_state=2, expand=1, **options))
    truth = copy.deepcopy(module).double()
    truth.backend = 'reference'
    arguments = fused_arguments(module)._replace(backend='triton')
    given = [torch.randn(2, 9, 6), torch.randn(2, 9, 6), torch.randn(6)]
    grads = torch.randn(2, 2, 9, 6)

    def leaves(dtype):
        return [x.to(dtype).requires_grad_() for x in given]

    narrow, wide = leaves(torch.float32), leaves(torch.float64)
    outputs = fused_block(*narrow, 1e-5, torch.float32, arguments)
    with torch.no_grad():
        assert torch.equal(fused_block(*narrow, 1e-5, torch.float32, arguments)[0], outputs[0])
    total = wide[0] + wide[1]
    expected = truth.forward_plain(F.rms_norm(total, (6,), wide[2], 1e-5)), total
    found = torch.autograd.grad(outputs, [*narrow, *module.parameters()], [*grads])
    exact = torch.autograd.grad(expected, [*wide, *truth.parameters()], [*grads.double()])
    for value, wanted in zip((*outputs, *found), (*expected, *exact), strict=True):
        assert value.dtype == torch.float32 and value.shape == wanted.shape
        assert worst_error(value, wanted) <= BOUND
