"""The benchmark of backbones, at sizes that say nothing about speed."""

import json
import math
import sys

import cv2
import pytest
import torch

from benchmarks.peers.backbones import GRAPHS, PUBLIC_VIM, Workload, contenders, hold_to, measure
from tests.benchmarks.test_benchmark_scan import table_under
from tests.models.small import small_backbone
from tests.scripts import load
from tests.tools.conftest import run_tool
from vim_mm.models.arguments import ARCHS

TINY = ('--n_trials', 1, '--seconds', 0, '--methods', 'zoh')


def run(tool, monkeypatch, *arguments):
    """The tool in this process, where models of 24 layers have two."""
    monkeypatch.setitem(ARCHS, 'tiny', ARCHS['tiny'] | {'num_layers': 2})
    monkeypatch.setattr(sys, 'argv', ['tool', *map(str, arguments)])
    tool['main'](tool['parse_args']())


@pytest.mark.slowest
def test_tables_hold_what_the_file_holds(tool, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(
        tool, monkeypatch, *TINY, '--images', '16x2', '48x1', '--modes', 'infer', 'graph', 'train',
        'train_cp', '--out', 'figures.json', '--markdown', 'tables.md', '--picture', 'sweep.png',
        '--peers', *PUBLIC_VIM, 'DeiT',
    )  # fmt: skip
    printed = ''.join(capsys.readouterr())
    tables = (tmp_path / 'tables.md').read_text()
    assert tables in printed
    assert 'left out: public Vim, its kernels need CUDA' in printed
    assert 'left out: public Vim without class token, its kernels need CUDA' in printed
    assert 'left out: zoh, graph: CUDA graphs need CUDA' in printed
    result = json.loads((tmp_path / 'figures.json').read_text())
    assert {'commit', 'date', 'torch'} <= result['environment'].keys()
    records = {(r['side'], r['model'], r['mode']): r for r in result['records']}
    assert [*records] == [
        (side, model, mode)
        for side in (16, 48) for model in ('zoh', 'DeiT') for mode in ('infer', 'train', 'train_cp')
    ]  # fmt: skip
    for mode, title in (('infer', 'Milliseconds'), ('train', 'Milliseconds')):
        section = tables[tables.index('## Inference' if mode == 'infer' else '## Training') :]
        for model, cells in list(table_under(title, section).items())[1:]:
            expected = [1e3 * records[side, model, mode]['seconds'] for side in (16, 48)]
            assert [float(cell) for cell in cells] == pytest.approx(expected, rel=6e-3)
    ratio = table_under('Peak memory in MiB, DeiT over the column', tables)['zoh']
    peak = {model: records[16, model, 'infer']['peak_bytes'] for model in ('zoh', 'DeiT')}
    assert float(ratio[0]) == pytest.approx(peak['DeiT'] / peak['zoh'], abs=6e-3)
    assert cv2.imread(str(tmp_path / 'sweep.png')).shape[1] > 500


@pytest.mark.slow
def test_recomputed_layers_take_less_memory():
    peaks = {}
    for mode, with_cp in (('train', False), ('train_cp', True)):
        model = small_backbone(
            out_type='raw', with_cp=with_cp, arch=dict(embed_dims=16, num_layers=6)
        )
        work = Workload(model, torch.randn(2, 3, 64, 64), 'fp32')
        peaks[mode] = measure(work, mode, trials=1, seconds=0)['peak_bytes']
        assert all(p.grad is None for p in model.parameters())
        assert peaks[mode] > work.stored_bytes()
    assert peaks['train_cp'] < 0.6 * peaks['train']


@pytest.mark.parametrize('arch', ['tiny', 'small'])
def test_layers_of_convnext(arch):
    """As many as what launches and the CPU's time are divided by."""
    peer = contenders(arch, [], ['ConvNeXt'])['ConvNeXt']
    with torch.device('meta'):
        model = peer.build(64, True)
        assert model(torch.empty(2, 3, 64, 64)).shape == (2, 768, 2, 2)
    assert sum(len(stage.blocks) for stage in model.stages) == peer.layers
    assert all(stage.grad_checkpointing for stage in model.stages)


@pytest.fixture(scope='module')
def tool():
    return load('benchmarks/benchmark_backbone.py')


@pytest.mark.parametrize(
    ('ours', 'side'),
    [
        ([8, 16, 32], None),  # always more than 4, 16 - nothing, 30
        ([3, 12, 29], 100),  # always less
        ([8, 32, 15], math.sqrt(200 * 400)),  # twice at 200, half at 400: in the middle, in logs
        ([3, 32, 15], math.sqrt(200 * 400)),  # what comes before the last crossing is no matter
    ],
)
def test_crossover_by_hand(tool, ours, side):
    found = tool['crossover']([100, 200, 400], ours, [4, 16, 30])
    assert found == (None if side is None else pytest.approx(side))


def test_report_by_hand(tool):
    """Ours takes 4 and 8 ms; public Vim 12 and 12, DeiT 2 and 16."""
    records = [
        {'side': side, 'batch': 2, 'model': model, 'mode': 'graph', 'layers': 24,
         'seconds': 1e-3 * ms}
        for side, times in {256: (4, 12, 2), 1024: (8, 12, 16)}.items()
        for model, ms in zip(('zoh', 'public Vim', 'DeiT'), times, strict=True)
    ]  # fmt: skip
    text = tool['report'](records)
    assert table_under('Milliseconds:', text)['DeiT'] == ('2', '16')
    assert table_under('Milliseconds, public Vim over the column', text)['zoh'] == ('3.00', '1.50')
    crossing = table_under('## Where ours cost less', text)
    assert crossing['ours'] == ('zoh',) and crossing['ours are below'] == ('from 512 on',)
    host = tool['host_table']([records[0] | {'launches': 240, 'host_seconds': 24e-4}])
    assert '| 10.0 |' in host.replace('  ', '') and host.splitlines()[-1].endswith(' 100 |')


def test_what_is_missing_leaves_a_gap(tool):
    """DeiT has no figure at 1024, zoh none at 2048; DeiT is cheaper at 512, ours at 2048."""
    times = {('zoh', 512): 2, ('zoh', 1024): 2, ('bilinear', 512): 2, ('bilinear', 1024): 2,
             ('bilinear', 2048): 2, ('DeiT', 512): 1, ('DeiT', 2048): 4}  # fmt: skip
    records = [
        {'side': side, 'batch': 2, 'model': model, 'mode': 'graph', 'layers': 24, 'seconds': ms}
        for (model, side), ms in times.items()
    ]
    text = tool['report'](records)
    ratio = table_under('Milliseconds, DeiT over the column', text)
    assert ratio['zoh'] == ('0.50', '') and ratio['bilinear'] == ('0.50', '2.00')
    crossing = table_under('## Where ours cost less', text)
    assert crossing['ours'] == ('bilinear',) and crossing['ours are below'] == ('from 1024 on',)


def test_an_interrupted_run_keeps_what_it_has(tool, tmp_path, monkeypatch, capsys):
    results = iter([{'seconds': 1.0}, {'seconds': 2.0}])

    def measure(*args):
        for result in results:
            return result
        raise KeyboardInterrupt

    monkeypatch.setitem(tool['main'].__globals__, 'measure', measure)
    out, picture = tmp_path / 'figures.json', tmp_path / 'sweep.png'
    options = [
        '--images',
        '16x1',
        '32x1',
        '48x1',
        '--methods',
        'zoh',
        '--peers',
        '--modes',
        'infer',
    ]
    monkeypatch.setattr(
        sys, 'argv', ['tool', *options, '--out', str(out), '--picture', str(picture)]
    )
    with pytest.raises(KeyboardInterrupt):
        tool['main'](tool['parse_args']())
    records = json.loads(out.read_text())['records']
    assert [(r['side'], r['seconds']) for r in records] == [(16, 1.0), (32, 2.0)]
    assert picture.exists() and '32 x 32, batch 1' in capsys.readouterr().out


@pytest.mark.slowest
def test_unknown_sizes_are_errors(tmp_path):
    printed = run_tool(
        'benchmarks/benchmark_backbone.py', '--images', '224', cwd=tmp_path, fails=True
    )
    assert "expected SIDExBATCH or one of ['standard', 'sweep'], got '224'" in printed


def test_a_peer_that_computes_something_else_is_an_error():
    ours = small_backbone(out_type='raw', out_feature='norm')
    theirs = small_backbone(out_type='raw', out_feature='norm')
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(1, 3, 32, 32)
    assert hold_to(ours, theirs, x) == 0
    with torch.no_grad():
        theirs.norm_f.weight *= 1.01
    with pytest.raises(RuntimeError, match=r'the outputs differ by .*: not comparable'):
        hold_to(ours, theirs, x)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_on_a_gpu(tmp_path):
    records = []
    for modes, more in (
        (('infer', 'graph', 'train'), ()),
        (('compiled_graph',), ('--methods', '--peers', 'DeiT')),  # of the fewest layers
    ):
        run_tool(
            'benchmarks/benchmark_backbone.py', *TINY, '--images', '32x1', '--device', 'cuda',
            '--out', f'{modes[0]}.json', '--modes', *modes, *more,
            cwd=tmp_path, CUDA_VISIBLE_DEVICES='0',
        )  # fmt: skip
        records += json.loads((tmp_path / f'{modes[0]}.json').read_text())['records']
    eager = [r for r in records if r['mode'] not in GRAPHS]
    assert {r['mode'] for r in records} == {'infer', 'graph', 'compiled_graph', 'train'}
    assert all(r['launches'] > r['layers'] and r['host_seconds'] > 0 for r in eager)
