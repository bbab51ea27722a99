"""tools/analysis/compare_methods.py on results whose differences are planted."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.tools.conftest import run_tool
from vim_mm.analysis.study.comparison import (
    ARMS,
    TaskResults,
    family,
    read_results,
    secondary_rows,
    verdicts,
)
from vim_mm.analysis.study.plots import plot_task

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / 'docs/study/results'
PAGE = ROOT / 'docs/methods_compared.md'
PLANTED = {'foh': -3.0, 'poly': 0.8}  # points from the control


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp('results')
    rng = np.random.default_rng(0)
    (folder / 'scenes').mkdir()
    seeds = rng.normal(40, 2, 12)
    for arm in ARMS:
        for seed, level in enumerate(seeds):
            metric = level + PLANTED.get(arm, 0) + rng.normal(0, 0.2)
            run = {
                'task': 'scenes', 'arm': arm, 'seed': seed, 'metric': metric,
                'curve': [[50, metric - 5, 1.0], [100, metric, 0.5]],
                'diverged': (arm, seed) == ('rk4', 3), 'settings': {'steps': 100},
                'resolutions': {'1': metric, '2': metric - 9, '2/dt': metric - 4},
                'card': 'a card', 'commit': 'abc', 'date': '2026-01-01',
            }  # fmt: skip
            (folder / f'scenes/{arm}_{seed}.json').write_text(json.dumps(run))
        cost = {'task': 'scenes', 'arm': arm, 'milliseconds': 2.0, 'mebibytes': 100.0}
        (folder / f'scenes/{arm}_cost.json').write_text(json.dumps(cost))
    return folder


def _run(*arguments):
    return run_tool('analysis/compare_methods.py', *arguments, cwd=ROOT)


def test_planted_differences_are_found(results):
    (task,) = read_results(results)
    found = family(task)
    significant = {arm for arm, (_, p) in found.items() if p < 0.05}
    assert significant == {*PLANTED}
    for arm, points in PLANTED.items():
        assert found[arm][0].low < points < found[arm][0].high
    assert len(verdicts(task)) == 6 and len(secondary_rows(task)) == 4


def test_only_seeds_that_all_have_enter(results, tmp_path):
    for file in results.glob('scenes/*'):
        if file.name not in ('zoh_5.json', 'rk4_11.json'):
            (tmp_path / 'scenes').mkdir(exist_ok=True)
            (tmp_path / 'scenes' / file.name).write_text(file.read_text())
    (task,) = read_results(tmp_path)
    assert task.seeds == [s for s in range(12) if s not in (5, 11)]
    assert 'interim' in _run(tmp_path)


@pytest.mark.parametrize(('pairs', 'can'), [(7, False), (8, True)])
def test_few_pairs_show_nothing(results, tmp_path, pairs, can):
    """Seven have 128 signs: even all of one sign is p = 2/128, and 0.09 after Holm."""
    (tmp_path / 'scenes').mkdir()
    for file in results.glob('scenes/*'):
        if file.stem.rpartition('_')[2] in map(str, range(pairs)):
            (tmp_path / 'scenes' / file.name).write_text(file.read_text())
    (task,) = read_results(tmp_path)
    for line in verdicts(task):
        assert ('nothing yet' in line) != can and ('excludes' in line or 'differs' in line) == can


def test_the_picture_of_a_task(results, tmp_path):
    (task,) = read_results(results)
    plot_task(task, tmp_path / 'images/task.png')
    picture = cv2.imread(str(tmp_path / 'images/task.png'))
    assert picture is not None and picture.std() > 10


def test_the_page_names_the_tasks_that_have_runs(results, tmp_path):
    """Not those that wait, whose protocol may change; a label takes a command of its own."""
    for task in ('fashion', 'scenes', 'scenes_dt0.01'):
        (tmp_path / task).mkdir()
        for file in results.glob('scenes/*_[01].json'):
            run = json.loads(file.read_text()) | dict(task=task)
            (tmp_path / task / file.name).write_text(json.dumps(run))
    _run(tmp_path, '--page', tmp_path / 'page.md')
    page = (tmp_path / 'page.md').read_text()
    commands = [line for line in page.splitlines() if 'run.py train' in line]
    assert [line.partition(' --data')[0] for line in commands] == [
        'python tools/study/run.py train --tasks fashion scenes',
        'python tools/study/run.py train --tasks scenes --label dt0.01',
    ]


@pytest.mark.slow
def test_page_latex_and_pictures(results, tmp_path):
    printed = _run(results, '--page', tmp_path / 'page.md', '--latex', tmp_path / 'tables.tex')
    page = (tmp_path / 'page.md').read_text()
    assert 'zoh_exact, averaged' in page and 'rk4, seed 3' in page and '-3.' in page
    assert printed.strip().splitlines()[-1] in page
    assert 'run.py train --tasks scenes --data DIR --out OUT --results EMPTY\n' in page
    picture = cv2.imread(str(tmp_path / 'images/study_scenes.png'))
    assert picture is not None and picture.std() > 10
    latex = (tmp_path / 'tables.tex').read_text()
    assert latex.count(r'\begin{tabular}') == latex.count(r'\end{tabular}') >= 4
    assert r'zoh\_exact' in latex


def test_other_models_stand_in_a_table_of_their_own(results, tmp_path):
    """Not among the methods; and the longer run is in that table alone."""
    (tmp_path / 'fashion').mkdir()
    (tmp_path / 'long').mkdir()
    for arm, metric in (('zoh', 91.0), ('zoh_exact', 91.5), ('deit', 90.0), ('resnet18', 93.0)):
        for seed in range(2):
            run = json.loads((results / 'scenes/zoh_0.json').read_text())
            run |= {'task': 'fashion', 'arm': arm, 'seed': seed, 'parameters': 1000}
            run |= {'metric': metric + seed, 'resolutions': {}}
            (tmp_path / f'fashion/{arm}_{seed}.json').write_text(json.dumps(run))
    (tmp_path / 'fashion/deit_cost.json').write_text(
        json.dumps({'arm': 'deit', 'milliseconds': 7.5, 'mebibytes': 300.0})
    )
    run |= {'task': 'long', 'arm': 'zoh', 'seed': 0, 'metric': 95.25}
    (tmp_path / 'long/zoh_0.json').write_text(json.dumps(run))
    _run(tmp_path, '--page', tmp_path / 'page.md')
    methods, others = (tmp_path / 'page.md').read_text().split('beside other models')
    assert 'DeiT' not in methods and '## long' not in methods
    rows = {
        row.split('|')[1].strip(): row.split('|')[2:] for row in others.splitlines() if '|' in row
    }
    cells = {name: [cell.strip() for cell in row] for name, row in rows.items()}
    assert cells['Vim, zoh'][:3] == ['1,000', '2', '91.50']
    assert cells['DeiT'][2] == '90.50' and cells['DeiT'][4:6] == ['7.50', '300']
    assert cells['Vim, zoh, 7 layers, 100 epochs, random erasing'][1:3] == ['1', '95.25']
    assert cells['WRN-40-4, 8.9 million parameters, crops and flips'][2] == '96.7'


def test_no_results(tmp_path):
    with pytest.raises(FileNotFoundError, match='holds no results of runs'):
        read_results(tmp_path)


@pytest.mark.skipif(not PAGE.exists(), reason='the page is made when there are results')
def test_the_page_is_made_from_the_results(tmp_path):
    _run(RESULTS, '--page', tmp_path / PAGE.name)
    assert (tmp_path / PAGE.name).read_text() == PAGE.read_text()


@pytest.mark.parametrize('readme', ['seg/README.md', 'det/README.md'])
def test_readmes_quote_the_page(readme):
    section = (ROOT / readme).read_text().split('## Which method is better?')[1].split('\n## ')[0]
    table = [line for line in section.splitlines() if line.startswith('|')]
    primary = PAGE.read_text().split('### Primary: six methods')[1].split('###')[0]
    assert table == [line for line in primary.splitlines() if line.startswith('|')]
    (task,) = (task for task in read_results(RESULTS) if task.name == 'fashion')
    assert f'has finished {len(task.seeds)} of 12 seeds' in section


def test_other_tasks_are_exploratory_and_of_the_methods_alone():
    """The protocol has variants for its primary tasks, and for every range of their settings."""
    runs = {arm: {0: {'metric': 1.0}} for arm in ('zoh', 'zoh_exact')}
    fashion, grid, recall = (
        TaskResults(n, runs) for n in ('fashion', 'fashion_lr0.001', 'recall_dt0.01')
    )
    assert [task.primary for task in (fashion, grid, recall)] == [True, False, False]
    assert fashion.missing == grid.missing == [*recall.missing, 'foh_matched', 'zoh_exact_averaged']
    assert recall.missing == ['foh', 'bilinear', 'poly', 'highorder', 'rk4']
    assert TaskResults('mIoU of runs', runs, planned=None).missing == []
