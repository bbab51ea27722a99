"""The CUDA scan of few rows and many steps, split in time, where there is no GPU.

Numbers of rows and steps are a fourth of those on a GPU: see FEW_ROWS. Splits are whole windows of
256 steps, at most eight of them.
"""

import ctypes
import functools

import pytest
import torch

from tests.emulation.test_dispatch import kernels_of
from tests.emulation.test_emulation import (  # noqa: F401  a fixture and marks
    compare,
    emulated,
    half_precision,
    pytestmark,
)
from tests.ops.inputs import grouped_inputs, inputs_in, worst_error
from tests.ops.test_selective_scan_cuda import BOUNDS, compare_many_steps
from vim_mm.ops import selective_scan_fn, selective_scan_grouped_fn, selective_scan_ref
from vim_mm.ops.discretization import METHODS

STEPS = 2048  # the fewest that are split: eight splits of a window
SPLIT = [method for method in METHODS if method not in ('bilinear', 'poly')]
each_method = pytest.mark.parametrize('method', METHODS)
each_split_method = pytest.mark.parametrize('method', SPLIT)
both_directions = pytest.mark.parametrize('reverse', [False, True])


@pytest.fixture
def library(emulation_library):
    return ctypes.CDLL(str(emulation_library))


def count_launches(library, scan):
    """How many launches of 256 threads: a forward scan takes one, and two where time is split."""
    before = library.count_launches(256)
    scan()
    return library.count_launches(256) - before


# Splits of one window and of three, the last one of fewer windows and of a few steps; channels and
# states that fill tiles and not.
@each_split_method
@both_directions
@pytest.mark.parametrize(
    ('dtype', 'batch', 'channels', 'length', 'states'),
    [
        (torch.bfloat16, 2, 8, STEPS, 16),
        (torch.float16, 1, 3, 2060, 5),
        (torch.bfloat16, 1, 9, 4100, 16),
    ],
)
def test_splits(library, method, dtype, batch, channels, length, states, reverse):
    inputs = inputs_in(dtype, batch=batch, channels=channels, length=length, states=states)
    scan = functools.partial(compare, inputs, discretization_method=method, reverse=reverse)
    assert count_launches(library, scan) == 2 + 2 + 1  # forward, the sweep, sums of gradients


@half_precision
def test_groups_of_different_directions(dtype):
    inputs = grouped_inputs(groups=2, channels=9, length=2060, states=16, dtype=torch.float32)
    for name in ('u', 'delta', 'z', 'B', 'C'):
        inputs[name] = inputs[name].detach().to(dtype).requires_grad_()
    compare(
        inputs,
        selective_scan_grouped_fn,
        functools.partial(selective_scan_grouped_fn, use_cuda_kernel=False),
        reverse=(False, True),
        discretization_method='foh',
    )


def steady(dt, rates, length=STEPS, dtype=torch.bfloat16):
    """Inputs of a row for each of the rates, whose steps are all about `dt`."""
    inputs = inputs_in(dtype, batch=1, channels=len(rates), length=length, states=4)
    spread = 1 + 0.5 * torch.rand(1, len(rates), length)
    inputs['A'] = torch.tensor(rates)[:, None] * torch.linspace(0.25, 1, 4)
    inputs['delta'] = (dt * spread).to(dtype)
    for name in ('z', 'delta_bias'):
        del inputs[name]
    return {name: x.detach() for name, x in inputs.items()}


def run(inputs, scan=selective_scan_fn, **options):
    return scan(**inputs, return_last_state=True, **options)


def unsplit(inputs, **options):
    """The same scan by the kernels of rows that are not aligned, which are not split."""
    u = inputs['u']
    apart = u.new_empty(*u.shape[:-1], u.shape[-1] + 1)[..., :-1].copy_(u)
    return run({**inputs, 'u': apart}, **options)


def assert_near(results, expected, bound=BOUNDS[torch.bfloat16]):
    for value, truth in zip(results, expected, strict=True):
        assert torch.isfinite(value).all()
        assert worst_error(value, truth) <= bound


# From states that keep all, to such that forget a split within its last steps; slowly growing ones.
@each_split_method
@both_directions
@pytest.mark.parametrize(
    ('dt', 'rates'),
    [
        (0.001, (-16.0, -1.0, 1.0, 8.0)),
        (0.02, (-16.0, -1.0, 0.25, 1.0)),
        (0.7, (-16.0, -1.0, -0.01, 0.02)),
    ],
)
def test_step_sizes(method, dt, rates, reverse):
    inputs = steady(dt, rates)
    options = dict(discretization_method=method, reverse=reverse)
    wide = {name: x.double() for name, x in inputs.items()}
    assert_near(run(inputs, **options), run(wide, selective_scan_ref, **options))


# Over a split, these states keep from nearly all to e^-60 of what enters it.
@each_method
@both_directions
def test_states_that_hardly_decay(method, reverse):
    inputs = inputs_in(torch.bfloat16, batch=1, channels=8, length=8192, states=16)
    inputs['A'] = -torch.logspace(-4, -1.4, 8 * 16).view(8, 16).requires_grad_()
    reference = functools.partial(selective_scan_fn, use_cuda_kernel=False)
    options = dict(discretization_method=method, reverse=reverse, delta_softplus=True)
    compare_many_steps(inputs, selective_scan_fn, reference, **options)


