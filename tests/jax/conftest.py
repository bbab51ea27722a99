"""Once JAX has computed, its threads make a fork unsafe, and other tests fork."""

import pytest


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Only ``pytest tests/jax`` runs these; in the whole suite tests/test_jax.py calls that."""
    asked = any('tests/jax' in str(arg) for arg in config.invocation_params.args)
    return None if asked else True
