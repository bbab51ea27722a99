"""Tables and pictures of the protocol's second part; protocol_second.md says what a figure is."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from benchmarks.comparison.results import (
    CONTROL,
    SIMULTANEOUS,
    Rows,
    comparison_row,
    interval_cell,
    is_testable,
)
from benchmarks.comparison.statistics import (
    Comparison,
    compare,
    equivalence_p,
    holm,
    simultaneous_interval,
)
from benchmarks.measure.tables import without_empty_columns
from studies.discretization.models.arms import AGAIN, SPACED
from studies.discretization.models.stiffness import EDGES, mean_shares, stiffness_rows
from studies.discretization.study import MARGINS, StudyTask
from studies.discretization.tables.first import change

TRAINED = '4'  # the distance of patches in training, pixels
PRIMARY = ('2, dt', '8, dt')  # dt multiplied by the ratio of the distances
SECONDARY = ('2', '8', '2, dt, dilated')
MARGIN = 0.5  # points of the primary endpoint
MARGIN_OF = {'spacing': 'scenes'}  # the metric's margin is that of another task
_PUBLISHED = '_published'


def second_tables(tasks: Mapping[str, StudyTask]) -> dict[str, Rows]:
    """Every table of the second round by its name, of the runs that there are."""
    tables: dict[str, Rows] = {}
    for name, task in tasks.items():
        if task.kind == 'spacing':
            tables[f'{name}: spacing'] = spacing_rows(task)
            tables[f'{name}: primary'] = primary_rows(task)
            tables[f'{name}: metric'] = pair_rows(task, [(arm, CONTROL) for arm in _others(task)])
            tables[f'{name}: other'] = [
                row for to in SECONDARY for arm in _others(task) if (row := _row(task, arm, to))
            ]
        tables[f'{name}: published'] = published_rows(task)
        tables[f'{name}: again'] = again_rows(task)
        titled = {task.title(arm): runs for arm, runs in task.runs.items()}
        tables[f'{name}: stiffness'] = stiffness_rows(titled)
    return {name: without_empty_columns(rows) for name, rows in tables.items() if rows}


def _others(task: StudyTask) -> list[str]:
    return [arm for arm in SPACED if arm != CONTROL and arm in task.runs]


def spacing_rows(task: StudyTask) -> Rows:
    """A row for each arm: the mean metric at each distance of patches, over its own seeds."""
    rows = []
    for arm, runs in task.runs.items():
        tests = next(iter(runs.values()))['spacings']
        means = {to: np.mean([run['spacings'][to] for run in runs.values()]) for to in tests}
        row = {'method': task.title(arm), 'seeds': str(len(runs))}
        rows.append(row | {to: f'{mean:.2f}' for to, mean in means.items()})
    return rows


def _row(task: StudyTask, arm: str, to: str) -> dict[str, str]:
    return change(task, arm, CONTROL, to, TRAINED, 'spacings')[0]


def primary_rows(task: StudyTask) -> Rows:
    """The primary endpoint: each arm's change from the distance of training, minus the control's.

    Simultaneous intervals and Holm's corrections are over all rows.
    """
    changes = [
        change(task, arm, CONTROL, to, TRAINED, 'spacings')
        for to in PRIMARY
        for arm in _others(task)
    ]
    found = [(row, comparison) for row, comparison in changes if comparison is not None]
    return _as_family(found, MARGIN)


def _as_family(found: Sequence[tuple[dict[str, str], Comparison]], margin: float | None) -> Rows:
    """Rows with what holds for all of them together, and whether they are within a margin."""
    rows = []
    p = holm([comparison.p for _, comparison in found])
    tests = [equivalence_p(each.differences, margin) if margin else 1.0 for _, each in found]
    for (row, comparison), corrected, within in zip(found, p, holm(tests)):
        if is_testable(comparison.count):
            bounds = simultaneous_interval(comparison.differences, len(found))
            row = {**row, 'p, Holm': f'{corrected:.4f}', SIMULTANEOUS: interval_cell(*bounds)}
            row['TOST, Holm'] = f'{within:.4f}' if margin else ''
        rows.append(row)
    return rows


def published_rows(task: StudyTask) -> Rows:
    """Each method with its published range against zoh, and against itself with zoh's range."""
    arms = [arm for arm in task.runs if arm.endswith(_PUBLISHED)]
    pairs = [(arm, 'zoh') for arm in arms]
    pairs += [(arm, arm.removesuffix(_PUBLISHED)) for arm in arms]
    return pair_rows(task, pairs)


def again_rows(task: StudyTask) -> Rows:
    """The control against itself: the same runs again, and by the plain block."""
    rows = pair_rows(task, [(arm, CONTROL) for arm in AGAIN])
    return [row | {'same metric': _same(task, row['A'])} for row in rows]


def _same(task: StudyTask, title: str) -> str:
    (arm,) = (arm for arm in AGAIN if task.title(arm) == title)
    seeds = task.pairs(arm, CONTROL)
    same = sum(task.runs[arm][s]['metric'] == task.runs[CONTROL][s]['metric'] for s in seeds)
    return f'{same} of {len(seeds)}'


def pair_rows(task: StudyTask, pairs: Sequence[tuple[str, str]]) -> Rows:
    """A row for each pair of arms: metric and training loss over the seeds that both have."""
    found = []
    for a, b in pairs:
        seeds = task.pairs(a, b)
        if len(seeds) < 2:
            continue
        metric = compare(*(task.metrics(arm, seeds=seeds) for arm in (a, b)))
        row = comparison_row(task, a, b, metric)
        row['pairs'] = str(len(seeds))
        row['standard deviation'] = f'{metric.deviation:.3f}'
        losses = [task.losses(arm, seeds) for arm in (a, b)]
        if None not in losses[0] + losses[1]:  # of a run that diverged
            row['loss, A - B'] = f'{np.subtract(*losses).mean():+.4f}'
        found.append((row, metric))
    return _as_family(found, MARGINS.get(MARGIN_OF.get(task.kind, task.kind)))


def plot_stiffness(task: StudyTask, path: Path) -> bool:
    """Draw the histograms of |z| of each arm, a line a layer; False where no run has one."""
    arms = {arm: mean_shares(runs) for arm, runs in task.runs.items()}
    arms = {arm: shares for arm, shares in arms.items() if len(shares)}
    if not arms:
        return False
    columns = min(4, len(arms))
    rows = -(-len(arms) // columns)
    figure = Figure(figsize=(3.4 * columns, 2.6 * rows), dpi=120, layout='constrained')
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat
    middles = 10 ** ((EDGES[:-1] + EDGES[1:]) / 2)
    for axes, (arm, shares) in zip(panels, arms.items()):
        for layer, line in enumerate(shares):
            shade = f'{0.75 - 0.75 * layer / max(1, len(shares) - 1):.2f}'
            axes.plot(middles, 100 * line, color=shade, label=f'layer {layer}')
        axes.axvline(1, color='C3', linewidth=0.8)
        axes.set(xscale='log', title=task.title(arm), xlabel='|z|', ylabel='percent a bin')
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=6, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return True
