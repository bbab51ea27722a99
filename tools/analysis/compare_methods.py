"""Compare methods over seeds: ``python tools/analysis/compare_methods.py docs/study/results``.

Reads one JSON a run, as tools/study writes them, and prints the tables of docs/study_protocol.md.
``--page FILE`` writes docs/methods_compared.md with its pictures, ``--latex FILE`` the tables.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/, for _command_line
from _command_line import add_debug, end, parse_first


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('results', type=Path, help='folder of <task>/<method>_<seed>.json')
    parser.add_argument('--page', type=Path, help='write the page, and pictures beside it')
    parser.add_argument('--latex', type=Path, help='write the tables for LaTeX (booktabs)')
    add_debug(parser)
    return parser.parse_args()


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

from vim_mm.analysis.comparison import (
    PLANNED_SEEDS,
    TaskResults,
    diverged,
    family_rows,
    read_results,
    resolution_rows,
    resolutions,
    secondary_rows,
    summary_rows,
    verdicts,
)
from vim_mm.analysis.comparison_plots import plot_task
from vim_mm.analysis.tables import markdown_table, write_text

Rows = list[dict[str, str]]
_HEAD = """# The methods compared

Made from the results of the runs, one JSON each, by
`python tools/analysis/compare_methods.py docs/study/results --page docs/methods_compared.md`.
Do not edit. Hypotheses, tasks, statistics and what may be concluded stand in
[the protocol](study_protocol.md), which was committed before the runs. The runs are repeated by
`python tools/study/run.py train --data DIR --out DIR`.
"""


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
    found = [
        ('Each method', summary_rows(task)),
        ('Primary: six methods against the control', family_rows(task)),
        ('Exploratory, p without correction', secondary_rows(task)),
        ('Other resolutions: dt as trained, and divided by the factor', resolution_rows(task)),
    ]
    found += [
        (f'Exploratory: against the control at {name}', family_rows(task, name))
        for name in resolutions(task)
    ]
    return [(title, rows) for title, rows in found if rows]


def machines(task: TaskResults) -> str:
    """Cards, commits and dates of the runs in the tables."""
    runs = [task.runs[arm][seed] for arm in task.arms for seed in task.seeds]
    names = {key: sorted({run[key] for run in runs}) for key in ('card', 'commit', 'date')}
    return '; '.join(f'{key}: {", ".join(values)}' for key, values in names.items())


def describe(task: TaskResults, table: Callable[[Rows], str], picture: str | None) -> str:
    """All that there is to say of one task."""
    count = len(task.seeds)
    interim = '' if count >= PLANNED_SEEDS else f' (interim: {PLANNED_SEEDS} are planned)'
    parts = [
        f'## {task.name}',
        f'{count} seeds that all methods finished{interim}. {machines(task)}.',
    ]
    if picture:
        parts.append(f'![{task.name}]({picture})')
    for title, rows in sections(task):
        parts += [f'### {title}', table(rows)]
    if count >= 2:
        parts += ['### What this shows', '\n'.join(f'* {line}' for line in verdicts(task))]
    lost = [*diverged(task)]
    if lost:
        parts.append('Diverged, and counted with their value: ' + '; '.join(lost) + '.')
    return '\n\n'.join(parts)


def main(args: argparse.Namespace) -> None:
    tasks = []
    for task in read_results(args.results):
        if task.seeds:
            tasks.append(task)
        else:
            print(f'{task.name}: no seed that all methods finished')
    print('\n\n'.join(describe(task, markdown_table, None) for task in tasks))
    if args.latex:
        tables = [latex_table(rows) for task in tasks for _, rows in sections(task)]
        write_text(args.latex, '\n\n'.join(tables))
    if args.page:
        texts = [_HEAD.strip()]
        for task in tasks:
            picture = args.page.parent / 'images' / f'study_{task.name}.png'
            plot_task(task, picture)
            relative = os.path.relpath(picture, args.page.parent)
            texts.append(describe(task, markdown_table, relative))
        write_text(args.page, '\n\n'.join(texts))


if __name__ == '__main__':
    end(main, ARGUMENTS)
