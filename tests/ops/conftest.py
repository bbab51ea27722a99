"""Fixtures of the tests of vim_mm.ops."""

import pytest
import torch


@pytest.fixture(autouse=True)
def uninitialized_memory_is_nan():
    """In deterministic mode PyTorch fills new memory with NaN, so reading before writing shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def nondeterministic(uninitialized_memory_is_nan):
    """Not so where filling memory is in the way."""
    torch.use_deterministic_algorithms(False)
