"""What MMEngine's registry holds: the models of :mod:`vim_mm.models`, and ``init_cfg``.

Importing this registers them under the names that configs use.
"""

from vim_mm.registered.simple_fpn import SimpleFPN
from vim_mm.registered.vision_mamba import VisionMamba

__all__ = ['SimpleFPN', 'VisionMamba']
