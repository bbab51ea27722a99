"""The study's runs as they are read, its tables, and the pages that hold them."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.comparison.figure import draw_task
from benchmarks.comparison.results import summary_rows
from studies.discretization.study import RUNS, StudyTask, read_detectors, read_results
from studies.discretization.tables import (
    all_tables,
    detection_rows,
    other_rows,
    resolution_rows,
    secondary_rows,
    short_rows,
    with_costs,
    with_counts,
)
from tests.scripts import ROOT, load
from tests.tools.conftest import run_tool

STUDY = ROOT / 'studies/discretization'


@pytest.fixture(scope='module')
def tasks():
    return read_results()


@pytest.fixture(scope='module')
def report():
    return load('studies/discretization/report.py')


@pytest.fixture
def copy(tmp_path):
    """Runs that a test may change."""
    shutil.copytree(RUNS, tmp_path / 'runs')
    return tmp_path / 'runs'


def change(file, arm, seed, **changed):
    """Change the record of a run; without changes it is removed."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    lines = []
    for record in records:
        if (record['arm'], record.get('seed')) != (arm, seed):
            lines.append(record)
        elif changed:
            lines.append(record | changed)
    file.write_text(''.join(f'{json.dumps(line)}\n' for line in lines))


def test_every_planned_run_is_there(tasks, report):
    """426 lines, of which 11 are costs."""
    report['refuse_missing_runs'](tasks)
    runs = sum(len(runs) for t in tasks.values() for runs in (*t.runs.values(), *t.peers.values()))
    assert (runs, sum(len(task.costs) for task in tasks.values())) == (415, 11)
    assert {name: task.seeds for name, task in tasks.items()} == {
        **{name: [*range(12)] for name in ('fashion', 'scenes', 'recall', 'recall_dt0.01')},
        'long': [0],
    }


@pytest.mark.parametrize(('file', 'arm'), [('fashion', 'deit'), ('recall_dt0.01', 'foh_matched')])
def test_the_pages_are_not_made_while_runs_are_missing(file, arm, copy, report):
    change(copy / f'{file}.jsonl', arm, 1)
    with pytest.raises(ValueError, match=rf'{file}: {arm} has seeds \[0, 2'):
        report['refuse_missing_runs'](read_results(copy))


@pytest.mark.parametrize(
    ('key', 'changed'),
    [
        ('settings', {'settings': {'steps': 200}}),
        ('data', {'data': {'train': 'b'}}),
        ('torch', {'versions': {'torch': '2.4'}}),
    ],
)
def test_runs_of_other_settings_are_refused(key, changed, copy):
    file = copy / 'scenes.jsonl'
    change(file, 'foh', 4, **changed)
    with pytest.raises(
        ValueError, match=f'must have the same {key}: in {re.escape(str(file))} foh 4 has '
    ):
        read_results(copy)


def test_no_results(tmp_path):
    with pytest.raises(FileNotFoundError, match='holds no results of runs'):
        read_results(tmp_path)
    (tmp_path / 'a.jsonl').write_text('{"seed": 1}\n')
    with pytest.raises(ValueError, match=r'a\.jsonl holds a line without arm'):
        read_results(tmp_path)


def test_tables_of_other_runs_are_printed(copy, tmp_path):
    for file in copy.glob('*'):
        if file.stem != 'recall':
            file.unlink()
    printed = run_tool('studies/discretization/report.py', '--runs', copy, cwd=tmp_path)
    assert printed.startswith('recall: control\n\n| A ') and 'scenes' not in printed


def test_the_tables_of_the_pages_are_made_from_the_runs(report):
    for page, text in report['pages']().items():
        assert page.read_text() == text
        assert text.count('<!-- table: ') == text.count('<!-- end -->') >= 15
        tables = re.sub(r'<!-- table: .*?<!-- end -->', '', text, flags=re.S)
        assert not re.findall(r'^\| (?:A|method) +\|', tables, re.M)
        for picture in re.findall(r'!\[[^]]*\]\(([^)]+)\)', text):
            assert (page.parent / picture).exists()


def test_a_table_that_there_is_not_is_an_error(report):
    with pytest.raises(ValueError, match="there is no table 'x', there are"):
        report['fill']('<!-- table: x -->\n\n<!-- end -->', {'y': []})


def test_the_short_table(tasks):
    rows = {row['method']: row for row in short_rows([tasks['scenes']])}
    values = tasks['scenes'].metrics('zoh_exact')
    assert rows['zoh_exact']['scenes'] == f'{np.mean(values):.2f} ({np.std(values, ddof=1):.2f})'
    assert len(rows) == 7 and {name for name in rows if '*' in rows[name]['scenes, p']} == {
        'foh',
        'poly',
    }


def test_secondary_comparisons_name_the_variants(tasks):
    rows = secondary_rows(tasks['scenes'])
    assert [(row['A'], row['B']) for row in rows] == [
        ('foh, matched', 'zoh_exact'),
        ('foh, matched', 'foh'),
        ('zoh_exact, averaged', 'zoh_exact'),
        ('poly', 'zoh_exact, averaged'),
    ]
    values = [tasks['scenes'].metrics(arm) for arm in ('poly', 'zoh_exact_averaged')]
    assert rows[-1]['A - B'] == f'{np.mean(np.subtract(*values)):+.3f}'
    assert len(secondary_rows(tasks['recall'])) == 2


