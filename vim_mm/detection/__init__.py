"""Detection heads that MMDetection lacks, and its two-stage detectors with faster losses.

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


@MODELS.register_module()
def FastDetector(of: str, **cfg) -> nn.Module:
    """Any two-stage detector of MMDetection, trained faster; see :mod:`vim_mm.detection.detector`.

    Args:
        of (str): Type of the detector, such as 'MaskRCNN'.
        cfg: Its arguments.

    Raises:
        TypeError: The type is no subclass of ``TwoStageDetector``.
    """
    from vim_mm.detection.detector import fast_detector_class

    return fast_detector_class(of)(**cfg)


@MODELS.register_module()
def FastDetDataPreprocessor(**cfg) -> nn.Module:
    """MMDetection's ``DetDataPreprocessor`` that does not wait for the GPU.

    See :class:`vim_mm.detection.images.FastDetDataPreprocessor`; takes its arguments.
    """
    from vim_mm.detection.images import FastDetDataPreprocessor

    return FastDetDataPreprocessor(**cfg)
