"""Runs of one task by several methods and seeds, and the rows of their tables."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.comparison.statistics import (
    Comparison,
    compare,
    detectable_effect,
    holm,
    interquartile_mean,
    simultaneous_interval,
)
from vim_mm.ops import METHODS

(CONTROL,) = (name for name, method in METHODS.items() if method.control)
FAMILY = tuple(name for name in METHODS if name != CONTROL)  # against the control
INTERVAL = '95 % interval'
SIMULTANEOUS = 'simultaneous 95 % interval'  # of all comparisons of a table
EACH = 'each seed'
LEVEL = 0.05

Rows = list[dict[str, str]]


@dataclass
class TaskResults:
    """The runs of one task.

    Attributes:
        name (str): Of the task.
        runs (dict): By arm and seed, what the run left: its ``metric`` and its ``curve``, a list of
            step and metric, and what else is known of it. An arm is a method or a variant of one.
        costs (dict): By arm, what a step costs alone on the card: ``milliseconds``.
        control (str): The arm that the others are compared with.
    """

    name: str
    runs: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    costs: dict[str, dict[str, Any]] = field(default_factory=dict)
    control: str = CONTROL

    @property
    def unit(self) -> str:
        """What the metric is, for an axis."""
        return self.name

    @property
    def compared(self) -> list[str]:
        """The methods that have runs and are compared with the control."""
        return [arm for arm in (*FAMILY, CONTROL) if arm in self.runs and arm != self.control]

    @property
    def arms(self) -> list[str]:
        """Those of the tables, in their order."""
        known = [arm for arm in (*FAMILY, CONTROL) if arm in self.runs]
        return known + sorted(self.runs.keys() - {*known})

    @property
    def seeds(self) -> list[int]:
        """Those that every arm has finished, the only ones that enter."""
        return sorted(set.intersection(*(set(self.runs[arm]) for arm in self.arms)))

    @property
    def entries(self) -> list[tuple[str, int, dict[str, Any]]]:
        """Arm, seed and run of all that enters a comparison."""
        return [(arm, seed, self.runs[arm][seed]) for arm in self.arms for seed in self.seeds]

    def title(self, arm: str) -> str:
        """What tables and pictures call an arm."""
        return arm

    def metrics(
        self, arm: str, resolution: str | None = None, seeds: Sequence[int] | None = None
    ) -> list[float]:
        """The metric by seed, of those of the tables or others, or that at another resolution."""
        runs = [self.runs[arm][seed] for seed in (self.seeds if seeds is None else seeds)]
        if resolution is None:
            return [run['metric'] for run in runs]
        return [run['resolutions'][resolution] for run in runs]


def family(task: TaskResults, resolution: str | None = None) -> dict[str, tuple[Comparison, float]]:
    """Of each method that is compared, the comparison with the control and Holm's p."""
    if task.control not in task.runs or len(task.seeds) < 2:
        return {}
    control = task.metrics(task.control, resolution)
    found = {arm: compare(task.metrics(arm, resolution), control) for arm in task.compared}
    adjusted = holm([comparison.p for comparison in found.values()])
    return {arm: (found[arm], p) for arm, p in zip(found, adjusted)}


def summary_rows(task: TaskResults) -> Rows:
    """A row for each arm: its metric over seeds."""
    rows = []
    for arm in task.arms:
        values = task.metrics(arm)
        rows.append(
            {
                'method': task.title(arm),
                'seeds': str(len(values)),
                'mean': f'{np.mean(values):.2f}',
                'interquartile mean': f'{interquartile_mean(values):.2f}',
                'standard deviation': deviation(values),
                'least': f'{min(values):.2f}',
                'greatest': f'{max(values):.2f}',
            }
        )
    return rows


def deviation(values: Sequence[float]) -> str:
    """The cell of a standard deviation over seeds, empty for one seed."""
    return f'{np.std(values, ddof=1):.2f}' if len(values) > 1 else ''


def comparison_row(task: TaskResults, a: str, b: str, found: Comparison) -> dict[str, str]:
    """Of pairs that are too few for an interval and p it has each difference in their place."""
    enough = is_testable(found.count)
    return {
        'A': task.title(a),
        'B': task.title(b),
        'A - B': f'{found.mean:+.3f}',
        EACH: '' if enough else by_seed(found),
        INTERVAL: interval_cell(found.low, found.high) if enough else '',
        'P(A > B)': f'{found.improvement:.2f}',
        'p': p_cell(found.p) if enough else '',
    }


