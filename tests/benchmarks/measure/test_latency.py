"""Results side by side: their names, their tables, their picture, and files that hold none."""

import json
import sys
from pathlib import Path

import matplotlib.figure
import pytest

from benchmarks.measure import latency
from benchmarks.measure.latency import distinct_names, folder_name, own_name
from tests.scripts import load
from vim_mm.json_lines import read_json, read_json_lines

MIB = 2**20
DEEP = pytest.param(b'[' * 200_000, id='deep')


def record(name, speed, form='eager', **further):
    return {
        'name': name, 'path': 'config', 'heads': 'fast', 'size': [512, 512], 'batch': 8,
        'dtype': 'bf16', 'form': form, 'mode': 'infer', 'images_per_second': speed,
        'peak_bytes': MIB * speed, 'parameters': 10**6, **further,
    }  # fmt: skip


def result(*records):
    return {'environment': {'commit': 'x'}, 'records': [*records]}


def cells(row):
    """Those that hold figures."""
    return {name: cell for name, cell in row.items() if name not in ('model', 'pass')}


@pytest.fixture
def two_runs():
    """As run_benchmark_after_training.sh leaves them: files of one name."""
    return {
        f'work_dirs/{run}/benchmark.json': result(record(run, speed))
        for run, speed in (('zoh_seed0', 10.0), ('foh_seed0', 15.0))
    }


def test_two_files_of_one_name_have_columns_of_their_own(two_runs):
    (row,) = latency.comparison_rows(latency.under_one_name(two_runs))
    assert row['model'] == 'zoh_seed0 / foh_seed0'
    assert cells(row) == {
        'zoh_seed0, images/s': '10',
        'zoh_seed0, MiB': '10',
        'foh_seed0, images/s': '15',
        'foh_seed0, MiB': '15',
        'foh_seed0 over zoh_seed0': '1.50',
    }


def test_the_tool_compares_two_runs(two_runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for file, found in two_runs.items():
        Path(file).parent.mkdir(parents=True)
        Path(file).write_text(json.dumps(found))
    monkeypatch.setattr(sys, 'argv', ['compare_benchmarks.py', *two_runs])
    load('analysis/compare_benchmarks.py', '__main__')
    assert '| foh_seed0 over zoh_seed0 |' in capsys.readouterr().out


def test_models_of_a_file_with_several_find_those_of_their_name():
    """Else one model would be held against another."""
    results = {
        'a.json': result(record('zoh', 10.0), record('foh', 20.0)),
        'b.json': result(record('foh', 30.0)),
    }
    (row,) = latency.comparison_rows(latency.under_one_name(results))
    assert row['model'] == 'foh' and row['b over a'] == '1.50'


def test_the_legend_tells_results_apart_and_hides_no_bar(two_runs, tmp_path, monkeypatch):
    drawn = []
    save = matplotlib.figure.Figure.savefig

    def saved(figure, *args):
        drawn.append(figure)
        save(figure, *args)

    monkeypatch.setattr(matplotlib.figure.Figure, 'savefig', saved)
    latency.draw(latency.under_one_name(two_runs), tmp_path / 'both.png')
    (figure,) = drawn
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    (legend,) = filter(None, legends)
    assert [text.get_text() for text in legend.get_texts()] == ['zoh_seed0, x', 'foh_seed0, x']
    box = legend.get_window_extent()
    assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)
    assert all(axes.get_window_extent().height > 40 for axes in figure.axes)


def test_runs_of_one_name_are_no_parts_of_one_run():
    """One would hide the other."""

    def of(parent, form='eager'):
        return result(record('zoh_seed0', 10.0, form, checkpoint=f'{parent}/zoh_seed0/iter_4.pth'))

    for other in (of('b'), of('b', 'graph'), result(record('zoh_seed0', 10.0))):
        with pytest.raises(ValueError, match=r'zoh_seed0 has .*/a/zoh_seed0/iter_4\.pth in one'):
            latency.merge({'one': of('a'), 'other': other})
    merged = latency.merge({'one': of('a'), 'other': of(Path('a').resolve(), 'graph')})
    assert len(merged['records']) == 2


def test_a_result_that_was_cut_off_is_named(tmp_path):
    files = [tmp_path / 'whole.json', tmp_path / 'cut.json']
    for file in files:
        file.write_text(json.dumps(result(record('zoh', 1.0))))
    files[1].write_text(files[1].read_text()[:40])
    with pytest.raises(ValueError, match=f'^{files[1]} is no JSON file'):
        latency.read_results(files)


def by_stem_or_folder(*files):
    return [*distinct_names(files, lambda file: file.stem, folder_name).values()]


def test_the_shortest_names_that_tell_files_apart():
    assert by_stem_or_folder('a/before.json', 'a/after.json') == ['before', 'after']
    assert by_stem_or_folder('a/benchmark.json', 'b/benchmark.json') == ['a', 'b']
    paths = ['x/a/benchmark.json', 'y/a/benchmark.json', 'y/b/benchmark.json']
    assert by_stem_or_folder(*paths) == paths


def test_a_path_that_is_given_twice_is_one():
    assert distinct_names(['a/b', 'a/b'], own_name) == {'a/b': 'b'}


def test_the_folder_in_which_one_stands_has_a_name(tmp_path, monkeypatch):
    (tmp_path / 'run' / 'logs').mkdir(parents=True)
    monkeypatch.chdir(tmp_path / 'run' / 'logs')
    assert own_name(Path()) == 'logs' and own_name(Path('..')) == 'run'
    assert by_stem_or_folder('benchmark.json', '../benchmark.json') == ['logs', 'run']


@pytest.mark.parametrize('content', [b'{"records": [', b'', b'\xff\xfe', b'[1, 2]', DEEP])
def test_a_file_that_holds_no_record_is_named(content, tmp_path):
    file = tmp_path / 'cut.json'
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f'^{file} (is no JSON file|holds no JSON object)'):
        read_json(file)


@pytest.mark.parametrize('line', [DEEP, pytest.param(b'1' * 5000, id='long')])
def test_a_line_that_python_cannot_read_is_named(line, tmp_path):
    file = tmp_path / 'log.json'
    file.write_bytes(b'{"step": 1}\n' + line)
    with pytest.raises(ValueError, match=f'^{file}, line 2, is no JSON: '):
        list(read_json_lines(file))
