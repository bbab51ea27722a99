"""Computes vim_mm/selftest/exact.json anew: ``python tools/dev/make_selftest.py`` (needs mpmath).

To be run when a method is added; a test compares the file with what this computes.
"""

import json
from argparse import ArgumentParser, Namespace

from _command_line import add_debug, end, parse_first


def parse_args() -> Namespace:
    parser = ArgumentParser(description='Compute vim_mm/selftest/exact.json anew.')
    add_debug(parser)
    return parser.parse_args()


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

import torch

from benchmarks.scan.exact import exact_scan
from vim_mm.ops import METHODS
from vim_mm.progress import progress
from vim_mm.selftest import QUANTITIES, VALUES, make_inputs, weights


def compute(method: str) -> dict[str, list[float]]:
    """Exact outputs and gradients of one method, flattened."""
    no_state = torch.zeros(1, 2, 2, dtype=torch.float64)
    results = exact_scan(make_inputs(), method, (weights(), no_state))
    return {name: results[name].flatten().tolist() for name in QUANTITIES}


def main(args: Namespace) -> None:
    values = {method: compute(method) for method in progress(METHODS, 'methods')}
    VALUES.write_text(json.dumps(values, indent=1) + '\n')


if __name__ == '__main__':
    end(main, ARGUMENTS)
