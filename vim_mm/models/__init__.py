"""Models of the plugin; importing this registers the backbone and the neck."""

from vim_mm.models.mamba import Mamba
from vim_mm.models.paths import LayerPath, path_of_layers
from vim_mm.models.simple_fpn import SimpleFPN
from vim_mm.models.vision_mamba import VisionMamba

__all__ = ['LayerPath', 'Mamba', 'SimpleFPN', 'VisionMamba', 'path_of_layers']
