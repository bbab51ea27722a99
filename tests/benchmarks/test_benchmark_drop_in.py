"""The benchmark of drop-ins, with ours in the place of mamba_ssm's extension as well."""

import json
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from benchmarks.measure.timing import ScanShape, make_inputs
from benchmarks.peers.scans import RawScanFunction, raw_oflex
from tests.scripts import load
from vim_mm.interop import mamba_ssm

FORWARD = ('fwd', 'forward')
SIZES = ['--batch', '2', '--dim', '6', '--seqlen', '10', '--dstate', '3', '--n_trials', '1']


@pytest.fixture(scope='module')
def tool():
    return load('benchmarks/benchmark_drop_in.py')


def arguments_of(tool, monkeypatch, *more):
    monkeypatch.setattr(sys, 'argv', ['tool', *SIZES, *more])
    return tool['parse_args']()


def test_the_function_over_an_extension_has_every_gradient():
    inputs = make_inputs(ScanShape(2, 6, 10, 3, 'fp64'), 'cpu')
    tensors = [*inputs.values()]
    ours = mamba_ssm.selective_scan_fn(*tensors, delta_softplus=True)
    written = RawScanFunction.apply(mamba_ssm.selective_scan_cuda, *tensors)
    torch.testing.assert_close(written, ours)
    grad = torch.randn_like(ours)
    expected = torch.autograd.grad(ours, tensors, grad)
    for name, one, two in zip(inputs, torch.autograd.grad(written, tensors, grad), expected):
        torch.testing.assert_close(one, two, msg=lambda m, n=name: f'{n}: {m}')


def test_the_scan_of_vmamba_has_every_gradient():
    inputs = make_inputs(ScanShape(2, 6, 10, 3, 'fp32'), 'cpu')
    del inputs['z']
    ours = mamba_ssm.selective_scan_fn(**inputs, delta_softplus=True)
    grad = torch.randn_like(ours)
    scan = raw_oflex(mamba_ssm.selective_scan_cuda_oflex, inputs, grad)
    result = scan.forward()
    torch.testing.assert_close(result[0], ours)
    expected = torch.autograd.grad(ours, [*inputs.values()], grad)
    for name, one, two in zip(inputs, scan.backward(result), expected, strict=True):
        torch.testing.assert_close(one, two, msg=lambda m, n=name: f'{n}: {m}')


def test_results_that_differ_are_told(tool, monkeypatch):
    def divided(extension, by):
        return SimpleNamespace(
            fwd=extension.fwd, bwd=lambda *arguments: [x / by for x in extension.bwd(*arguments)]
        )

    args = arguments_of(tool, monkeypatch, '--dtype', 'fp32')
    own = partial(getattr, mamba_ssm)
    monkeypatch.setitem(tool['scans'].__globals__, 'their_layer', own)
    for by, wrong in ((1, 0.0), (2, 1.0)):
        peers = {
            'mamba_ssm': divided(mamba_ssm.selective_scan_cuda, by),
            'VMamba': divided(mamba_ssm.selective_scan_cuda_oflex, by),
        }
        records = [*tool['records_of'](args, peers)]
        assert [r['library'] for r in records] == ['theirs', 'vim_mm'] * 10
        assert all(r['call'] > 0 for r in records)
        for r in records:
            is_layer, is_backward = 'inner' in r['function'], r['pass'] not in FORWARD
            expected = wrong if is_backward and not is_layer else 0
            assert abs(r['difference'] - expected) < 1e-5, r
        row = tool['report'](records).splitlines()[-1]
        assert 'bwd' in row and (f'{wrong:.1e}' in row or not wrong)


def test_where_one_library_is_there_the_others_rows_have_gaps(tool, monkeypatch):
    args = arguments_of(tool, monkeypatch, '--dtype', 'fp32')
    peers = {'VMamba': mamba_ssm.selective_scan_cuda_oflex}
    head, _, *rows = tool['report']([*tool['records_of'](args, peers)]).splitlines()
    assert [cell.strip() for cell in head.split('|')[4:-1]] == [
        'theirs, call',
        'vim_mm, call',
        'difference',
    ]
    timed = {row.split('|')[1].strip() for row in rows if row.split('|')[4].strip()}
    assert timed == {'selective_scan_cuda_oflex'}
    assert len(rows) == 10


def test_without_mamba_ssm_ours_is_timed(tool, tmp_path, monkeypatch, capsys):
    out = tmp_path / 'drop_in.json'
    tool['main'](arguments_of(tool, monkeypatch, '--out', str(out)))
    records = json.loads(out.read_text())['records']
    assert {(r['function'], r['pass'], r['library']) for r in records} == {
        ('selective_scan_fn', 'forward', 'vim_mm'),
        ('selective_scan_fn', 'forward and backward', 'vim_mm'),
        ('mamba_inner_fn', 'forward', 'vim_mm'),
        ('mamba_inner_fn', 'forward and backward', 'vim_mm'),
        ('mamba_inner_fn_no_out_proj', 'forward', 'vim_mm'),
        ('mamba_inner_fn_no_out_proj', 'forward and backward', 'vim_mm'),
        ('selective_scan_cuda', 'fwd', 'vim_mm'),
        ('selective_scan_cuda', 'bwd', 'vim_mm'),
        ('selective_scan_cuda_oflex', 'fwd', 'vim_mm'),
        ('selective_scan_cuda_oflex', 'bwd', 'vim_mm'),
    }
    assert 'mamba_ssm not timed, VMamba not timed' in capsys.readouterr().out
    monkeypatch.setattr(sys, 'argv', ['tool', '--batch', '2'])
    with pytest.raises(SystemExit):
        tool['parse_args']()
