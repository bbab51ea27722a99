"""Detection heads that MMDetection lacks.

Importing this registers the names below with MMEngine and needs nothing else: MMDetection is
imported when a model is built from them.
"""

from mmengine.registry import MODELS
from torch import nn


@MODELS.register_module()
def SharedMaskCascadeRoIHead(**cfg) -> nn.Module:
    """Cascade R-CNN as detectron2 has it, see :mod:`vim_mm.detection.roi_head`.

    Args:
        cfg: Arguments of MMDetection's ``CascadeRoIHead``, without ``stage_loss_weights``.
    """
    from vim_mm.detection.roi_head import SharedMaskCascadeRoIHead

    return SharedMaskCascadeRoIHead(**cfg)
