"""tools/analysis/compare_methods.py on results whose differences are planted."""

import json
import re
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest

from benchmarks.comparison.answer import best_found, cautions, is_tested, short_rows, short_verdict
from benchmarks.comparison.comparison import (
    ARMS,
    FAMILY,
    INTERVAL,
    TaskResults,
    family,
    family_rows,
    read_results,
    resolution_rows,
    secondary_rows,
    summary_rows,
    verdicts,
)
from benchmarks.comparison.detection import detection_rows, metric_of
from benchmarks.comparison.page import waits
from benchmarks.comparison.plots import draw_task, plot_task
from benchmarks.comparison.provenance import which
from benchmarks.comparison.run_folders import find_runs, read_runs
from benchmarks.comparison.statistics import compare, detectable_effect
from benchmarks.measure.tables import latex_table, without_empty_columns
from tests.tools.conftest import run_tool

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / 'docs/study/results'
DETECTORS = ROOT / 'docs/study/detection'
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


def _run(*arguments, **options):
    return run_tool('analysis/compare_methods.py', *arguments, cwd=ROOT, **options)


def test_planted_differences_are_found(results):
    (task,) = read_results(results)
    found = family(task)
    significant = {arm for arm, (_, p) in found.items() if p < 0.05}
    assert significant == {*PLANTED}
    for arm, points in PLANTED.items():
        assert found[arm][0].low < points < found[arm][0].high
    assert len(verdicts(task)) == 6 and len(secondary_rows(task)) == 4


@pytest.mark.parametrize(
    ('key', 'other'),
    [('settings', {'steps': 200}), ('data', {'train': 'b'}), ('torch', '2.4')],
)
def test_runs_of_other_settings_are_refused(key, other, results, tmp_path):
    shutil.copytree(results / 'scenes', tmp_path / 'scenes')
    file = tmp_path / 'scenes/foh_4.json'
    changed = {'versions': {key: other}} if key == 'torch' else {key: other}
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(ValueError, match=f'must have the same {key}: .*json has .*, .*json has'):
        read_results(tmp_path)


def test_how_much_of_poly_are_its_scans(results):
    (task,) = read_results(results)
    for seed, run in task.runs['zoh_exact_averaged'].items():
        run['metric'] = task.runs['zoh_exact'][seed]['metric'] - 3.0
        task.runs['poly'][seed]['metric'] = run['metric'] + 0.5
    assert '  ' not in ' '.join(cautions([task]))
    (line,) = (line for line in cautions([task]) if line.startswith('`poly`'))
    assert line.endswith(
        'control. On `scenes` it differs from the control by -3.00 points (95 % interval -3.00 to '
        '-3.00, p 0.0005), and `poly` from it by +0.50 points (95 % interval +0.50 to +0.50, '
        'p 0.0005). These p are not corrected.'
    )
    other = read_results(results)[0]
    del other.runs['zoh_exact_averaged'][0]
    (line,) = (line for line in cautions([task, other]) if line.startswith('`poly`'))
    assert '-3.00 points' in line and line.endswith(
        'not corrected. So far `zoh_exact, averaged` has 11 of 12 seeds on `scenes`; how much each '
        'contributes is open there.'
    )
    del task.runs['poly']
    assert not any('scans' in line for line in cautions([task]))


def test_only_seeds_that_all_have_enter(results, tmp_path):
    for file in results.glob('scenes/*'):
        if file.name not in ('zoh_5.json', 'rk4_11.json'):
            (tmp_path / 'scenes').mkdir(exist_ok=True)
            (tmp_path / 'scenes' / file.name).write_text(file.read_text())
    (task,) = read_results(tmp_path)
    assert task.seeds == [s for s in range(12) if s not in (5, 11)]
    assert 'interim' in _run(tmp_path)


def first_seeds(results, folder, count):
    (folder / 'scenes').mkdir()
    for file in results.glob('scenes/*'):
        if file.stem.rpartition('_')[2] in map(str, range(count)):
            (folder / 'scenes' / file.name).write_text(file.read_text())
    (task,) = read_results(folder)
    return task


