"""The detectors of the study, which are described and not tested: three seeds are too few."""

from collections.abc import Sequence

import numpy as np

from benchmarks.comparison.comparison import (
    EACH,
    TaskResults,
    by_seed,
    deviation,
    facts,
    family,
    least_p,
    title,
)
from benchmarks.comparison.provenance import machines
from benchmarks.measure.tables import markdown_table, without_empty_columns

_CONFIG = 'mask_rcnn_vim_fashion'
_TEXT = """## Detection

Mask R-CNN on scenes of garments, 128 x 128, 8,000 to train and 2,000 to test. The model is that of
`configs/det/{config}_*.py`, from random weights, with 4,000 iterations of 8 pictures
in bfloat16. The metrics are COCO's box AP and mask AP in percent, the means over thresholds of IoU
from 0.5 to 0.95, with the standard deviation over seeds. Differences from the control
(`{control}`) are paired by seed, in percentage points; COCO's AP of a run is logged to 0.1. They
are described and not tested: with {count} pairs p would be at least {p:.2g}. So no method can be
called better or worse. The protocol planned these four methods alone; `foh`, one of the two that
are worse on `scenes`, was not run.{lacking}"""
_HOW = f"""```bash
CONFIG=configs/det/{_CONFIG}_{{method}}.py det/run_all_methods.sh \\
    --methods zoh bilinear poly zoh_exact --seeds 0..2 --amp \\
    --cfg-options train_cfg.max_iters=4000 train_cfg.val_interval=4000
```"""


def is_detection(task: TaskResults) -> bool:
    """Whether a task is one of task 5 of the protocol, from folders of runs."""
    return not task.planned and task.name.startswith(f'{_CONFIG} ')


def detection_section(tasks: Sequence[TaskResults]) -> str:
    """The section of the study's page.

    Args:
        tasks (Sequence): One for each metric of the same runs, from their folders.
    """
    first = tasks[0]
    count = len(first.seeds)
    has_control = first.control in first.runs
    lacking = '' if has_control else f' There is no run of `{first.control}`, so no difference.'
    return '\n\n'.join(
        [
            _TEXT.format(
                config=_CONFIG,
                control=title(first.control),
                count=count,
                p=least_p(count),
                lacking=lacking,
            ),
            markdown_table(without_empty_columns(detection_rows(tasks))),
            f'{machines(facts(run for *_, run in first.entries))}.',
            _HOW,
        ]
    )


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
