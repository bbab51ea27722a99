"""Part A of the regression's page: the error over the step length, nothing trained."""

from pathlib import Path
from typing import Any

import numpy as np
from convergence import EXACT, STEPS, order
from matplotlib.figure import Figure
from page_parts import Rows, quoted, tidy
from signals import INPUTS

from benchmarks.comparison.comparison import CONTROL
from benchmarks.measure.tables import bullets, figures, markdown_table
from benchmarks.pictures.methods import STYLES

SHOWN_RATE = -4.0  # of the tables; the picture has all
SHOWN_STEPS = STEPS[::2]
ALIKE = ('zoh', 'foh', 'highorder', 'rk4', CONTROL)  # at a fixed dt they differ in a factor

HEAD = """## Part A: the error over the step length, nothing trained

![Nine panels: the error over the step length for three inputs and three rates](PICTURE)

A method that is exact has no line. Errors above 10,000 or below 1e-6 are outside."""

_AFTER_GAIN = """### After the best gain

A trained B multiplies the states by any factor. So here are the same states, each times the factor
that makes its error least: what is left is an error of the dynamics. At a fixed step length `zoh`,
`foh`, `highorder`, `rk4` and `zoh_exact` have the same decay and read the same samples. They differ
in a factor, and so are one line here."""


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
        f'A4: after the best gain the errors of {quoted(ALIKE)} differ by {100 * apart:.4f} % of '
        'their value at most, over all inputs, rates and step lengths.',
    ]


def _is_held_control(record: dict[str, Any]) -> bool:
    return record['input'] == 'held' and record['method'] == CONTROL


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
            tidy(axes)
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


def describe_convergence(results: dict[str, Any]) -> str:
    """Part A in Markdown, without its head."""
    parts = [
        '### What was expected, and found',
        bullets(convergence_findings(results)),
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