def test_a_variant_does_not_take_seeds_from_the_methods(results, tmp_path):
    """It is compared on its own seeds. While methods lack seeds too, all are treated alike."""
    variant = 'zoh_exact_averaged'
    (tmp_path / 'scenes').mkdir()
    for file in results.glob('scenes/*'):
        if not file.name.startswith((f'{variant}_1', f'{variant}_7')):  # 1, 10, 11 and 7
            (tmp_path / 'scenes' / file.name).write_text(file.read_text())
    diverged_run = tmp_path / f'scenes/{variant}_3.json'
    diverged_run.write_text(json.dumps(json.loads(diverged_run.read_text()) | {'diverged': True}))
    (task,) = read_results(tmp_path)
    assert task.seeds == [*range(12)] and variant not in task.arms and task.waiting == {variant: 8}
    assert [row['pairs'] for row in secondary_rows(task)] == ['12', '12', '8', '8']
    ours, control = (
        [task.runs[arm][seed]['metric'] for seed in (0, 2, 3, 4, 5, 6, 8, 9)]
        for arm in (variant, 'zoh_exact')
    )
    assert secondary_rows(task)[2]['A - B'] == f'{np.mean(np.subtract(ours, control)):+.3f}'
    printed = _run(tmp_path)
    assert '`zoh_exact, averaged` has finished only seeds 0, 2, 3, 4, 5, 6, 8, 9. It' in printed
    task.runs[variant] = {seed: task.runs[variant][seed] for seed in (0, 2, 3)}
    *_, full, few, _ = secondary_rows(task)
    assert full['p'] and full['95 % interval'] and not full['each seed']
    assert few['each seed'].count(', ') == 2 and not few['p'] and not few['95 % interval']
    (task,) = read_results(tmp_path)
    assert 'rk4, seed 3; zoh_exact, averaged, seed 3.' in printed
    assert any('averaged` has 8 of 12 seeds on `scenes`' in line for line in cautions([task]))
    (tmp_path / 'scenes/foh_0.json').unlink()
    (task,) = read_results(tmp_path)
    assert variant in task.arms and task.seeds == [2, 3, 4, 5, 6, 8, 9]
    task.final = True
    assert variant not in task.arms and task.seeds == [*range(1, 12)]
    task.control = variant
    assert variant in task.arms and task.waiting == {}


@pytest.mark.parametrize(('pairs', 'can'), [(7, False), (8, True)])
def test_few_pairs_show_nothing(results, tmp_path, pairs, can):
    """Seven have 128 signs: even all of one sign is p = 2/128, and 0.09 after Holm."""
    task = first_seeds(results, tmp_path, pairs)
    task.planned = None  # no study, so no test waits for more seeds
    for line in verdicts(task):
        assert ('nothing yet' in line) != can and ('within' in line or 'differs' in line) == can


def test_an_interim_table_concludes_nothing(results, tmp_path):
    """Though nine pairs would do for the planted difference of `foh`: the test is made once."""
    task = first_seeds(results, tmp_path, 9)
    (line,) = verdicts(task)
    assert line.startswith('Nothing is concluded from an interim table')
    effects = [
        found.deviation * detectable_effect(12, 0.05 / 6) for found, _ in family(task).values()
    ]
    assert f'{min(effects):.2f} points' in line and f'{max(effects):.2f} points' in line


def test_the_test_can_be_made_with_fewer_seeds(results, tmp_path):
    """When no more will come."""
    first_seeds(results, tmp_path, 9)
    assert 'Nothing is concluded' in _run(tmp_path)
    printed = _run(tmp_path, '--final')
    assert '`foh` differs from `zoh_exact`' in printed and 'interim' not in printed


def test_a_cost_without_memory(results, tmp_path):
    """And of an arm that has no run."""
    (tmp_path / 'scenes').mkdir()
    for file in results.glob('scenes/*'):
        if file.name == 'rk4_cost.json' or 'rk4' not in file.name:
            (tmp_path / 'scenes' / file.name).write_text(file.read_text())
    cost = {'task': 'scenes', 'arm': 'rk4', 'milliseconds': 2.0, 'card': 'a card'}
    (tmp_path / 'scenes/rk4_cost.json').write_text(json.dumps(cost))
    assert 'card: a card. `rk4`, measured beside them: 2.00 ms.' in _run(tmp_path)


