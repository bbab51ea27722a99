"""Around a training step: the optimizer wrapper behind ``--amp``."""

from contextlib import contextmanager

import torch
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from mmengine.runner.amp import autocast
from torch import nn

from vim_mm.acceleration import hand_over_float32, parts_of


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
        self._hooks = [
            part.register_forward_hook(_hand_over_float32)
            for part in parts_of(model.module if is_model_wrapper(model) else model)
        ]

    def keep_bfloat16(self) -> None:
        """Let the parts hand over what they compute, for a model that takes bfloat16 everywhere."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def optim_context(self, model: nn.Module):
        """As in OptimWrapper, under autocast."""
        with super().optim_context(model), autocast(dtype=torch.bfloat16):
            yield


def _hand_over_float32(module: nn.Module, inputs: tuple, outputs):
    """Forward hook, see :func:`vim_mm.acceleration.hand_over_float32`."""
    return hand_over_float32(outputs)
