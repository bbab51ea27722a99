"""Tables of the study of methods, from its results alone: one small JSON for each run.

What a figure is stands in docs/study_protocol.md.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.comparison.statistics import (
    Comparison,
    compare,
    detectable_effect,
    holm,
    interquartile_mean,
)
from vim_mm.json_lines import read_json
from vim_mm.ops import METHODS

(CONTROL,) = (name for name, method in METHODS.items() if method.control)
FAMILY = tuple(name for name in METHODS if name != CONTROL)  # against the control
SECONDARY = (  # exploratory: A against B
    ('foh_matched', CONTROL),
    ('foh_matched', 'foh'),
    ('zoh_exact_averaged', CONTROL),
    ('poly', 'zoh_exact_averaged'),
)
ARMS = (*FAMILY, CONTROL, 'foh_matched', 'zoh_exact_averaged')
SMALL_TASK_ARMS = (*FAMILY, CONTROL, 'foh_matched')  # of tasks that are not primary
PEERS = ('deit', 'resnet18')  # other people's models, of the same recipe
TITLES = {
    'foh_matched': 'foh, matched',
    'zoh_exact_averaged': 'zoh_exact, averaged',
    'deit': 'DeiT',
    'resnet18': 'ResNet-18',
}
INTERVAL = '95 % interval'
EACH = 'each seed'
LEVEL = 0.05
PLANNED_SEEDS = 12
PRIMARY = ('fashion', 'scenes')  # tasks; the others are exploratory
# Of a task on which many runs stay at chance: chance, and percentages above which runs are counted.
CHANCE = {'recall': 100 / 15}
ABOVE = (10.0, 50.0)
# What the records of all runs of a task have in common.
_ALIKE: dict[str, Callable[[dict[str, Any]], Any]] = {
    'settings': lambda record: record.get('settings'),
    'data': lambda record: record.get('data'),
    'torch': lambda record: record.get('versions', {}).get('torch'),
}


@dataclass
class TaskResults:
    """The runs of one task.

    Attributes:
        name (str): Of the task, and of its setting where that is not the primary one.
        runs (dict): By arm and seed, what the run left.
        peers (dict): As ``runs``, of other people's models.
        costs (dict): By arm or peer, what a step costs alone on the card.
        control (str): The arm that the others are compared with.
        planned (int, optional): Seeds of the protocol; fewer are marked as interim.
        final (bool): Whether no further seeds will come, so that fewer are tested.
    """

    name: str
    runs: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    peers: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    costs: dict[str, dict[str, Any]] = field(default_factory=dict)
    control: str = CONTROL
    planned: int | None = PLANNED_SEEDS
    final: bool = False

    @property
    def kind(self) -> str:
        """The name without the setting."""
        return self.name.partition('_')[0]

    @property
    def primary(self) -> bool:
        """Whether the comparison with the control is a hypothesis of the protocol."""
        return self.planned is None or self.name in PRIMARY

    @property
    def interim(self) -> bool:
        """Whether the test of the protocol is still to be made: it is made once, of all methods."""
        if self.planned is None:
            return False
        lacks_methods = self.primary and not METHODS.keys() <= self.runs.keys()
        return lacks_methods or (not self.final and len(self.seeds) < self.planned)

    @property
    def chance(self) -> float | None:
        """Of a task on which many runs stay at chance, that percentage; else None."""
        return CHANCE.get(self.kind) if self.planned else None

    @property
    def at_chance(self) -> list[float]:
        """The metrics of the runs of the tables that are not above the first of ``ABOVE``."""
        values = (value for arm in self.arms for value in self.metrics(arm))
        return sorted(value for value in values if value <= ABOVE[0])

    @property
    def unit(self) -> str:
        """What the metric is, for an axis."""
        if not self.planned:
            return self.name
        return 'mIoU, percent' if self.kind == 'scenes' else 'accuracy, percent'

    @property
    def missing(self) -> list[str]:
        """The arms that the protocol plans and that have no run."""
        planned = ARMS if self.kind in PRIMARY else SMALL_TASK_ARMS
        return [arm for arm in planned if self.planned and arm not in self.runs]

    @property
    def compared(self) -> list[str]:
        """The methods that have runs and are compared with the control."""
        return [arm for arm in (*FAMILY, CONTROL) if arm in self.runs and arm != self.control]

    @property
    def waiting(self) -> dict[str, int]:
        """By variant, how many of the methods' seeds it has, of variants that lack some of them.

        They enter the secondary comparisons alone, as other tables would lose seeds by them. While
        methods themselves lack seeds, no variant waits.
        """
        if self.planned is None or not METHODS.keys() <= self.runs.keys():
            return {}
        if self.control not in METHODS:
            return {}
        every = set.intersection(*(set(self.runs[arm]) for arm in METHODS))
        if not (self.final or len(every) >= self.planned):
            return {}
        variants = self.runs.keys() - {*METHODS}
        has = {arm: len(every & self.runs[arm].keys()) for arm in sorted(variants)}
        return {arm: count for arm, count in has.items() if count < len(every)}

    @property
    def arms(self) -> list[str]:
        """Those of the tables, in their order."""
        entering = self.runs.keys() - self.waiting.keys()
        return [arm for arm in ARMS if arm in entering] + sorted(entering - {*ARMS})

    @property
    def seeds(self) -> list[int]:
        """Those that every arm of the tables has finished, the only ones that enter."""
        return sorted(set.intersection(*(set(self.runs[arm]) for arm in self.arms)))

    @property
    def entries(self) -> list[tuple[str, int, dict[str, Any]]]:
        """Arm, seed and run of all that enters a comparison, of variants that wait as well."""
        return [
            (arm, seed, self.runs[arm][seed])
            for arm in (*self.arms, *self.waiting)
            for seed in self.seeds
            if seed in self.runs[arm]
        ]

    def metrics(
        self, arm: str, resolution: str | None = None, seeds: Sequence[int] | None = None
    ) -> list[float]:
        """The metric by seed, of those of the tables or others, or that at another resolution."""
        runs = [self.runs[arm][seed] for seed in (self.seeds if seeds is None else seeds)]
        if resolution is None:
            return [run['metric'] for run in runs]
        return [run['resolutions'][resolution] for run in runs]


def holds_results(folder: Path) -> bool:
    """Whether a folder has a file that is a result of the study."""
    for file in folder.glob('*/*.json'):
        with suppress(ValueError, OSError):  # of somebody's files
            if 'arm' in read_json(file):
                return True
    return False


def read_results(folder: Path) -> list[TaskResults]:
    """All results under a folder, ``<task>/<arm>_<seed>.json`` and ``<task>/<arm>_cost.json``.

    Raises:
        FileNotFoundError: There are none.
        ValueError: A file holds something else, or the runs of a task differ in their settings, the
            digest of their data or torch; names the file.
    """
    tasks: dict[str, TaskResults] = {}
    first: dict[tuple[str, str], tuple[Path, Any]] = {}  # by task and key: file and value
    for file in sorted(folder.glob('*/*.json')):
        record = read_json(file)
        if 'arm' not in record:
            raise ValueError(
                f'{folder} holds no run with a run.json of run_all_methods.py, and {file} is no '
                'result of the study'
            )
        task = tasks.setdefault(file.parent.name, TaskResults(file.parent.name))
        if 'seed' in record:
            for key, look_up in _ALIKE.items():
                value = look_up(record)
                like, other = first.setdefault((task.name, key), (file, value))
                if value != other:
                    raise ValueError(
                        f'runs of {task.name} that are compared must have the same {key}: {file} '
                        f'has {value}, {like} has {other}'
                    )
            runs = task.peers if record['arm'] in PEERS else task.runs
            runs.setdefault(record['arm'], {})[record['seed']] = record
        else:
            task.costs[record['arm']] = record
    tasks = {name: task for name, task in tasks.items() if task.runs}
    if not tasks:
        raise FileNotFoundError(f'{folder} holds no results of runs')
    return [*tasks.values()]


def title(arm: str) -> str:
    return TITLES.get(arm, arm)


def family(task: TaskResults, resolution: str | None = None) -> dict[str, tuple[Comparison, float]]:
    """Of each method that is compared, the comparison with the control and Holm's p."""
    if task.control not in task.runs or len(task.seeds) < 2:
        return {}
    control = task.metrics(task.control, resolution)
    found = {arm: compare(task.metrics(arm, resolution), control) for arm in task.compared}
    adjusted = holm([comparison.p for comparison in found.values()])
    return {arm: (found[arm], p) for arm, p in zip(found, adjusted)}