def test_tables_at_another_resolution_are_of_that_resolution(tasks):
    task = tasks['scenes']
    for row, arm in zip(resolution_rows(task), task.arms, strict=True):
        for name in ('1', '1.5', '1.5/dt', '2', '2/dt'):
            mean = np.mean([task.runs[arm][s]['resolutions'][name] for s in range(12)])
            assert row[name] == f'{mean:.2f}'
    assert resolution_rows(tasks['fashion']) == []


def recall_task():
    """Of 12 seeds `zoh` learns three and the control two, one of them the same."""
    metrics = {'zoh': [100.0, 20, 13] + 9 * [6.7], 'zoh_exact': [90.0, 6.7, 6.7, 30] + 8 * [6.7]}
    runs = {
        arm: {
            seed: {'metric': value, 'curve': [[1, 6.7, 1.0], [2, value, 0.5]]}
            for seed, value in enumerate(values)
        }
        for arm, values in metrics.items()
    }
    return StudyTask('recall_dt0.01', runs)


def test_a_task_that_few_runs_learn(tasks):
    """Runs above chance are counted: both medians are at chance."""
    task = recall_task()
    rows = with_counts(task, summary_rows(task))
    assert [row['above 10 %'] for row in rows] == ['3 of 12', '2 of 12']
    assert [row['above 50 %'] for row in rows] == ['1 of 12', '1 of 12']
    assert [row['above 10 %, control too'] for row in rows] == ['1', '2']
    assert [row['above 50 %, control too'] for row in rows] == ['1', '1']
    curves, ends = draw_task(task).axes
    assert len(curves.lines) == 25  # and chance
    for row, arm in enumerate(task.arms):
        points = ends.lines[row]
        np.testing.assert_allclose(points.get_xdata(), sorted(task.metrics(arm)))
        assert abs(points.get_ydata() - row).max() < 0.5
    rows = with_counts(tasks['scenes'], summary_rows(tasks['scenes']))
    assert not any('above' in name for row in rows for name in row)


def test_a_cost_without_memory(tasks):
    """The last line of an arm counts; an arm that was not measured has empty cells."""
    task = StudyTask('fashion', tasks['fashion'].runs, {'rk4': {'milliseconds': 2.0}})
    rows = {row['method']: row for row in with_costs(task, summary_rows(task))}
    assert (rows['rk4']['ms a step'], rows['rk4']['MiB']) == ('2.00', '')
    assert (rows['zoh']['ms a step'], rows['zoh']['MiB']) == ('', '')


def test_other_models_stand_in_a_table_of_their_own(tasks):
    """Not among the methods; and the longer run is in that table alone."""
    rows = {row['model']: row for row in other_rows(tasks['fashion'], tasks['long'])}
    deit = [run['metric'] for run in tasks['fashion'].peers['deit'].values()]
    assert rows['DeiT']['accuracy'] == f'{np.mean(deit):.2f}' and rows['DeiT']['seeds'] == '3'
    assert rows['Vim, zoh, 7 layers, 100 epochs, random erasing']['seeds'] == '1'
    assert rows['WRN-40-4, 8.9 million parameters, crops and flips']['accuracy'] == '96.7'
    tables = all_tables(tasks, [])
    assert not any('DeiT' in row['method'] for row in tables['fashion: methods'])
    assert not any(name.startswith('long') for name in tables)


def test_the_detectors_of_the_study():
    tasks = read_detectors()
    assert [task.name for task in tasks] == [
        f'mask_rcnn_vim_fashion {metric} AP' for metric in ('box', 'mask')
    ]
    for task in tasks:
        assert {*task.runs} == {'zoh', 'bilinear', 'poly', 'zoh_exact'}
        assert all([*runs] == [0, 1, 2] for runs in task.runs.values())
        assert {run['settings']['steps'] for *_, run in task.entries} == {4000}
    for row in detection_rows(tasks):
        assert (row['box AP - control'] == '') == (row['method'] == 'zoh_exact')


def test_the_runs_name_no_path_of_a_machine():
    machines = re.compile(r'/(root|home|work|opt|tmp|usr)\b')
    assert not any(machines.search(file.read_text()) for file in RUNS.glob('*'))


@pytest.mark.parametrize(
    ('task', 'readme', 'cells'),
    [
        ('segmentation', 'seg/README.md', {'mIoU': '.2f'}),
        ('detection', 'det/README.md', {'box AP': '.1f', 'mask AP': '.1f'}),
    ],
)
def test_the_table_of_models_on_scenes(task, readme, cells):
    record = json.loads((RUNS / 'models_on_scenes.json').read_text())[task]
    readme = (ROOT / readme).read_text()
    assert record['commit'] in readme and record['date'] in readme
    for run in record['runs']:
        config = Path(run['config'])
        (row,) = (
            line for line in readme.splitlines() if line.startswith('|') and config.name in line
        )
        quoted = [cell.strip() for cell in row.split('|')[3:-1]]
        figures = [format(run[name][-1][1], digits) for name, digits in cells.items()]
        assert quoted == [f'{run["parameters"] / 1e6:.1f}M', *figures]
        assert (STUDY / config).exists()
