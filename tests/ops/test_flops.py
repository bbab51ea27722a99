"""Counted operations against counts by hand, each counter under its own convention."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.models.small import small_mixer
from vim_mm.ops import METHODS, flops, selective_scan_fn
from vim_mm.ops.block import fused_mixer

# By hand, for one state and step: docs/flops.md writes them out.
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
    arguments = mixer.to('meta').fused_arguments()
    with FlopCounterMode(display=False) as counter:
        out = fused_mixer(torch.empty(x.shape, device='meta', requires_grad=True), arguments)
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == 2 * (products + scans)
    backward = 2 * (2 * products + conv + dt + 3 * scans)
    assert counter.get_total_flops() == forward + backward


@each_method
def test_mmengine_counts_the_mixer(method):
    pytest.importorskip('mmengine')
    from mmengine.analysis import FlopAnalyzer, get_model_complexity_info

    import vim_mm.engine  # noqa: F401, registers the formula

    mixer, scans = small_mixer(discretization_method=method), 2 * by_hand(method, 2, 16, 11, 4)
    products = 22 * 8 * 32 + 2 * 22 * 16 * (4 + 9 + 1) + 22 * 16 * 8
    x = torch.randn(2, 11, 8)
    analyzer = FlopAnalyzer(mixer, (x,))
    assert analyzer.by_operator()['selective_scan_fwd'] == scans
    assert analyzer.total() == products + scans
    info = get_model_complexity_info(mixer, inputs=(x,), show_table=False, show_arch=False)
    assert info['flops'] == products + scans


def test_operators_of_triton_are_counted():
    pytest.importorskip('triton')
    u = torch.empty(2, 3, 8, 11, device='meta', requires_grad=True)
    M = torch.empty(2, 3, 4, 11, device='meta')
    A = torch.empty(3, 8, 4, device='meta')
    with FlopCounterMode(display=False) as counter:
        out, *_ = torch.ops.vim_mm.triton_scan_fwd(
            u, u, A, M, M, None, None, None, True, METHODS['foh'].id, [0, 0, 1]
        )
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == 2 * by_hand('foh', 2, 3 * 8, 11, 4)
    assert counter.get_total_flops() == 4 * forward
