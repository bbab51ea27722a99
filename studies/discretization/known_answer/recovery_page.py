"""Part B of the regression's page: the error after training, irregular samples."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from page_parts import Rows, quoted, tidy
from recovery import ARMS, RANGES, RATES
from signals import INPUTS

from benchmarks.comparison.comparison import (
    CONTROL,
    FAMILY,
    LEVEL,
    TaskResults,
    can_differ,
    family,
    family_rows,
    secondary_rows,
)
from benchmarks.measure.tables import bullets, figures, markdown_table, without_empty_columns

LEAST_DRAWN = 0.1  # percent; what is below stands at the edge
WITH_FACTOR = tuple(name for name, arm in ARMS.items() if arm.factor)

HEAD = """## Part B: the error after training, irregular samples

With a fixed step length a causal method is x_k = α x_{k-1} + β u_k with two free numbers, and all
methods learn the same. Here each step has its own length, between 1/32 and 10/32, and the scan gets
it. Learned are a and a gain. What a method cannot learn away is how its coefficients change with
the step.

Errors are in percent, on sequences that were not trained on, the mean over five systems (a = -1 to
-16). Lower is better. *Half* and *twice* are tested without retraining, with steps half and twice
as long.

![Three panels: the errors of each method for three inputs, in three ranges of steps](PICTURE)

