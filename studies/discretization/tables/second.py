"""Tables and pictures of the protocol's second part; protocol_second.md says what a figure is."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.comparison.results import (
    CONTROL,
    SIMULTANEOUS,
    Rows,
    can_differ,
    comparison_row,
    detectable,
    facts,
    interval_cell,
    is_testable,
    p_cell,
)
from benchmarks.comparison.statistics import (
    Comparison,
    compare,
    equivalence_p,
    holm,
    simultaneous_interval,
)
from benchmarks.measure.tables import without_empty_columns
from studies.discretization.models.arms import AGAIN, PUBLISHED, SPACED
from studies.discretization.models.stiffness import EDGES, mean_shares, stiffness_rows
from studies.discretization.plans import PLANS
from studies.discretization.study import ALIKE, MARGINS, StudyTask
from studies.discretization.tables.first import change, cost_cells
from studies.discretization.tasks import TASKS

S1 = 'spacing_dt1'  # the primary hypothesis; the other setting of the task is the secondary one
TRAINED = '4'  # the distance of patches in training, pixels
PRIMARY = ('2, dt', '8, dt')  # dt multiplied by the ratio of the distances
SECONDARY = ('2', '8', '2, dt, dilated')
MARGIN = 0.5  # points of the primary endpoint
MARGIN_OF = {'spacing': 'scenes'}  # the metric's margin is that of another task
_PUBLISHED = '_published'
_LOSS = -1.0  # points of zoh from which exact integration is what to take
# Comparisons of a family as the protocol has it, however many arms have run.
_ENDPOINTS, _METRICS, _RANGES = (
    len(PRIMARY) * (len(SPACED) - 1),
    len(SPACED) - 1,
    2 * len(PUBLISHED),
)


def second_tables(tasks: Mapping[str, StudyTask]) -> dict[str, Rows]:
    """Every table of the second round by its name, empty where its runs are missing.

    A row has an arm or a pair of arms with enough seeds for an interval; that of runs which
    collapse or stagnate has any number.
    """
    tables: dict[str, Rows] = {'second: state': state_rows(tasks)}
    planned = [job.key[0] for part in PLANS['second'] for job in part.jobs()]
    for name in dict.fromkeys([*tasks, *planned]):
        task = tasks.get(name, StudyTask(name))
        if task.kind == 'spacing':
            tables[f'{name}: spacing'] = spacing_rows(task)
            tables[f'{name}: endpoint'] = endpoint_rows(task)
            if name == S1:  # of the others the protocol writes no sentences
                tables[f'{name}: verdict'] = verdict_rows(task)
            pairs = [(arm, CONTROL) for arm in _others(task)]
            tables[f'{name}: metric'] = pair_rows(task, pairs, _METRICS)
            tables[f'{name}: cost'] = cost_rows(task)
            tables[f'{name}: other'] = [
                change(task, arm, CONTROL, to, TRAINED, 'spacings')[0]
                for to in SECONDARY
                for arm in _others(task)
            ]
        tables[f'{name}: published'] = published_rows(task)
        tables[f'{name}: course'] = course_rows(task)
        tables[f'{name}: again'] = again_rows(task)
        tables[f'{name}: stiffness'] = stiffness_rows(
            {task.title(arm): runs for arm, runs in _with_enough_seeds(task).items()}
        )
    tables['scenes: repeated'] = repeated_rows(tasks)
    return {name: without_empty_columns(rows) for name, rows in tables.items()}


def state_rows(tasks: Mapping[str, StudyTask]) -> Rows:
    """A row for each part of the plan: how many of its runs there are, and of which commits.

    None if there are no runs at all.
    """
    rows, any_made = [], False
    for part in PLANS['second']:
        planned = [*part.jobs()]
        name, *_ = planned[0].key
        runs = tasks[name].runs if name in tasks else {}
        made = [job for job in planned if job.seed in runs.get(job.arm, {})]
        seeds = [{job.seed for job in made if job.arm == arm} for arm in part.arms]
        whole = set.intersection(*seeds)
        any_made = any_made or bool(made)
        records = [runs[job.arm][job.seed] for job in made]
        broken: dict[str, list[str]] = {}
        for job in made:
            if _diverged(runs, job.arm, job.seed):
                broken.setdefault(job.arm, []).append(str(job.seed))
        rows.append(
            {
                'runs': f'{name}: ' + ', '.join(part.arms),
                'planned': str(len(planned)),
                'made': str(len(made)),
                'complete': 'all'
                if len(made) == len(planned)
                else f'{len(whole)} of {len({job.seed for job in planned})} seeds',
                'diverged': '; '.join(f'{arm} {", ".join(of)}' for arm, of in broken.items()),
                **{key: ', '.join(found) for key, found in facts(records).items()},
            }
        )
    return rows if any_made else []


def cost_rows(task: StudyTask) -> Rows:
    """A row for each arm whose step was measured alone on the card."""
    return [{'method': task.title(arm), **cost_cells(task, arm)} for arm in task.costs]


def _others(task: StudyTask) -> list[str]:
    """The arms of the task that are compared with the control."""
    arms = (arm for arm in SPACED if arm != CONTROL)
    return [arm for arm in arms if is_testable(len(task.pairs(arm, CONTROL)))]


def _with_enough_seeds(task: StudyTask) -> dict[str, dict[int, dict[str, Any]]]:
    return {arm: runs for arm, runs in task.runs.items() if is_testable(len(runs))}


def _diverged(runs: Mapping[str, Mapping[int, Mapping[str, Any]]], arm: str, seed: int) -> bool:
    return bool(runs[arm][seed].get('diverged'))


def _pairs(task: StudyTask, a: str, b: str) -> dict[str, str]:
    """The cells of how many pairs there are, and how many of one commit and card."""
    both = [(task.runs[a][seed], task.runs[b][seed]) for seed in task.pairs(a, b)]
    alike = [all(x.get(key) == y.get(key) for key in ('commit', 'card')) for x, y in both]
    return {'pairs': str(len(both)), 'of one commit and card': str(sum(alike))}


def spacing_rows(task: StudyTask) -> Rows:
    """A row for each arm: the mean metric at each distance of patches, over its own seeds."""
    rows = []
    for arm, runs in _with_enough_seeds(task).items():
        tests = next(iter(runs.values()))['spacings']
        means = {to: np.mean([run['spacings'][to] for run in runs.values()]) for to in tests}
        row = {'method': task.title(arm), 'seeds': str(len(runs))}
        rows.append(row | {to: f'{mean:.2f}' for to, mean in means.items()})
    return rows


def _endpoints(task: StudyTask) -> dict[tuple[str, str], tuple[dict[str, str], Comparison]]:
    """By arm and distance, the row and the comparison."""
    found = {}
    for to in PRIMARY:
        for arm in _others(task):
            row, comparison = change(task, arm, CONTROL, to, TRAINED, 'spacings')
            assert comparison is not None
            found[arm, to] = row | _pairs(task, arm, CONTROL), comparison
    return found


def endpoint_rows(task: StudyTask) -> Rows:
    """The endpoint of S1 and S2: each arm's change from training's distance, minus the control's.

    Simultaneous intervals and Holm's corrections are over the eight of the protocol.
    """
    return _as_family([*_endpoints(task).values()], MARGIN, _ENDPOINTS)


def verdict_rows(task: StudyTask) -> Rows:
    """What the protocol's fixed rule says of each arm that has all of its seeds.

    It says nothing of an arm of which a run diverged: such a network is equally bad at every
    distance, and its endpoint would count as a gain.
    """
    bounds = {
        key: (comparison.mean, *simultaneous_interval(comparison.differences, _ENDPOINTS))
        for key, (_, comparison) in _endpoints(task).items()
    }
    rows = []
    for arm in _others(task):
        seeds = task.pairs(arm, CONTROL)
        if len(seeds) < TASKS[task.kind].seeds:
            continue
        each = [bounds[arm, to] for to in PRIMARY]
        broken = any(_diverged(task.runs, a, seed) for a in (arm, CONTROL) for seed in seeds)
        words = [BROKEN if broken else _verdict(*found) for found in each]
        row = {'method': task.title(arm)}
        row |= {f'at {to}': word for to, word in zip(PRIMARY, words)}
        follows = '' if arm != 'zoh' else 'undecided' if broken else _what_follows(each)
        rows.append(row | {'what follows': follows})
    return rows


BROKEN = 'a run diverged'
Bounds = tuple[float, float, float]  # mean, and a simultaneous interval


def _verdict(_: float, low: float, high: float) -> str:
    words = ['better'] if low > 0 else ['worse'] if high < 0 else []
    words += ['equivalent'] if low >= -MARGIN and high <= MARGIN else []
    return ', '.join(words) or 'undecided'


def _what_follows(each: Sequence[Bounds]) -> str:
    if any(mean <= _LOSS and high < 0 for mean, _, high in each):
        return 'take exact integration where the spacing of tokens varies'
    if all(low >= -MARGIN and high <= MARGIN for _, low, high in each):
        return 'take zoh'
    return 'undecided'


def _as_family(
    found: Sequence[tuple[dict[str, str], Comparison]], margin: float | None, size: int
) -> Rows:
    """Rows with what holds for a family of this size, and whether they are within a margin.

    Comparisons whose runs are missing count: as ones in which nothing is found.
    """
    rows = []
    missing = [1.0] * (size - len(found))
    p = holm([comparison.p for _, comparison in found] + missing)
    tests = [equivalence_p(each.differences, margin) if margin else 1.0 for _, each in found]
    for (row, comparison), corrected, within in zip(found, p, holm(tests + missing)):
        bounds = simultaneous_interval(comparison.differences, size)
        more = {'p, Holm': p_cell(corrected), SIMULTANEOUS: interval_cell(*bounds)}
        more['TOST, Holm'] = p_cell(within) if margin else ''
        found_at_all = can_differ(comparison.count, size)
        more['detectable'] = f'{detectable(comparison, size):.2f}' if found_at_all else ''
        rows.append(row | more)
    return rows


def published_rows(task: StudyTask) -> Rows:
    """Each method with its published range against zoh, and against itself with zoh's range."""
    arms = [arm for arm in task.runs if arm.endswith(_PUBLISHED)]
    pairs = [(arm, 'zoh') for arm in arms]
    pairs += [(arm, arm.removesuffix(_PUBLISHED)) for arm in arms]
    return pair_rows(task, pairs, _RANGES)


