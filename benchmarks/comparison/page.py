"""The page of a comparison: its tables in Markdown with what has to be said of them, in order."""

import os
from pathlib import Path
from typing import NamedTuple

from benchmarks.comparison.answer import (
    best_found,
    cautions,
    is_tested,
    short_rows,
    short_verdict,
)
from benchmarks.comparison.comparison import (
    ABOVE,
    CONTROL,
    INTERVAL,
    TaskResults,
    diverged,
    facts,
    family_rows,
    is_testable,
    least_p,
    resolution_rows,
    resolutions,
    secondary_rows,
    summary_rows,
    title,
    verdicts,
)
from benchmarks.comparison.detection import detection_section, is_detection
from benchmarks.comparison.others import PAPER, SOURCE, other_rows
from benchmarks.comparison.plots import plot_task
from benchmarks.comparison.provenance import machines, made_by, which
from benchmarks.measure.tables import (
    bullets,
    markdown_table,
    without_empty_columns,
    write_text,
)

Rows = list[dict[str, str]]
_HEAD = """# The methods compared

A state space model needs a formula that turns its continuous system into steps. Small Vision Mamba
models were trained with six such formulas ([methods](methods.md)) and a control, with the same
seeds and settings. [The protocol](study_protocol.md) describes hypotheses, tasks and statistics.
Its first version was committed before the runs; later changes, some of them after results had been
seen, are [listed](study_protocol.md#changes)."""
_HOW = """## How this page is made

A script makes it from the results of the runs, one JSON each, and the folders of the detectors. Do
not edit it:

```bash
python tools/analysis/compare_methods.py docs/study/results docs/study/detection \\
    --page docs/methods_compared.md
```

These commands repeat the runs and make the tables again. DIR holds Fashion-MNIST's IDX files
(`python -m vim_mm.datasets.fashion`). EMPTY is an empty folder; without `--results EMPTY`, `train`
skips the runs whose results are in `docs/study/results`.

```bash
{commands}
python tools/study/run.py import OUT --results NEW
python tools/analysis/compare_methods.py NEW
```"""
_TERMS = {
    '`zoh`, `foh`, `bilinear`, `poly`, `highorder`, `rk4`': 'the six methods that are compared; '
    '[their formulas](methods.md)',
    '`zoh_exact`': 'the control: the exact zero-order hold, of which `zoh` is a simplification',
    '`dt`': 'the step size, which the model computes for each token',
    'seed': 'of all random numbers of a run: first weights, order of the data, augmentation, drop '
    'path. They are the same for every method',
    'foh, matched': 'a variant of `foh`: the projection that computes the input matrix is scaled '
    'at initialization so that for small steps the input coefficient, the mean over channels, '
    'equals that of `zoh`. Most channels stay far below that mean',
    'zoh_exact, averaged': 'a variant of the control: each direction is scanned in both orders, '
    'and the outputs are averaged, as in `poly`',
    'A - B': 'mean over the seeds of the difference between A and B with the same seed',
    'P(A > B)': 'share of seeds in which A is better; ties count half',
    INTERVAL: 'of the mean difference, a percentile bootstrap over seeds, not corrected for the '
    'number of comparisons. With few seeds it is too narrow: for normally distributed differences '
    'it covers the true mean in 86 % of cases with 6 seeds, 88 % with 8 and 91 % with 12',
    'p; p, Holm': 'p of the sign-flip test, which is exact if the distribution of the differences '
    'is symmetric about its mean; the same after correction (Holm) for the methods of the table',
    'detectable': 'about the smallest true difference that this number of pairs detects with a '
    'probability of 0.8: of a paired t test at the level 0.05 divided by the number of methods, '
    'with the observed standard deviation of the differences',
    'interquartile mean': 'mean over seeds without the quarter at each end',
    'mIoU': 'intersection over union, the mean over classes',
    'exploratory': 'of a secondary hypothesis or task; p is corrected where the column is '
    '"p, Holm"',
    'ms a step, MiB': 'time and peak memory of the GPU of one training step of this model, with '
    "the protocol's batch and in bfloat16, replayed as a CUDA graph, alone on the card. "
    '`zoh_exact, averaged` runs unfused, so its time is not that of its arithmetic',
}


