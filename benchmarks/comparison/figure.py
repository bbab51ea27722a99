"""The picture of a comparison: learning curves, paired differences, accuracy and time."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.comparison.results import TaskResults, family, is_testable
from benchmarks.pictures.palette import styles_of


def plot_task(task: TaskResults, path: Path) -> None:
    """Write :func:`draw_task` as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_task(task).savefig(path)


def draw_task(task: TaskResults) -> Figure:
    """Up to three panels of a task that has finished seeds.

    Learning curves are means over seeds with a band of one standard deviation. Differences from the
    control have their 95 % interval, and a point for each seed. Time is the cost of a step alone on
    the card times the steps. Without differences, or without costs, there is no such panel.
    """
    panels = [_draw_curves]
    panels += [_draw_differences] if family(task) else []
    panels += [_draw_times] if task.costs.keys() & {*task.arms} else []
    figure = Figure(figsize=(5 * len(panels), 4.2), dpi=120, layout='constrained')
    styles = styles_of(task.arms)
    for axes, draw in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        draw(axes, task, styles)
        axes.grid(alpha=0.3)
        axes.spines[['top', 'right']].set_visible(False)
    text = f'{task.name}, {len(task.seeds)} seeds'
    figure.suptitle(text, x=0.01, ha='left', fontweight='bold')
    return figure


def _draw_curves(axes: Axes, task: TaskResults, styles: dict[str, dict]) -> None:
    for arm in task.arms:
        curve = np.array([[p[:2] for p in task.runs[arm][s]['curve']] for s in task.seeds])
        steps, values = curve[0, :, 0], curve[..., 1]
        mean, spread = values.mean(axis=0), _deviation(values)
        axes.plot(steps, mean, label=task.title(arm), **styles[arm])
        axes.fill_between(
            steps, mean - spread, mean + spread, color=styles[arm]['color'], alpha=0.12
        )
    heading = 'Test images while training'
    if len(task.seeds) > 1:
        heading = 'While training: mean and standard deviation'
    axes.set(xlabel='step', ylabel=task.unit, title=heading)
    axes.legend(fontsize=7, frameon=False)


def _deviation(values: Sequence) -> np.ndarray:
    """The standard deviation over seeds, the first axis; 0 of one seed."""
    return np.std(values, axis=0, ddof=min(1, len(values) - 1))


def _draw_differences(axes: Axes, task: TaskResults, styles: dict[str, dict]) -> None:
    found = family(task)
    spread = is_testable(len(task.seeds))
    for row, (arm, (comparison, _)) in enumerate(found.items()):
        points = comparison.differences
        axes.plot(points, np.full(len(points), row), '.', color=styles[arm]['color'], alpha=0.4)
        error = [[comparison.mean - comparison.low], [comparison.high - comparison.mean]]
        error = error if spread else None
        axes.errorbar(
            comparison.mean, row, xerr=error, fmt='o', color=styles[arm]['color'], capsize=3
        )
    axes.axvline(0, color='black', linewidth=0.8)
    axes.set_yticks(range(len(found)), [task.title(arm) for arm in found])
    axes.invert_yaxis()
    axes.set(
        xlabel=f'points: mean, {"95 % interval, " if spread else ""}each seed',
        title=f'Difference from {task.control}, paired by seed',
    )


def _draw_times(axes: Axes, task: TaskResults, styles: dict[str, dict]) -> None:
    seconds = {
        arm: task.costs[arm]['milliseconds'] * task.runs[arm][task.seeds[0]]['settings']['steps']
        / 1000
        for arm in task.arms
        if arm in task.costs
    }  # fmt: skip
    near = 0.05 * (max(seconds.values()) - min(seconds.values()))
    for arm, x in seconds.items():
        values = task.metrics(arm)
        mean, deviation = np.mean(values), _deviation(values)
        axes.errorbar(x, mean, yerr=deviation, fmt='o', color=styles[arm]['color'], capsize=3)
        # On the left of its point where another point is near on the right.
        left = any(0 < other - x < near for other in seconds.values())
        axes.annotate(
            task.title(arm), (x, float(mean)), (-4 if left else 4, 3), textcoords='offset points',
            ha='right' if left else 'left', fontsize=7,
        )  # fmt: skip
    axes.margins(x=0.12)
    cards = sorted({cost['card'] for cost in task.costs.values() if 'card' in cost})
    axes.set(
        xlabel=f'seconds of training, alone on {" or ".join(cards) or "the card"}',
        ylabel=task.unit,
        title='Mean and standard deviation over time',
    )
