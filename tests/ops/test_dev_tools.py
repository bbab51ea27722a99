"""What developers run on a GPU: every kernel, and how accurate the scans are."""

import sys

import pytest
import torch

from tests.scripts import load
from vim_mm.ops import METHODS, selective_scan

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device'),
]


@pytest.fixture
def run(monkeypatch, capsys):
    """Calls the tool's main function with these arguments: what it returns, and what it printed."""

    def run(tool, *arguments):
        monkeypatch.setattr(sys, 'argv', [tool, *arguments])
        script = load(tool)
        result = script['main'](script['parse_args']())
        return result, capsys.readouterr().out

    return run


def test_every_kernel(run):
    _, printed = run('dev/every_kernel.py', '--rows', 'eight', 'six', '--methods', 'poly')
    cases = printed.splitlines()
    with_states = [case for case in cases if case.endswith(' with_states')]
    assert len(cases) == 21, '8 layouts in the first rows, 5 of them in the others, 8 with states'
    assert len(with_states) == 8, 'with the first rows alone'
    assert cases[-1] == '21 of 21: poly fp32_odd six'


def test_which_kernels(run):
    _, printed = run('dev/which_kernels.py', '--dtype', 'fp32', '--strided')
    assert printed.startswith(
        'zoh\nthe general path, because a tensor is missing or not contiguous'
    )
    _, printed = run('dev/which_kernels.py', '--batch', '8', '--dim', '384')
    assert printed.startswith('zoh\nforward: 2048 rows or more; 384 blocks')


def test_scan_accuracy(run):
    result, printed = run('benchmarks/scan_accuracy.py', '--lengths', '1', '70')
    assert result == 0
    assert f'{len(METHODS) * 3 * 4 * 2 * 2} cases' in printed
    for method in METHODS:
        assert f'| {method} ' in printed


def test_scan_accuracy_finds_another_method(run, monkeypatch):
    """The scan on the GPU runs zoh under the name foh."""
    scan = selective_scan.selective_scan_fn

    def wrong(u, *arguments, discretization_method, **options):
        method = 'zoh' if u.is_cuda else discretization_method
        return scan(u, *arguments, discretization_method=method, **options)

    monkeypatch.setattr('benchmarks.scan.paths.selective_scan_fn', wrong)
    result, _ = run('benchmarks/scan_accuracy.py', '--lengths', '70', '--methods', 'foh')
    assert result == 1