def test_the_answer_in_short(results, tmp_path):
    """Of primary tasks that were tested: which methods differ, and how far the others may."""
    (task,) = read_results(results)
    assert is_tested(task)
    others = [c for arm, (c, _) in family(task).items() if arm not in PLANTED]
    furthest = max(max(abs(c.low), abs(c.high)) for c in others)
    foh, poly = (family(task)[arm][0].mean for arm in ('foh', 'poly'))
    assert short_verdict(task) == (
        f'`scenes`: `foh` ({foh:+.2f} points) is worse than `zoh_exact`, and `poly` '
        f'({poly:+.2f} points) is better than `zoh_exact`. For the other methods no difference was '
        'found; their intervals lie within '
        f'±{furthest:.2f} points.'
    )
    rows = {row['method']: row for row in short_rows([task])}
    values = task.metrics('zoh_exact')
    assert rows['zoh_exact']['scenes'] == f'{np.mean(values):.2f} ({np.std(values, ddof=1):.2f})'
    assert rows['foh']['scenes'] == f'{foh:+.2f}' and rows['foh']['scenes, p'] == '**0.0029**'
    assert len(rows) == 7 and '*' not in rows['rk4']['scenes, p']
    assert best_found([task]) == '`poly` was found to be better than the control.'
    assert 'With 12 pairs 0.0029 is the smallest corrected p possible' in cautions([task])[0]
    effects = [
        found.deviation * detectable_effect(12, 0.05 / 6)
        for arm, (found, _) in family(task).items()
        if arm not in PLANTED
    ]
    assert f'{min(effects):.2f} to {max(effects):.2f} points' in cautions([task])[1]
    assert not any('is open' in line for line in cautions([task]))
    same = TaskResults('scenes', task.runs | dict.fromkeys(PLANTED, task.runs['rk4']))
    assert 'no difference from `zoh_exact` was found. All intervals lie' in short_verdict(same)


def test_nothing_is_answered_too_early(results, tmp_path):
    """With seeds to come, with a method missing, with too few pairs, or on another task."""
    task = first_seeds(results, tmp_path, 9)
    assert not is_tested(task) and not is_tested(recall_task())
    task.final = True
    assert is_tested(task)
    assert not is_tested(TaskResults('fashion_lr0.001', task.runs, final=True))
    few = {arm: {s: run for s, run in runs.items() if s < 7} for arm, runs in task.runs.items()}
    assert not is_tested(TaskResults('scenes', few, final=True))
    del task.runs['rk4']
    assert not is_tested(task)


def test_a_missing_method_is_waited_for(results, tmp_path):
    """The test is of all methods at once, so that a later one does not change what was said."""
    (tmp_path / 'scenes').mkdir()
    for file in results.glob('scenes/*'):
        if not file.name.startswith('rk4'):
            (tmp_path / 'scenes' / file.name).write_text(file.read_text())
    printed = _run(tmp_path, '--page', tmp_path / 'page.md')
    assert 'Nothing is concluded from an interim table' in printed and 'differs' not in printed
    assert '0 to 11 (interim: methods are missing), which' in printed
    page = (tmp_path / 'page.md').read_text()
    assert '## In short' not in page and 'detectable' not in printed


def test_secondary_comparisons_use_the_seeds_of_the_tables(results):
    (task,) = read_results(results)
    for seed in range(8, 12):
        del task.runs['zoh_exact'][seed]
    assert (
        task.interim and min(float(row['p']) for row in secondary_rows(task)) >= 0.0078
    )  # of 2 / 2**8
    task.final = True
    del task.runs['zoh_exact_averaged'][3]
    assert task.waiting == {'zoh_exact_averaged': 7}
    assert [row['pairs'] for row in secondary_rows(task)] == ['8', '8', '7', '7']
    assert [row['pairs'] for row in secondary_rows(task)] != ['12', '12', '11', '11']


def test_columns_that_no_row_has():
    rows = [{'a': '1', 'b': '', 'c': ''}, {'a': '', 'b': '', 'c': '2'}]
    assert without_empty_columns(rows) == [{'a': '1', 'c': ''}, {'a': '', 'c': '2'}]
    assert without_empty_columns([]) == []


@pytest.mark.parametrize(
    ('seeds', 'words'),
    [([0, 1, 2, 3], '0 to 3'), ([0, 2, 3], '0, 2, 3'), ([4, 5], '4, 5'), ([1], '1')],
)
def test_seeds_in_words(seeds, words):
    assert which(seeds) == words


