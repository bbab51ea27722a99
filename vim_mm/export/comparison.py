"""How far what was exported is from PyTorch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def differences(
    module: nn.Module,
    exported: Callable[[Tensor], Tensor | Sequence[Tensor]],
    images: Sequence[Tensor],
) -> list[float]:
    """For each batch the greatest difference of any output from PyTorch's, relative to its maximum.

    NaN where an output has one.

    Args:
        module: What was exported.
        exported: The file or package as a function of images: an ``OnnxModule``, or what
            ``load_package`` returns.
        images: Batches (B, C, H, W), float32, on the module's device.
    """
    worst = []
    # TF32 of cuDNN's convolutions, PyTorch's default, is a difference as large as 1e-3.
    with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
        for batch in images:
            pairs = zip(_listed(exported(batch)), _listed(module(batch)), strict=True)
            errors = [((a - b).abs().max() / (b.abs().max() or 1.0)).item() for a, b in pairs]
            # PyTorch takes a NaN for the largest.
            worst.append(torch.tensor(errors, dtype=torch.float64).max().item())
    return worst


def _listed(outputs: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs
