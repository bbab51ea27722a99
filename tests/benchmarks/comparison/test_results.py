"""Comparisons of runs whose differences are planted, and what the picture shows of them."""

import cv2
import numpy as np
import pytest

from benchmarks.comparison.figure import draw_task, plot_task
from benchmarks.comparison.report import describe, sections
from benchmarks.comparison.results import (
    CONTROL,
    FAMILY,
    TaskResults,
    alike_rows,
    diverged,
    family,
    family_rows,
    mixed_seeds,
    summary_rows,
    verdict_rows,
)
from benchmarks.comparison.statistics import compare, detectable_effect
from benchmarks.measure.tables import latex_table, without_empty_columns

PLANTED = {'foh': -3.0, 'poly': 0.8}  # points from the control
ARMS = (*FAMILY, CONTROL)


@pytest.fixture
def task():
    """Twelve seeds of every method, of a hundred steps of 2 ms."""
    rng = np.random.default_rng(0)
    levels = rng.normal(40, 2, 12)
    found = TaskResults('mIoU', costs={arm: {'milliseconds': 2.0} for arm in ARMS})
    for arm in ARMS:
        found.runs[arm] = {}
        for seed, level in enumerate(levels):
            metric = float(level + PLANTED.get(arm, 0) + rng.normal(0, 0.2))
            found.runs[arm][seed] = {
                'metric': metric, 'curve': [[50, metric - 5, 1.0], [100, metric, 0.5]],
                'diverged': (arm, seed) == ('rk4', 3), 'settings': {'steps': 100},
                'resolutions': {'1': metric, '2': metric - 9 - 20 * (arm == 'foh')},
                'card': 'a card', 'commit': 'abc', 'date': '2026-01-01',
            }  # fmt: skip
    return found


def keep_seeds(task, count):
    for arm, runs in task.runs.items():
        task.runs[arm] = {seed: run for seed, run in runs.items() if seed < count}


def test_planted_differences_are_found(task):
    found = family(task)
    assert {arm for arm, (_, p) in found.items() if p < 0.05} == {*PLANTED}
    for arm, points in PLANTED.items():
        assert found[arm][0].low < points < found[arm][0].high
    verdicts = {row['A']: row['verdict'] for row in verdict_rows(task)}
    assert verdicts == {
        arm: 'differs' if arm in PLANTED else 'no difference found' for arm in FAMILY
    }


def test_only_seeds_that_all_have_enter(task):
    del task.runs['zoh'][5], task.runs['rk4'][11]
    assert task.seeds == [s for s in range(12) if s not in (5, 11)]
    assert {row['seeds'] for row in summary_rows(task)} == {'10'}


@pytest.mark.parametrize(('pairs', 'can'), [(7, False), (8, True)])
def test_few_pairs_show_nothing(task, pairs, can):
    """Seven have 128 signs: even all of one sign is p = 2/128, and 0.09 after Holm."""
    keep_seeds(task, pairs)
    rows = verdict_rows(task)
    assert {(row['verdict'] != 'too few pairs') for row in rows} == {can}
    assert all(('detectable' in row) == can for row in rows)


def test_which_difference_would_be_found(task):
    """The power after Holm's correction; of fewer methods the level is higher."""
    found, _ = family(task)['bilinear']
    (row,) = (row for row in family_rows(task, power=True) if row['A'] == 'bilinear')
    assert row['detectable'] == f'{found.deviation * detectable_effect(12, 0.05 / 6):.2f}'
    del task.runs['rk4'], task.runs['poly']
    (row,) = (row for row in family_rows(task, power=True) if row['A'] == 'bilinear')
    assert row['detectable'] == f'{found.deviation * detectable_effect(12, 0.05 / 4):.2f}'


def test_another_control(task):
    task.control = 'zoh'
    assert [*family(task)] == [arm for arm in ARMS if arm != 'zoh']
    assert sections(task)[0][0] == 'Against zoh'


