"""The two calls of XLA into the compiled scan, and the derivative that joins them."""

import ctypes
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vim_mm.ops import library


class Options(NamedTuple):
    """What of a scan is no array."""

    delta_softplus: bool
    method: int
    reverse: tuple[bool, ...]  # of each group


# Those of vim_mm.ops.reference.TENSORS as csrc/ops.cpp has them; from D on None if missing.
Operands = tuple[Array | None, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scan(options: Options, operands: Operands) -> tuple[Array, Array]:
    """out [B, G, H, L] in u's dtype and the last state [B, G, H, N], in one call of the CPU or GPU.

    Args:
        options: Compile-time constants.
        operands: All of them checked, G = ``len(options.reverse)``.
    """
    u, A = operands[0], operands[2]
    precision = jnp.float64 if u.dtype == jnp.float64 else jnp.float32
    state_dtype = jnp.result_type(precision, 1j) if jnp.iscomplexobj(A) else precision
    last_state = jax.ShapeDtypeStruct((*u.shape[:3], A.shape[-1]), state_dtype)
    return _call('forward', [_like(u), last_state], options, operands)


def _scan_forward(options: Options, operands: Operands) -> tuple[tuple[Array, Array], Operands]:
    return scan(options, operands), operands


def _scan_backward(
    options: Options, operands: Operands, cotangents: tuple[Array, Array]
) -> tuple[Operands]:
    # JAX's cotangent of a complex number is the conjugate of PyTorch's gradient.
    grad_out, grad_last_state = cotangents
    given = (grad_out, jnp.conj(grad_last_state), *operands)
    *differentiable, _ = operands
    like = [_like(_missing_as_empty(x)) for x in differentiable]
    results = _call('backward', like, options, given)
    pairs = zip(differentiable, results, strict=True)
    return ((*(None if x is None else jnp.conj(g) for x, g in pairs), None),)


scan.defvjp(_scan_forward, _scan_backward)


def _call(
    name: str, results: list[jax.ShapeDtypeStruct], options: Options, arrays: Operands
) -> tuple[Array, ...]:
    _register()
    # The handler goes through the dimensions that vmap adds, and repeats nothing.
    call = jax.ffi.ffi_call(f'vim_mm_scan_{name}', results, vmap_method='expand_dims')
    return tuple(
        call(
            *map(_missing_as_empty, arrays),
            delta_softplus=np.bool_(options.delta_softplus),
            method=np.int64(options.method),
            reverse=np.array(options.reverse, np.int64),
        )
    )


def _missing_as_empty(x: Array | None) -> Array:
    return jnp.zeros(0, jnp.float32) if x is None else x


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@functools.cache
def _register() -> None:
    """Make the handlers known to XLA, of the devices that ``vim_mm._C`` has kernels for."""
    from vim_mm.jax.build import (
        build,
    )  # not above: `python -m vim_mm.jax.build` imports this module

    handlers = ctypes.CDLL(str(build()))
    for device, platform in (('cpu', 'cpu'), ('cuda', 'CUDA')):
        if library.has_kernel(device):
            for name in ('vim_mm_scan_forward', 'vim_mm_scan_backward'):
                capsule = jax.ffi.pycapsule(getattr(handlers, f'{name}_{device}'))
                jax.ffi.register_ffi_target(name, capsule, platform=platform)
