"""The benchmark of the stream, at sizes that say nothing about speed."""

import json
import sys
from types import SimpleNamespace

import pytest

from tests.scripts import load
from tests.tools.conftest import configs  # noqa: F401  fixture
from vim_mm.stream.running import Summary

pytest.importorskip('mmseg')
TOOL = 'analysis/benchmark_stream.py'
STAGES = ['decode', 'preprocess', 'backbone', 'head', 'postprocess', 'download', 'overlay']


@pytest.mark.slow
def test_stages_add_up_to_the_wall_clock(configs, tmp_path, monkeypatch, capsys):  # noqa: F811
    out = tmp_path / 'figures.json'
    arguments = [configs['seg'], '--sizes', '96x64', '80x80', '--forms', 'eager', 'graph']
    arguments += ['--frames', 5, '--device', 'cpu', '--out', out, '--debug']
    monkeypatch.setattr(sys, 'argv', [TOOL, *map(str, arguments)])
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)  # which the tool sets
    load(TOOL, '__main__')
    printed = capsys.readouterr().out
    records = json.loads(out.read_text())['records']
    measured = [record for record in records if record['form'] == 'eager']
    assert [(r['width'], r['height']) for r in measured] == [(96, 64), (80, 80)]
    for record in measured:
        assert [*record['stages']] == STAGES
        for times in (*record['stages'].values(), record['mask'], record['interval']):
            assert 0 < times['p50'] <= times['p90'] <= times['p99']
        assert record['mask']['p50'] > record['stages']['backbone']['p50']
        assert 0.7 < record['sum_of_wall'] < 1.05
        assert record['rate'] > 0 and 0 <= record['mask_beyond'] <= 1
    assert printed.count('| tiny_seg') == 4
    assert printed.count('graph: CUDA graphs need CUDA') == 2


def test_a_stream_that_the_user_ends_is_no_measurement(monkeypatch):
    tool = load(TOOL)
    ended = SimpleNamespace(run=lambda: Summary(predicted=60, interrupted=True))
    monkeypatch.setitem(tool['side_by_side'].__globals__, 'Stream', lambda *_, **__: ended)
    with pytest.raises(KeyboardInterrupt):
        tool['side_by_side'](None, None, None)


def test_what_does_not_add_up_or_failed_is_said():
    tables = load(TOOL)['tables']
    times = {'p50': 0.001, 'p90': 0.002, 'p99': 0.02}
    record = dict(model='m', size='', form='eager', height=2, width=4, rate=100.0)
    record |= dict(stages={'decode': times}, mask=times, interval=times, latency=times)
    record |= dict(mask_beyond=0.25, interval_beyond=0.0, sum_of_wall=0.8)
    failed = dict(model='n', size='4x2', form='graph', left_out='no room')
    text = tables([record, failed])
    assert '| m     | 4 x 2 | eager |' in text and '1 / 2 / 20' in text and '25.0 %' in text
    assert 'm, 4 x 2' not in text and 'm, , eager: the stages do not add up' in text
    assert text.endswith('left out: n, 4x2, graph: no room')
