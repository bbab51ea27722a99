"""Clocks, memory and floors: what a benchmark rests on."""

import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks.measure import timing
from benchmarks.measure.floors import Card
from benchmarks.measure.tables import figures
from benchmarks.measure.timing import (
    WARM_UP_CALLS,
    ScanShape,
    differentiable_scan,
    make_inputs,
    pass_times,
    peak_memory,
    steady_times,
    wall_times,
)


def test_calls_are_timed_one_by_one():
    pauses = iter([0.0] * WARM_UP_CALLS + [0.3, 0.1, 0.2])
    times = wall_times(lambda: time.sleep(next(pauses)), trials=3)
    assert [round(t, 1) for t in times] == [0.3, 0.1, 0.2]


@pytest.mark.parametrize(('seconds', 'calls'), [(0.0, 3), (0.1, 6)])
def test_time_is_limited(seconds, calls):
    times = wall_times(lambda: time.sleep(0.02), trials=100, seconds=seconds)
    assert 3 <= len(times) <= calls


def test_calls_that_follow_one_another():
    pauses = iter([0.2] * WARM_UP_CALLS + [0.06, 0.02, 0.04, 0.12])
    times = steady_times(lambda: time.sleep(next(pauses)), calls=2, rounds=2)
    assert times == [pytest.approx(0.04, abs=0.02), pytest.approx(0.08, abs=0.02)]


def test_passes_are_timed_apart():
    x = torch.ones(1, requires_grad=True)

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            time.sleep(0.05)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(0.15)
            return grad

    scan = differentiable_scan(lambda: Slow.apply(x), [x], torch.ones(1))
    times = pass_times(scan, 'cpu', trials=3)
    assert times == {
        'forward': pytest.approx(0.05, abs=0.025),
        'backward': pytest.approx(0.15, abs=0.025),
    }


def test_peak_memory_counts_what_lives_at_a_time():
    x = torch.ones(1000)

    def function():
        y = x + 1
        z = y + 1
        del y
        return z + 1

    assert peak_memory(function, 'cpu') == pytest.approx(
        2 * 4000, abs=64
    )  # the numbers 1 are tensors too


def test_inputs_have_the_dtypes_of_a_layer():
    inputs = make_inputs(ScanShape(2, 3, 5, 4, 'bf16'), 'cpu', dt_bias=0.0)
    assert {name for name, x in inputs.items() if x.dtype == torch.bfloat16} == set('uzBC') | {
        'delta'
    }
    assert all(x.requires_grad for x in inputs.values())
    assert inputs['A'][1].tolist() == [-1, -2, -3, -4]
    wide = make_inputs(ScanShape(2, 3, 5, 4, 'fp64'), 'cpu')
    assert {x.dtype for x in wide.values()} == {torch.float64}
    # Only the bias depends on the step size asked for.
    torch.testing.assert_close(inputs['delta_bias'].double() - 4, wide['delta_bias'])


def test_floors_by_hand():
    """(1, 2, 3), N = 4 in bf16: 24 exponentials; 6-element rows, 12-element states."""
    card = Card(ex2=48.0, ex2_source='', bandwidth=2.0)
    shape = ScanShape(1, 2, 3, 4, 'bf16')
    assert card.ex2_seconds(shape) == 0.5
    assert card.memory_seconds(shape, backward=False) == 4 * 6 + 2 * 12
    assert card.memory_seconds(shape, backward=True) == 7 * 6 + 4 * 12


@pytest.mark.parametrize(
    ('value', 'text'),
    [
        (0.012345, '0.0123'),
        (1.0, '1'),
        (9.996, '10'),
        (123.4, '123'),
        (12345.0, '12300'),
        (1.23e-5, '1.23e-05'),
        (0.0, '0'),
        (float('nan'), 'nan'),
    ],
)
def test_figures(value, text):
    assert figures(value) == text


def test_the_clocks_are_those_of_the_visible_card(monkeypatch):
    """nvidia-smi lists all cards, also those that CUDA_VISIBLE_DEVICES hides."""
    asked = []

    def run(command, **options):
        asked.extend(command)
        return SimpleNamespace(stdout='1980, 1980, 2619, 2619, 700.00\n')

    card = SimpleNamespace(uuid='00000000-1111-2222-3333-444444444444')
    monkeypatch.setattr(timing.subprocess, 'run', run)
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 0)
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda device: card)
    assert timing.clock_rates('cuda')['power.limit'] == '700.00'
    assert '--id=GPU-00000000-1111-2222-3333-444444444444' in asked
