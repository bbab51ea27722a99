"""Pictures of the study of methods: learning curves, paired differences, accuracy and time."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vim_mm.analysis.study.comparison import TaskResults, family, title


def plot_task(task: TaskResults, path: Path) -> None:
    """Three panels of a task that has finished seeds.

    Learning curves are means over seeds with a band of one standard deviation. Differences from the
    control have their 95 % interval, and a point for each seed. Time is the cost of a step alone on
    the card times the steps; where it was not measured the panel says so.
    """
    figure = Figure(figsize=(15, 4.2), dpi=120, layout='constrained')
    curves, differences, times = figure.subplots(1, 3)
    colours = {arm: f'C{i}' for i, arm in enumerate(task.arms)}
    _draw_curves(curves, task, colours)
    _draw_differences(differences, task, colours)
    _draw_times(times, task, colours)
    for axes in (curves, differences, times):
        axes.grid(alpha=0.3)
        axes.spines[['top', 'right']].set_visible(False)
    figure.suptitle(f'{task.name}, {len(task.seeds)} seeds')
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_curves(axes: Axes, task: TaskResults, colours: dict[str, str]) -> None:
    for arm in task.arms:
        curve = np.array([[p[:2] for p in task.runs[arm][s]['curve']] for s in task.seeds])
        steps, values = curve[0, :, 0], curve[..., 1]
        mean, spread = values.mean(axis=0), values.std(axis=0)
        axes.plot(steps, mean, color=colours[arm], label=title(arm), linewidth=1.2)
        axes.fill_between(steps, mean - spread, mean + spread, color=colours[arm], alpha=0.12)
    axes.set(xlabel='step', ylabel='percent', title='Held-out images while training')
    axes.legend(fontsize=7, frameon=False)


def _draw_differences(axes: Axes, task: TaskResults, colours: dict[str, str]) -> None:
    found = family(task)
    control = task.metrics(task.control) if found else []
    for row, (arm, (comparison, _)) in enumerate(found.items()):
        points = np.subtract(task.metrics(arm), control)
        axes.plot(points, np.full(len(points), row), '.', color=colours[arm], alpha=0.4)
        error = [[comparison.mean - comparison.low], [comparison.high - comparison.mean]]
        axes.errorbar(comparison.mean, row, xerr=error, fmt='o', color=colours[arm], capsize=3)
    axes.axvline(0, color='black', linewidth=0.8)
    axes.set_yticks(range(len(found)), [title(arm) for arm in found])
    axes.invert_yaxis()
    axes.set(xlabel='points', title=f'Difference from {task.control}, paired by seed')


def _draw_times(axes: Axes, task: TaskResults, colours: dict[str, str]) -> None:
    for arm in task.arms:
        if arm not in task.costs:
            continue
        runs = [task.runs[arm][seed] for seed in task.seeds]
        seconds = task.costs[arm]['milliseconds'] * runs[0]['settings']['steps'] / 1000
        values = task.metrics(arm)
        axes.errorbar(seconds, np.mean(values), yerr=np.std(values), fmt='o', color=colours[arm],
                      capsize=3, label=title(arm))  # fmt: skip
    if task.costs:
        axes.legend(fontsize=7, frameon=False)
    else:
        axes.text(0.5, 0.5, 'not measured', ha='center', transform=axes.transAxes)
    axes.set(xlabel='seconds of training, alone on the card', title='Accuracy and time')