def test_a_variant_that_waits_in_words(results):
    (task,) = read_results(results)
    name = 'zoh_exact_averaged'
    runs = task.runs[name]
    task.runs[name] = {seed: runs[seed] for seed in range(6)}
    assert waits(name, task) == (
        '`zoh_exact, averaged` has finished only seeds 0 to 5. It is in the table of variants '
        'alone; its rows there use these seeds and are interim.'
    )
    task.final = True
    assert 'interim' not in waits(name, task)
    task.runs[name] = {seed: runs[seed] for seed in range(5)}
    assert waits(name, task).endswith('They are too few for an interval and a test.')
    task.runs[name] = {0: runs[0]}
    assert waits(name, task).endswith('has finished only 1 of these, and is not compared.')


@pytest.mark.parametrize(
    ('differ', 'words'),
    [
        ((), 'no difference from `zoh_exact` was found. All intervals lie within'),
        (('foh',), '`foh` (-3.00 points) is worse than `zoh_exact`. For the other methods'),
        (FAMILY, 'and `rk4` (-3.00 points) are worse than `zoh_exact`.'),
    ],
)
def test_a_verdict_in_short_of_none_one_and_all(results, differ, words):
    (task,) = read_results(results)
    control = task.runs['zoh_exact']
    noise = np.random.default_rng(1).normal(0, 0.01, (len(FAMILY), 12))
    noise -= noise.mean(axis=1, keepdims=True)
    for i, arm in enumerate(FAMILY):
        for seed, run in task.runs[arm].items():
            run['metric'] = control[seed]['metric'] - 3.0 * (arm in differ) + noise[i, seed]
    text = short_verdict(task)
    assert words in text and ('±' in text) == (differ != FAMILY)


def test_labels_stand_clear_of_the_next_point(results):
    (task,) = read_results(results)
    for i, arm in enumerate(task.arms):
        task.costs[arm] = {'milliseconds': 10.0 + 5 * i}
    task.costs['foh']['milliseconds'] = task.costs['zoh']['milliseconds'] + 0.2
    times = draw_task(task).axes[-1]
    sides = {label.get_text(): label.get_ha() for label in times.texts}
    assert sides['zoh'] == 'right' and {*sides.values()} == {'right', 'left'}
    assert list(sides.values()).count('right') == 1


def test_a_cost_of_a_waiting_variant_alone_is_no_picture(results):
    (task,) = read_results(results)
    del task.runs['zoh_exact_averaged'][0]
    task.costs = {'zoh_exact_averaged': {'milliseconds': 2.0}}
    assert len(draw_task(task).axes) == 2


def test_an_interval_without_0_is_explained(results):
    """The intervals are not corrected for six comparisons, and p is."""
    (task,) = read_results(results)
    runs = task.runs | {
        'rk4': {
            seed: run | {'metric': task.runs['zoh_exact'][seed]['metric'] + 0.1 - (seed < 2) * 0.12}
            for seed, run in task.runs['rk4'].items()
        }
    }
    shifted = TaskResults('scenes', runs)
    found, p = family(shifted)['rk4']
    assert found.low > 0 and p < 0.05  # found: nothing to explain
    assert not any('`rk4`' in line for line in cautions([shifted]))
    for seed in (2, 3):
        runs['rk4'][seed]['metric'] -= 0.15
    found, p = family(shifted)['rk4']
    assert found.low > 0 and p > 0.05
    assert (
        'That of `rk4` on `scenes` excludes 0, but no difference was found there.'
        in (cautions([shifted])[0])
    )


def test_how_far_a_difference_may_lie_and_which_would_be_found(results):
    """The end of the interval that is further from 0, and the power after Holm's correction."""
    (task,) = read_results(results)
    found, p = family(task)['bilinear']
    assert p > 0.05 and abs(found.low) != abs(found.high)
    line = next(line for line in verdicts(task) if line.startswith('`bilinear`'))
    assert line.endswith(f'lies within ±{max(abs(found.low), abs(found.high)):.2f} points.')
    (row,) = (row for row in family_rows(task, power=True) if row['A'] == 'bilinear')
    assert row['detectable'] == f'{found.deviation * detectable_effect(12, 0.05 / 6):.2f}'
    # Of fewer methods the level is higher.
    del task.runs['rk4'], task.runs['poly']
    (row,) = (row for row in family_rows(task, power=True) if row['A'] == 'bilinear')
    assert row['detectable'] == f'{found.deviation * detectable_effect(12, 0.05 / 4):.2f}'


