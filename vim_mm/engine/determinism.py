"""Deterministic training: what MMCV cannot do in it, and where another algorithm does no harm."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

# Modules of mmcv.ops whose gradients are sums in any order on a GPU. PyTorch's switch does not know
# of them: they raise no error.
_IN_ANY_ORDER = {
    'CARAFE', 'DeformConv2d', 'ModulatedDeformConv2d', 'MultiScaleDeformableAttention', 'RoIAlign',
    'RoIAlignRotated', 'RoIPool',
}  # fmt: skip


def sums_in_any_order(model: nn.Module) -> list[str]:
    """Kinds of a model's modules whose gradients differ from run to run on a GPU."""
    kinds = {type(module) for module in model.modules()}
    bases = {base for kind in kinds for base in kind.__mro__ if base.__module__.startswith('mmcv.')}
    return sorted({base.__name__ for base in bases} & _IN_ANY_ORDER)


@contextlib.contextmanager
def any_algorithms() -> Iterator[None]:
    """Inside of it PyTorch takes algorithms that are not deterministic as well."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
