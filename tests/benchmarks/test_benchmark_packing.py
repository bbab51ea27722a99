"""The benchmark of packing, at sizes that say nothing about speed."""

import json
import sys

import pytest
import torch

from tests.models.small import small_backbone
from tests.scripts import load
from vim_mm.models.arguments import ARCHS


@pytest.fixture(scope='module')
def tool():
    return load('benchmarks/benchmark_packing.py')


def test_the_ways_of_packing_give_the_features_alone(tool):
    model = small_backbone(cls_token='middle', out_type='cls_token').double()
    images = [torch.randn(3, *size, dtype=torch.double) for size in ((16, 40), (32, 8), (24, 24))]
    ways = tool['ways'](model, images, [1, 2])
    assert [*ways] == ['padded', 'alone', 'packed 1', 'packed 2']
    found = {name: features() for name, features in ways.items()}
    assert {tuple(x.shape) for x in found.values()} == {(3, 16)}
    torch.testing.assert_close(found['packed 1'], found['alone'])
    torch.testing.assert_close(found['packed 2'], found['alone'])
    assert (found['padded'] - found['alone']).abs().max() > 1e-3


@pytest.mark.slow
def test_the_table_holds_every_way(tool, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(ARCHS, 'tiny', ARCHS['tiny'] | {'num_layers': 2})
    out = tmp_path / 'packing.json'
    arguments = [
        '--images',
        '3',
        '--sides',
        '16',
        '48',
        '--rows',
        '1',
        '2',
        '--n_trials',
        '1',
        '--seconds',
        '0',
        '--dtype',
        'fp32',
    ]
    monkeypatch.setattr(sys, 'argv', ['tool', *arguments, '--out', str(out)])
    tool['main'](tool['parse_args']())
    printed = capsys.readouterr()
    assert 'left out: graph' in printed.err and '| packed 2 |' in printed.out
    result = json.loads(out.read_text())
    assert {(r['way'], r['mode']) for r in result['records']} == {
        (way, mode)
        for way in ('padded', 'alone', 'packed 1', 'packed 2') for mode in ('infer', 'train')
    }  # fmt: skip
    assert all(r['seconds'] > 0 for r in result['records'])
    facts = result['environment']
    assert facts['tokens with padding'] > facts['tokens'] > 0