def test_latex_has_no_character_that_means_something():
    text = latex_table([{'a_b': '5 %', 'p > 0': 'x & y'}])
    assert r'a\_b & p $>$ 0 \\' in text and r'5 \% & x \& y \\' in text


def test_tables_at_another_resolution_are_of_that_resolution(results, tmp_path):
    (tmp_path / 'scenes').mkdir()
    for file in results.glob('scenes/*'):
        run = json.loads(file.read_text())
        if run['arm'] == 'foh' and 'resolutions' in run:
            run['resolutions']['2'] -= 20
        (tmp_path / 'scenes' / file.name).write_text(json.dumps(run))
    (task,) = read_results(tmp_path)
    row = next(row for row in resolution_rows(task) if row['method'] == 'foh')
    assert float(row['1']) - float(row['2']) == pytest.approx(29, abs=0.02)
    assert float(row['1']) - float(row['2/dt']) == pytest.approx(4, abs=0.02)
    (foh,) = (row for row in family_rows(task, '2') if row['A'] == 'foh')
    (plain,) = (row for row in family_rows(task) if row['A'] == 'foh')
    assert float(foh['A - B']) == pytest.approx(float(plain['A - B']) - 20, abs=0.002)


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
    return TaskResults('recall_dt0.01', runs)


def test_a_task_that_few_runs_learn(results):
    """Counts, no verdict: both medians are at chance, and an interval about 0 would mislead."""
    task = recall_task()
    rows = summary_rows(task)
    assert [row['above 10 %'] for row in rows] == ['3 of 12', '2 of 12']
    assert [row['above 50 %'] for row in rows] == ['1 of 12', '1 of 12']
    assert [row['above 10 %, control too'] for row in rows] == ['1', '2']
    assert [row['above 50 %, control too'] for row in rows] == ['1', '1']
    (line,) = verdicts(task)
    assert 'no method can be called better or worse' in line
    assert task.at_chance == [6.7] * 19
    for run in (run for runs in task.runs.values() for run in runs.values()):
        run['metric'] += 10
    assert not any('can be called' in line for line in verdicts(task))
    for run in (run for runs in task.runs.values() for run in runs.values()):
        run['metric'] -= 10
    curves, ends = draw_task(task).axes
    assert len(curves.lines) == 25  # and chance
    for row, arm in enumerate(task.arms):
        points = ends.lines[row]
        np.testing.assert_allclose(points.get_xdata(), sorted(task.metrics(arm)))
        assert abs(points.get_ydata() - row).max() < 0.5
    (scenes,) = read_results(results)
    assert not any('above' in name for row in summary_rows(scenes) for name in row)


def test_what_the_picture_draws(results):
    """A - B to the right where A is better, intervals about means, seconds of all steps."""
    (task,) = read_results(results)
    figure = draw_task(task)
    curves, differences, times = figure.axes
    names = [label.get_text() for label in differences.get_yticklabels()]
    for row, arm in enumerate(names):
        values = np.subtract(task.metrics(arm), task.metrics('zoh_exact'))
        points, mean = (
            line.get_xdata()
            for line in differences.lines
            if len(line.get_xdata()) in (1, 12) and line.get_ydata()[0] == row
            and line.get_marker() in '.o'
        )  # fmt: skip
        np.testing.assert_allclose(points, values)
        assert mean[0] == pytest.approx(values.mean())
        found = compare(task.metrics(arm), task.metrics('zoh_exact'))
        (bar,) = (b for b in differences.collections if b.get_segments()[0][0][1] == row)
        np.testing.assert_allclose(bar.get_segments()[0][:, 0], [found.low, found.high])
    middle = [line for line in times.lines if line.get_marker() == 'o']
    assert {line.get_xdata()[0] for line in middle} == {0.2}  # 100 steps of 2 ms
    assert figure.get_suptitle() == 'scenes, 12 seeds'
    assert curves.get_ylabel() == 'mIoU, percent'


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
    commands = [line for line in page.splitlines() if ' --data' in line]
    assert [line.partition(' --data')[0] for line in commands] == [
        'python tools/study/run.py train --tasks fashion scenes',
        'python tools/study/run.py train --tasks scenes --label dt0.01',
    ]


