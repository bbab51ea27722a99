"""Counted operations against counts by hand, each counter under its own convention."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.models.small import small_mixer
from tests.registered.fresh import run_fresh
from vim_mm.models.fused import fused_arguments
from vim_mm.ops import METHODS, flops, library, selective_scan_fn
from vim_mm.ops.block import fused_mixer

# By hand, for one state and step: docs/measuring.md writes them out.
PER_STATE = dict(zoh=5, foh=11, bilinear=9, poly=14, highorder=15, rk4=10, zoh_exact=9)
each_method = pytest.mark.parametrize('method', METHODS)
BATCH, CHANNELS, LENGTH, STATES = 2, 6, 5, 3


def by_hand(method, batch=BATCH, channels=CHANNELS, length=LENGTH, states=STATES):
    """Multiply-adds of one scan."""
    return batch * length * channels * (states * PER_STATE[method] + 2)


def test_every_method_has_a_formula():
    assert METHODS.keys() <= flops.PER_STATE.keys() == PER_STATE.keys()


def scan(method, dtype=torch.float32):
    u, delta = (torch.rand(BATCH, CHANNELS, LENGTH, requires_grad=True) for _ in range(2))
    A = -torch.rand(CHANNELS, STATES, dtype=dtype)
    B, C = (torch.rand(BATCH, STATES, LENGTH, dtype=dtype) for _ in range(2))
    return selective_scan_fn(u, delta, A, B, C, discretization_method=method)


@each_method
def test_torch_counts_the_scan(method):
    with FlopCounterMode(display=False) as counter:
        out = scan(method)
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == 2 * by_hand(method)
    assert counter.get_total_flops() == 4 * forward


def test_complex_states_are_four():
    with FlopCounterMode(display=False) as counter:
        scan('zoh', torch.complex64)
    assert counter.get_total_flops() == 2 * BATCH * LENGTH * CHANNELS * (4 * 5 * STATES + 2)


@each_method
@pytest.mark.parametrize('backend', ['torch', 'reference'])
def test_torch_counts_the_scans_of_pytorch(backend, method, monkeypatch):
    monkeypatch.setenv('VIM_MM_BACKEND', backend)
    test_torch_counts_the_scan(method)


@pytest.mark.parametrize('backend', ['torch', 'reference'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.complex64])
@pytest.mark.parametrize('constant', [False, True])
@pytest.mark.parametrize('method', ['foh', 'poly'])
def test_a_scan_that_is_counted_is_the_same(backend, dtype, constant, method):
    torch.manual_seed(0)
    shape = (CHANNELS, STATES) if constant else (BATCH, STATES, LENGTH)
    tensors = [
        torch.rand(BATCH, CHANNELS, LENGTH),
        torch.rand(BATCH, CHANNELS, LENGTH),
        -torch.rand(CHANNELS, STATES, dtype=dtype),
        *torch.rand(2, *shape, dtype=dtype),
        torch.rand(CHANNELS),
        None,
        torch.rand(CHANNELS),
        torch.rand(BATCH, CHANNELS, STATES, dtype=dtype) if method == 'foh' else None,
    ]
    reset = torch.rand(BATCH, LENGTH) < 0.4

    def results():
        leaves = [None if x is None else x.clone().requires_grad_() for x in tensors]
        *given, initial_state = leaves
        out, last_state = selective_scan_fn(
            *given, True, True, method, reverse=True, backend=backend,
            initial_state=initial_state, reset=reset,
        )  # fmt: skip
        (out.sin().sum() + last_state.abs().sum()).backward()
        return [out, last_state, *(x.grad for x in leaves if x is not None)]

    expected = results()
    with FlopCounterMode(display=False):
        found = results()
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_a_scan_that_is_counted_has_no_second_derivative():
    u = torch.rand(BATCH, CHANNELS, LENGTH, requires_grad=True)
    A, B = torch.rand(CHANNELS, STATES), torch.rand(BATCH, STATES, LENGTH)
    with FlopCounterMode(display=False):
        out = selective_scan_fn(u, u, A, B, B, backend='reference')
        with pytest.raises(RuntimeError, match='no second derivative'):
            torch.autograd.grad(out.sum(), u, create_graph=True)


@each_method
@pytest.mark.parametrize('bimamba_type', ['none', 'v1', 'v2'])
def test_torch_counts_the_mixer(method, bimamba_type):
    """8 outer and 16 inner channels, 4 states, rank 1, 4 taps, two sequences of 11 steps."""
    mixer = small_mixer(bimamba_type=bimamba_type, discretization_method=method)
    x = torch.randn(2, 11, 8, requires_grad=True)
    sets = 2 if bimamba_type == 'v2' else 1
    directions = 1 if bimamba_type == 'none' else 2
    conv, dt = sets * 22 * 16 * 4, sets * 22 * 16
    products = 22 * 8 * 32 + conv + sets * 22 * 16 * 9 + dt + 22 * 16 * 8
    scans = directions * by_hand(method, 2, 16, 11, 4)
    with FlopCounterMode(display=False) as counter:
        mixer(x)
    # The counter's hooks have every module called.
    assert counter.get_total_flops() == 2 * (products + scans)
    arguments = fused_arguments(mixer.to('meta'))
    with FlopCounterMode(display=False) as counter:
        out = fused_mixer(torch.empty(x.shape, device='meta', requires_grad=True), arguments)
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == 2 * (products + scans)
    backward = 2 * (2 * products + conv + dt + 3 * scans)
    assert counter.get_total_flops() == forward + backward


@each_method
@pytest.mark.parametrize(
    'backend',
    ['native', *(pytest.param(b, marks=pytest.mark.slow) for b in ('torch', 'reference'))],
)
def test_mmengine_counts_the_mixer(backend, method, monkeypatch):
    if backend == 'native' and library.MISSING is not None:
        pytest.skip(library.MISSING)
    monkeypatch.setenv('VIM_MM_BACKEND', backend)
    pytest.importorskip('mmengine')
    from mmengine.analysis import FlopAnalyzer, get_model_complexity_info

    import vim_mm

    vim_mm.activate()  # which lets it see the scans of PyTorch's operators
    mixer, scans = small_mixer(discretization_method=method), 2 * by_hand(method, 2, 16, 11, 4)
    products = 22 * 8 * 32 + 2 * 22 * 16 * (4 + 9 + 1) + 22 * 16 * 8
    x = torch.randn(2, 11, 8)
    analyzer = FlopAnalyzer(mixer, (x,))
    operator = 'selective_scan_fwd' if backend == 'native' else f'{backend}_scan_fwd'
    assert analyzer.by_operator()[operator] == scans
    assert analyzer.total() == products + scans
    info = get_model_complexity_info(mixer, inputs=(x,), show_table=False, show_arch=False)
    assert info['flops'] == products + scans


@pytest.mark.parametrize('backend', ['torch', 'reference'])
def test_mmengine_counts_no_scan_of_pytorch_before_activation(backend, tmp_path):
    """As docs/measuring.md says: an import changes nothing of MMEngine's trace."""
    pytest.importorskip('mmengine')
    program = f"""
import os, torch
os.environ['VIM_MM_BACKEND'] = {backend!r}
import vim_mm
from mmengine.analysis import FlopAnalyzer
mixer = vim_mm.Mamba(8, d_state=4, expand=2)
counts = [[*FlopAnalyzer(mixer, (torch.randn(2, 11, 8),)).by_operator()]]
vim_mm.activate()
counts += [[*FlopAnalyzer(mixer, (torch.randn(2, 11, 8),)).by_operator()]]
print(counts)
"""
    found = run_fresh(program, tmp_path).splitlines()[-1]
    products = ['linear', 'conv']
    assert found == str([products, [*products, f'{backend}_scan_fwd']])


