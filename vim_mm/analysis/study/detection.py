"""The detectors of the study: described, not tested, as three seeds are too few for a test."""

from collections.abc import Sequence

import numpy as np

from vim_mm.analysis.study.comparison import EACH, TaskResults, by_seed, deviation, family, title

_CONFIG = 'mask_rcnn_vim_fashion'


def is_detection(task: TaskResults) -> bool:
    """Whether a task is one of task 5 of the protocol, from folders of runs."""
    return not task.planned and task.name.startswith(f'{_CONFIG} ')


def detection_rows(tasks: Sequence[TaskResults]) -> list[dict[str, str]]:
    """A row for each method: mean, standard deviation and differences from the control by seed.

    Args:
        tasks (Sequence): One for each metric of the same runs, from their folders.
    """
    rows: dict[str, dict[str, str]] = {}
    for task in tasks:
        metric = metric_of(task)
        found = family(task)
        for arm in task.arms:
            values = task.metrics(arm)
            row = rows.setdefault(arm, {'method': title(arm)})
            row[metric] = f'{np.mean(values):.2f} ({deviation(values)})'
            differs = arm in found
            row[f'{metric} - control'] = f'{found[arm][0].mean:+.2f}' if differs else ''
            row[f'{metric}, {EACH}'] = by_seed(found[arm][0]) if differs else ''
    return [*rows.values()]


def metric_of(task: TaskResults) -> str:
    """The metric of a task from folders of runs, whose name it ends."""
    return task.name.partition(' ')[2]
