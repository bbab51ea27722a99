"""Heads, a segmentor, a preprocessor and transforms that cost less than MMSegmentation's.

Importing this registers the names below with MMEngine and needs nothing else: MMSegmentation is
imported when a model is built from them.
"""

from collections.abc import Callable

from mmengine.registry import MODELS, TRANSFORMS
from torch import nn


@MODELS.register_module()
def FastHead(of: str, **cfg) -> nn.Module:
    """Any decode head of MMSegmentation with the fast loss, see :mod:`vim_mm.segmentation.heads`.

    Args:
        of (str): Type of the head, such as 'SegformerHead'.
        cfg: Its arguments.

    Raises:
        TypeError: The type is no subclass of ``BaseDecodeHead``.
        ValueError: Its losses do not fit its output channels, see
            :func:`vim_mm.segmentation.guards.check_losses`.
    """
    from vim_mm.segmentation.guards import check_losses
    from vim_mm.segmentation.heads import fast_head_class

    head = fast_head_class(of)(**cfg)
    check_losses(head)
    return head


@MODELS.register_module()
def FastUPerHead(**cfg) -> nn.Module:
    """MMSegmentation's ``UPerHead`` with the fast loss; takes its arguments."""
    return FastHead('UPerHead', **cfg)


@MODELS.register_module()
def FastFCNHead(**cfg) -> nn.Module:
    """MMSegmentation's ``FCNHead`` with the fast loss; takes its arguments."""
    return FastHead('FCNHead', **cfg)


@MODELS.register_module()
def FastEncoderDecoder(**cfg) -> nn.Module:
    """MMSegmentation's ``EncoderDecoder`` with predictions in little memory.

    See :class:`vim_mm.segmentation.segmentor.FastEncoderDecoder` for what it does not store.
    """
    from vim_mm.segmentation.segmentor import FastEncoderDecoder

    return FastEncoderDecoder(**cfg)


@MODELS.register_module()
def FastSegDataPreProcessor(**cfg) -> nn.Module:
    """MMSegmentation's ``SegDataPreProcessor`` that does not wait for the GPU.

    See :class:`vim_mm.segmentation.preprocessor.FastSegDataPreProcessor`; takes its arguments.
    """
    from vim_mm.segmentation.preprocessor import FastSegDataPreProcessor

    return FastSegDataPreProcessor(**cfg)


@TRANSFORMS.register_module()
def FastRandomCrop(**cfg) -> Callable[[dict], dict | None]:
    """MMSegmentation's ``RandomCrop`` in a fifth of the time; takes its arguments.

    See :class:`vim_mm.segmentation.transforms.FastRandomCrop`.
    """
    from vim_mm.segmentation.transforms import FastRandomCrop

    return FastRandomCrop(**cfg)


@TRANSFORMS.register_module()
def FastPackSegInputs(**cfg) -> Callable[[dict], dict | None]:
    """MMSegmentation's ``PackSegInputs`` with labels in 8 bits, for ``FastSegDataPreProcessor``.

    See :class:`vim_mm.segmentation.transforms.FastPackSegInputs`; takes its arguments.
    """
    from vim_mm.segmentation.transforms import FastPackSegInputs

    return FastPackSegInputs(**cfg)
