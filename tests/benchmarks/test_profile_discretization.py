"""The profile as a user runs it, its dense subject, and a verdict that follows the figures."""

import json
import math
import re

import pytest
import torch

from benchmarks.measure.timing import ScanShape, make_inputs
from benchmarks.scan.dense_inverse import dense_coefficients, dense_scan
from benchmarks.scan.parallel import FORMS
from tests.scripts import load
from tests.tools.conftest import run_tool
from vim_mm.ops import METHODS, discretize, selective_scan_ref

TOOL = 'analysis/profile_discretization.py'
TINY = ('--batch', 2, '--dim', 3, '--seqlen', 12, '--dstate', 4, '--n_trials', 3)


@pytest.fixture(scope='module')
def tool():
    return load(TOOL)


@pytest.mark.slow
def test_every_method_by_every_path(tmp_path):
    printed = run_tool(TOOL, *TINY, '--out', 'figures.json', cwd=tmp_path)
    result = json.loads((tmp_path / 'figures.json').read_text())
    expected = [(m, path) for m in METHODS for path in ('CPU kernel', 'Python')]
    expected.insert(expected.index(('bilinear', 'Python')) + 1, ('bilinear', 'dense inverse'))
    for part in ('operations', 'scans'):
        if part == 'scans':
            expected.insert(
                expected.index(('bilinear', 'dense inverse')) + 1, ('bilinear', 'dense A')
            )
        assert [(r['method'], r['path']) for r in result[part]] == expected
        for record in result[part]:
            errors = [value for name, value in record.items() if name.endswith('_error')]
            assert len(errors) == 2 and all(0 <= error < 1e-5 for error in errors), record
            assert record['peak_bytes'] > 0
    assert all(r['forward_trials'] == r['backward_trials'] == 3 for r in result['scans'])
    assert result['verdict'] in printed
    for record in result['scans']:
        steps = 2 * 12
        assert record['forward_steps_per_second'] == pytest.approx(steps / record['forward'])
        both = record['forward'] + record['backward']
        assert record['both_steps_per_second'] == pytest.approx(steps / both)
    assert [r['path'] for r in result['bare']] == ['torch.exp', 'torch.linalg.inv']
    assert all(0 <= r['value_error'] < 1e-5 and r['seconds'] > 0 for r in result['bare'])
    assert 'The matrix inverse takes' in printed
    peak = {r['path']: r['peak_bytes'] for r in result['scans'] if r['method'] == 'bilinear'}
    assert peak['dense inverse'] > peak['Python'] > peak['CPU kernel']


@pytest.mark.slow
@pytest.mark.parametrize(('flag', 'part'), [('ops', 'operations'), ('scan', 'scans')])
def test_one_part_alone(tmp_path, flag, part):
    run_tool(TOOL, *TINY, f'--profile_{flag}', '--methods', 'rk4', '--out', 'f.json', cwd=tmp_path)
    result = json.loads((tmp_path / 'f.json').read_text())
    assert {'operations', 'scans'} & result.keys() == {part}
    assert ('bare' in result) == (part == 'operations')


@pytest.mark.slow
def test_parallel_scans_beside_the_kernel(tmp_path):
    options = ('--profile_scan', '--parallel_scans', '--methods', 'bilinear', 'poly')
    run_tool(TOOL, *TINY, *options, '--out', 'f.json', cwd=tmp_path)
    result = json.loads((tmp_path / 'f.json').read_text())['scans']
    forms = {r['path']: r for r in result if r['path'].endswith(' form')}
    assert [*forms] == [f'{form} form' for form in FORMS]
    assert {r['method'] for r in forms.values()} == {'bilinear'}
    assert all(r['out_error'] < 1e-5 and r['gradient_error'] < 1e-5 for r in forms.values())


@pytest.mark.parametrize('trials', ['0', '-3', 'two'])
def test_a_figure_needs_a_call(tool, trials, monkeypatch, capsys):
    monkeypatch.setattr('sys.argv', ['profile', '--n_trials', trials])
    with pytest.raises(SystemExit):
        tool['parse_args']()
    message = f'argument --n_trials: expected a whole number from 1, got {trials!r}'
    assert capsys.readouterr().err.strip().endswith(message)


def test_the_dense_inverse_is_bilinear(tool):
    inputs = make_inputs(ScanShape(2, 3, 9, 4, 'fp64'), 'cpu', dt_bias=0.0)
    dense = dense_scan(inputs)
    expected = selective_scan_ref(**inputs, delta_softplus=True, discretization_method='bilinear')
    torch.testing.assert_close(dense, expected, rtol=1e-12, atol=1e-12)
    grads = [
        torch.autograd.grad(y.square().sum(), list(inputs.values())) for y in (dense, expected)
    ]
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)

    steps, A = tool['steps_and_rates'](ScanShape(2, 3, 5, 4, 'fp64'), 'cpu')
    torch.testing.assert_close(
        dense_coefficients(steps, A), discretize(steps, A, 'bilinear'), rtol=1e-12, atol=0
    )


