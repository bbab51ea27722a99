"""How far what was exported is from PyTorch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from vim_mm.accuracy import largest, relative_error


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
            errors = {i: relative_error(*pair) for i, pair in enumerate(pairs)}
            worst.append(largest(errors)[1])
    return worst


def _listed(outputs: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs
