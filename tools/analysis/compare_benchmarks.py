"""Holds results of benchmark_latency_flops.py side by side.

    python tools/analysis/compare_benchmarks.py before.json after.json --picture both.png
    python tools/analysis/compare_benchmarks.py seg.json seg_compiled.json --merge

The table has a row for each case that the first file and another one hold, with the images per
second of each over those of the first. Files of one model each, such as benchmark.json of two
runs, are compared whatever the models are called. --merge takes the files for parts of one run
instead, and prints each model at its best form. Results of unlike machines, threads or versions of
torch are refused.
"""

from argparse import Namespace
from pathlib import Path

from _command_line import add_debug, end, parser_of


def parse_args() -> Namespace:
    parser = parser_of(__doc__)
    parser.add_argument('results', nargs='+', type=Path, metavar='JSON')
    parser.add_argument('--merge', action='store_true', help='parts of one run, not two runs')
    parser.add_argument(
        '--allow-unlike', action='store_true', help='compare unlike machines all the same'
    )
    parser.add_argument('--picture', type=Path, help='draw bars into this file')
    parser.add_argument('--markdown', type=Path, help='write the tables to this file as well')
    add_debug(parser)
    return parser.parse_args()


def main(args: Namespace) -> None:
    from benchmarks.measure import latency
    from benchmarks.measure.tables import markdown_table, write_text

    results = latency.read_results(args.results)
    if not args.allow_unlike:
        latency.insist_on_one_machine(results)
    if args.merge:
        text = latency.report(latency.merge(results))
    else:
        results = latency.under_one_name(results)
        rows = latency.comparison_rows(results)
        lines = [f'{name}: {latency.head(result)}' for name, result in results.items()]
        if not rows:
            names = '; '.join(
                f'{file} has {sorted({record["name"] for record in result["records"]})}'
                for file, result in results.items()
            )
            raise SystemExit(f'no measured case is in the first file and in another one: {names}')
        text = '\n\n'.join([*lines, markdown_table(rows)])
    print(text)
    if args.markdown:
        write_text(args.markdown, text)
    if args.picture:
        latency.draw(results, args.picture)


if __name__ == '__main__':
    end(main, parse_args())