def test_the_page_names_mixed_cards_and_the_card_of_costs(results, tmp_path):
    (tmp_path / 'scenes').mkdir()
    for file in results.glob('scenes/*'):
        run = json.loads(file.read_text())
        if file.name == 'rk4_4.json':
            run |= dict(card='another card', commit='def')
        if 'seed' not in run:
            run |= dict(card='a third', commit='123', date='2026-02-02')
        (tmp_path / 'scenes' / file.name).write_text(json.dumps(run))
    printed = _run(tmp_path)
    assert 'Seeds whose runs are of several commits: 4.' in printed
    assert 'Seeds whose runs are of several cards: 4.' in printed
    (row,) = (
        line
        for line in printed.splitlines()
        if re.match(r'\| rk4 +\| +zoh_exact \| +11 \| +[+-]\d\.\d{3} \|$', line)
    )
    (task,) = read_results(results)
    pairs = [s for s in range(12) if s != 4]
    values = [task.metrics(arm, seeds=pairs) for arm in ('rk4', 'zoh_exact')]
    assert row.split('|')[-2].strip() == f'{np.mean(np.subtract(*values)):+.3f}'
    assert re.search(
        r'\| zoh_exact, averaged +\| +zoh_exact \| +12 \| +[+-]\d\.\d{3} \|\n', printed
    )
    assert 'The cost of a step: card: a third; commit: 123; date: 2026-02-02.' in printed


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


def test_nothing_to_compare_is_an_error(results, tmp_path):
    (tmp_path / 'long').mkdir()
    (tmp_path / 'long/zoh_0.json').write_text((results / 'scenes/zoh_0.json').read_text())
    assert _run(tmp_path, fails=True).strip().endswith('There is nothing to compare.')


def test_no_results(tmp_path):
    with pytest.raises(FileNotFoundError, match='holds no results of runs'):
        read_results(tmp_path)


@pytest.mark.skipif(not PAGE.exists(), reason='the page is made when there are results')
def test_the_page_is_made_from_the_results(tmp_path):
    _run(RESULTS, DETECTORS, '--page', tmp_path / PAGE.name)
    assert (tmp_path / PAGE.name).read_text() == PAGE.read_text()


def test_the_detectors_of_the_study():
    """Task 5 of the protocol, whose figures the page, the protocol and det/README.md quote."""
    tasks, left_out = read_runs(find_runs([DETECTORS]))
    assert [metric_of(task) for task in tasks] == ['box AP', 'mask AP'] and not left_out
    for task in tasks:
        assert {*task.runs} == {'zoh', 'bilinear', 'poly', 'zoh_exact'}
        assert all([*runs] == [0, 1, 2] for runs in task.runs.values())
        assert {run['settings']['steps'] for *_, run in task.entries} == {4000}
    rows = detection_rows(tasks)
    readme = (ROOT / 'det/README.md').read_text()
    quoted = [
        [cell.strip() for cell in line.split('|')[1:-1]]
        for line in readme.split('| method | box AP ')[1].split('\n\n')[0].splitlines()[2:]
    ]
    assert quoted == [[row[n] for n in row if 'each seed' not in n] for row in rows]
    largest = max(abs(found.mean) for task in tasks for found, _ in family(task).values())
    protocol = ' '.join((ROOT / 'docs/study_protocol.md').read_text().split())
    assert f'No mean difference from the control is larger than {largest:.2f} points' in protocol
    assert all(family(task)['poly'][0].mean > 0 for task in tasks)
    files = [file for file in DETECTORS.glob('**/*') if file.is_file()]
    assert len(files) == 24  # a record and a log each
    paths_of_machines = re.compile(r'/(root|home|work|opt|tmp|usr)\b')
    assert not any(paths_of_machines.search(file.read_text()) for file in files)