def p_cell(p: float) -> str:
    """The cell of a p, which is never 0."""
    return f'{p:.4f}' if p >= 0.0001 else '< 0.0001'


def interval_cell(low: float, high: float, digits: int = 3) -> str:
    """The cell of an interval in points."""
    return f'{low:+.{digits}f} to {high:+.{digits}f}'


def by_seed(found: Comparison) -> str:
    """The differences of all pairs, in the order of the seeds."""
    return ', '.join(f'{difference:+.2f}' for difference in found.differences)


def family_rows(task: TaskResults, resolution: str | None = None, power: bool = False) -> Rows:
    """A row for each method that is compared, against the control.

    With ``power`` also the difference that was detectable, where anything could be found.
    """
    all_found = family(task, resolution)
    rows = []
    for arm, (found, p) in all_found.items():
        corrected = p_cell(p) if is_testable(found.count) else ''
        row = {**comparison_row(task, arm, task.control, found), 'p, Holm': corrected}
        if is_testable(found.count):
            bounds = simultaneous_interval(found.differences, len(all_found))
            row[SIMULTANEOUS] = interval_cell(*bounds)
        if power and can_differ(found.count, len(all_found)):
            row['detectable'] = f'{detectable(found, len(all_found)):.2f}'
        rows.append(row)
    return rows


def verdict_rows(task: TaskResults) -> Rows:
    """:func:`family_rows` with what may be concluded by the level ``LEVEL``, in a last column."""
    all_found = family(task)
    rows = family_rows(task, power=True)
    for row, (found, p) in zip(rows, all_found.values(), strict=True):
        if not can_differ(found.count, len(all_found)):
            row['verdict'] = 'too few pairs'
        else:
            row['verdict'] = 'differs' if p < LEVEL else 'no difference found'
    return rows


def least_p(pairs: int) -> float:
    """The least p that the sign-flip test of so many pairs can have, whatever the differences."""
    return 2 / 2**pairs


def can_differ(pairs: int, comparisons: int) -> bool:
    """Whether so many pairs can give a p below ``LEVEL`` at all, after Holm's correction."""
    return comparisons * least_p(pairs) < LEVEL


def is_testable(pairs: int) -> bool:
    """Whether pairs are enough for p and an interval: of fewer nothing can be rejected."""
    return can_differ(pairs, comparisons=1)


def detectable(found: Comparison, comparisons: int) -> float:
    """The difference in points that its pairs find with a probability of 0.8."""
    return found.deviation * detectable_effect(found.count, LEVEL / comparisons)


def diverged(task: TaskResults) -> list[str]:
    """The runs that enter a comparison and whose loss was not finite, by arm and seed."""
    return [f'{task.title(arm)} {seed}' for arm, seed, run in task.entries if run.get('diverged')]


def facts(records: Iterable[dict[str, Any]]) -> dict[str, list[str]]:
    """Cards, commits and dates of runs or costs."""
    records = [*records]
    keys = ('card', 'commit', 'date')
    return {key: sorted({record[key] for record in records if key in record}) for key in keys}


def mixed_seeds(task: TaskResults) -> dict[str, list[int]]:
    """Seeds whose runs are of several commits, and of several cards."""
    return {
        key: [s for s in task.seeds if len({task.runs[a][s].get(key) for a in task.arms}) > 1]
        for key in ('commit', 'card')
    }


def alike_rows(task: TaskResults, pairs: Sequence[tuple[str, str]]) -> Rows:
    """The differences of A and B in the pairs of one commit and card alone; no test is made."""
    rows = []
    for a, b in dict.fromkeys(pairs):
        if not {a, b} <= {*task.arms}:
            continue
        both = [(s, task.runs[a][s], task.runs[b][s]) for s in task.seeds]
        seeds = [s for s, *runs in both if len({(r['commit'], r['card']) for r in runs}) == 1]
        values = [task.metrics(arm, seeds=seeds) for arm in (a, b)]
        rows.append(
            {
                'A': task.title(a),
                'B': task.title(b),
                'pairs of one commit and card': str(len(seeds)),
                'A - B in these': f'{np.mean(np.subtract(*values)):+.3f}' if seeds else '',
            }
        )
    return rows
