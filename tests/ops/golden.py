"""Reads tests/golden and holds any implementation of the scan to it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from vim_mm.ops.discretization import METHODS

FOLDER = Path(__file__).parents[1] / 'golden'
SITUATIONS = ('bnl', 'bnl_reverse', 'const', 'grouped', 'complex', 'stiff')
CONTINUED = ('initial', 'initial_reverse')  # of causal methods
# Of every method in the table rather than globbed: what is missing is an error, not one test fewer.
CASES = {
    f'{name}_{situation}': (name, situation)
    for name, method in METHODS.items()
    for situation in (*SITUATIONS, *(CONTINUED if method.causal else ()))
}
# Largest error allowed, relative to the largest entry of the expected array.
TOLERANCES = [
    pytest.param(torch.float64, 1e-10, id='fp64'),
    pytest.param(torch.float32, 1e-5, id='fp32'),
]


def load(case):
    """The named vector: field -> array."""
    method, situation = CASES[case]
    with np.load(FOLDER / f'{method}.npz') as file:
        fields = (name.partition('.') for name in file)
        return {field: file[f'{of}.{field}'] for of, _, field in fields if of == situation}


def arguments(vector, dtype):
    """Keyword arguments of ``selective_scan_fn``: tensors of ``dtype``, or its complex partner."""
    tensors = {}
    for field, array in vector.items():
        if field.startswith('in_'):
            target = dtype.to_complex() if np.iscomplexobj(array) else dtype
            tensors[field[len('in_') :]] = torch.tensor(array, dtype=target, requires_grad=True)
    return tensors | {
        'discretization_method': str(vector['method']),
        'delta_softplus': bool(vector['delta_softplus']),
        'reverse': bool(vector['reverse']),
    }


def assert_reproduced(scan, case, dtype, tolerance):
    """``scan``, called like ``selective_scan_fn``, gives the vector's results and gradients."""
    vector = load(case)
    given = arguments(vector, dtype)
    out, last_state = scan(**given, return_last_state=True)
    loss = (out * torch.tensor(vector['weight'], dtype=dtype)).sum()
    if 'weight_last' in vector:
        loss = loss + (last_state * torch.tensor(vector['weight_last'], dtype=dtype)).sum()
    loss.backward()
    results = {'out': out, 'last_state': last_state}
    results |= {f'grad_{n}': t.grad for n, t in given.items() if isinstance(t, torch.Tensor)}

    assert {'out', 'last_state', *(f for f in vector if f.startswith('grad_'))} == results.keys()
    for field, result in results.items():
        expected = vector[field]
        assert result.shape == expected.shape, field
        assert result.dtype == (dtype.to_complex() if np.iscomplexobj(expected) else dtype), field
        error = np.abs(result.detach().numpy() - expected).max() / np.abs(expected).max()
        assert error <= tolerance, f'{field} is off by {error:.1e}'
