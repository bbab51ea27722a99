"""Others' scans, where installed, for ``benchmark_scan`` and ``benchmark_drop_in`` to time."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure.timing import Scan

# Takes what make_inputs returns and the gradient of the output.
Peer = Callable[[dict[str, Tensor], Tensor], Scan]

# The module with the scan of each, and its distribution where that has another name.
_MODULES = {'mamba_ssm': 'selective_scan_cuda', 'VMamba': 'selective_scan_cuda_oflex'}
_DISTRIBUTIONS = {'VMamba': 'selective_scan'}


def raw_scan(extension: Any, inputs: dict[str, Tensor], grad_out: Tensor) -> Scan:
    """mamba_ssm's CUDA scan, or what stands in its place, called without an autograd function.

    ``fwd`` returns the output before the gate, the states between its chunks, and the output;
    ``bwd`` the gradients of u, delta, A, B, C, D, delta_bias and z. Source: csrc/selective_scan
    of state-spaces/mamba.

    Args:
        extension: Has ``fwd`` and ``bwd``.
        inputs: As :func:`~benchmarks.measure.timing.make_inputs` returns them; for mamba_ssm's own
            on CUDA, not fp64.
        grad_out: Gradient of the output.
    """
    tensors = tuple(x.detach() for x in inputs.values())

    def forward() -> tuple:
        ungated, states, out = extension.fwd(*tensors, True)
        return out, ungated, states

    def backward(result: tuple) -> list[Tensor]:
        _, ungated, states = result
        return extension.bwd(*tensors, grad_out, states, ungated, None, True, False)

    return Scan(forward, backward)


def raw_oflex(extension: Any, inputs: dict[str, Tensor], grad_out: Tensor) -> Scan:
    """VMamba's CUDA scan, or what stands in its place: no gate, an output in float32.

    ``fwd`` returns the output and states, ``bwd`` the gradients of u, delta, A, B, C, D and
    delta_bias. Source: kernels/selective_scan of MzeroMiko/VMamba. Arguments as of
    :func:`raw_scan`; ``z`` is left out.
    """
    tensors = tuple(x.detach() for name, x in inputs.items() if name != 'z')
    grad_out = grad_out.float()
    softplus, rows, in_float = True, 1, True

    def forward() -> tuple:
        return tuple(extension.fwd(*tensors, softplus, rows, in_float))

    def backward(result: tuple) -> list[Tensor]:
        return extension.bwd(*tensors, grad_out, result[1], softplus, rows)

    return Scan(forward, backward)


class RawScanFunction(torch.autograd.Function):
    """mamba_ssm's ``selective_scan_fn`` over an extension of its, written anew: softplus, gate."""

    @staticmethod
    def forward(ctx, extension, u, delta, A, B, C, D, z, delta_bias):
        tensors = (u, delta, A, B, C, D, z, delta_bias)
        ungated, states, out = extension.fwd(*tensors, True)
        ctx.extension = extension
        ctx.save_for_backward(*tensors, states, ungated)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        *tensors, states, ungated = ctx.saved_tensors
        *gradients, of_bias, of_gate = ctx.extension.bwd(
            *tensors, grad_out, states, ungated, None, True, False
        )
        return None, *gradients, of_gate, of_bias


def installed_extensions() -> dict[str, Any]:
    """The modules with ``fwd`` and ``bwd`` that can be imported, by name."""
    return {
        name: import_module(module)
        for name, module in _MODULES.items()
        if find_spec(module) is not None
    }


def installed_peers() -> dict[str, Peer]:
    """Their gated scans, which know ``zoh``, by name."""
    extensions = installed_extensions()
    return {
        name: partial(raw_scan, extensions[name]) for name in ('mamba_ssm',) if name in extensions
    }


def peer_version(name: str) -> str:
    """Of the distribution; one that was built by hand need not say."""
    try:
        return version(_DISTRIBUTIONS.get(name, name))
    except PackageNotFoundError:
        return 'of unknown version'