Points are seeds, lines their means. What is below 0.1 % stands at the lower edge."""


def task_of(results: dict[str, Any], name: str) -> TaskResults:
    """The runs of one input as a task; its metric is the mean error over rates, in percent."""
    task = TaskResults(name, planned=None)
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
    return without_empty_columns(rows)


def factor_rows(tasks: list[TaskResults]) -> Rows:
    """The variants with a factor, against their method and the control, as trained."""
    pairs = [(name, other) for name in WITH_FACTOR for other in (ARMS[name].method, CONTROL)]
    rows = [
        {'A': row.pop('A'), 'input': task.name, **row}
        for task in tasks
        for row in secondary_rows(task, pairs, 'as trained')
    ]
    return without_empty_columns(rows)


def records_of(results: dict[str, Any], name: str, arm: str) -> list[dict[str, Any]]:
    """What the runs of an arm on an input left, one a seed."""
    return [r for r in results['recovery'] if (r['input'], r['arm']) == (name, arm)]


def errors_by_rate(results: dict[str, Any], name: str, arm: str) -> np.ndarray:
    """The error as trained in percent, over seeds, one for each of RATES."""
    runs = records_of(results, name, arm)
    return 100 * np.mean([run['errors']['as trained'] for run in runs], axis=0)


def rate_rows(results: dict[str, Any], name: str) -> Rows:
    """By rate, the error as trained and what was learned for a: a row for each arm."""
    rows = []
    for arm in ARMS:
        records = records_of(results, name, arm)
        errors = errors_by_rate(results, name, arm)
        learned = np.median([np.multiply(r['a'], r['factor']) for r in records], axis=0)
        row = {'method': arm}
        for title, values in (('%', errors), ('a', learned)):
            row |= {f'{title} at {a:g}': f'{value:.2f}' for a, value in zip(RATES, values)}
        rows.append(row)
    return rows


def far_off(results: dict[str, Any], name: str) -> str:
    """The arms that learn more than ten times the true a, empty if none does."""
    learned = {
        arm: np.median([r['a'] for r in records_of(results, name, arm)], axis=0).max()
        for arm in ARMS
        if arm not in WITH_FACTOR
    }
    return ', '.join(f'`{arm}`' for arm, most in learned.items() if most > 10)


def verdict(task: TaskResults, title: str) -> str:
    """Which methods differ from the control in a range of steps, in a sentence."""
    found = family(task, title)
    if not found or not can_differ(len(task.seeds), len(found)):
        return f'{task.name}, {title}: {len(task.seeds)} seeds are too few to tell.'
    kinds: dict[str, list[str]] = {'larger': [], 'smaller': [], 'no difference found': []}
    for arm in FAMILY:
        comparison, p = found[arm]
        kind = 'larger' if comparison.mean > 0 else 'smaller'
        kinds[kind if p < LEVEL else 'no difference found'].append(
            f'`{arm}` ({comparison.mean:+.2f})'
        )
    texts = [f'{kind}: {", ".join(arms)}' for kind, arms in kinds.items() if arms]
    return f'{task.name}, {title}: {"; ".join(texts)}.'


def mean_error(task: TaskResults, arm: str, title: str = 'as trained') -> float:
    """Of an arm in a range of steps, in percent, over seeds."""
    return float(np.mean(task.metrics(arm, title)))


def losses(task: TaskResults, title: str) -> dict[str, float]:
    """By method, how much larger its error is in another range than as trained, in points."""
    return {arm: mean_error(task, arm, title) - mean_error(task, arm) for arm in (*FAMILY, CONTROL)}


def recovery_findings(results: dict[str, Any], tasks: list[TaskResults]) -> list[str]:
    """The hypotheses B1 to B4 of the protocol, and what came out."""
    held = tasks[INPUTS.index('held')]
    exact = max(max(held.metrics(CONTROL, title)) for title in RANGES)
    learned = [run['a'] for run in records_of(results, 'held', CONTROL)]
    off = 100 * np.abs(np.subtract(learned, 1)).max()
    errors = '; '.join(f'`{arm}` {in_ranges(held, arm)}' for arm in FAMILY)
    smaller = []
    for title in ('half', 'twice'):
        arms = [arm for arm in FAMILY if losses(held, title)[arm] < 0]
        smaller.append(f'{quoted(arms) or "no method"} with {title} the steps')
    differ = ', '.join(
        f'{task.name} {sum(p < LEVEL for _, p in family(task, "as trained").values())}'
        for task in tasks
    )
    grown = []
    for title in ('half', 'twice'):
        worst = [(task.name, *largest(losses(task, title))) for task in tasks]
        texts = [f'{name} `{arm}` {points:+.1f}' for name, arm, points in worst]
        grown.append(f'{title} the steps: {", ".join(texts)}')
    above = [
        f'`{arm}` '
        + ', '.join(f'{t.name} {mean_error(t, arm) - mean_error(t, CONTROL):+.2f}' for t in tasks)
        for arm in ('highorder', 'highorder, factor')
    ]
    return [
        f'B1, held: the error of `zoh_exact` is {exact:.1e} % at most in every range, and its a is '
        f'off by {off:.4f} % at most. Errors of the others as trained, half, twice: {errors}. The '
        f'error is smaller than as trained for {"; ".join(smaller)}.',
        f'B2, methods of six that differ from `zoh_exact` as trained: {differ}.',
        f'B3, whose error grows most, in percentage points: {"; ".join(grown)}.',
        f'B4, percentage points above `zoh_exact` as trained: {"; ".join(above)}.',
    ]


def in_ranges(task: TaskResults, arm: str) -> str:
    """The mean errors of an arm as trained, half, twice."""
    return ', '.join(f'{mean_error(task, arm, title):.1f}' for title in RANGES)


def largest(values: dict[str, float]) -> tuple[str, float]:
    """Name and value of the largest."""
    return max(values.items(), key=lambda item: item[1])


def training_finding(results: dict[str, Any]) -> str:
    """How far above the best of a grid training ends."""
    above = [
        (max(record['over_grid']) - 1, record['arm'], record['input'])
        for record in results['recovery']
        if record['arm'] not in WITH_FACTOR
    ]
    worst, arm, name = max(above)
    late = sum(excess > 0.01 for excess, _, _ in above)
    return (
        f'Training found the minimum: of {len(above)} runs of five systems, {late} have one that '
        'ends more than 1 % above the best of a grid over a, each with its best gain. The worst is '
        f'{100 * max(worst, 0):.1f} % above (`{arm}`, {name}).'
    )


def factor_finding(results: dict[str, Any]) -> str:
    """What factors on the step were learned."""
    texts = []
    for arm in WITH_FACTOR:
        factors = [np.median(r['factor']) for r in results['recovery'] if r['arm'] == arm]
        texts.append(f'`{arm}` {figures(float(np.median(factors)), 2)}')
    return (
        'A factor s on all steps multiplies the terms of `poly` and `highorder` by s, s² and s³, '
        'so that a small one leaves the first term, which is that of `zoh_exact`. For the other '
        'methods it is nothing that a and the gain could not do. Learned, median over all runs: '
        + ', '.join(texts)
        + '.'
    )


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
        tidy(axes)
        if task is tasks[0]:
            axes.set_ylabel('error on other sequences, percent')
            axes.legend(frameon=False, title='steps')
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def describe_recovery(results: dict[str, Any], tasks: list[TaskResults]) -> str:
    """Part B in Markdown, without its head."""
    parts = [
        '### What was expected, and found',
        bullets(recovery_findings(results, tasks)),
        '### Which methods differ from the control',
        f'Whose error is larger than that of `{CONTROL}`, and whose is smaller, with the mean '
        f'difference in percentage points. A difference counts if p after Holm is below {LEVEL}.',
        bullets([verdict(task, title) for task in tasks for title in RANGES]),
        training_finding(results),
    ]
    for task in tasks:
        parts += [f'### {task.name.capitalize()} inputs', markdown_table(recovery_rows(task))]
        if rows := comparison_rows(task):
            parts += [
                f'Differences from `{CONTROL}`, in percentage points:',
                markdown_table(rows),
            ]
        parts += [
            'By the rate a of the system: the error as trained in percent, and a as learned over '
            'the truth (times the factor; median over seeds).',
            markdown_table(rate_rows(results, task.name)),
        ]
        if far := far_off(results, task.name):
            parts.append(
                f'Where a is tens of times the truth ({far}), the error hardly depends on it.'
            )
    parts += ['### With a factor on the step', factor_finding(results)]
    if rows := factor_rows(tasks):
        parts.append(markdown_table(rows))
    return '\n\n'.join(parts)
