"""The compiled selective scan as a function of JAX: ``pip install '.[jax]'``.

docs/other_libraries.md describes it.
"""

try:
    import jax as _  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != 'jax':  # it is there, and lacks something itself
        raise
    raise ModuleNotFoundError(
        "vim_mm.jax needs JAX, which is not installed: pip install 'jax>=0.6'", name='jax'
    ) from None

from vim_mm.jax.selective_scan import selective_scan_fn

__all__ = ['selective_scan_fn']