def course_rows(task: StudyTask) -> Rows:
    """Of published ranges: the runs that collapse or stagnate, as the protocol has these words."""
    arms = [arm for arm in task.runs if arm.endswith(_PUBLISHED)]
    if not arms or 'zoh' not in task.runs:
        return []
    half = np.mean([run['metric'] for run in task.runs['zoh'].values()]) / 2
    rows = []
    for arm in arms:
        runs = [*task.runs[arm].values()]
        # A curve has five points: the third is where the last two fifths begin.
        rises = [run['curve'][-1][1] - run['curve'][-3][1] for run in runs]
        rows.append(
            {
                'method': task.title(arm),
                'runs': str(len(runs)),
                'mean': f'{np.mean([run["metric"] for run in runs]):.2f}',
                'collapsed': str(sum(run['metric'] < half for run in runs)),
                'stagnating': str(sum(rise <= 0 for rise in rises)),
                'rise over the last two fifths': f'{np.mean(rises):+.2f}',
                'diverged': str(sum(bool(run.get('diverged')) for run in runs)),
            }
        )
    return rows


def again_rows(task: StudyTask) -> Rows:
    """The control against itself: the same runs again, and by the plain block."""
    rows = pair_rows(task, [(arm, CONTROL) for arm in AGAIN], None)
    return [row | {'same metric': _same(task, row['A'])} for row in rows]


