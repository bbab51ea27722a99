"""The page of the regression with a known answer: tables, pictures, and what they show."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from convergence import EXACT, INPUTS, STEPS, order
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from recovery import ARMS, RANGES, RATES

from vim_mm.analysis.pictures.methods import STYLES
from vim_mm.analysis.study.comparison import (
    CONTROL,
    FAMILY,
    LEVEL,
    TaskResults,
    can_differ,
    family,
    family_rows,
    secondary_rows,
)
from vim_mm.analysis.tables import figures, markdown_table, write_text

Records = list[dict[str, Any]]
Rows = list[dict[str, str]]
SHOWN_RATE = -4.0  # of the tables of part A; the picture has all
SHOWN_STEPS = STEPS[::2]
ALIKE = ('zoh', 'foh', 'highorder', 'rk4', CONTROL)  # at a fixed dt they differ in a factor
LEAST_DRAWN = 0.1  # percent; what is below stands at the edge
WITH_FACTOR = tuple(name for name, arm in ARMS.items() if arm.factor)

_HEAD = """# A regression with a known answer

Do not edit. Made from the results of the runs, `docs/study/known_answer.json`, by

```bash
python tools/study/known_answer.py --results docs/study/known_answer.json \\
    --page docs/known_answer.md
```

With `--out` in place of `--results` the same command makes the runs again, in some minutes on one
core. [The protocol](study_protocol.md#a-regression-with-a-known-answer-secondary-cpu) says what is
simulated, learned and expected. It was committed before the runs.

The system is x' = a x + u with x(0) = 0, the simplest that has a state. Its exact states are known.
The package's scan computes them from samples of the input, in float64. An error is the root mean
square of the difference from the exact states, relative to that of the exact states."""

_CONVERGENCE = """## Part A: the error over the step length, nothing trained

![Nine panels: the error over the step length for three inputs and three rates](PICTURE)

A method that is exact has no line. Errors above 10,000 or below 1e-6 are outside."""

_AFTER_GAIN = """### After the best gain

A trained B multiplies the states by any factor. So here are the same states, each times the factor
that makes its error least: what is left is an error of the dynamics. At a fixed step length `zoh`,
`foh`, `highorder`, `rk4` and `zoh_exact` have the same decay and read the same samples. They differ
in a factor, and so are one line here."""

_RECOVERY = """## Part B: the error after training, irregular samples

With a fixed step length a causal method is x_k = α x_{k-1} + β u_k with two free numbers, and all
methods learn the same. Here each step has its own length, between 1/32 and 10/32, and the scan gets
it. Learned are a and a gain. What a method cannot learn away is how its coefficients change with
the step.

Errors are in percent, on sequences that were not trained on, the mean over five systems (a = -1 to
-16). Lower is better. *Half* and *twice* are tested without retraining, with steps half and twice
as long.

![Three panels: the errors of each method for three inputs, in three ranges of steps](PICTURE)

Points are seeds, lines their means. What is below 0.1 % stands at the lower edge."""


def shown(error: float) -> str:
    """An error with two digits, or that there is none."""
    return 'exact' if error < EXACT else figures(error, 2)


def fraction(dt: float) -> str:
    """1, 1/4 ..."""
    return '1' if dt == 1 else f'1/{round(1 / dt)}'


# Part A


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


def spread_of_alike(results: dict[str, Any]) -> float:
    """The largest relative difference of the errors after gain of the methods in ``ALIKE``."""
    worst = 0.0
    for record in results['convergence']:
        if record['method'] in ALIKE:
            truth = convergence_of(results, record['input'], record['a'])[CONTROL]
            here, there = (np.array(r['error_after_gain']) for r in (record, truth))
            differences = np.abs(here - there) / np.maximum(there, EXACT)
            worst = max(worst, float(differences[there > EXACT].max(initial=0)))
    return worst


def convergence_findings(results: dict[str, Any]) -> list[str]:
    """The expectations A1 to A4 of the protocol, and what came out."""
    smooth, held, noisy = (convergence_of(results, name, SHOWN_RATE) for name in INPUTS)

    def orders(records: dict, methods: tuple[str, ...], key: str = 'error') -> str:
        return ', '.join(f'`{m}` {order(records[m][key]):.2f}' for m in methods)

    first = ('zoh', 'bilinear', 'highorder', 'rk4', CONTROL)
    exact = max(max(r['error']) for r in results['convergence'] if _is_held_control(r))
    apart = spread_of_alike(results)
    return [
        f'A1, held: `zoh_exact` is exact, to {"1e-13" if exact < EXACT else shown(exact)}. '
        f'Orders: {orders(held, ("rk4", "bilinear", "zoh", "highorder"))}.',
        f'A2, smooth: orders {orders(smooth, first)}. Exact integration of a held input does not '
        f'raise the order. Noisy: {orders(noisy, first)}.',
        f'A3: the error of `foh` at the shortest step is {shown(smooth["foh"]["error"][-1])}; '
        f'it needs a gain of {figures(smooth["foh"]["gain"][-1])} there. That of `poly` is '
        f'{shown(smooth["poly"]["error"][-1])}, and '
        f'{shown(smooth["poly"]["error_after_gain"][-1])} after its best gain.',
        f'A4: after the best gain the errors of {_names(ALIKE)} differ by {100 * apart:.4f} % of '
        'their value at most, over all inputs, rates and step lengths.',
    ]


def _is_held_control(record: dict[str, Any]) -> bool:
    return record['input'] == 'held' and record['method'] == CONTROL


def _names(methods: Iterable[str]) -> str:
    return ', '.join(f'`{method}`' for method in methods)


# Part B


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
        errors = 100 * np.mean([r['errors']['as trained'] for r in records], axis=0)
        learned = np.median([np.multiply(r['a'], r['factor']) for r in records], axis=0)
        row = {'method': arm}
        for title, values in (('%', errors), ('a', learned)):
            row |= {f'{title} at {a:g}': f'{value:.2f}' for a, value in zip(RATES, values)}
        rows.append(row)
    return rows


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
    learned = [r['a'] for r in results['recovery'] if (r['input'], r['arm']) == ('held', CONTROL)]
    off = 100 * np.abs(np.subtract(learned, 1)).max()
    errors = '; '.join(f'`{arm}` {in_ranges(held, arm)}' for arm in FAMILY)
    smaller = []
    for title in ('half', 'twice'):
        arms = [arm for arm in FAMILY if losses(held, title)[arm] < 0]
        smaller.append(f'{_names(arms) or "no method"} with {title} the steps')
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


def summary(results: dict[str, Any], tasks: list[TaskResults]) -> list[str]:
    """The main points, with their figures."""
    smooth, _, noisy = tasks
    records = convergence_of(results, 'smooth', SHOWN_RATE)
    without = {m: shown(r['error'][STEPS.index(1 / 64)]) for m, r in records.items()}
    biased = [r['a'] for r in results['recovery'] if (r['input'], r['arm']) == ('smooth', CONTROL)]
    first, *_, last = np.median(biased, axis=0)
    arms = (CONTROL, 'bilinear', 'rk4', 'highorder', 'zoh', 'foh', 'poly')
    trained = '; '.join(f'`{arm}` {in_ranges(smooth, arm)}' for arm in arms)
    control = mean_error(noisy, CONTROL)
    near = max(abs(mean_error(noisy, arm) - control) for arm in ('bilinear', 'rk4'))
    return [
        'On smooth inputs no method is better than first order, because each reads one sample a '
        f'step. With a = -4 and dt = 1/64 the error of `zoh_exact` is {without[CONTROL]}, of '
        f'`bilinear` {without["bilinear"]}, of `zoh` {without["zoh"]}: exact integration improves '
        'the constant.',
        'At one fixed step length a trained gain makes `zoh`, `foh`, `highorder`, `rk4` and '
        '`zoh_exact` the same method. They can differ only where the step varies, as it does in '
        'Mamba.',
        'Where the step varies, training does not make them equal. Errors in percent on smooth '
        f'inputs as trained, with half, with twice the steps: {trained}.',
        'The differences come from stiff systems. The tables by rate show them shrink from a = -16 '
        'to a = -1, least for `highorder`, whose further terms depend on the step and hardly on a, '
        'and not for `foh` (its gain goes with the square of the step) and `poly` (it reads the '
        'future).',
        'With noise most of the error comes from the samples themselves: that of `zoh_exact` is '
        f'{control:.1f} %, and `bilinear` and `rk4` are within {near:.2f} points of it.',
        'A good fit does not find the true a. On smooth inputs `zoh_exact` learns '
        f'{first:.2f} times a at a = -1 and {last:.2f} times a at a = -16. The sample at the end '
        'of a step stands for all of it, so the input comes half a step early, and a slower state '
        'makes up for that. On held inputs it finds a.',
        'This is a linear system with given steps. A network chooses its steps and has gates, so '
        'nothing follows for its accuracy.',
    ]


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


# Pictures


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
    path.parent.mkdir(parents=True, exist_ok=True)
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _tidy(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.spines[['top', 'right']].set_visible(False)


# The page


def _list(lines: list[str]) -> str:
    return '\n'.join(f'* {line}' for line in lines)


def describe_convergence(results: dict[str, Any]) -> str:
    """Part A in Markdown, without its head."""
    parts = [
        '### What was expected, and found',
        _list(convergence_findings(results)),
        f'### The order: the power of dt over the last four steps, a = {SHOWN_RATE:g}',
        markdown_table(order_rows(results)),
    ]
    for name in INPUTS:
        parts += [
            f'### Errors on {name} inputs, a = {SHOWN_RATE:g}',
            markdown_table(error_rows(results, name)),
        ]
    parts += [_AFTER_GAIN, markdown_table(after_gain_rows(results))]
    return '\n\n'.join(parts)


def describe_recovery(results: dict[str, Any], tasks: list[TaskResults]) -> str:
    """Part B in Markdown, without its head."""
    parts = [
        '### What was expected, and found',
        _list(recovery_findings(results, tasks)),
        '### Which methods differ from the control',
        f'Whose error is larger than that of `{CONTROL}`, and whose is smaller, with the mean '
        f'difference in percentage points. A difference counts if p after Holm is below {LEVEL}.',
        _list([verdict(task, title) for task in tasks for title in RANGES]),
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
    parts += ['### With a factor on the step', factor_finding(results)]
    if rows := factor_rows(tasks):
        parts.append(markdown_table(rows))
    return '\n\n'.join(parts)


def describe(results: dict[str, Any], pictures: tuple[str, str] | None = None) -> str:
    """All that there is to say, in Markdown.

    Args:
        results (dict): What the tool measured.
        pictures (tuple, optional): Addresses of the two pictures; without them the text is for a
            terminal.
    """
    tasks = [task_of(results, name) for name in INPUTS]
    facts = (
        f'{len(results["seeds"])} seeds, {results["iterations"]} iterations of training; commit '
        f'{results["commit"]}, torch {results["torch"]}, {results["date"]}.'
    )
    parts = [describe_convergence(results), describe_recovery(results, tasks)]
    if pictures:
        heads = (_CONVERGENCE, _RECOVERY)
        parts = [
            '\n\n'.join([head.replace('PICTURE', picture), part])
            for head, picture, part in zip(heads, pictures, parts)
        ]
        parts = [_HEAD, facts, '## In short', _list(summary(results, tasks)), *parts]
    return '\n\n'.join(parts)


def write_page(results: dict[str, Any], page: Path) -> None:
    """The page in Markdown, and the pictures in ``images`` beside it."""
    pictures = [
        page.parent / 'images' / f'known_answer_{part}.png' for part in ('convergence', 'recovery')
    ]
    plot_convergence(results, pictures[0])
    plot_recovery([task_of(results, name) for name in INPUTS], pictures[1])
    first, second = (os.path.relpath(picture, page.parent) for picture in pictures)
    write_text(page, describe(results, (first, second)))