def test_a_comparison_at_another_resolution_is_of_that_resolution(task):
    (foh,) = (row for row in family_rows(task, '2') if row['A'] == 'foh')
    (plain,) = (row for row in family_rows(task) if row['A'] == 'foh')
    assert float(foh['A - B']) == pytest.approx(float(plain['A - B']) - 20, abs=0.002)


def test_a_diverged_run_is_named(task):
    assert diverged(task) == ['rk4 3']
    assert '* diverged, counted with their value: rk4 3' in describe(task)


def test_mixed_commits_and_cards_are_named(task):
    """And the comparison is repeated without these pairs."""
    assert mixed_seeds(task) == {'commit': [], 'card': []} and 'several' not in describe(task)
    task.runs['rk4'][4] |= dict(card='another card', commit='def')
    assert mixed_seeds(task) == {'commit': [4], 'card': [4]}
    assert '* seeds of several commits: 4' in describe(task)
    rows = {row['A']: row for row in alike_rows(task, [(arm, CONTROL) for arm in FAMILY])}
    pairs = [s for s in range(12) if s != 4]
    values = [task.metrics(arm, seeds=pairs) for arm in ('rk4', CONTROL)]
    assert rows['rk4']['pairs of one commit and card'] == '11'
    assert rows['rk4']['A - B in these'] == f'{np.mean(np.subtract(*values)):+.3f}'
    assert rows['zoh']['pairs of one commit and card'] == '12'


def test_columns_that_no_row_has():
    rows = [{'a': '1', 'b': '', 'c': ''}, {'a': '', 'b': '', 'c': '2'}]
    assert without_empty_columns(rows) == [{'a': '1', 'c': ''}, {'a': '', 'c': '2'}]
    assert without_empty_columns([]) == []


def test_latex_has_no_character_that_means_something():
    text = latex_table([{'a_b': '5 %', 'p > 0': 'x & y'}])
    assert r'a\_b & p $>$ 0 \\' in text and r'5 \% & x \& y \\' in text


def test_labels_stand_clear_of_the_next_point(task):
    for i, arm in enumerate(task.arms):
        task.costs[arm] = {'milliseconds': 10.0 + 5 * i}
    task.costs['foh']['milliseconds'] = task.costs['zoh']['milliseconds'] + 0.2
    times = draw_task(task).axes[-1]
    sides = {label.get_text(): label.get_ha() for label in times.texts}
    assert sides['zoh'] == 'right' and {*sides.values()} == {'right', 'left'}
    assert list(sides.values()).count('right') == 1


def test_a_cost_of_what_is_not_compared_is_no_picture(task):
    task.costs = {'other': {'milliseconds': 2.0}}
    assert len(draw_task(task).axes) == 2


def test_what_the_picture_draws(task):
    """A - B to the right where A is better, intervals about means, seconds of all steps."""
    figure = draw_task(task)
    curves, differences, times = figure.axes
    names = [label.get_text() for label in differences.get_yticklabels()]
    for row, arm in enumerate(names):
        values = np.subtract(task.metrics(arm), task.metrics(CONTROL))
        points, mean = (
            line.get_xdata()
            for line in differences.lines
            if len(line.get_xdata()) in (1, 12) and line.get_ydata()[0] == row
            and line.get_marker() in '.o'
        )  # fmt: skip
        np.testing.assert_allclose(points, values)
        assert mean[0] == pytest.approx(values.mean())
        found = compare(task.metrics(arm), task.metrics(CONTROL))
        (bar,) = (b for b in differences.collections if b.get_segments()[0][0][1] == row)
        np.testing.assert_allclose(bar.get_segments()[0][:, 0], [found.low, found.high])
    middle = [line for line in times.lines if line.get_marker() == 'o']
    assert {line.get_xdata()[0] for line in middle} == {0.2}  # 100 steps of 2 ms
    assert figure.get_suptitle() == 'mIoU, 12 seeds' and curves.get_ylabel() == 'mIoU'


def test_the_picture_of_a_task(task, tmp_path):
    plot_task(task, tmp_path / 'images/task.png')
    picture = cv2.imread(str(tmp_path / 'images/task.png'))
    assert picture is not None and picture.std() > 10
