"""Around a training step: the optimizer wrapper behind ``--amp``."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from mmengine.runner.amp import autocast
from mmengine.utils import apply_to
from torch import nn


@OPTIM_WRAPPERS.register_module()
class BFloat16OptimWrapper(OptimWrapper):
    """Mixed precision by bfloat16 autocast, on the CPU and on CUDA alike.

    bfloat16 has float32's range, so that there is no loss to scale. MMEngine's AmpOptimWrapper
    always makes a loss scaler, and is for accelerators only.

    The parts of a model (backbone, neck, heads) compute in bfloat16 and hand over float32: what
    MMDetection does between them, NMS and RoIAlign, knows no bfloat16.
    """

    def initialize_count_status(self, model: nn.Module, *args) -> None:
        """As in OptimWrapper; the first call by the runner that tells the model."""
        super().initialize_count_status(model, *args)
        for part in _parts(model.module if is_model_wrapper(model) else model):
            part.register_forward_hook(_hand_over_float32)

    @contextmanager
    def optim_context(self, model: nn.Module):
        """As in OptimWrapper, under autocast."""
        with super().optim_context(model), autocast(dtype=torch.bfloat16):
            yield


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """What the losses and predictions of a model are computed by, one call after another."""
    yield from model.children()
    # MMDetection never calls a RoI head, but what it is made of; a cascade holds that in lists.
    for part in getattr(model, 'roi_head', nn.Module()).children():
        yield from part if isinstance(part, nn.ModuleList) else (part,)


def _hand_over_float32(module: nn.Module, inputs: tuple, outputs):
    """Forward hook: the outputs, in any nesting, with float32 tensors in place of bfloat16 ones."""
    return apply_to(
        outputs,
        lambda x: isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16,
        torch.Tensor.float,
    )
