"""Compares methods over seeds, from what their runs left.

    python tools/analysis/compare_methods.py work_dirs --page comparison.md --latex tables.tex
    python tools/analysis/compare_methods.py docs/study/results --page docs/methods_compared.md

Reads the folders that run_all_methods.py made, or the study's results (one JSON a run), and prints
the tables of docs/study_protocol.md: means over seeds, differences from the control paired by seed
with their interval, exact p with Holm's correction, P(A > B), and what may be concluded.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/, for _command_line
from _command_line import add_debug, end, parse_first


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        'results', nargs='+', type=Path, help='folders of runs, or the folder above them'
    )
    parser.add_argument('--control', help='the method to compare with (default: zoh_exact)')
    parser.add_argument(
        '--allow-unlike',
        action='store_true',
        help='compare runs of another path, commit, torch or machine all the same',
    )
    parser.add_argument(
        '--final',
        action='store_true',
        help='test the finished seeds of the study, though fewer than planned: no more will come',
    )
    parser.add_argument('--page', type=Path, help='write Markdown, and PNG in images/ beside it')
    parser.add_argument('--latex', type=Path, help='write the tables for LaTeX (booktabs)')
    add_debug(parser)
    return parser.parse_args()


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

from vim_mm.analysis.study.comparison import (
    CONTROL,
    INTERVAL,
    TaskResults,
    cost_cells,
    diverged,
    facts,
    family_rows,
    is_tested,
    read_results,
    resolution_rows,
    resolutions,
    secondary_rows,
    short_rows,
    short_verdict,
    summary_rows,
    title,
    verdicts,
)
from vim_mm.analysis.study.others import PAPER, SOURCE, other_rows
from vim_mm.analysis.study.plots import plot_task
from vim_mm.analysis.study.run_folders import find_runs, read_runs
from vim_mm.analysis.tables import markdown_table, write_text

Rows = list[dict[str, str]]
_HEAD = """# The methods compared

Made from the results of the runs, one JSON each, by
`python tools/analysis/compare_methods.py docs/study/results --page docs/methods_compared.md`.
Do not edit. Hypotheses, tasks, statistics and what may be concluded stand in
[the protocol](study_protocol.md), whose first version was committed before the runs. These commands
repeat the runs; DIR holds Fashion-MNIST's IDX files (`python -m vim_mm.datasets.fashion`):

```bash
{commands}
python tools/study/run.py import OUT --results NEW
python tools/analysis/compare_methods.py NEW
```

EMPTY is an empty folder. Without it `train` leaves out the runs that `docs/study/results` holds.

{terms}
"""
_TERMS = {
    '`zoh_exact`': 'the control: the true zero-order hold, with which every method is compared',
    'foh, matched': '`foh` with B enlarged at initialization, so that its input gain is that of '
    '`zoh`',
    'zoh_exact, averaged': 'the control, each direction scanned in both orders and averaged, as '
    '`poly` does',
    'A - B, P(A > B)': 'mean difference over seeds, and the share of seeds in which A is better; '
    'ties count half',
    INTERVAL: 'of the mean difference: a percentile bootstrap over seeds. It is too narrow '
    'for few seeds: of normal differences it holds the true mean in 86 % of cases with 6 seeds, '
    '88 % with 8, 91 % with 12',
    'p; p, Holm': 'exact p of the sign-flip test; the same, corrected for the methods of the table',
    'ms a step, MiB': 'time and peak memory of the GPU of one training step, alone on the card',
}
# By task of the study: the metric of its tables, and the data.
_MEASURED = {
    'fashion': 'the accuracy in percent on the 10,000 test images of Fashion-MNIST. Training used '
    'its 60,000 training images',
    'scenes': 'the mIoU in percent over 11 classes on 2,000 test scenes of garments. Training used '
    '8,000 other scenes',
    'recall': 'the accuracy in percent on the regions of 2,000 test images. A cue, at least 129 '
    'tokens earlier in the scan, tells the class of the region; 6.7 is chance. Training used '
    '32,000 other images',
}
_CHANCE = (
    'Most runs end at chance. A mean therefore says mainly how many runs do not, and intervals and '
    'p say little. The columns "above 10 %" and "above 50 %" were added after the runs: 10 % is '
    'well above what a run at chance has, and many runs end at two or three times chance.'
)
# What stands between the title of a table and the table.
_NOTES = {
    'Other resolutions': 'mIoU in percent on the first 500 test scenes, as they are and enlarged '
    '1.5 and 2 times. "/dt" means that `dt` was divided by the enlargement; else it is as trained.',
}
_SHORT = (
    f'Mean differences from `{CONTROL}` in percentage points of the metric, paired by seed, with '
    f"{INTERVAL} and p after Holm's correction. A positive one is an advantage of the method. The "
    'metric of `fashion` is the accuracy of classification, that of `scenes` the mIoU of '
    'segmentation.'
)
_LONG = 'long'  # the task of one longer run, which compares nothing
_BESIDE = f"""## Fashion-MNIST beside other models

