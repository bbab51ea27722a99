"""The ways to compute a scan that ``tools/analysis`` hold side by side, and the call of each."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vim_mm.ops import discretize, library, selective_scan_fn
from vim_mm.ops.discretization import method_id


@dataclass(frozen=True)
class Path:
    """One implementation on one device.

    Attributes:
        name (str): What tables call it.
        device (str): 'cpu' or 'cuda'.
        compiled (bool): The kernel of that device, else the Python reference.
    """

    name: str
    device: str
    compiled: bool

    def missing(self) -> str | None:
        """Why it cannot run here, or None."""
        if self.device == 'cuda' and not torch.cuda.is_available():
            return 'there is no CUDA device'
        if self.compiled and not library.has_kernel(self.device):
            return library.MISSING or f'vim_mm._C has no kernel for {self.device}'
        return None

    def dtypes(self) -> tuple[str, ...]:
        """Words of the dtypes that it takes: the CUDA kernel has no float64."""
        wide = () if self.compiled and self.device == 'cuda' else ('fp64',)
        return (*wide, 'fp32', 'fp16', 'bf16')

    def scan(self, inputs: dict[str, Tensor], method: str, **options) -> Tensor:
        """``selective_scan_fn(**inputs, **options)`` on this path, which never gives way.

        Raises:
            RuntimeError: The path is missing.
        """
        if self.compiled and self.device == 'cpu':
            if missing := self.missing():
                raise RuntimeError(f'no {self.name}: {missing}')
            chosen = {'backend': 'native'}
        else:
            chosen = {'use_cuda_kernel': self.compiled}
        return selective_scan_fn(**inputs, discretization_method=method, **chosen, **options)

    def coefficients(self, delta: Tensor, A: Tensor, method: str) -> tuple[Tensor, Tensor]:
        """A_bar and beta of ``delta`` and ``A``, which broadcast, by this path."""
        if not self.compiled:
            return discretize(delta, A, method)
        delta, A = (x.contiguous() for x in torch.broadcast_tensors(delta, A))
        A_bar, beta, *_ = torch.ops.vim_mm.discretize(delta, A, method_id(method))
        return A_bar, beta


CUDA_KERNEL = Path('CUDA kernel', 'cuda', compiled=True)
CPU_KERNEL = Path('CPU kernel', 'cpu', compiled=True)


def python_on(device: str) -> Path:
    """The Python reference on a device."""
    return Path('Python', device, compiled=False)
