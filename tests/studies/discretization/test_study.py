"""The study's runs as they are read, its tables, and the pages that hold them."""

import json
import re
import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks.comparison.results import summary_rows
from studies.discretization.models.arms import ROUND_ONE, SPACED
from studies.discretization.models.other_models import PEERS
from studies.discretization.study import RUNS, StudyTask, read_detectors, read_results
from studies.discretization.tables.first import (
    all_tables,
    detection_rows,
    dividing_rows,
    equivalence_rows,
    loss_rows,
    other_rows,
    resolution_rows,
    secondary_rows,
    short_rows,
    with_costs,
)
from studies.discretization.tables.second import (
    endpoint_rows,
    plot_stiffness,
    repeated_rows,
    second_tables,
    state_rows,
    verdict_rows,
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
    """Of the first part 426 lines, of which 11 are costs."""
    tasks = {name: task for name, task in tasks.items() if not name.startswith('spacing')}
    report['refuse_missing_runs'](tasks)
    of_first = {*ROUND_ONE, *PEERS}
    runs = [
        len(runs)
        for task in tasks.values()
        for arm, runs in (task.runs | task.peers).items()
        if arm in of_first
    ]
    costs = sum(len(of_first & task.costs.keys()) for task in tasks.values())
    assert (sum(runs), costs) == (415, 11)
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
        shown = {page.parent / name for name in re.findall(r'!\[[^]]*\]\(([^)]+)\)', text)}
        drawn = [*page.parent.glob('*.png'), *page.parent.glob('images/*.png')]
        assert shown == {*drawn}


def test_a_table_that_there_is_not_is_an_error(report):
    with pytest.raises(ValueError, match="there is no table 'x', there are"):
        report['fill']('<!-- table: x -->\n\n<!-- end -->', {'y': []})


def test_the_short_table(tasks):
    rows = {row['method']: row for row in short_rows([tasks['scenes']])}
    values = tasks['scenes'].metrics('zoh_exact')
    assert rows['zoh_exact']['scenes'] == f'{np.mean(values):.2f} ({np.std(values, ddof=1):.2f})'
    assert len(rows) == 7
    d = np.subtract(tasks['scenes'].metrics('rk4'), values)
    truth = stats.ttest_1samp(d, 0).confidence_interval(1 - 0.05 / 6)
    bounds = f'{truth.low:+.2f} to {truth.high:+.2f}'
    assert rows['rk4']['scenes, simultaneous 95 % interval'] == bounds == '-0.17 to +0.70'


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


def test_most_runs_of_recall_stay_at_chance(tasks):
    """The sentence of the page that stands for their tables."""
    runs = [
        run['metric']
        for name in ('recall', 'recall_dt0.01')
        for by_seed in tasks[name].runs.values()
        for run in by_seed.values()
    ]
    assert (sum(metric < 10 for metric in runs), len(runs)) == (157, 192)


def test_equivalence_is_tested_against_the_margin(tasks):
    rows = equivalence_rows(tasks['scenes'])
    within = {row['A'] for row in rows if float(row['p, Holm']) < 0.05}
    assert within == {'zoh', 'bilinear', 'highorder', 'rk4'}
    control = np.array(tasks['scenes'].metrics('zoh_exact'))
    d = np.array(tasks['scenes'].metrics('rk4')) - control
    flips = np.array([*product((1, -1), repeat=12)])
    truth = np.mean(flips @ (0.7 - d) >= (0.7 - d).sum() - 1e-9)
    (row,) = (row for row in rows if row['A'] == 'rk4')
    assert float(row['p of TOST']) == pytest.approx(truth, abs=1e-4)
    assert equivalence_rows(tasks['recall']) == []


def test_losses_are_those_of_the_last_fifth(tasks):
    for row in loss_rows(tasks['fashion']):
        runs, control = (tasks['fashion'].runs[arm] for arm in (row['A'], 'zoh_exact'))
        d = [runs[s]['curve'][-1][2] - control[s]['curve'][-1][2] for s in range(12)]
        assert row['A - B'] == f'{np.mean(d):+.4f}'
        assert row['seeds in which A has more'] == f'{sum(x > 0 for x in d)} of 12'


def test_losses_of_a_diverged_run(tasks):
    runs = {arm: {s: dict(run) for s, run in tasks['fashion'].runs[arm].items()}
            for arm in ('zoh', 'rk4', 'zoh_exact')}  # fmt: skip
    runs['rk4'][3]['curve'] = [[2340, 10.0, None]]
    assert [row['A'] for row in loss_rows(StudyTask('fashion', runs))] == ['zoh']


def test_what_dividing_dt_gains(tasks):
    rows = dividing_rows(tasks['scenes'])
    assert len(rows) == 12
    (zoh,) = (row for row in rows if (row['A'], row['from']) == ('zoh', '1.5'))
    gains = [
        np.array(tasks['scenes'].metrics(arm, '1.5/dt')) - tasks['scenes'].metrics(arm, '1.5')
        for arm in ('zoh', 'zoh_exact')
    ]
    assert zoh['A - B'] == f'{np.mean(gains[0] - gains[1]):+.3f}' == '-0.462'


def spacing_task(seeds=8):
    """Zoh loses a point more than the control at stride 2, the others nothing."""
    rng = np.random.default_rng(0)
    runs = {}
    for arm in SPACED:
        runs[arm] = {}
        for seed in range(seeds):
            base = 40 + rng.normal(0, 0.3)
            tests = dict.fromkeys(('8', '8, dt', '2', '2, dt', '2, dt, dilated'), base - 5)
            tests['2, dt'] -= (arm == 'zoh') + rng.normal(0, 0.05)
            tests['8, dt'] += rng.normal(0, 0.05)
            shares = np.zeros((2, 36))
            shares[:, 20 + (arm == 'zoh')] = 1
            runs[arm][seed] = {
                'metric': base,
                'curve': [[4000, base, 0.3 + 0.01 * (arm == 'zoh')]],
                'spacings': {**tests, '4': base},
                'stiffness': {'shares': shares.tolist()},
            }
    return StudyTask('spacing_dt1', runs)


@pytest.mark.slowest
def test_the_primary_endpoint_of_the_second_round(tmp_path):
    task = spacing_task()
    tables = second_tables({'spacing_dt1': task})
    rows = tables['spacing_dt1: endpoint']
    assert [(row['to'], row['A']) for row in rows] == [
        (to, task.title(arm)) for to in ('2, dt', '8, dt') for arm in SPACED if arm != 'zoh_exact'
    ]
    changes = [
        [task.runs[arm][s]['spacings']['2, dt'] - task.runs[arm][s]['metric'] for s in range(8)]
        for arm in ('zoh', 'zoh_exact')
    ]
    d = np.subtract(*changes)
    truth = stats.ttest_1samp(d, 0).confidence_interval(1 - 0.05 / 8)
    assert rows[0]['A - B'] == f'{d.mean():+.3f}'
    assert rows[0]['simultaneous 95 % interval'] == f'{truth.low:+.3f} to {truth.high:+.3f}'
    assert [float(row['TOST, Holm']) < 0.05 for row in rows] == [False] + 7 * [True]
    assert [float(row['p, Holm']) < 0.07 for row in rows] == [True] + 7 * [False]
    metric = tables['spacing_dt1: metric']
    assert [row['loss, A - B'] for row in metric] == ['+0.0100'] + 3 * ['+0.0000']
    # A seed that one arm lacks leaves the comparisons of that arm alone.
    del task.runs['bilinear'][3]
    rows = second_tables({'spacing_dt1': task})['spacing_dt1: endpoint']
    assert rows[0]['A - B'] == f'{d.mean():+.3f}'
    levels = {row['method']: row['median'] for row in tables['spacing_dt1: stiffness']}
    assert len(levels) == 5 and levels['zoh'] != levels['zoh_exact']
    assert plot_stiffness(task, tmp_path / 'z.png') and (tmp_path / 'z.png').stat().st_size > 5000
    assert not plot_stiffness(StudyTask('fashion', {'zoh': {0: {}}}), tmp_path / 'none.png')
    assert not (tmp_path / 'none.png').exists()


def test_a_family_has_the_size_of_the_protocol():
    """Comparisons whose runs are missing count, so intervals do not grow when they come."""
    task = spacing_task()
    whole = endpoint_rows(task)
    del task.runs['exp_trapezoidal'], task.runs['foh_two_sample']
    part = endpoint_rows(task)
    names = 'simultaneous 95 % interval', 'A - B'
    assert [[row[name] for name in names] for row in part] == [
        [row[name] for name in names] for row in whole if row['A'] in ('zoh', 'bilinear')
    ]
    assert [row['p, Holm'] for row in part] == [
        f'{min(1, 8 * 2 / 2**8):.4f}' if row['A - B'] == whole[0]['A - B'] else row['p, Holm']
        for row in part
    ]


def spaced_task(loss):
    """All seeds; zoh loses ``loss`` more than the control at stride 2."""
    task, rng = spacing_task(16), np.random.default_rng(1)
    for arm, runs in task.runs.items():
        for run in runs.values():
            run['spacings']['2, dt'] = run['metric'] - 20 - loss * (arm == 'zoh')
            run['spacings']['2, dt'] += rng.normal(0, 0.02)
    return task


@pytest.mark.parametrize(
    ('loss', 'expected'),
    [
        (1.5, ('worse', 'take exact integration where the spacing of tokens varies')),
        (0.7, ('worse', 'undecided')),
        (0.2, ('worse, equivalent', 'take zoh')),
        (0.0, ('equivalent', 'take zoh')),
        (-0.7, ('better', 'undecided')),
    ],
)
def test_the_fixed_rule(loss, expected):
    rows = {row['method']: row for row in verdict_rows(spaced_task(loss))}
    assert (rows['zoh']['at 2, dt'], rows['zoh']['what follows']) == expected
    assert rows['bilinear']['at 2, dt'] == 'equivalent' and not rows['bilinear']['what follows']


def test_the_rule_speaks_once_of_all_seeds():
    """Not after each session, which would be as many tests."""
    task = spaced_task(1.5)
    del task.runs['zoh'][15]
    assert [row['method'] for row in verdict_rows(task)] == [
        task.title(arm) for arm in SPACED if arm not in ('zoh', 'zoh_exact')
    ]
    del task.runs['zoh_exact'][0]
    assert verdict_rows(task) == [] and len(endpoint_rows(task)) == 8


@pytest.mark.parametrize('broken', ['zoh', 'zoh_exact'])
def test_a_diverged_run_is_named_and_is_no_gain(broken):
    """Its mIoU is the same at all strides, so it loses nothing; the rows count it."""
    task = spaced_task(1.5)
    run = task.runs[broken][3]
    run |= {'metric': 4.5, 'diverged': True, 'curve': [[4000, 4.5, None]]}
    run['spacings'] = dict.fromkeys(run['spacings'], 4.5)
    run['stiffness'] = {'shares': np.eye(36)[[-1, -1]].tolist()}
    tables = second_tables({'spacing_dt1': task})
    assert tables['second: state'][0]['diverged'] == f'{broken} 3'
    rows = {row['method']: row for row in tables['spacing_dt1: verdict']}
    assert (rows['zoh']['at 2, dt'], rows['zoh']['what follows']) == ('a run diverged', 'undecided')
    assert rows['bilinear']['at 2, dt'] == ('equivalent' if broken == 'zoh' else 'a run diverged')
    zoh, bilinear, *_ = tables['spacing_dt1: metric']
    losses = [bool(row.get('loss, A - B')) for row in (zoh, bilinear)]
    assert losses == [False, broken == 'zoh']
    assert float(zoh['A - B']) * (-1 if broken == 'zoh' else 1) > 2
    levels = tables['spacing_dt1: stiffness'], second_tables({'spacing_dt1': spaced_task(0)})
    assert levels[0] == levels[1]['spacing_dt1: stiffness']


def test_the_fixed_rule_is_of_the_primary_hypothesis_alone():
    """The other setting of the task has the same endpoint, and no sentences."""
    tables = second_tables(dict.fromkeys(('spacing', 'spacing_dt1'), spacing_task()))
    assert [name for name in tables if name.endswith('verdict')] == ['spacing_dt1: verdict']
    assert tables['spacing: endpoint'] == tables['spacing_dt1: endpoint']


def test_too_few_pairs_are_no_row():
    """And what is not shown is not found: Holm's correction counts it with p = 1."""
    task = spacing_task()
    whole = endpoint_rows(task)
    task.runs['bilinear'] = {seed: task.runs['bilinear'][seed] for seed in range(5)}
    tables = second_tables({'spacing_dt1': task})
    names = [task.title(arm) for arm in ('zoh', 'exp_trapezoidal', 'foh_two_sample')]
    for name, count in (('endpoint', 2), ('other', 3), ('metric', 1)):
        assert [row['A'] for row in tables[f'spacing_dt1: {name}']] == count * names
    assert {row['method'] for row in tables['spacing_dt1: spacing']} == {*names, 'zoh_exact'}
    assert endpoint_rows(task)[0]['p, Holm'] == whole[0]['p, Holm']
    assert tables['scenes: again'] == tables['spacing: endpoint'] == []


def test_pairs_of_one_commit_and_card_are_counted():
    task = spacing_task()
    for arm, commits in (('zoh', 'aaaaabbb'), ('zoh_exact', 'aaabbbbb')):
        for seed, run in task.runs[arm].items():
            run |= {'commit': commits[seed], 'card': 'H100'}
    cells = endpoint_rows(task)[0]
    assert (cells['pairs'], cells['of one commit and card']) == ('8', '6')
    state = state_rows({'spacing_dt1': task})[0]
    assert (state['commit'], state['card']) == ('a, b', 'H100')


def test_the_detectable_difference_is_that_of_the_family():
    task, rng = spacing_task(16), np.random.default_rng(1)
    for run in task.runs['zoh'].values():
        run['spacings']['2, dt'] += rng.normal(-3, 1)
    row = endpoint_rows(task)[0]
    changes = [
        [task.runs[arm][s]['spacings']['2, dt'] - task.runs[arm][s]['metric'] for s in range(16)]
        for arm in ('zoh', 'zoh_exact')
    ]
    effect = float(row['detectable']) / np.std(np.subtract(*changes), ddof=1)
    critical = stats.t.isf(0.05 / 16, 15)
    assert stats.nct.sf(critical, 15, 4 * effect) == pytest.approx(0.8, abs=0.02)
    assert (row['p'], row['p, Holm']) == ('< 0.0001', '0.0002')


def test_what_is_complete_is_said():
    task = spacing_task()
    rows = state_rows({'spacing_dt1': task})
    assert [row['runs'].partition(':')[0] for row in rows] == [
        'spacing_dt1', 'spacing_dt1', 'scenes', 'scenes', 'spacing_dt1', 'spacing', 'fashion',
        'fashion',
    ]  # fmt: skip
    assert [row['made'] for row in rows] == ['24', '8', '0', '0', '8', '0', '0', '0']
    assert rows[0]['planned'] == '48' and rows[0]['complete'] == '8 of 16 seeds'
    del task.runs['bilinear'][3], task.runs['zoh'][7]
    assert state_rows({'spacing_dt1': task})[0]['complete'] == '6 of 16 seeds'
    for arm in SPACED:
        task.runs[arm] = dict.fromkeys(range(16), task.runs['zoh'][0])
    assert state_rows({'spacing_dt1': task})[0]['complete'] == 'all'
    assert state_rows({}) == []


def test_runs_of_the_second_round_leave_the_tables_of_the_first(tasks):
    """They are compared among themselves and with round one's, over the seeds that they have."""
    task = tasks['scenes']
    runs = {arm: task.runs[arm] for arm in ROUND_ONE}
    for arm, like, shift in (
        ('rk4_published', 'rk4', -2.0),
        ('zoh_exact_again', 'zoh_exact', 0.0),
    ):
        runs[arm] = {
            s: run | {'metric': run['metric'] + shift}
            for s, run in task.runs[like].items()
            if s < 9
        }
    more = StudyTask('scenes', runs, task.costs)
    assert all_tables({'scenes': more}, []) == all_tables({'scenes': task}, [])
    tables = second_tables({'scenes': more})
    against_zoh, against_itself = tables['scenes: published']
    assert (against_zoh['B'], against_itself['B']) == ('zoh', 'rk4')
    assert against_itself['A - B'] == '-2.000' and against_itself['pairs'] == '9'
    (course,) = tables['scenes: course']
    assert (course['runs'], course['collapsed'], course['stagnating']) == ('9', '0', '0')
    for seed, metric in ((0, 20.0), (1, 30.0)):  # half of what zoh has is 23.2
        run = dict(more.runs['rk4_published'][seed], metric=metric)
        run['curve'] = [*run['curve'][:-1], [4000, metric, 0.3]]
        more.runs['rk4_published'][seed] = run
    (course,) = second_tables({'scenes': more})['scenes: course']
    assert (course['collapsed'], course['stagnating']) == ('1', '2')
    (again,) = tables['scenes: again']
    assert again['same metric'] == '9 of 9' and again['standard deviation'] == '0.000'
    assert again['p'] == '1.0000'  # of no family: nothing is corrected or tested besides
    assert not again.keys() & {'p, Holm', 'TOST, Holm', 'simultaneous 95 % interval'}


def test_the_same_training_again(tasks):
    """Of the arms that both tasks have; what was trained otherwise is no repetition."""
    first = tasks['scenes']
    rng, shifts = np.random.default_rng(0), {}
    later = StudyTask('spacing', {})
    for arm in ('zoh', 'bilinear'):
        shifts[arm] = rng.normal(size=9)
        later.runs[arm] = {
            s: run | {'metric': run['metric'] + shifts[arm][s]}
            for s, run in first.runs[arm].items()
            if s < 9
        }
    later.runs['rk4'] = {0: first.runs['rk4'][0]}
    later.runs['exp_trapezoidal'] = later.runs['zoh']
    rows = repeated_rows({'scenes': first, 'spacing': later})
    assert [(row['A'], row['B'], row['pairs']) for row in rows] == [
        ('zoh, S2', 'zoh', '9'),
        ('bilinear, S2', 'bilinear', '9'),
    ]
    old = np.array([first.runs['zoh'][s]['metric'] for s in range(9)])
    new = old + shifts['zoh']
    assert rows[0]['A - B'] == f'{shifts["zoh"].mean():+.3f}'
    assert rows[0]['standard deviation'] == f'{shifts["zoh"].std(ddof=1):.3f}'
    assert rows[0]['over seeds'] == f'{new.std(ddof=1):.2f} and {old.std(ddof=1):.2f}'
    assert rows[0]['r'] == f'{stats.pearsonr(old, new).statistic:+.2f}'
    whole = later.runs['zoh'][3]
    for name, word in (
        ('parameters', 'parameters'), ('data', 'data'), ('settings', 'settings'),
        ('versions', 'torch'),
    ):  # fmt: skip
        later.runs['zoh'][3] = whole | {name: {'torch': '1.0'}}
        with pytest.raises(ValueError, match=f'runs of zoh differ in their {word}'):
            repeated_rows({'scenes': first, 'spacing': later})
    assert repeated_rows({'scenes': first}) == []


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
    ('task', 'digits'),
    [
        ('segmentation', {'mIoU': '.2f'}),
        ('detection', {'box AP': '.1f', 'mask AP': '.1f'}),
    ],
)
def test_the_table_of_models_on_scenes(task, digits):
    record = json.loads((RUNS / 'models_on_scenes.json').read_text())[task]
    page = (ROOT / 'docs/benchmarks.md').read_text()
    assert record['commit'] in page and record['date'] in page
    for run in record['runs']:
        config = Path(run['config'])
        (row,) = (
            line for line in page.splitlines() if line.startswith('|') and config.name in line
        )
        quoted = [cell.strip() for cell in row.split('|')[4:-1]]
        figures = ' / '.join(format(run[name][-1][1], form) for name, form in digits.items())
        assert quoted == [f'{run["parameters"] / 1e6:.1f}M', figures]
        assert (STUDY / config).exists()