def summary_rows(task: TaskResults) -> list[dict[str, str]]:
    """A row for each arm: its metric over seeds, and its cost where that was measured."""
    rows = []
    for arm in task.arms:
        values = task.metrics(arm)
        row = {
            'method': title(arm),
            'seeds': str(len(values)),
            'mean': f'{np.mean(values):.2f}',
            'interquartile mean': f'{interquartile_mean(values):.2f}',
            'standard deviation': deviation(values),
            'least': f'{min(values):.2f}',
            'greatest': f'{max(values):.2f}',
        }
        if task.chance is not None:
            for level in ABOVE:
                above = runs_above(task, arm, level)
                row[f'above {level:g} %'] = f'{sum(above)} of {len(values)}'
                if task.control in task.arms:
                    both = zip(above, runs_above(task, task.control, level))
                    row[f'above {level:g} %, control too'] = str(sum(map(all, both)))
        rows.append(row | (cost_cells(task, arm) if task.costs else {}))
    return rows


def runs_above(task: TaskResults, arm: str, level: float) -> list[bool]:
    """By seed, whether the run ends above a percentage."""
    return [value > level for value in task.metrics(arm)]


def deviation(values: Sequence[float]) -> str:
    """The cell of a standard deviation over seeds, empty for one seed."""
    return f'{np.std(values, ddof=1):.2f}' if len(values) > 1 else ''


