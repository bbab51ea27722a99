"""Others' scans, where installed, for ``benchmarks/benchmark_scan.py`` to time beside ours."""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from torch import Tensor

from benchmarks.measure.timing import Scan

# Takes what make_inputs returns and the gradient of the output.
Peer = Callable[[dict[str, Tensor], Tensor], Scan]


def mamba_ssm_scan(inputs: dict[str, Tensor], grad_out: Tensor) -> Scan:
    """The CUDA scan of mamba_ssm, which knows ``zoh``, called without its autograd function.

    Its ``fwd`` returns the output before the gate, the states between its chunks, and the output;
    its ``bwd`` the gradients of u, delta, A, B, C, D, delta_bias and z. Source: csrc/selective_scan
    of state-spaces/mamba.

    Args:
        inputs: As :func:`~benchmarks.measure.timing.make_inputs` returns them, on CUDA, not fp64.
        grad_out: Gradient of the output.
    """
    import selective_scan_cuda

    x = {name: tensor.detach() for name, tensor in inputs.items()}
    tensors = tuple(x[name] for name in ('u', 'delta', 'A', 'B', 'C', 'D', 'z', 'delta_bias'))

    def forward() -> tuple:
        ungated, states, out = selective_scan_cuda.fwd(*tensors, True)
        return out, ungated, states

    def backward(result: tuple) -> list[Tensor]:
        _, ungated, states = result
        return selective_scan_cuda.bwd(*tensors, grad_out, states, ungated, None, True, False)

    return Scan(forward, backward)


# By distribution: the module that must be there, and how to run its scan.
_KNOWN = {'mamba_ssm': ('selective_scan_cuda', mamba_ssm_scan)}


def installed_peers() -> dict[str, Peer]:
    """Those that can be imported, by name."""
    return {name: scan for name, (module, scan) in _KNOWN.items() if find_spec(module) is not None}


def peer_version(name: str) -> str:
    """Of the distribution; one that was built by hand need not say."""
    try:
        return version(name)
    except PackageNotFoundError:
        return 'of unknown version'