class _Measured(NamedTuple):
    """What a task of the study is, the metric of its tables with the data, and both in short."""

    title: str
    metric: str
    short: str


_MEASURED = {
    'fashion': _Measured(
        'Classification',
        'the accuracy in percent on the 10,000 test images of Fashion-MNIST. Training used its '
        '60,000 training images',
        'the accuracy of the classification of Fashion-MNIST',
    ),
    'scenes': _Measured(
        'Segmentation',
        'the mIoU in percent over 11 classes, ten garments and the ground, on 2,000 test scenes: '
        'grey images of 128 x 128, drawn from garments of Fashion-MNIST that are scaled, turned '
        'and pasted on a noisy ground. Training used 8,000 other scenes',
        'the mIoU of the segmentation of synthetic scenes of garments',
    ),
    'recall': _Measured(
        'Recall',
        'the accuracy in percent on the regions of 2,000 test images. A cue, at least 129 tokens '
        'earlier in the scan, tells the class of the region. Training used 32,000 other images',
        'the accuracy on regions whose class a cue far away tells',
    ),
}
# What stands between the title of a table and the table.
_NOTES = {
    'Other resolutions': 'mIoU in percent on the first 500 test scenes, as they are and enlarged '
    '1.5 and 2 times. "/dt" means that `dt` was divided by the enlargement; else it is as trained.',
}
_SHORT = (
    f'The table has the mean of the control, the exact zero-order hold (`{CONTROL}`), with its '
    'standard deviation over seeds. For each method it has the mean difference from the control '
    f'over seeds, in percentage points, with {INTERVAL} and p. Positive means better than the '
    'control. {tasks} The models start from random weights{sizes}. All methods have the same '
    "settings. The initialization is Mamba's, which was made for `zoh`, and the learning rate was "
    'chosen with `zoh` before the study. A method may do better with settings of its own; that was '
    'not tested.'
)
_SEE = (
    '[The protocol](study_protocol.md#question-and-hypotheses) has the answers to H2 to H4, and '
    '[what may be concluded](study_protocol.md#what-may-be-concluded). Among that: `foh` is not '
    'the first-order hold of textbooks, and the coefficients of `poly` and `highorder` add terms '
    'of different physical units ([formulas](methods.md)). So a difference of theirs says nothing '
    'about holds or orders of accuracy in general.'
)
LONG = 'long'  # the task of one longer run, which compares nothing
_BESIDE = f"""## Fashion-MNIST beside other models

Accuracy in percent on the 10,000 test images, standard split. The rows with a number of seeds were
trained by the code of the study (`--arms deit resnet18`, and `--tasks long --seeds 0`), in 10
epochs where the row does not say otherwise. The recipe was chosen for Vim; another may serve the
others better. The goal of the longer run, DenseNet-BC's 95.4 %, was missed.

The rows without were not run here, and their recipes differ. All but the last were
[submitted to the data set's README]({SOURCE}), which did not verify them. The last is from
[a later paper]({PAPER})."""


def in_order(tasks: list[TaskResults]) -> list[TaskResults]:
    """The tasks in the order of the page; those that the study has not come first."""
    order = [*_MEASURED]
    return sorted(tasks, key=lambda t: order.index(t.kind) if t.kind in order else -1)


def sections(task: TaskResults) -> list[tuple[str, Rows]]:
    """Titles and tables of a task, those that are not empty."""
    as_planned = not task.planned or task.control == CONTROL
    testable = is_testable(len(task.seeds))
    secondary = 'Exploratory' if testable else 'Described, not tested'
    kind = 'Primary' if testable and task.primary and as_planned else secondary
    control = 'the control' if task.control == CONTROL else f'`{title(task.control)}`'
    methods = 'six methods' if len(task.compared) == 6 else 'each method'
    each = [('Each method', summary_rows(task))]
    tested = not task.interim and task.chance is None
    found = [
        (f'{kind}: {methods} against {control}', family_rows(task, power=tested)),
        (f'{secondary}: variants{", p not corrected" if testable else ""}', secondary_rows(task)),
        ('Other resolutions', resolution_rows(task)),
    ]
    found += [
        (f'Exploratory: against {control} at {at(name)}', family_rows(task, name))
        for name in resolutions(task)
    ]
    found = each + found if task.chance is not None else found + each
    return [(name, without_empty_columns(rows)) for name, rows in found if rows]


