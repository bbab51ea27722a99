"""Computes vim_mm/selftest.json anew: ``python tools/dev/make_selftest.py`` (needs mpmath).

To be run when a method is added; a test compares the file with what this computes.
"""

import json

import torch

from vim_mm.analysis.exact import exact_scan
from vim_mm.ops import METHODS
from vim_mm.selftest import QUANTITIES, VALUES, make_inputs, weights


def compute(method: str) -> dict[str, list[float]]:
    """Exact outputs and gradients of one method, flattened."""
    no_state = torch.zeros(1, 2, 2, dtype=torch.float64)
    results = exact_scan(make_inputs(), method, (weights(), no_state))
    return {name: results[name].flatten().tolist() for name in QUANTITIES}


if __name__ == '__main__':
    VALUES.write_text(json.dumps({method: compute(method) for method in METHODS}, indent=1) + '\n')
