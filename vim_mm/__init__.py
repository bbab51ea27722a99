"""Vision Mamba for MMDetection and MMSegmentation: importing this registers everything.

The operators need PyTorch alone. Where MMEngine is installed, its registries learn the backbone and
the neck, its configs the bases ``vim_mm::...``, and every checkpoint is from then on read by
:mod:`vim_mm.engine.checkpoint`, which never runs code from a file.
"""

from importlib.util import find_spec

from vim_mm import ops

__version__ = '0.1.0'
__all__ = ['ops']

if find_spec('mmengine') is not None:
    from vim_mm import datasets, engine, models, segmentation
    from vim_mm.config import config_names, config_path

    __all__ += ['config_names', 'config_path', 'datasets', 'engine', 'models', 'segmentation']
