"""The tables of README.md, by their names there; protocol.md says what a figure is."""

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.comparison.results import (
    CONTROL,
    EACH,
    INTERVAL,
    SIMULTANEOUS,
    Rows,
    TaskResults,
    alike_rows,
    by_seed,
    comparison_row,
    deviation,
    family,
    family_rows,
    interval_cell,
    p_cell,
    summary_rows,
)
from benchmarks.comparison.statistics import (
    Comparison,
    compare,
    equivalence_p,
    holm,
    simultaneous_interval,
)
from benchmarks.measure.tables import without_empty_columns
from studies.discretization.study import LONG, MARGINS, SECONDARY, TITLES, StudyTask

PRIMARY = ('fashion', 'scenes')  # the others are exploratory
# As the data set's README lists them at commit 02cf067: submitted by their authors, not tested by
# it. The last is from a later paper, arXiv 2006.09042.
_PUBLISHED = {
    'ResNet-18, flips, translation, rotation': '94.9',
    'DenseNet-BC, 768 thousand parameters, crops and flips': '95.4',
    'WRN-28-10, crops and flips': '95.9',
    'WRN-28-10, crops, flips, random erasing': '96.3',
    'WRN-40-4, 8.9 million parameters, crops and flips': '96.7',
    'Fine-Tuning DARTS, architecture search': '96.91',
}


def all_tables(tasks: Mapping[str, StudyTask], detectors: Sequence[TaskResults]) -> dict[str, Rows]:
    """Every table of round one by its name; those of tasks that have no runs are not there."""
    tables = {}
    if primary := [tasks[name] for name in PRIMARY if name in tasks and family(tasks[name])]:
        tables['short'] = short_rows(primary)
    for name, task in tasks.items():
        if name != LONG and task.arms and task.kind != 'spacing':
            tables |= {f'{name}: {part}': rows for part, rows in task_tables(task).items()}
    if 'fashion' in tasks:
        tables['other models'] = other_rows(tasks['fashion'], tasks.get(LONG))
    if detectors:
        tables['detection'] = detection_rows(detectors)
    return {name: without_empty_columns(rows) for name, rows in tables.items() if rows}


def task_tables(task: StudyTask) -> dict[str, Rows]:
    """The tables of a task, those that are not empty."""
    pairs = [(arm, task.control) for arm in task.compared]
    found = {
        'control': family_rows(task, power=True),
        'equivalence': equivalence_rows(task),
        'loss': loss_rows(task),
        'variants': secondary_rows(task),
        'methods': with_costs(task, with_pairing(task, summary_rows(task))),
        'dividing dt': dividing_rows(task),
        'resolutions': resolution_rows(task),
        'one commit and card': alike_rows(task, [*pairs, *SECONDARY]),
    }
    found |= {f'control at {name}': family_rows(task, name) for name in resolutions(task)}
    return {name: rows for name, rows in found.items() if rows}


def short_rows(tasks: Sequence[StudyTask]) -> Rows:
    """The control's mean and loss, and of each method its differences and simultaneous bounds."""
    rows: dict[str, dict[str, str]] = {}
    for task in tasks:
        values = task.metrics(task.control)
        rows.setdefault(CONTROL, {'method': task.title(CONTROL)}).update(
            {
                task.name: f'{np.mean(values):.2f} ({deviation(values)})',
                f'{task.name}, {SIMULTANEOUS}': '',
                f'{task.name}, loss': f'{np.mean(task.losses(task.control)):.3f}',
            }
        )
        found = family(task)
        for arm, (comparison, _) in found.items():
            row = rows.setdefault(arm, {'method': task.title(arm)})
            bounds = simultaneous_interval(comparison.differences, len(found))
            row[task.name] = f'{comparison.mean:+.2f}'
            row[f'{task.name}, {SIMULTANEOUS}'] = interval_cell(*bounds, digits=2)
            losses = [task.losses(each) for each in (arm, task.control)]
            row[f'{task.name}, loss'] = f'{np.subtract(*losses).mean():+.3f}'
    return [*rows.values()]


def equivalence_rows(task: StudyTask) -> Rows:
    """A row for each method: whether it is within the task's margin of the control."""
    found, margin = family(task), MARGINS.get(task.name)
    if margin is None or not found:
        return []
    tests = [equivalence_p(comparison.differences, margin) for comparison, _ in found.values()]
    return [
        {
            'A': task.title(arm),
            'B': task.title(task.control),
            'A - B': f'{found[arm][0].mean:+.3f}',
            'margin': f'{margin:g}',
            'p of TOST': p_cell(p),
            'p, Holm': p_cell(corrected),
        }
        for arm, p, corrected in zip(found, tests, holm(tests))
    ]


def loss_rows(task: StudyTask) -> Rows:
    """A row for each method: its training loss, the mean of the last fifth, against the control."""
    rows = []
    for arm in task.compared if len(task.seeds) > 1 else ():
        if None in task.losses(arm) + task.losses(task.control):  # of a run that diverged
            continue
        found = compare(task.losses(arm), task.losses(task.control))
        rows.append(
            {
                'A': task.title(arm),
                'B': task.title(task.control),
                'loss of A': f'{np.mean(task.losses(arm)):.4f}',
                'A - B': f'{found.mean:+.4f}',
                INTERVAL: interval_cell(found.low, found.high, 4),
                'seeds in which A has more': f'{sum(d > 0 for d in found.differences)} of '
                f'{found.count}',
                'p': p_cell(found.p),
            }
        )
    return rows


