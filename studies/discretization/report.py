"""Makes the tables and pictures of the study's pages from its runs.

    python studies/discretization/report.py
    python studies/discretization/report.py --runs NEW

The first writes them into README.md and known_answer/README.md, each table between its markers; the
text around them is written by hand. Of |z| it draws the histograms that README.md shows. The second
prints the tables of other runs, and draws all their histograms in that folder.
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from _command_line import add_debug, end, parse_first, parser_of

HERE = Path(__file__).resolve().parent
ROUND_ONE = ('fashion', 'scenes', 'recall', 'long')  # tasks whose runs have to be there


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument('--runs', type=Path, help='print the tables of this folder of runs')
    add_debug(parser)
    return parser.parse_args()


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

from benchmarks.comparison.figure import plot_task
from benchmarks.comparison.results import Rows
from benchmarks.measure.tables import markdown_table, write_text
from studies.discretization.known_answer import tables as known_answer
from studies.discretization.study import ARMS, PEERS, StudyTask, read_detectors, read_results
from studies.discretization.tables.first import PRIMARY, all_tables
from studies.discretization.tables.second import plot_stiffness, second_tables
from studies.discretization.tasks import TASKS
from vim_mm.json_lines import read_json

_TABLE = re.compile(r'(<!-- table: (.+?) -->\n).*?(\n<!-- end -->)', re.S)


def fill(text: str, tables: Mapping[str, Rows]) -> str:
    """A page with its tables made anew.

    Raises:
        ValueError: The page has a table that there is not.
    """

    def table(found: re.Match) -> str:
        if found[2] not in tables:
            raise ValueError(f'there is no table {found[2]!r}, there are {[*tables]}')
        return f'{found[1]}\n{markdown_table(tables[found[2]])}\n{found[3]}'

    return _TABLE.sub(table, text)


def refuse_missing_runs(tasks: Mapping[str, StudyTask]) -> None:
    """The pages are about all runs of round one: the table of a task takes seeds of all arms.

    Raises:
        ValueError: Some are missing.
    """
    for name, task in tasks.items():
        if task.kind not in ROUND_ONE:
            continue
        planned = TASKS[task.kind]
        for arm in (arm for arm in planned.arms if arm in (*ARMS, *PEERS)):
            there = (task.runs | task.peers).get(arm, {})
            # The other settings have no other people's models.
            if {*planned.planned_seeds(arm)} - there.keys() and (name == task.kind or there):
                raise ValueError(f'{name}: {arm} has seeds {sorted(there)} alone')


def pages() -> dict[Path, str]:
    """The text of each page, as it should be."""
    tasks = read_results()
    refuse_missing_runs(tasks)
    answer, regression = HERE / 'README.md', HERE / 'known_answer/README.md'
    return {
        answer: fill(
            answer.read_text(), all_tables(tasks, read_detectors()) | second_tables(tasks)
        ),
        regression: fill(
            regression.read_text(),
            known_answer.all_tables(read_json(regression.parent / 'runs.json')),
        ),
    }


def main(args: argparse.Namespace) -> None:
    if args.runs:
        tasks = read_results(args.runs)
        for name, rows in (all_tables(tasks, []) | second_tables(tasks)).items():
            if rows:
                print(f'{name}\n\n{markdown_table(rows)}\n')
        for name, task in tasks.items():
            plot_stiffness(task, args.runs / f'stiffness_{name}.png')
        return
    for page, text in pages().items():
        write_text(page, text.rstrip('\n'))
    shown = (HERE / 'README.md').read_text()
    for name, task in read_results().items():
        if name in PRIMARY:
            plot_task(task, HERE / f'images/{name}.png')
        picture = f'images/stiffness_{name}.png'
        if f']({picture})' in shown:
            plot_stiffness(task, HERE / picture)
    results = read_json(HERE / 'known_answer/runs.json')
    for name, draw in known_answer.pictures(results).items():
        draw(HERE / 'known_answer' / name)


if __name__ == '__main__':
    end(main, ARGUMENTS)
