"""Holds runs side by side: ``python tools/compare_runs.py WORK_DIR ... [--picture FILE]``."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from _command_line import add_debug, end


def summary(work_dir: Path) -> dict[str, str]:
    """What the table says of one run."""
    from benchmarks.runs.work_dir import read_history

    losses, metrics = read_history(work_dir)
    iterations = max(points[-1][0] for points in (losses, *metrics.values()) if points)
    return {
        'run': work_dir.name,
        'iterations': str(iterations),
        # A run that is shorter than the logger's interval logs no loss.
        'loss': f'{losses[-1][1]:.3g}' if losses else '',
        **{name: f'{points[-1][1]:.2f}' for name, points in metrics.items()},
    }


def parse_args() -> Namespace:
    parser = ArgumentParser(description='Print the last loss and metrics of runs.')
    parser.add_argument('work_dirs', nargs='+', type=Path, help='working directories of runs')
    parser.add_argument(
        '--picture',
        type=Path,
        help='draw the training losses: a panel for each parent directory, a line for each run, '
        'of one name and colour in all panels',
    )
    add_debug(parser)
    return parser.parse_args()


def main(args: Namespace) -> None:
    # After the arguments: --help takes no PyTorch.
    from benchmarks.measure.tables import markdown_table
    from benchmarks.pictures.plots import plot_losses
    from benchmarks.runs.work_dir import read_history

    tables: dict[tuple[str, ...], list[dict[str, str]]] = {}  # one for each set of metrics
    for row in map(summary, args.work_dirs):
        tables.setdefault(tuple(row), []).append(row)
    print(*map(markdown_table, tables.values()), sep='\n\n')
    if args.picture:
        panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
        for work_dir in args.work_dirs:
            resolved = work_dir.resolve()
            panels.setdefault(resolved.parent.name, {})[work_dir.name] = read_history(work_dir)[0]
        plot_losses(panels, args.picture)


if __name__ == '__main__':
    end(main, parse_args())