def test_what_does_not_fit_is_refused(tool):
    """A thousand rows of the dense scan at N = 64 need some GiB, a million some TiB."""
    (subject,) = (s for s in tool['subjects']('cpu', ['bilinear']) if s.path == 'dense inverse')
    shape = ScanShape(1000, 1000, 1000, 64)
    reason = tool['refusal'](lambda s: tool['scan_of'](subject, s).both, shape, 'cpu')
    needed = float(reason.split()[2])
    matrix = 4 * 1e9 * 64 * 64 / 2**30
    assert 3 * matrix < needed < 20 * matrix
    record = {'method': 'bilinear', 'path': 'dense inverse', 'refused': reason}
    assert tool['table']([record]).startswith(f'Refused: bilinear by dense inverse {reason}')


def test_what_fits_is_told_by_the_memory_that_is_free(tool, monkeypatch):
    """8 rows of 64 steps take 800 bytes here, and in proportion all the rest."""
    refusal = tool['refusal']
    part, whole = ScanShape(1, 8, 64, 4), ScanShape(4, 125, 4096, 4)
    needed = 800 * whole.size / part.size
    grown = needed * math.log(4097) / math.log(65)
    monkeypatch.setitem(refusal.__globals__, 'peak_memory', lambda call, device: call)
    for levels, exact in ((False, needed), (True, grown)):
        for free, fits in ((exact / 0.89, True), (exact / 0.91, False)):
            monkeypatch.setitem(refusal.__globals__, 'free_memory', lambda device, free=free: free)
            found = refusal(lambda shape: 800, whole, 'cpu', levels)
            assert (found is None) == fits


def test_the_inverse_is_compared_with_the_exponential(tool):
    exp, inverse = ({'seconds': s, 'peak_bytes': b} for s, b in ((2.0, 10), (9.0, 30)))
    assert tool['compare_bare']([exp, inverse]) == (
        'The matrix inverse takes 4.5 times as long as the exponential and 3.0 times its memory.'
    )


def test_units_of_the_table(tool):
    record = {'method': 'zoh', 'path': 'Python', 'forward': 0.002, 'backward': 0.003,
              'forward_steps_per_second': 5000.0, 'both_steps_per_second': 2000.0,
              'peak_bytes': 3 * 2**20, 'out_error': 1e-7}  # fmt: skip
    header, _, row = tool['table']([record]).splitlines()
    found = dict(zip(*(re.split(r'\s*\|\s*', line) for line in (header, row)), strict=True))
    del found['']
    assert found == {
        'method': 'zoh', 'path': 'Python', 'forward, ms': '2', 'backward, ms': '3',
        'forward, ksteps/s': '5', 'both, ksteps/s': '2', 'peak, MiB': '3', 'out error': '1.0e-07',
    }  # fmt: skip


def scans(**seconds):
    """Records of two methods, with the times of a path the same for both."""
    return [
        {'method': m, 'path': path, 'forward': t, 'backward': 2 * t, 'peak_bytes': 100 * t}
        for m in ('zoh', 'bilinear')
        for path, t in seconds.items()
        if m == 'bilinear' or path != 'dense inverse'
    ]


def test_the_verdict_follows_the_figures(tool):
    slow = {'CPU kernel': 1.0, 'Python': 8.0, 'dense inverse': 40.0}
    text = tool['verdict'](scans(**slow), 'cpu')
    assert 'faster than the CPU kernel for 0 of 2 methods; it takes 8.0 to 8.0 times' in text
    assert 'takes 40.0 times as long as its kernel forward' in text
    assert '5.0 times as long forward as Python without' in text
    assert text.endswith('holds for no method here.')
    fast = {'CPU kernel': 4.0, 'Python': 8.0, 'dense inverse': 2.0}
    text = tool['verdict'](scans(**fast), 'cpu')
    assert text.endswith('holds for bilinear by dense inverse.')
    text = tool['verdict'](scans(**{'CPU kernel': 4.0, 'Python': 2.0}), 'cpu')
    assert 'for 2 of 2 methods (zoh, bilinear); it takes 0.5' in text
    assert text.endswith('holds for zoh by Python, bilinear by Python.')
    assert tool['verdict'](scans(**{'Python': 2.0}), 'cpu').startswith('No verdict')


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_on_a_gpu(tmp_path):
    run_tool(TOOL, *TINY, '--out', 'figures.json', cwd=tmp_path, CUDA_VISIBLE_DEVICES='0')
    result = json.loads((tmp_path / 'figures.json').read_text())
    assert {r['path'] for r in result['scans']} == {
        'CUDA kernel', 'CPU kernel', 'Python', 'dense inverse', 'dense A'
    }  # fmt: skip
    assert all(r['out_error'] < 1e-4 for r in result['scans'])
