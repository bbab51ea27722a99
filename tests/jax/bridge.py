"""The scan of JAX called with tensors of PyTorch, so that the tests of the operator hold it too."""

import jax
import jax.numpy as jnp
import torch

from vim_mm.jax import selective_scan_fn


def to_jax(x):
    """The same numbers in the same dtype."""
    x = x.detach()
    if x.dtype in (torch.bfloat16, torch.float16):
        return jnp.asarray(x.float().numpy()).astype(str(x.dtype).removeprefix('torch.'))
    return jnp.asarray(x.numpy())


def to_torch(x):
    """Likewise."""
    dtype = getattr(torch, x.dtype.name)
    half = dtype in (torch.bfloat16, torch.float16)
    return torch.tensor(jax.device_get(x.astype(jnp.float32) if half else x)).to(dtype)


class _Bridge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, *tensors):
        results, ctx.pull_back = jax.vjp(jax.jit(function), *map(to_jax, tensors))
        return tuple(map(to_torch, results))

    @staticmethod
    def backward(ctx, *grads):
        # PyTorch's gradient of a complex number is the conjugate of JAX's cotangent.
        cotangents = ctx.pull_back(tuple(to_jax(g).conj() for g in grads))
        # What is no number has none: of a mask.
        has_none = jax.dtypes.float0
        return None, *(None if x.dtype == has_none else to_torch(x.conj()) for x in cotangents)


def scan(return_last_state=True, **arguments):
    """Like ``vim_mm.ops.selective_scan_fn``: compiled by XLA, derivatives by ``jax.vjp``."""
    tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    options = {name: x for name, x in arguments.items() if name not in tensors}

    def of_arrays(*arrays):
        named = dict(zip(tensors, arrays, strict=True))
        return selective_scan_fn(**named, return_last_state=True, **options)

    out, last_state = _Bridge.apply(of_arrays, *tensors.values())
    return (out, last_state) if return_last_state else out