def test_the_detectors_beside_other_runs_and_another_control(tmp_path):
    for record in DETECTORS.glob('*/run.json'):
        other = tmp_path / 'mine' / record.parent.name
        shutil.copytree(record.parent, other)
        changed = json.loads(record.read_text()) | {'task': 'my_detector'}
        (other / 'run.json').write_text(json.dumps(changed))
    arguments = (RESULTS, DETECTORS, tmp_path / 'mine', '--page', tmp_path / 'page.md')
    _run(*arguments, '--control', 'foh')
    page = (tmp_path / 'page.md').read_text()
    ours = page.split('## Detection')[1].split('\n## ')[0]
    assert page.count('\n## my_detector box AP') == 1 and 'my_detector' not in ours
    assert 'There is no run of `foh`, so no difference.' in ' '.join(ours.split())
    assert '| method    |       box AP |      mask AP |' in ours  # there is no run of foh


@pytest.mark.parametrize('readme', ['seg/README.md', 'det/README.md'])
def test_readmes_quote_the_page(readme):
    section = (ROOT / readme).read_text().split('In [the study]')[1].split('\n## ')[0]
    short = PAGE.read_text().split('## In short')[1].split('\n## ')[0]
    for start in ('|', '* '):
        quoted = [line for line in section.splitlines() if line.startswith(start)]
        assert quoted == [line for line in short.splitlines() if line.startswith(start)] != []
    (caution,) = (line for line in short.splitlines() if line.startswith('"No difference'))
    assert caution in ' '.join(section.split())
    costs = next(task.costs for task in read_results(RESULTS) if task.name == 'fashion')
    times = {arm: f'{costs[arm]["milliseconds"]:.1f}' for arm in ('zoh', 'zoh_exact', 'poly')}
    assert (
        f'{times["zoh"]} ms with `zoh`, {times["zoh_exact"]} with `zoh_exact` and {times["poly"]} '
        'with `poly`' in ' '.join(section.split())
    )


def test_the_front_page_has_the_figures_of_the_study():
    text = ' '.join((ROOT / 'README.md').read_text().split())
    fashion, scenes = (
        next(task for task in read_results(RESULTS) if task.name == name)
        for name in ('fashion', 'scenes')
    )
    foh, poly = (-family(scenes)[arm][0].mean for arm in ('foh', 'poly'))
    assert f'`foh` and `poly` were worse by {foh:.1f} and {poly:.1f} points' in text
    worse = {arm for arm, (found, p) in family(scenes).items() if p < 0.05 and found.mean < 0}
    better = [
        f for t in (fashion, scenes) for f, p in family(t).values() if p < 0.05 and f.mean > 0
    ]
    assert worse == {'foh', 'poly'} and not better
    assert min(fashion.arms, key=lambda arm: fashion.costs[arm]['milliseconds']) == 'zoh'


