"""A regression with a known answer: x' = a x + u by every method, against the exact states.

    python studies/discretization/run_known_answer.py --out RUNS.json

It measures on the CPU, in some minutes: part A, the error over the step length without training;
part B, the error after training on irregular samples. protocol.md says what is expected and how it
is tested; studies/discretization/report.py makes the tables.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from _command_line import add_debug, end, numbers, parse_first, parser_of, positive


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument('--seeds', type=numbers, default=[*range(12)], help="'0..11' or '0,3'")
    parser.add_argument(
        '--iterations', type=positive, help="of a training, instead of the protocol's"
    )
    parser.add_argument(
        '--out', type=Path, required=True, help='write every figure as JSON to this file'
    )
    add_debug(parser)
    return parser.parse_args()


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

from datetime import datetime, timezone
from itertools import product

import torch

from studies.discretization.known_answer import convergence, recovery
from vim_mm.ops import METHODS
from vim_mm.progress import progress
from vim_mm.version import commit

DIGITS = 6  # of a figure in the file


def rounded(value: Any) -> Any:
    """The same with ``DIGITS`` significant digits, inside of lists and dicts as well."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f'{value:.{DIGITS}g}') if isinstance(value, float) else value


def measure_convergence(seeds: list[int]) -> list[dict[str, Any]]:
    """Part A: a record for each input, rate and method, with lists over ``convergence.STEPS``."""
    records: dict[tuple[str, float, str], dict[str, Any]] = {}
    cells = [*product(convergence.INPUTS, convergence.STEPS)]
    for name, dt in progress(cells, 'step lengths'):
        for (method, a), figures in convergence.measure(name, dt, [*METHODS], seeds).items():
            record = records.setdefault(
                (name, a, method), {'input': name, 'a': a, 'method': method, 'dt': []}
            )
            for key, value in {'dt': dt, **figures}.items():
                record.setdefault(key, []).append(value)
    return [*records.values()]


def measure_recovery(seeds: list[int], iterations: int) -> list[dict[str, Any]]:
    """Part B: a record for each input, arm and seed."""
    cells = [*product(recovery.INPUTS, recovery.ARMS)]
    return [
        record
        for name, arm in progress(cells, 'trainings')
        for record in recovery.measure(name, arm, seeds, iterations)
    ]


def measure(seeds: list[int], iterations: int) -> dict[str, Any]:
    """Both parts, and what is noted with them."""
    return {
        'commit': commit(7),
        'torch': torch.__version__,
        'date': datetime.now(timezone.utc).strftime('%Y-%m-%d'),
        'iterations': iterations,
        'seeds': seeds,
        'convergence': rounded(measure_convergence(seeds)),
        'recovery': rounded(measure_recovery(seeds, iterations)),
    }


def write_results(results: dict[str, Any], path: Path) -> None:
    """As JSON with a line for each record."""
    lines = []
    for key, value in results.items():
        text = json.dumps(value)
        if value and isinstance(value, list) and isinstance(value[0], dict):
            text = '[\n' + ',\n'.join(f'  {json.dumps(each)}' for each in value) + '\n ]'
        lines.append(f' {json.dumps(key)}: {text}')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{\n' + ',\n'.join(lines) + '\n}\n')


def main(args: argparse.Namespace) -> None:
    write_results(measure(args.seeds, args.iterations or recovery.ITERATIONS), args.out)


if __name__ == '__main__':
    end(main, ARGUMENTS)