Accuracy in percent on the 10,000 test images, standard split. The rows with parameters were trained
by the code of the study (`--arms deit resnet18`, and `--tasks long --seeds 0`), in 10 epochs where
the row does not say otherwise. The recipe was chosen for Vim; another may serve the others better.
The longer run was to reach 95.4 %.

The rows without parameters were not run here, and their recipes differ. All but the last were
[submitted to the data set's README]({SOURCE}), which did not verify them. The last is from
[a later paper]({PAPER})."""


def latex_table(rows: Rows) -> str:
    """Rows of the same columns as a tabular of booktabs."""
    escape = str.maketrans({'_': r'\_', '%': r'\%', '>': r'$>$', '&': r'\&'})
    lines = [[*rows[0]], *([*row.values()] for row in rows)]
    head, *body = (' & '.join(cell.translate(escape) for cell in line) + r' \\' for line in lines)
    columns = 'l' + 'r' * (len(rows[0]) - 1)
    inner = [r'\toprule', head, r'\midrule', *body, r'\bottomrule']
    return '\n'.join([rf'\begin{{tabular}}{{{columns}}}', *inner, r'\end{tabular}'])


def sections(task: TaskResults) -> list[tuple[str, Rows]]:
    """Titles and tables of a task, those that are not empty."""
    as_planned = not task.planned or task.control == CONTROL
    kind = 'Primary' if task.primary and as_planned else 'Exploratory'
    control = 'the control' if task.control == CONTROL else f'`{title(task.control)}`'
    methods = 'six methods' if len(task.compared) == 6 else 'each method'
    found = [
        ('Each method', summary_rows(task)),
        (f'{kind}: {methods} against {control}', family_rows(task)),
        ('Exploratory, p without correction', secondary_rows(task)),
        ('Other resolutions', resolution_rows(task)),
    ]
    found += [
        (f'Exploratory: against {control} at {name}', family_rows(task, name))
        for name in resolutions(task)
    ]
    return [(heading, with_interval(rows)) for heading, rows in found if rows]


def with_interval(rows: Rows) -> Rows:
    """Without the column of intervals where there is none."""
    if any(row.get(INTERVAL) for row in rows):
        return rows
    return [{name: cell for name, cell in row.items() if name != INTERVAL} for row in rows]


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
        f'The metric is {measured}. Differences are in percentage points. The model is the '
        f'`VisionMamba` of the protocol{size}.{starts}'
    )


def mixed(task: TaskResults) -> list[str]:
    """Which seeds have runs of several commits or cards, and of which."""
    lines = []
    for key in ('commit', 'card'):
        found = {s: sorted({task.runs[a][s][key] for a in task.arms}) for s in task.seeds}
        seeds = [f'seed {s} of {", ".join(names)}' for s, names in found.items() if len(names) > 1]
        if seeds:
            lines.append(f'Runs of one seed are of different {key}s: {"; ".join(seeds)}.')
    return lines


def machines(found: dict[str, list[str]]) -> str:
    """Cards, commits and dates in words."""
    return '; '.join(f'{key}: {", ".join(values)}' for key, values in found.items() if values)


def table_runs(task: TaskResults) -> list[dict[str, Any]]:
    """The runs that enter the tables."""
    return [task.runs[arm][seed] for arm in task.arms for seed in task.seeds]


def costs_alone(task: TaskResults) -> str:
    """The cost of a step of what is not in the tables, in sentences."""
    found = ''
    for arm in sorted(task.costs.keys() - {*task.arms} - task.peers.keys()):
        cells = [cell for cell in cost_cells(task, arm).items() if cell[1]]
        found += f' `{title(arm)}`, which is not in the tables: '
        found += ', '.join(f'{value} {unit.removesuffix(" a step")}' for unit, value in cells) + '.'
    return found


def describe(task: TaskResults, table: Callable[[Rows], str], picture: str | None) -> str:
    """All that there is to say of one task."""
    count = len(task.seeds)
    interim = f' ({count} of {task.planned}: interim)' if task.interim else ''
    parts = [
        f'## {task.name}',
        *filter(None, [model_and_metric(task)]),
        'The tables use the seeds that every method and variant in them has finished: '
        f'{", ".join(map(str, task.seeds))}{interim}. {machines(facts(table_runs(task)))}.',
        *mixed(task),
    ]
    if task.missing:
        names = '; '.join(f'`{title(arm)}`' for arm in task.missing)
        parts.append(f'No run yet: {names}.')
    parts += [
        f'`{title(arm)}` has finished {has} of these {count} seeds, and enters with the last.'
        for arm, has in task.waiting.items()
    ]
    if any('card' in cost for cost in task.costs.values()):
        parts.append(
            f'The cost of a step: {machines(facts(task.costs.values()))}.{costs_alone(task)}'
        )
    if picture:
        parts.append(f'![{task.name}]({picture})')
    tables = sections(task)
    if family_rows(task) and not any(INTERVAL in rows[0] for _, rows in tables):
        parts.append(f'{count} pairs are too few for a {INTERVAL}.')
    if task.chance is not None:
        parts.append(_CHANCE)
    for heading, rows in tables:
        parts += filter(None, [f'### {heading}', _NOTES.get(heading), table(rows)])
    if family_rows(task):
        parts += ['### What this shows', '\n'.join(f'* {line}' for line in verdicts(task))]
    lost = [*diverged(task)]
    if lost:
        parts.append('Diverged, and counted with their value: ' + '; '.join(lost) + '.')
    return '\n\n'.join(parts)


def in_short(tasks: list[TaskResults]) -> str:
    """The answer to the primary hypothesis, of the tasks on which it was tested."""
    tasks = [task for task in tasks if is_tested(task)]
    rows = short_rows(tasks)
    if not rows:
        return ''
    return '\n\n'.join(
        [
            '## In short',
            _SHORT,
            markdown_table(rows),
            '\n'.join(f'* {short_verdict(task)}' for task in tasks),
        ]
    )


def absent(task: TaskResults) -> str | None:
    """Why the tables of a task lack the comparison, or None."""
    if task.control not in task.runs:
        return f'{task.name}: no run of the control {task.control}, so nothing is compared with it.'
    if len(task.seeds) < 2:
        return f'{task.name}: a comparison takes at least 2 seeds that all methods finished.'
    return None


def read(paths: list[Path], allow_unlike: bool) -> list[TaskResults]:
    """Folders of runs, else the one folder of results."""
    if folders := find_runs(paths):
        tasks, left_out = read_runs(folders, allow_unlike)
        print(*left_out, sep='\n', end='\n' if left_out else '')
        return tasks
    return [task for path in paths for task in read_results(path)]


def commands(tasks: list[TaskResults], long: TaskResults | None) -> str:
    """What makes the runs of these tasks of the study, a line for each label, and their costs."""
    labels: dict[str, list[str]] = {}
    for task in tasks:
        _, _, label = task.name.partition('_')
        labels.setdefault(f' --label {label}' if label else '', []).append(task.kind)
    if long:
        labels.setdefault('', []).append(_LONG)
    lines = [
        f'train --tasks {" ".join(kinds)}{label} --data DIR --out OUT --results EMPTY'
        for label, kinds in labels.items()
    ]
    if costs := [task.name for task in tasks if task.costs]:
        lines.append(f'cost --tasks {" ".join(costs)} --data DIR --out OUT')
    return '\n'.join(f'python tools/study/run.py {line}' for line in lines)


def head_of_study(tasks: list[TaskResults], long: TaskResults | None) -> str:
    """How the page and the runs are made, and what its words mean."""
    rows = [('word', 'meaning'), ('---', '---'), *_TERMS.items()]
    terms = '\n'.join(f'| {word} | {meaning} |' for word, meaning in rows)
    return _HEAD.format(commands=commands(tasks, long), terms=terms)


def _facts_of_others(task: TaskResults, long: TaskResults | None) -> str:
    groups = [*task.peers.values(), *(long.runs.values() if long else ())]
    return machines(facts(run for runs in groups for run in runs.values()))


def write_page(
    tasks: list[TaskResults], page: Path, study: bool, long: TaskResults | None = None
) -> None:
    """The tables in Markdown, and the pictures in ``images`` beside it.

    Of the study also how to repeat the runs, and which tasks have none yet.
    """
    head = head_of_study(tasks, long) if study else '# Methods compared\n'
    texts = [head.strip(), *filter(None, [in_short(tasks) if study else ''])]
    for task in tasks:
        picture = page.parent / 'images' / f'study_{task.name.replace(" ", "_")}.png'
        plot_task(task, picture)
        relative = os.path.relpath(picture, page.parent)
        texts.append(describe(task, markdown_table, relative))
    by_name = {task.name: task for task in tasks}
    if 'fashion' in by_name and (rows := other_rows(by_name['fashion'], long)):
        others = _facts_of_others(by_name['fashion'], long)
        texts += [_BESIDE, f'DeiT, ResNet-18 and the longer run: {others}.', markdown_table(rows)]
    if study:
        names = {task.name for task in tasks}
        texts += [f'## {name}\n\nNo run yet.' for name in _MEASURED if name not in names]
    write_text(page, '\n\n'.join(texts))


def main(args: argparse.Namespace) -> None:
    tasks, long = [], None
    for task in read(args.results, args.allow_unlike):
        if task.name == _LONG:
            long = task
            continue
        task.control = args.control or CONTROL
        task.final = args.final
        if task.seeds:
            tasks.append(task)
        else:
            print(f'{task.name}: no seed that all methods finished')
    if not tasks:
        raise SystemExit('There is nothing to compare.')
    known = sorted({arm for task in tasks for arm in task.runs})
    if args.control and args.control not in known:
        raise SystemExit(f'--control: expected one of {known}, got {args.control!r}.')
    order = [*_MEASURED]
    tasks.sort(key=lambda task: order.index(kind) if (kind := task.kind) in order else -1)
    print('\n\n'.join(describe(task, markdown_table, None) for task in tasks))
    print(*filter(None, map(absent, tasks)), sep='\n')
    if args.latex:
        tables = [latex_table(rows) for task in tasks for _, rows in sections(task)]
        write_text(args.latex, '\n\n'.join(tables))
    if args.page:
        write_page(tasks, args.page, study=not find_runs(args.results), long=long)


if __name__ == '__main__':
    end(main, ARGUMENTS)