def with_pairing(task: TaskResults, rows: Rows) -> Rows:
    """Rows of the arms with the correlation over seeds of their metric with the control's."""
    if task.control not in task.runs or len(task.seeds) < 3:
        return rows
    control = task.metrics(task.control)
    cells = [
        '' if arm == task.control else f'{np.corrcoef(task.metrics(arm), control)[0, 1]:+.2f}'
        for arm in task.arms
    ]
    return [row | {'r with the control': cell} for row, cell in zip(rows, cells, strict=True)]


def change(
    task: StudyTask, a: str, b: str, to: str, since: str, field: str
) -> tuple[dict[str, str], Comparison | None]:
    """A against B by how much the metric changes from one test of the trained models to another.

    Args:
        task (StudyTask): The runs.
        a, b (str): Arms.
        to, since (str): The tests, such as '1.5/dt' and '1.5'.
        field (str): What of a run has these tests, 'resolutions' or 'spacings'.

    Returns:
        tuple: The row and the comparison, over the seeds that both have; {} and None of fewer than
        two.
    """
    seeds = task.pairs(a, b)
    if len(seeds) < 2:
        return {}, None
    changes = [
        [task.runs[arm][s][field][to] - task.runs[arm][s][field][since] for s in seeds]
        for arm in (a, b)
    ]
    found = compare(*changes)
    row = {'from': since, 'to': to, **comparison_row(task, a, b, found)}
    return row | {'change of A': f'{np.mean(changes[0]):+.2f}'}, found


def dividing_rows(task: StudyTask) -> Rows:
    """What each method gains by dividing dt at another resolution, against the control."""
    return [
        change(task, arm, task.control, f'{name}/dt', name, 'resolutions')[0]
        for name in resolutions(task)
        if f'{name}/dt' in resolutions(task)
        for arm in task.compared
    ]


def with_costs(task: TaskResults, rows: Rows) -> Rows:
    """Rows of the arms with what a step costs, where that was measured."""
    if not task.costs:
        return rows
    return [row | cost_cells(task, arm) for arm, row in zip(task.arms, rows, strict=True)]


def cost_cells(task: TaskResults, arm: str) -> dict[str, str]:
    """The cells of what a step costs, empty where that was not measured."""
    cost = task.costs.get(arm)
    return {
        'ms a step': f'{cost["milliseconds"]:.2f}' if cost else '',
        'MiB': f'{cost["mebibytes"]:.0f}' if cost and 'mebibytes' in cost else '',
    }


def secondary_rows(
    task: TaskResults,
    pairs: Sequence[tuple[str, str]] = SECONDARY,
    resolution: str | None = None,
) -> Rows:
    """A row for each exploratory comparison of A with B, p as it is."""
    if len(task.seeds) < 2:
        return []
    return [
        comparison_row(task, a, b, compare(*(task.metrics(arm, resolution) for arm in (a, b))))
        for a, b in pairs
        if {a, b} <= {*task.arms}
    ]


def resolutions(task: TaskResults) -> list[str]:
    """The other resolutions that the task's models were tested at."""
    run = next(iter(task.runs[task.arms[0]].values()))
    return [name for name in run.get('resolutions', {}) if name != '1']


def resolution_rows(task: TaskResults) -> Rows:
    """A row for each arm: the mean metric at other resolutions; none where there are none."""
    names = resolutions(task)
    return [
        {
            'method': task.title(arm),
            **{name: f'{np.mean(task.metrics(arm, name)):.2f}' for name in ('1', *names)},
        }
        for arm in task.arms
        if names and task.seeds
    ]


def other_rows(task: StudyTask, long: StudyTask | None) -> Rows:
    """Fashion-MNIST by methods, other people's models, the longer run, and published figures."""
    if not task.peers:
        return []
    rows = [
        _model_row(f'Vim, {task.title(arm)}', task, arm, task.runs[arm], task.seeds)
        for arm in task.arms
    ]
    for peer, runs in task.peers.items():
        rows.append(_model_row(TITLES[peer], task, peer, runs, sorted(runs)))
    for arm, runs in long.runs.items() if long else ():
        name = f'Vim, {long.title(arm)}, 7 layers, 100 epochs, random erasing'
        rows.append(_model_row(name, long, arm, runs, sorted(runs)))
    blank = dict.fromkeys(rows[0], '')
    return rows + [blank | {'model': name, 'accuracy': value} for name, value in _PUBLISHED.items()]


def _model_row(name, task, arm, runs, seeds):
    values = [runs[seed]['metric'] for seed in seeds]
    (parameters,) = {runs[seed]['parameters'] for seed in seeds}
    return {
        'model': name,
        'parameters': f'{parameters:,}',
        'seeds': str(len(values)),
        'accuracy': f'{np.mean(values):.2f}',
        'standard deviation': deviation(values),
        **cost_cells(task, arm),
    }


def detection_rows(tasks: Sequence[TaskResults]) -> Rows:
    """A row for each method: mean, standard deviation and differences from the control by seed.

    Args:
        tasks (Sequence): One for each metric of the same runs, as they are read from folders.
    """
    rows: dict[str, dict[str, str]] = {}
    for task in tasks:
        metric = task.name.partition(' ')[2]
        found = family(task)
        for arm in task.arms:
            values = task.metrics(arm)
            row = rows.setdefault(arm, {'method': arm})
            row[metric] = f'{np.mean(values):.2f} ({deviation(values)})'
            row[f'{metric} - control'] = f'{found[arm][0].mean:+.2f}' if arm in found else ''
            row[f'{metric}, {EACH}'] = by_seed(found[arm][0]) if arm in found else ''
    return [*rows.values()]
