"""Vim as a classifier of timm: importing this registers ``vim_*`` for ``timm.create_model``."""

from vim_mm.timm_models.classifier import VisionMambaClassifier
from vim_mm.timm_models.pyramid import VisionMambaPyramid
from vim_mm.timm_models.vim import checkpoint_filter_fn

__all__ = ['VisionMambaClassifier', 'VisionMambaPyramid', 'checkpoint_filter_fn']