def cost_cells(task: TaskResults, arm: str) -> dict[str, str]:
    """The cells of what a step costs, empty where that was not measured."""
    cost = task.costs.get(arm)
    return {
        'ms a step': f'{cost["milliseconds"]:.2f}' if cost else '',
        'MiB': f'{cost["mebibytes"]:.0f}' if cost and 'mebibytes' in cost else '',
    }


def facts(records: Iterable[dict[str, Any]]) -> dict[str, list[str]]:
    """Cards, commits and dates of runs or costs."""
    records = [*records]
    keys = ('card', 'commit', 'date')
    return {key: sorted({record[key] for record in records if key in record}) for key in keys}


def _comparison_row(a: str, b: str, found: Comparison) -> dict[str, str]:
    """Of pairs that are too few for an interval and p it has each difference in their place."""
    enough = is_testable(found.count)
    return {
        'A': title(a),
        'B': title(b),
        'A - B': f'{found.mean:+.3f}',
        EACH: '' if enough else by_seed(found),
        INTERVAL: f'{found.low:+.3f} to {found.high:+.3f}' if enough else '',
        'P(A > B)': f'{found.improvement:.2f}',
        'p': f'{found.p:.4f}' if enough else '',
    }


def by_seed(found: Comparison) -> str:
    """The differences of all pairs, in the order of the seeds."""
    return ', '.join(f'{difference:+.2f}' for difference in found.differences)


def family_rows(
    task: TaskResults, resolution: str | None = None, power: bool = False
) -> list[dict[str, str]]:
    """A row for each method that is compared, against the control.

    With ``power`` also the difference that was detectable, where anything could be found.
    """
    all_found = family(task, resolution)
    rows = []
    for arm, (found, p) in all_found.items():
        corrected = f'{p:.4f}' if is_testable(found.count) else ''
        row = {**_comparison_row(arm, task.control, found), 'p, Holm': corrected}
        if power and can_differ(found.count, len(all_found)):
            effect = detectable(found, len(all_found), found.count)
            row['detectable'] = f'{effect:.2f}' if math.isfinite(effect) else ''
        rows.append(row)
    return rows


def pair_seeds(task: TaskResults, a: str, b: str) -> list[int]:
    """The seeds of the tables that A and B have both, of variants that wait as well."""
    if not {a, b} <= {*task.arms, *task.waiting}:
        return []
    return [seed for seed in task.seeds if seed in task.runs[a] and seed in task.runs[b]]