def _same(task: StudyTask, title: str) -> str:
    (arm,) = (arm for arm in AGAIN if task.title(arm) == title)
    seeds = task.pairs(arm, CONTROL)
    same = sum(task.runs[arm][s]['metric'] == task.runs[CONTROL][s]['metric'] for s in seeds)
    return f'{same} of {len(seeds)}'


def repeated_rows(tasks: Mapping[str, StudyTask]) -> Rows:
    """S2's runs against the first part's of the same seeds: the same trainings at other commits.

    Most are of another card, too.

    Raises:
        ValueError: They are not the same trainings.
    """
    first, later = (tasks.get(name, StudyTask(name)) for name in ('scenes', 'spacing'))
    rows = []
    for arm, runs in later.runs.items():
        title = f'{arm}, S2'
        both = StudyTask('scenes', {arm: first.runs.get(arm, {}), title: runs})
        seeds = both.pairs(title, arm)
        for key, look_up in (ALIKE | {'parameters': lambda run: run.get('parameters')}).items():
            if any(look_up(both.runs[arm][seed]) != look_up(runs[seed]) for seed in seeds):
                raise ValueError(f'scenes and spacing: runs of {arm} differ in their {key}')
        for row in pair_rows(both, [(title, arm)], None):
            metrics = [both.metrics(name, seeds=seeds) for name in (title, arm)]
            spread = [f'{np.std(of_arm, ddof=1):.2f}' for of_arm in metrics]
            row['over seeds'] = f'{spread[0]} and {spread[1]}'
            rows.append(row | {'r': f'{np.corrcoef(*metrics)[0, 1]:+.2f}'})
    return rows


