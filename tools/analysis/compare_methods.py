"""Compares methods over seeds, from the folders that run_all_methods.py made.

    python tools/analysis/compare_methods.py work_dirs --page comparison.md --latex tables.tex

Prints means over seeds and differences from the control, paired by seed, with their interval, exact
p with Holm's correction, P(A > B), and whether a difference was found. docs/comparing_methods.md
says how to read them.
"""

import argparse
from pathlib import Path

from _command_line import add_debug, end, parse_first, parser_of


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        'results', nargs='+', type=Path, help='folders of runs, or the folder above them'
    )
    parser.add_argument('--control', help='the method to compare with (default: zoh_exact)')
    parser.add_argument(
        '--allow-unlike',
        action='store_true',
        help='compare folders of runs that differ in more than method and seed all the same',
    )
    parser.add_argument('--page', type=Path, help='write Markdown, and PNG in images/ beside it')
    parser.add_argument('--latex', type=Path, help='write the tables for LaTeX (booktabs)')
    add_debug(parser)
    return parser.parse_args()


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

from benchmarks.comparison.report import describe, sections, write_page
from benchmarks.comparison.results import CONTROL, TaskResults
from benchmarks.comparison.run_folders import find_runs, read_runs
from benchmarks.measure.tables import latex_table, write_text


def absent(task: TaskResults) -> str | None:
    """Why the tables of a task lack the comparison, or None."""
    if task.control not in task.runs:
        return f'{task.name}: no run of the control {task.control}, so nothing is compared with it.'
    if len(task.seeds) < 2:
        return f'{task.name}: a comparison takes at least 2 seeds that all methods finished.'
    return None


def read(paths: list[Path], allow_unlike: bool) -> list[TaskResults]:
    """The tasks of folders of runs; a path that holds none is named and ignored.

    Raises:
        FileNotFoundError: A path does not exist, or none holds a run.
    """
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f'there is no {path}')
        if not find_runs([path]):
            print(f'ignored: {path} holds no run with a run.json of run_all_methods.py.')
    folders = find_runs(paths)
    if not folders:
        raise FileNotFoundError(
            f'{", ".join(map(str, paths))}: no run with a run.json of run_all_methods.py'
        )
    tasks, left_out = read_runs(folders, allow_unlike)
    print(*left_out, sep='\n', end='\n' if left_out else '')
    return tasks


def main(args: argparse.Namespace) -> None:
    tasks = []
    for task in read(args.results, args.allow_unlike):
        task.control = args.control or CONTROL
        if task.seeds:
            tasks.append(task)
        else:
            print(f'{task.name}: no seed that all methods finished')
    if not tasks:
        raise SystemExit('There is nothing to compare.')
    known = sorted({arm for task in tasks for arm in task.runs})
    if args.control and args.control not in known:
        raise SystemExit(f'--control: expected one of {known}, got {args.control!r}.')
    print('\n\n'.join(describe(task) for task in tasks))
    print(*filter(None, map(absent, tasks)), sep='\n')
    if args.latex:
        tables = [latex_table(rows) for task in tasks for _, rows in sections(task)]
        write_text(args.latex, '\n\n'.join(tables))
    if args.page:
        write_page(tasks, args.page)


if __name__ == '__main__':
    end(main, ARGUMENTS)