def secondary_rows(
    task: TaskResults,
    pairs: Sequence[tuple[str, str]] = SECONDARY,
    resolution: str | None = None,
) -> list[dict[str, str]]:
    """A row for each exploratory comparison of A with B, p as it is.

    Of a variant that waits on those seeds of the tables that it has.
    """
    rows = []
    for a, b in pairs:
        seeds = pair_seeds(task, a, b)
        if len(seeds) > 1:
            found = compare(*(task.metrics(arm, resolution, seeds) for arm in (a, b)))
            count = {'pairs': str(len(seeds))} if task.waiting else {}
            rows.append(_comparison_row(a, b, found) | count)
    return rows


def resolutions(task: TaskResults) -> list[str]:
    """The other resolutions that the task's models were tested at."""
    run = next(iter(task.runs[task.arms[0]].values()))
    return [name for name in run.get('resolutions', {}) if name != '1']


def resolution_rows(task: TaskResults) -> list[dict[str, str]]:
    """A row for each arm: the mean metric at other resolutions; none where there are none."""
    names = resolutions(task)
    return [
        {
            'method': title(arm),
            **{name: f'{np.mean(task.metrics(arm, name)):.2f}' for name in ('1', *names)},
        }
        for arm in task.arms
        if names and task.seeds
    ]


def least_p(pairs: int) -> float:
    """The least p that the sign-flip test of so many pairs can have, whatever the differences."""
    return 2 / 2**pairs


def can_differ(pairs: int, comparisons: int) -> bool:
    """Whether so many pairs can give a p below ``LEVEL`` at all, after Holm's correction."""
    return comparisons * least_p(pairs) < LEVEL


def is_testable(pairs: int) -> bool:
    """Whether pairs are enough for p and an interval: of fewer a bootstrap gives the range."""
    return can_differ(pairs, comparisons=1)


def furthest(found: Comparison) -> float:
    """The end of the interval that is further from 0, without its sign."""
    return max(abs(found.low), abs(found.high))


def detectable(found: Comparison, comparisons: int, pairs: int) -> float:
    """The difference in points that so many pairs find with a probability of 0.8."""
    return found.deviation * detectable_effect(pairs, LEVEL / comparisons)


def verdicts(task: TaskResults) -> list[str]:
    """What may be concluded of each method that is compared.

    Of an interim table only the power that all seeds will have.
    """
    all_found = family(task)
    if task.interim:
        effects = [
            detectable(found, len(all_found), task.planned) for found, _ in all_found.values()
        ]
        return [
            'Nothing is concluded from an interim table: the differences of all methods are tested '
            f'once, with {task.planned} seeds. With the standard deviations so far, {task.planned} '
            f'pairs find a difference of {min(effects):.2f} points (the method that varies least) '
            f'to {max(effects):.2f} points (most) with a probability of 0.8.'
        ]
    if task.chance is not None and 2 * len(task.at_chance) > len(task.arms) * len(task.seeds):
        return ['As most runs end at chance, no method can be called better or worse.']
    lines = []
    for arm, (found, p) in all_found.items():
        if not can_differ(found.count, len(all_found)):
            least = min(1.0, len(all_found) * least_p(found.count))
            lines.append(
                f'`{arm}`: nothing yet. With {found.count} pairs p after Holm is at least '
                f'{least:.2f}.'
            )
            continue
        interval = f'{found.low:+.2f} to {found.high:+.2f}'
        if p < LEVEL:
            lines.append(
                f'`{arm}` differs from `{task.control}` by {found.mean:+.2f} points ({INTERVAL} '
                f'{interval}, p after Holm {p:.4f}).'
            )
        else:
            lines.append(
                f'`{arm}`: no difference from `{task.control}` was found. Its interval lies within '
                f'±{furthest(found):.2f} points.'
            )
    return lines


def diverged(task: TaskResults) -> Iterable[str]:
    """The runs that enter a comparison and whose loss was not finite."""
    for arm, seed, run in task.entries:
        if run.get('diverged'):
            yield f'{title(arm)}, seed {seed}'
