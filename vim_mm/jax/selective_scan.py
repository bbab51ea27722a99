"""selective_scan_fn for JAX: checks its arguments as the PyTorch operator does, then calls it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from vim_mm.errors import UserTypeError
from vim_mm.jax.calls import Options, scan
from vim_mm.ops.discretization import method_id
from vim_mm.ops.reference import TENSORS, ScanInputs
from vim_mm.ops.selective_scan import check_bool, check_shapes, check_state_matrices


def selective_scan_fn(
    u: Array,
    delta: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None = None,
    z: Array | None = None,
    delta_bias: Array | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    discretization_method: str = 'zoh',
    *,
    reverse: bool = False,
    initial_state: Array | None = None,
    reset: Array | None = None,
) -> Array | tuple[Array, Array]:
    """Selective scan: x_t = A_bar_t x_{t-1} + beta_t B_t u_t, out_t = (C_t x_t + D u_t) silu(z_t).

    :func:`vim_mm.ops.selective_scan_fn` for arrays of JAX, computed by the same compiled kernels.
    Works under ``jax.jit``, ``jax.vmap`` and ``jax.grad``, in any order; of every argument, and
    through both results. There is no forward mode (``jax.jvp``) and no second derivative.

    Shapes, dtypes and meanings of the arguments and of what is returned are those of that function;
    B and C are not interleaved. Options are Python values: under ``jax.jit`` they are constants,
    not traced arrays.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: An argument has a wrong shape or value, or the method is unknown.
        RuntimeError: The compiled scan is missing, or its handlers cannot be built.
    """
    named = dict(
        u=u, delta=delta, A=A, B=B, C=C, D=D, z=z, delta_bias=delta_bias,
        initial_state=initial_state, reset=reset,
    )  # fmt: skip
    arrays = {name: None if x is None else _as_array(name, x) for name, x in named.items()}
    method = method_id(discretization_method)
    groups = _check(arrays, delta_softplus, method, [reverse])
    check_bool('delta_softplus', delta_softplus)
    check_bool('return_last_state', return_last_state)
    check_bool('reverse', reverse)
    options = Options(delta_softplus, method, (reverse,) * groups)
    out, last_state = scan(options, _split(arrays, groups))
    batch, channels, _ = arrays['u'].shape
    out, last_state = (x.reshape(batch, channels, x.shape[-1]) for x in (out, last_state))
    return (out, last_state) if return_last_state else out


def _as_array(name: str, x: Array) -> Array:
    if not isinstance(x, jax.Array | np.ndarray):
        raise UserTypeError(f'{name}: expected an array, got {type(x).__name__}')
    return jnp.asarray(x)


def _check(arrays: dict[str, Array | None], *options: Any) -> int:
    """Shapes and dtypes, by the checks of the PyTorch operator; the number of groups G."""

    def tensor(name: str, x: Array | None) -> torch.Tensor | None:
        """One without memory, of the same shape and dtype."""
        if x is None:
            return None
        dtype = getattr(torch, x.dtype.name, None)
        if not isinstance(dtype, torch.dtype):
            raise UserTypeError(f'{name}: expected a floating point dtype, got {x.dtype}')
        return torch.empty(x.shape, dtype=dtype, device='meta')

    inputs = ScanInputs(*(tensor(name, arrays[name]) for name in TENSORS), *options)
    check_shapes(inputs, 'D')
    return check_state_matrices(inputs)


def _split(arrays: dict[str, Array | None], groups: int) -> tuple[Array | None, ...]:
    """The arrays with their channels (D) as (G, D / G), and B and C of every group."""

    def split(name: str, x: Array) -> Array:
        if name in 'BC' and x.ndim > 2:
            x = x if x.ndim == 4 else x[:, None]
            return jnp.broadcast_to(x, (x.shape[0], groups, *x.shape[2:]))
        if name == 'reset':
            return x
        axis = 1 if name in ('u', 'delta', 'z', 'initial_state') else 0
        sizes = (groups, x.shape[axis] // groups)
        return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])

    return tuple(None if x is None else split(name, x) for name, x in arrays.items())