def test_split_and_unsplit(library):
    inputs = steady(0.02, (-16.0, -0.1))
    assert count_launches(library, lambda: run(inputs)) == 2
    assert count_launches(library, lambda: unsplit(inputs)) == 1
    out, last_state = run(inputs)
    other_out, other_last_state = unsplit(inputs)
    assert worst_error(last_state, other_last_state) <= 5e-5
    assert worst_error(out, other_out) <= BOUNDS[torch.bfloat16]


@each_split_method
@both_directions
def test_nothing_stays_nothing_where_states_grow(method, reverse):
    """Over a split e^z is infinite, but of a state of 0, which stays 0 until there is an input."""
    inputs = steady(0.7, (16.0, 2.0))
    last, keep = (slice(8), slice(8, None)) if reverse else (slice(-8, None), slice(-8))
    inputs['u'][...] = 0
    inputs['u'][..., last] = 1e-30
    options = dict(discretization_method=method, reverse=reverse)
    out, last_state = run(inputs, **options)
    assert torch.equal(out[..., keep], torch.zeros_like(out[..., keep]))
    assert not out.isnan().any()
    assert not last_state.isnan().any()


@both_directions
def test_what_overflows_may_decay_to_nothing(reverse):
    """A split ends with infinite states, of which later ones leave nothing, which is not NaN."""
    inputs = steady(0.7, (16.0,))
    grown = slice(-512, -256) if reverse else slice(256, 512)
    inputs['delta'][...] = -0.7
    inputs['delta'][..., grown] = 0.7
    inputs['u'][...] = inputs['u'].abs() + 1
    inputs['B'][...] = inputs['B'].abs() + 1
    for name in ('C', 'D'):
        inputs[name][...] = 1
    out, last_state = run(inputs, reverse=reverse)
    behind = slice(None, -1024) if reverse else slice(1024, None)
    assert out[..., grown].isinf().any()
    assert not out[..., behind].isnan().any()
    assert not last_state.isnan().any()


@each_split_method
@both_directions
def test_no_gradient_stays_none_where_states_grow(method, reverse):
    """Likewise of the adjoint, which is 0 behind the steps whose outputs count."""
    inputs = steady(0.7, (1.0, 0.5))
    inputs['u'][...] = 0
    first, others = (slice(-8, None), slice(-8)) if reverse else (slice(8), slice(8, None))
    wanted = [inputs[name].requires_grad_() for name in ('u', 'delta')]
    out, _ = run(inputs, discretization_method=method, reverse=reverse)
    for grad in torch.autograd.grad(out[..., first].sum(), wanted):
        assert torch.equal(grad[..., others], torch.zeros_like(grad[..., others]))
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize('grown', [slice(1, 256), slice(256, 512)], ids=['within', 'over'])
def test_what_grows_beyond_e_to_the_88(grown):
    """That is infinite in float32; a tiny state that grows by as much is not."""
    inputs = steady(0.02, (0.39,))
    inputs['delta'][...] = 0
    inputs['delta'][..., 0] = inputs['delta'][..., grown] = 1
    inputs['u'][..., 0] = 1e-30
    inputs['u'][..., 1:] = 0
    inputs['B'][...] = 1
    wide = {name: x.double() for name, x in inputs.items()}
    expected = run(wide, selective_scan_ref)
    assert expected[1].max() > 1e12
    assert_near(run(inputs), expected)


def test_steps_of_both_signs():
    """The first step has a weight, but the sum of all steps of later windows alone has none."""
    inputs = steady(0.02, (-1.0,), length=2 * STEPS)  # splits of two windows
    inputs['delta'][...] = 0
    inputs['delta'][..., 0] = 1
    inputs['delta'][..., 1:256] = -0.45
    inputs['delta'][..., 256:511] = 0.45
    inputs['u'][..., 0] = 1e-30
    inputs['u'][..., 1:] = 0
    out, last_state = run(inputs)
    wide = {name: x.double() for name, x in inputs.items()}
    expected, last_expected = run(wide, selective_scan_ref)
    assert_near((out[..., 512:], last_state), (expected[..., 512:], last_expected))
    assert last_expected.abs().max() > 1e-32


@each_split_method
def test_the_same_bits_every_time(method):
    inputs = inputs_in(torch.bfloat16, channels=9, length=2060, states=16)
    once, again = (run(inputs, delta_softplus=True, discretization_method=method) for _ in range(2))
    for value, other in zip(once, again, strict=True):
        assert torch.equal(value, other)


def test_which_scans_are_split():
    def forward(**changes):
        return next(
            line for line in kernels_of(**dict(seqlen=STEPS) | changes) if 'forward' in line
        )

    def is_split(**changes):
        return 'time is split' in forward(**changes)

    assert '16 blocks of 256 threads' in forward()  # 2 sets of channels, 8 splits
    assert is_split(batch=66, dim=4)
    assert is_split(batch=1, dim=504)
    for method in METHODS:
        assert is_split(method=method) == (method in SPLIT)
    for change in (
        dict(seqlen=STEPS - 4),
        dict(seqlen=STEPS + 1),
        dict(batch=67, dim=4),
        dict(dtype='fp32'),
        dict(complex=True),
        dict(strided=True),
        dict(constant=True),
        dict(dstate=17),
        dict(reset=True),
    ):
        assert not is_split(**change), change
