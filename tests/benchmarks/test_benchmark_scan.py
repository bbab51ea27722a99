"""The benchmark as a user runs it, at a size that says nothing about speed."""

import json

import pytest
import torch

from benchmarks.scan import paths
from tests.scripts import load
from tests.tools.conftest import run_tool
from vim_mm.ops import METHODS

TINY = ('--batch', 1, '--dim', 4, '--seqlen', 16, '--dstate', 2, '--n_trials', 1)


def table_under(title, text):
    """Column -> cells of the first table after a title."""
    lines = text[text.index(title) :].split('\n\n')[1].splitlines()
    cells = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines]
    return dict(zip(cells[0], zip(*cells[2:], strict=True), strict=True))


@pytest.mark.slowest
def test_tables_hold_what_the_file_holds(tmp_path):
    printed = run_tool(
        'benchmarks/benchmark_scan.py', *TINY, '--backends', 'native', 'reference',
        '--out', 'figures.json', '--markdown', 'tables.md', cwd=tmp_path,
    )  # fmt: skip
    tables = (tmp_path / 'tables.md').read_text()
    assert tables in printed
    result = json.loads((tmp_path / 'figures.json').read_text())
    names = [*METHODS, *(f'{name} reference' for name in METHODS)]
    assert [r['scan'] for r in result['records']] == 2 * names
    assert [r['dt_bias'] for r in result['records']] == [-4.0] * len(names) + [0.0] * len(names)
    assert {'commit', 'date', 'torch'} <= result['environment'].keys()

    first = {r['scan']: r for r in result['records'][: len(names)]}
    forward = table_under('Forward, microseconds', tables)
    ratio = table_under('Forward, time of the column over time of zoh', tables)
    for name in names:
        assert float(forward[name][0]) == pytest.approx(1e6 * first[name]['forward'], rel=6e-3)
        assert first[name]['backward'] > 0
    assert float(ratio['zoh reference'][0]) == pytest.approx(
        first['zoh reference']['forward'] / first['zoh']['forward'], rel=6e-3, abs=6e-3
    )
    memory = {name: r['peak_bytes'] for name, r in first.items()}
    assert memory['zoh reference'] > memory['zoh'] > 0


@pytest.mark.slowest
def test_named_shapes_and_cost_over_the_length(tmp_path):
    printed = run_tool(
        'benchmarks/benchmark_scan.py', '--shapes', 'L1024', 't1024', '--dstate', 1, '--methods',
        'zoh', '--dt-bias', 0, '--n_trials', 1, cwd=tmp_path,
    )  # fmt: skip
    assert '(2, 384, 4096) bf16' in table_under('Forward, microseconds', printed)['(B, D, L)']
    assert table_under('Forward, nanoseconds per step', printed)['shape'] == ('L1024',)


@pytest.mark.parametrize('variable', ['VIM_USE_CUDA_KERNEL', 'VIM_MM_BACKEND'])
def test_no_variable_changes_the_path(monkeypatch, variable):
    monkeypatch.setenv(variable, {'VIM_MM_BACKEND': 'reference'}.get(variable, '0'))
    inputs = dict.fromkeys(('u', 'delta'), torch.randn(1, 2, 5)) | dict(A=-torch.ones(2, 1))
    inputs |= dict.fromkeys(('B', 'C'), torch.randn(1, 1, 5))
    with torch.profiler.profile() as recorded:
        paths.CPU_KERNEL.scan(inputs, 'zoh')
    assert any(event.key == 'vim_mm::selective_scan_fwd' for event in recorded.key_averages())


@pytest.fixture(scope='module')
def tool():
    return load('benchmarks/benchmark_scan.py')


def test_ratios_and_floors_by_hand(tool):
    """Two shapes; the peer takes 6 and 8 microseconds, zoh 2 and 4, foh 3 and 16."""
    records = [
        {'shape': shape, 'batch': 1, 'dim': 2, 'seqlen': 3, 'dstate': 4, 'dtype': 'bf16',
         'dt_bias': 0.0, 'forward_ex2_floor': 1e-6, 'forward_memory_floor': 5e-7, 'scan': scan,
         'forward': 1e-6 * time, 'backward': 2e-6 * time, 'peak_bytes': 2**20 * time}
        for shape, times in {'one': (6, 2, 3), 'two': (8, 4, 16)}.items()
        for scan, time in zip(('mamba_ssm', 'zoh', 'foh'), times, strict=True)
    ]  # fmt: skip
    text = tool['report'](records, ['mamba_ssm'])
    forward = table_under('Forward, microseconds', text)
    assert forward['ex2 floor'] == ('1', '1') and forward['memory floor'] == ('0.5', '0.5')
    assert forward['mamba_ssm'] == ('6', '8') and forward['foh'] == ('3', '16')
    assert table_under('Peak memory', text)['zoh'] == ('2', '4')
    gain = table_under('Forward, time of mamba_ssm over time of the column', text)
    assert gain['shape'] == ('one', 'two', 'least', 'greatest', 'mean')
    assert gain['zoh'] == ('3.00', '2.00', '2.00', '3.00', '2.45')
    assert gain['foh'] == ('2.00', '0.50', '0.50', '2.00', '1.00')
    cost = table_under('Backward, time of the column over time of zoh', text)
    assert cost['foh'] == ('1.50', '4.00', '1.50', '4.00', '2.45')


def test_a_peer_that_computes_something_else_is_an_error(tool):
    hold_to = tool['hold_to']
    ours = torch.linspace(-1, 1, 5)
    hold_to(ours, ours + 1e-6, 'peer', 'fp32')
    with pytest.raises(RuntimeError, match=r'peer differs from zoh by 1\.0e-02'):
        hold_to(ours, ours + 1e-2, 'peer', 'fp32')
    with pytest.raises(RuntimeError, match='nan'):
        hold_to(ours, ours * torch.nan, 'peer', 'fp32')


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_on_a_gpu(tmp_path):
    printed = run_tool(
        'benchmarks/benchmark_scan.py', *TINY, '--device', 'cuda', '--out', 'figures.json',
        cwd=tmp_path, CUDA_VISIBLE_DEVICES='0',
    )  # fmt: skip
    assert float(table_under('Forward, microseconds', printed)['ex2 floor'][0]) > 0
    card = json.loads((tmp_path / 'figures.json').read_text())['card']
    assert card['ex2'] > 1e11 and card['bandwidth'] > 1e10