def at(resolution: str) -> str:
    """'1.5' and '1.5/dt' in words."""
    factor, _, divided = resolution.partition('/')
    return f'{factor} times the size' + (f', `dt` divided by {factor}' if divided else '')


def model_and_metric(task: TaskResults) -> str | None:
    """What the tables of a task of the study show, in which unit, of which model."""
    measured = _MEASURED.get(task.kind)
    if not task.planned or measured is None:
        return None
    runs = [run for arm in task.arms for run in task.runs[arm].values()]
    sizes = sorted({run['parameters'] for run in runs if 'parameters' in run})
    size = f', with {" or ".join(f"{size:,}" for size in sizes)} parameters' if sizes else ''
    ranges = sorted({tuple(run['settings'].get('dt_range', ())) for run in runs})
    starts = ''.join(f' Its `dt` starts between {r[0]:g} and {r[1]:g}.' for r in ranges if r)
    return (
        f'The metric is {measured.metric}. Differences are in percentage points. The model is the '
        f'`VisionMamba` of the protocol{size}.{starts}'
    )


def heading(task: TaskResults) -> str:
    """Of a task of the study what it is, and its name."""
    if not task.planned or task.kind not in _MEASURED:
        return task.name
    return f'{_MEASURED[task.kind].title} (`{task.name}`)'


def waits(arm: str, task: TaskResults) -> str:
    """What becomes of a variant that lacks seeds."""
    seeds = sorted(task.runs[arm].keys() & {*task.seeds})
    if len(seeds) < 2:
        return f'`{title(arm)}` has finished only {len(seeds)} of these, and is not compared.'
    interim = '' if task.final else ' and are interim'
    return (
        f'`{title(arm)}` has finished only seeds {which(seeds)}. It is in the table of variants '
        f'alone; its rows there use these seeds{interim}.'
        + ('' if is_testable(len(seeds)) else ' They are too few for an interval and a test.')
    )


def describe(task: TaskResults, picture: str | None = None) -> str:
    """All that there is to say of one task, in Markdown.

    Args:
        task (TaskResults): Its runs.
        picture (str, optional): Its address, relative to the page.
    """
    count = len(task.seeds)
    interim = ''
    if task.interim:
        why = f'{count} of {task.planned}: interim'
        interim = f' ({why if count < task.planned else "interim: methods are missing"})'
    against_control = family_rows(task)
    parts = [
        f'## {heading(task)}',
        *filter(None, [model_and_metric(task)]),
        f'The tables use seeds {which(task.seeds)}{interim}, which all methods and variants in '
        f'them have finished{", with the exception below" if task.waiting else ""}.',
    ]
    if task.missing:
        names = '; '.join(f'`{title(arm)}`' for arm in task.missing)
        parts.append(f'No run yet: {names}.')
    parts += [waits(arm, task) for arm in task.waiting]
    if picture:
        parts.append(f'![{task.name}]({picture})')
    tables = sections(task)
    testable = is_testable(count)
    if against_control and not testable:
        parts.append(
            f'{count} pairs are too few for a {INTERVAL} and for a test: p would be at least '
            f'{least_p(count):.3g}. The tables have the difference of each seed.'
        )
    if task.chance is not None:
        parts.append(ends(task))
    for name, rows in tables:
        parts += filter(None, [f'### {name}', _NOTES.get(name), markdown_table(rows)])
    if against_control and (testable or task.interim):
        parts += ['### What this shows', bullets(verdicts(task))]
    lost = [*diverged(task)]
    if lost:
        parts.append('Diverged, and counted with their value: ' + '; '.join(lost) + '.')
    return '\n\n'.join([*parts, *made_by(task)])