def test_operators_of_triton_are_counted():
    pytest.importorskip('triton')
    u = torch.empty(2, 3, 8, 11, device='meta', requires_grad=True)
    M = torch.empty(2, 3, 4, 11, device='meta')
    A = torch.empty(3, 8, 4, device='meta')
    with FlopCounterMode(display=False) as counter:
        out, *_ = torch.ops.vim_mm.triton_scan_fwd(
            u, u, A, M, M, *(None,) * 5, True, METHODS['foh'].id, [0, 0, 1]
        )
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == 2 * by_hand('foh', 2, 3 * 8, 11, 4)
    assert counter.get_total_flops() == 4 * forward


@pytest.mark.parametrize('backend', ['torch', 'reference'])
def test_a_trace_that_exports_takes_the_scan_apart(backend):
    """Its file is loaded where there is no vim_mm."""

    class Scan(torch.nn.Module):
        def forward(self, u):
            A = -torch.ones(3, 2)
            return selective_scan_fn(u, u, A, u[:, :2], u[:, :2], backend=backend)

    traced = torch.jit.trace(Scan(), torch.rand(1, 3, 4), check_trace=False)
    assert 'vim_mm::' not in str(traced.inlined_graph)


def test_a_counter_changes_no_forward_mode_derivative():
    u, A, B = torch.rand(1, 3, 4), -torch.ones(3, 2), torch.rand(1, 2, 4)

    def scan(x):
        return selective_scan_fn(x, u, A, B, B, backend='reference').sum()

    _, expected = torch.func.jvp(scan, (u,), (torch.ones_like(u),))
    with FlopCounterMode(display=False):
        _, found = torch.func.jvp(scan, (u,), (torch.ones_like(u),))
    assert found == expected != 0
