"""Models in plain PyTorch, timm and einops: the backbone, its mixer and the detector's neck."""

from vim_mm.models.fused import LayerPath, path_of_layers
from vim_mm.models.mamba import Mamba, MambaState
from vim_mm.models.simple_fpn import SimpleFPN
from vim_mm.models.vim import vim_base, vim_small, vim_tiny
from vim_mm.models.vision_mamba import VisionMamba

__all__ = [
    'LayerPath',
    'Mamba',
    'MambaState',
    'SimpleFPN',
    'VisionMamba',
    'path_of_layers',
    'vim_base',
    'vim_small',
    'vim_tiny',
]
