"""Vim in its three sizes: the short forms of :class:`~vim_mm.models.VisionMamba`."""

from typing import Any

from vim_mm.models.vision_mamba import VisionMamba


def vim_tiny(**kwargs: Any) -> VisionMamba:
    """``VisionMamba(arch='tiny', **kwargs)``: 192 channels, 24 layers."""
    return VisionMamba(arch='tiny', **kwargs)


def vim_small(**kwargs: Any) -> VisionMamba:
    """``VisionMamba(arch='small', **kwargs)``: 384 channels, 24 layers."""
    return VisionMamba(arch='small', **kwargs)


def vim_base(**kwargs: Any) -> VisionMamba:
    """``VisionMamba(arch='base', **kwargs)``: 768 channels, 24 layers."""
    return VisionMamba(arch='base', **kwargs)
