"""What developers run on a GPU: every kernel, and how accurate the scans are."""

import re
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.native import ROOT
from tests.scripts import load
from vim_mm.ops import METHODS, selective_scan
from vim_mm.ops.library import MISSING


def on_a_gpu(test):
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
    return pytest.mark.cuda(skip(test))


@pytest.fixture
def run(monkeypatch, capsys):
    """Calls the tool's main function with these arguments: what it returns, and what it printed."""

    def run(tool, *arguments):
        monkeypatch.setattr(sys, 'argv', [tool, *arguments])
        script = load(tool)
        result = script['main'](script['parse_args']())
        return result, capsys.readouterr().out

    return run


@on_a_gpu
def test_every_kernel(run):
    what = ('--what', 'scan', '--rows', 'eight', 'six', '--methods', 'poly')
    _, printed = run('dev/every_kernel.py', *what)
    cases = printed.splitlines()
    with_states = [case for case in cases if case.endswith(' with_states')]
    assert len(cases) == 21, '8 layouts in the first rows, 5 of them in the others, 8 with states'
    assert len(with_states) == 8, 'with the first rows alone'
    assert cases[-1] == '21 of 21: poly fp32_odd six'


@on_a_gpu
def test_every_kernel_of_the_block(run):
    _, printed = run('dev/every_kernel.py', '--what', 'block')
    *_, last = printed.splitlines()
    assert last == '58 of 58: mixer inference bfloat16'


class Called(TorchDispatchMode):
    """The names of this library's operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == 'vim_mm':
            self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


# Of the operators, those that run no kernel, and those of the scan's own cases.
WITHOUT_KERNELS = {'selective_scan_kernels', 'mixer_workspace', 'cpu_capability', 'build_info'}
OF_THE_SCAN = {'selective_scan_fwd', 'selective_scan_bwd'}


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_every_operator_of_the_block_is_in_a_case():
    """Of those whose schemas are in csrc/ops.cpp; on tensors without memory."""
    cases = load('dev/every_kernel.py')['block_cases'](METHODS, 'meta')
    with torch.library._scoped_library('vim_mm', 'IMPL') as library, Called() as called:
        library.impl('discretize', lambda delta, A, _: A.new_empty(6, *A.shape), 'Meta')
        names = [name for name, run in cases if run() is None]
    assert len({*names}) == 58
    defined = re.findall(r'm\.def\(\s*"(\w+)\(', (ROOT / 'csrc/ops.cpp').read_text())
    assert called.names >= {*defined} - WITHOUT_KERNELS - OF_THE_SCAN
    assert {*defined} >= WITHOUT_KERNELS | OF_THE_SCAN


@on_a_gpu
def test_which_kernels(run):
    _, printed = run('dev/which_kernels.py', '--dtype', 'fp32', '--strided')
    assert printed.startswith(
        'zoh\nthe general path, because a tensor is missing or not contiguous'
    )
    _, printed = run('dev/which_kernels.py', '--batch', '8', '--dim', '384')
    assert printed.startswith('zoh\nforward: 2048 rows or more; 384 blocks')
    _, printed = run('dev/which_kernels.py', '--initial-state', '--methods', 'zoh', 'poly')
    assert printed.startswith('zoh\nforward: an initial state or resets; ')
    assert printed.endswith('poly\nhas no initial state, because it scans from both ends\n')


@on_a_gpu
def test_scan_accuracy(run):
    result, printed = run('benchmarks/scan_accuracy.py', '--lengths', '1', '70')
    assert result == 0
    assert f'{len(METHODS) * 3 * 4 * 2 * 2} cases' in printed
    for method in METHODS:
        assert f'| {method} ' in printed


@on_a_gpu
def test_scan_accuracy_finds_another_method(run, monkeypatch):
    """The scan on the GPU runs zoh under the name foh."""
    scan = selective_scan.selective_scan_fn

    def wrong(u, *arguments, discretization_method, **options):
        method = 'zoh' if u.is_cuda else discretization_method
        return scan(u, *arguments, discretization_method=method, **options)

    monkeypatch.setattr('benchmarks.scan.paths.selective_scan_fn', wrong)
    result, _ = run('benchmarks/scan_accuracy.py', '--lengths', '70', '--methods', 'foh')
    assert result == 1
