"""Prints the last metrics of runs side by side: ``python tools/compare_runs.py WORK_DIR ...``."""

from argparse import ArgumentParser
from pathlib import Path

from vim_mm.analysis.runs import read_history
from vim_mm.analysis.tables import markdown_table


def summary(work_dir: Path) -> dict[str, str]:
    """What the table says of one run."""
    _, metrics = read_history(work_dir)
    (iterations,) = {points[-1][0] for points in metrics.values()}
    return {
        'run': work_dir.name,
        'iterations': str(iterations),
        **{name: f'{points[-1][1]:.2f}' for name, points in metrics.items()},
    }


def main() -> None:
    parser = ArgumentParser(description='Print the last metrics of runs of one task as a table.')
    parser.add_argument('work_dirs', nargs='+', type=Path, help='working directories of runs')
    print(markdown_table([summary(work_dir) for work_dir in parser.parse_args().work_dirs]))


if __name__ == '__main__':
    main()
