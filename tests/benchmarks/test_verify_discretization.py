"""The verification passes what is right, and fails what the prior art did wrong."""

import dataclasses
import re
import sys

import pytest
import torch

from benchmarks.scan.paths import CPU_KERNEL, CUDA_KERNEL
from tests.scripts import load
from vim_mm.ops import METHODS, selective_scan
from vim_mm.ops.discretization import psi
from vim_mm.ops.reference import ScanInputs

TOOL = 'analysis/verify_discretization.py'
TINY = ('--dim', '2', '--seqlen', '9', '--dstate', '2', '--methods', 'zoh', 'foh')


def verify(monkeypatch, capsys):
    """Exit code, and the lines that failed, of the tool run in this process."""
    monkeypatch.setattr(sys, 'argv', [TOOL, *TINY])
    code = 0
    try:
        load(TOOL, '__main__')
    except SystemExit as exit_:  # a code of 0 is an end without it
        code = exit_.code
    printed = capsys.readouterr().out
    passed, failed = map(int, re.search(r'(\d+) passed, (\d+) failed\n$', printed).groups())
    assert passed + failed >= 60
    lines = re.findall('^FAIL  (.*)', printed, re.M)
    assert len(lines) == failed
    return code, lines


@pytest.mark.slow
def test_what_is_right_passes(monkeypatch, capsys):
    assert verify(monkeypatch, capsys) == (0, [])


@pytest.mark.slow
def test_a_truncated_coefficient_fails(monkeypatch, capsys):
    """foh's beta as a polynomial in z, as the prior art had it."""

    def truncated(dt, a):
        return psi(dt, a, 0), dt**2 * (1 / 2 + dt * a / 6 + (dt * a) ** 2 / 24)

    wrong = dataclasses.replace(METHODS['foh'], coefficients=truncated)
    monkeypatch.setitem(METHODS, 'foh', wrong)
    code, lines = verify(monkeypatch, capsys)
    assert code == 1
    assert any(re.match('foh +real +fp64 +Python .*beta', line) for line in lines)
    assert any(re.match('foh +stiff +fp64 +Python', line) for line in lines)
    assert not any(line.startswith('zoh') for line in lines)
    # Part 3 compares with the wrong reference; the exact values of parts 1 and 2 acquit the kernel.
    exact = [line for line in lines if re.search('real|complex|wards|stiff', line)]
    assert exact and not any(' kernel' in line for line in exact)


@pytest.mark.slow
def test_a_method_that_falls_back_to_another_fails(monkeypatch, capsys):
    """The kernel runs zoh under the name foh."""
    zoh = METHODS['zoh'].id
    call = lambda operator, *inputs: operator(*ScanInputs(*inputs)._replace(method=zoh))  # noqa: E731
    monkeypatch.setattr(selective_scan, 'call', call)
    code, lines = verify(monkeypatch, capsys)
    assert code == 1
    for path in (CPU_KERNEL, CUDA_KERNEL):
        differ = any(line.startswith(f'{path.name}: every pair differs') for line in lines)
        assert differ == (path.missing() is None)
    assert all(' kernel' in line for line in lines)
    assert any(re.match('foh +forwards', line) for line in lines)


def test_a_nan_fails():
    report = load(TOOL)['Report']()
    report.error('subject', {'one': 0.0, 'two': torch.nan, 'three': 1.0}, 1e-3)
    assert (report.passed, report.failed) == (0, 1)
