"""The tables and pictures of this folder's README.md, from the results of measure.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.comparison.results import CONTROL, Rows, TaskResults, family_rows
from benchmarks.measure.tables import figures, without_empty_columns
from benchmarks.pictures.palette import STYLES
from studies.discretization.known_answer.convergence import EXACT, STEPS, order
from studies.discretization.known_answer.recovery import ARMS, RANGES, RATES
from studies.discretization.known_answer.signals import INPUTS
from studies.discretization.tables.first import secondary_rows

SHOWN_RATE = -4.0  # of the tables of part A; the picture has all
SHOWN_STEPS = STEPS[::2]
LEAST_DRAWN = 0.1  # percent; what is below stands at the edge
WITH_FACTOR = tuple(name for name, arm in ARMS.items() if arm.factor)


def all_tables(results: dict[str, Any]) -> dict[str, Rows]:
    """Every table of the page by its name."""
    tasks = [task_of(results, name) for name in INPUTS]
    tables = {'orders': order_rows(results)}
    tables |= {f'{name}: errors': error_rows(results, name) for name in INPUTS}
    tables['after gain'] = after_gain_rows(results)
    for task in tasks:
        tables |= {
            f'{task.name}: ranges': recovery_rows(task),
            f'{task.name}: control': comparison_rows(task),
            f'{task.name}: rates': rate_rows(results, task.name),
        }
    tables['factors'] = factor_rows(tasks)
    return {name: without_empty_columns(rows) for name, rows in tables.items()}


def pictures(results: dict[str, Any]) -> dict[str, Callable[[Path], None]]:
    """What draws each picture, by the name of its file."""
    return {
        'convergence.png': lambda path: plot_convergence(results, path),
        'recovery.png': lambda path: plot_recovery(
            [task_of(results, name) for name in INPUTS], path
        ),
    }


def shown(error: float) -> str:
    """An error with two digits, or that there is none."""
    return 'exact' if error < EXACT else figures(error, 2)


def fraction(dt: float) -> str:
    """1, 1/4 ..."""
    return '1' if dt == 1 else f'1/{round(1 / dt)}'


def convergence_of(results: dict[str, Any], name: str, a: float) -> dict[str, dict[str, list]]:
    """By method, the lists over ``STEPS`` of one input and rate."""
    return {
        record['method']: record
        for record in results['convergence']
        if (record['input'], record['a']) == (name, a)
    }


def order_rows(results: dict[str, Any]) -> Rows:
    """The power of dt that the last errors follow: a row for each method."""
    rows: dict[str, dict[str, str]] = {}
    for key, ending in (('error', ''), ('error_after_gain', ', after gain')):
        for name in INPUTS:
            for method, record in convergence_of(results, name, SHOWN_RATE).items():
                power = order(record[key])
                cell = 'exact' if np.isnan(power) else f'{power + 0:.1f}'.replace('-0.0', '0.0')
                rows.setdefault(method, {'method': method})[name + ending] = cell
    return [*rows.values()]


def error_rows(results: dict[str, Any], name: str) -> Rows:
    """Errors over the step length on one input: a row for each method."""
    return [
        {
            'method': method,
            **{f'dt {fraction(dt)}': shown(record['error'][STEPS.index(dt)]) for dt in SHOWN_STEPS},
            'best gain, dt 1/256': figures(record['gain'][-1]),
        }
        for method, record in convergence_of(results, name, SHOWN_RATE).items()
    ]


def after_gain_rows(results: dict[str, Any]) -> Rows:
    """Errors after the best gain: a row for each input and each kind of dynamics."""
    rows = []
    for name in INPUTS:
        records = convergence_of(results, name, SHOWN_RATE)
        for title, method in (('the five', CONTROL), ('bilinear',) * 2, ('poly',) * 2):
            found = records[method]['error_after_gain']
            cells = {f'dt {fraction(dt)}': shown(found[STEPS.index(dt)]) for dt in SHOWN_STEPS}
            rows.append({'input': name, 'method': title, **cells})
    return rows


def task_of(results: dict[str, Any], name: str) -> TaskResults:
    """The runs of one input as a task; its metric is the mean error over rates, in percent."""
    task = TaskResults(name)
    for record in results['recovery']:
        if record['input'] == name:
            percent = {title: 100 * np.mean(e) for title, e in record['errors'].items()}
            run = {'metric': percent['as trained'], 'resolutions': percent}
            task.runs.setdefault(record['arm'], {})[record['seed']] = run
    return task


def recovery_rows(task: TaskResults) -> Rows:
    """Errors in each range of steps: a row for each arm."""
    rows = []
    for arm in task.arms:
        cells = {}
        for title in RANGES:
            values = task.metrics(arm, title)
            spread = np.std(values, ddof=1) if len(values) > 1 else 0.0
            cells[title] = f'{np.mean(values):.2f} ± {spread:.2f}'
        rows.append({'method': arm, **cells})
    return rows


def comparison_rows(task: TaskResults) -> Rows:
    """Differences from the control in percentage points: a row for each range and method."""
    rows = []
    for title in RANGES:
        for row in family_rows(task, title):
            arm, _ = row.pop('A'), row.pop('B')
            difference, larger = row.pop('A - B'), row.pop('P(A > B)')
            cells = {'method': arm, 'steps': title, 'difference': difference}
            rows.append({**cells, 'P(larger)': larger, **row})
    return rows


def factor_rows(tasks: list[TaskResults]) -> Rows:
    """The variants with a factor, against their method and the control, as trained."""
    pairs = [(name, other) for name in WITH_FACTOR for other in (ARMS[name].method, CONTROL)]
    return [
        {'A': row.pop('A'), 'input': task.name, **row}
        for task in tasks
        for row in secondary_rows(task, pairs, 'as trained')
    ]


def rate_rows(results: dict[str, Any], name: str) -> Rows:
    """By rate, the error as trained and what was learned for a: a row for each arm."""
    rows = []
    for arm in ARMS:
        records = [r for r in results['recovery'] if (r['input'], r['arm']) == (name, arm)]
        errors = 100 * np.mean([run['errors']['as trained'] for run in records], axis=0)
        learned = np.median([np.multiply(r['a'], r['factor']) for r in records], axis=0)
        row = {'method': arm}
        for title, values in (('%', errors), ('a', learned)):
            row |= {f'{title} at {a:g}': f'{value:.2f}' for a, value in zip(RATES, values)}
        rows.append(row)
    return rows


def plot_convergence(results: dict[str, Any], path: Path) -> None:
    """The errors of part A: a column for each input, a row for each rate."""
    rates = sorted({record['a'] for record in results['convergence']}, reverse=True)
    figure = Figure(figsize=(12, 10), dpi=100, layout='constrained')
    grid = figure.subplots(len(rates), len(INPUTS), sharex=True, sharey=True, squeeze=False)
    for a, line in zip(rates, grid):
        for name, axes in zip(INPUTS, line):
            for method, record in convergence_of(results, name, a).items():
                error = np.array(record['error'])
                drawn = np.where(error < EXACT, np.nan, error)
                axes.loglog(STEPS, drawn, label=method, **STYLES[method])
            axes.set_title(f'{name}, a = {a:g}', fontsize=10)
            _tidy(axes)
    for axes in grid[-1]:
        axes.set(xlabel='dt', ylim=(1e-6, 1e4))
        axes.set_xticks(STEPS[::2], [fraction(dt) for dt in STEPS[::2]])
        axes.minorticks_off()
    for axes in grid[:, 0]:
        axes.set_ylabel('relative error')
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc='outside lower center', ncols=7, frameon=False, handlelength=4
    )
    figure.savefig(path)


def plot_recovery(tasks: list[TaskResults], path: Path) -> None:
    """The errors of part B: a panel for each input; points are seeds, lines their means."""
    figure = Figure(figsize=(14, 4.8), dpi=100, layout='constrained')
    for task, axes in zip(tasks, figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]):
        for i, title in enumerate(sorted(RANGES, key=lambda title: RANGES[title])):
            for place, arm in enumerate(task.arms):
                at = place + 0.25 * (i - 1)
                values = np.maximum(task.metrics(arm, title), LEAST_DRAWN)
                label = title if place == 0 else None
                axes.plot(np.full(len(values), at), values, '.', color=f'C{i}', alpha=0.35)
                axes.hlines(
                    values.mean(), at - 0.12, at + 0.12, color=f'C{i}', linewidth=2.5, label=label
                )
        axes.set_yscale('log')
        axes.set_xticks(range(len(task.arms)), task.arms, rotation=45, ha='right', fontsize=9)
        axes.set_title(task.name)
        _tidy(axes)
        if task is tasks[0]:
            axes.set_ylabel('error on other sequences, percent')
            axes.legend(frameon=False, title='steps')
    figure.savefig(path)


def _tidy(axes: Axes) -> None:
    """A grid, and a frame at the left and at the bottom only."""
    axes.grid(alpha=0.3)
    axes.spines[['top', 'right']].set_visible(False)