def ends(task: TaskResults) -> str:
    """Where the runs end, of a task on which many stay at chance."""
    low = task.at_chance
    above = sorted(v for arm in task.arms for v in task.metrics(arm) if v > ABOVE[0])
    text = f'Chance is {task.chance:.1f} %. '
    if low:
        count = len(low) + len(above)
        text += f'{len(low)} of the {count} runs end at {low[0]:.1f} to {low[-1]:.1f} %. '
    if low and above:
        text += f'The others end at {above[0]:.1f} % and more. '
    return text + (
        'A mean says mainly how many runs end above chance, and intervals and p say little. So '
        f'the table counts the runs that end above {ABOVE[0]:g} % and above {ABOVE[1]:g} %, and '
        'with how many of these seeds the control does too. The counts were added after the runs.'
    )


def in_short(tasks: list[TaskResults]) -> str:
    """The answer to the primary hypothesis, of the tasks on which it was tested."""
    tasks = [task for task in tasks if is_tested(task)]
    if not tasks:
        return ''
    runs = [run for task in tasks for *_, run in task.entries]
    sizes = [f'{n / 1e6:.2f}' for n in sorted({r['parameters'] for r in runs if 'parameters' in r})]
    return '\n\n'.join(
        [
            '## In short',
            best_found(tasks),
            bullets(map(short_verdict, tasks)),
            _SHORT.format(
                tasks=' '.join(f'`{task.name}` is {_MEASURED[task.kind].short}.' for task in tasks),
                sizes=f' and have {" and ".join(sizes)} million parameters' if sizes else '',
            ),
            markdown_table(short_rows(tasks)),
            *cautions(tasks),
            _SEE,
        ]
    )


def commands(tasks: list[TaskResults], long: TaskResults | None) -> str:
    """What makes the runs of these tasks of the study, a line for each label, and their costs."""
    labels: dict[str, list[str]] = {}
    for task in tasks:
        _, _, label = task.name.partition('_')
        labels.setdefault(f' --label {label}' if label else '', []).append(task.kind)
    if long:
        labels.setdefault('', []).append(LONG)
    lines = [
        f'train --tasks {" ".join(kinds)}{label} --data DIR --out OUT --results EMPTY'
        for label, kinds in labels.items()
    ]
    if costs := [task.name for task in tasks if task.costs]:
        lines.append(f'cost --tasks {" ".join(costs)} --data DIR --out OUT')
    return '\n'.join(f'python tools/study/run.py {line}' for line in lines)


def terms() -> str:
    """What the words of the study's tables mean."""
    rows = [('word', 'meaning'), ('---', '---'), *_TERMS.items()]
    return '\n'.join(['## Terms', '', *(f'| {word} | {meaning} |' for word, meaning in rows)])


def _facts_of_others(task: TaskResults, long: TaskResults | None) -> str:
    groups = [*task.peers.values(), *(long.runs.values() if long else ())]
    return machines(facts(run for runs in groups for run in runs.values()))


def write_page(
    tasks: list[TaskResults], page: Path, study: bool, long: TaskResults | None = None
) -> None:
    """The tables in Markdown, and the pictures in ``images`` beside it.

    Of the study also how to repeat the runs, and which tasks have none yet.

    Args:
        tasks (list): By task and setting; of the study also those of its detectors' folders.
        page (Path): The file.
        study (bool): Whether the tasks are the study's.
        long (TaskResults, optional): The study's longer run.
    """
    detectors = [task for task in tasks if study and is_detection(task)]
    tasks = [task for task in tasks if task not in detectors]
    texts = [_HEAD, *filter(None, [in_short(tasks)]), terms()] if study else ['# Methods compared']
    for task in tasks:
        picture = page.parent / 'images' / f'study_{task.name.replace(" ", "_")}.png'
        plot_task(task, picture)
        relative = os.path.relpath(picture, page.parent)
        texts.append(describe(task, relative))
    by_name = {task.name: task for task in tasks}
    if 'fashion' in by_name and (rows := other_rows(by_name['fashion'], long)):
        others = _facts_of_others(by_name['fashion'], long)
        texts += [_BESIDE, f'DeiT, ResNet-18 and the longer run: {others}.', markdown_table(rows)]
    if detectors:
        texts.append(detection_section(detectors))
    if study:
        texts += [f'## {name}\n\nNo run yet.' for name in _MEASURED if name not in by_name]
        texts.append(_HOW.format(commands=commands(tasks, long)))
    write_text(page, '\n\n'.join(texts))
