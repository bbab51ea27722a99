"""Once JAX has computed, its threads make a fork unsafe, and other tests fork."""

import pytest


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Only ``pytest tests/jax`` runs these; in the whole suite tests/test_jax.py calls that."""
    asked = any('tests/jax' in str(arg) for arg in config.invocation_params.args)
    return None if asked else True


@pytest.fixture(autouse=True, scope='session')
def compute_on_the_cpu():
    """Also where JAX finds a GPU, whose scan has no float64; tests/jax/test_cuda.py asks for it."""
    try:
        import jax
    except ImportError:
        return
    jax.config.update('jax_default_device', jax.devices('cpu')[0])


@pytest.fixture
def float64_allowed():
    import jax

    before = jax.config.jax_enable_x64
    jax.config.update('jax_enable_x64', True)
    yield
    jax.config.update('jax_enable_x64', before)