def test_the_protocol_has_the_figures_of_the_results():
    """Its column *found*, hypothesis by hypothesis."""
    tasks = {task.name: task for task in read_results(RESULTS)}
    scenes = tasks['scenes']
    differences = {arm: found.mean for arm, (found, _) in family(scenes).items()}
    larger, at_two = (
        {arm: found.mean for arm, (found, _) in family(scenes, name).items()}
        for name in ('1.5/dt', '2/dt')
    )
    secondary = {(row['A'], row['B']): row for row in secondary_rows(scenes)}
    gain, rest, both, poly = (
        (abs(float(row['A - B'])), row['p'])
        for row in (
            secondary['foh, matched', 'foh'],
            secondary['foh, matched', 'zoh_exact'],
            secondary['zoh_exact, averaged', 'zoh_exact'],
            secondary['poly', 'zoh_exact, averaged'],
        )
    )

    def interval(a, b):
        return secondary[a, b][INTERVAL].replace('+', '')

    def drop(arm, name):
        return np.subtract(scenes.metrics(arm, '1'), scenes.metrics(arm, name))

    drops = {
        (arm, name): compare(drop(arm, name), drop('zoh_exact', name))
        for arm in ('foh', 'poly')
        for name in ('1.5/dt', '2/dt')
    }
    gaps = np.subtract(*(scenes.metrics(a) for a in ('zoh_exact', 'zoh_exact_averaged')))
    start = compare(scenes.metrics('poly', '1'), scenes.metrics('zoh_exact', '1'))
    protocol = ' '.join((ROOT / 'docs/study_protocol.md').read_text().split())
    for sentence in (
        f'`foh` ({differences["foh"]:+.2f} points) and `poly` ({differences["poly"]:+.2f}) differ',
        f'differs from `foh` by +{gain[0]:.2f} points (p {gain[1]}), and from the control by '
        f'-{rest[0]:.2f} (p {rest[1]})',
        f'The intervals are {interval("foh, matched", "foh")} and '
        f'{interval("foh, matched", "zoh_exact")}, and p is not corrected',
        'By the drop from that size, `poly` loses {:.2f} points less than the control at 1.5 times '
        'the size (p {:.3f}) and {:.2f} less at 2 times (p {:.4f}), and `foh` loses {:.2f} and '
        '{:.2f} more (p {:.4f} and {:.4f})'.format(
            -drops['poly', '1.5/dt'].mean,
            drops['poly', '1.5/dt'].p,
            -drops['poly', '2/dt'].mean,
            drops['poly', '2/dt'].p,
            drops['foh', '1.5/dt'].mean,
            drops['foh', '2/dt'].mean,
            drops['foh', '1.5/dt'].p,
            drops['foh', '2/dt'].p,
        ),
        f'differs from the control by -{both[0]:.2f} points (p {both[1]}), and `poly` from it by '
        f'-{poly[0]:.2f} (p {poly[1]}). The intervals are '
        f'{interval("zoh_exact, averaged", "zoh_exact")} and '
        f'{interval("poly", "zoh_exact, averaged")}, and p is not corrected',
        f'it starts {-start.mean:.2f} points lower',
        f'(0a6e3b0) are {gaps[:4].mean():.2f} points behind the control and its seeds 4 to 11 '
        f'(371f189) {gaps[4:].mean():.2f}',
        f'at both sizes ({larger["foh"]:+.2f} and {at_two["foh"]:+.2f} points), `poly` at 1.5 '
        f'({larger["poly"]:+.2f})',
    ):
        assert sentence in protocol
    remainder = secondary['poly', 'zoh_exact, averaged'][INTERVAL]
    low, high, p = *map(float, remainder.split(' to ')), float(poly[1])
    for readme in ('seg/README.md', 'det/README.md'):
        text = ' '.join((ROOT / readme).read_text().split())
        assert (
            f'differs from the control by -{both[0]:.2f} points, and `poly` from that variant by '
            f'-{poly[0]:.2f} points (95 % interval {low:+.2f} to {high:+.2f}, p {p:.2f}, '
            'not corrected)'
        ) in text
    assert all(
        np.mean(scenes.metrics(arm, name)) < 0.5 * np.mean(scenes.metrics(arm, '1'))
        for arm in scenes.arms
        for name in ('1.5', '1.5/dt')
    )


@pytest.mark.parametrize(
    ('task', 'readme', 'cells'),
    [
        ('segmentation', 'seg/README.md', {'mIoU': '.2f'}),
        ('detection', 'det/README.md', {'box AP': '.1f', 'mask AP': '.1f'}),
    ],
)
def test_the_readme_quotes_the_models_on_scenes(task, readme, cells):
    record = json.loads((ROOT / 'docs/study/models_on_scenes.json').read_text())[task]
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
        assert (ROOT / config).exists()


def test_another_control_is_named_and_exploratory(results):
    printed = _run(results, '--control', 'zoh')
    assert '### Exploratory: six methods against `zoh`' in printed and 'Primary' not in printed
    refused = _run(results, '--control', 'zho', fails=True)
    assert "--control: expected one of ['bilinear', " in refused and "got 'zho'." in refused


def test_other_tasks_are_exploratory_and_lack_a_variant():
    """The protocol has both for its primary tasks, and for every range of their settings."""
    runs = {arm: {0: {'metric': 1.0}} for arm in ('zoh', 'zoh_exact')}
    fashion, grid, recall = (
        TaskResults(n, runs) for n in ('fashion', 'fashion_lr0.001', 'recall_dt0.01')
    )
    assert [task.primary for task in (fashion, grid, recall)] == [True, False, False]
    assert fashion.missing == grid.missing == [*recall.missing, 'zoh_exact_averaged']
    assert recall.missing == ['foh', 'bilinear', 'poly', 'highorder', 'rk4', 'foh_matched']
    assert TaskResults('mIoU of runs', runs, planned=None).missing == []