def pair_rows(task: StudyTask, pairs: Sequence[tuple[str, str]], size: int | None) -> Rows:
    """A row for each pair of arms: metric and training loss over the seeds that both have.

    ``size`` is how many comparisons the family has in the protocol; None: they are none.
    """
    found = []
    for a, b in pairs:
        seeds = task.pairs(a, b)
        if not is_testable(len(seeds)):
            continue
        metric = compare(*(task.metrics(arm, seeds=seeds) for arm in (a, b)))
        row = comparison_row(task, a, b, metric) | _pairs(task, a, b)
        row['standard deviation'] = f'{metric.deviation:.3f}'
        losses = [task.losses(arm, seeds) for arm in (a, b)]
        finite = None not in losses[0] + losses[1]  # as that of a run that diverged
        row['loss, A - B'] = f'{np.subtract(*losses).mean():+.4f}' if finite else ''
        found.append((row, metric))
    if size is None:
        return [row for row, _ in found]
    return _as_family(found, MARGINS.get(MARGIN_OF.get(task.kind, task.kind)), size)


def plot_stiffness(task: StudyTask, path: Path) -> bool:
    """Draw the histograms of |z| of each arm, a line a layer; False where no run has one."""
    arms = {arm: mean_shares(runs) for arm, runs in _with_enough_seeds(task).items()}
    arms = {arm: shares for arm, shares in arms.items() if len(shares)}
    if not arms:
        return False
    columns = min(5, len(arms))
    rows = -(-len(arms) // columns)
    figure = Figure(figsize=(3.4 * columns, 2.6 * rows), dpi=120, layout='constrained')
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    middles = 10 ** ((EDGES[:-1] + EDGES[1:]) / 2)
    for axes, (arm, shares) in zip(panels, arms.items()):
        for layer, line in enumerate(shares):
            shade = f'{0.75 - 0.75 * layer / max(1, len(shares) - 1):.2f}'
            axes.plot(middles, 100 * line, color=shade, label=f'layer {layer}')
        axes.axvline(1, color='C3', linewidth=0.8)
        axes.set(xscale='log', title=task.title(arm), xlabel='|z|', ylabel='percent a bin')
        axes.tick_params(labelbottom=True)
        axes.grid(alpha=0.3)
    for axes in panels[len(arms) :]:
        axes.remove()
    figure.axes[0].legend(fontsize=6, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return True
