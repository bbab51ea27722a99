"""Vision Mamba for MMDetection and MMSegmentation: importing this registers everything.

The operators need PyTorch alone. Where MMEngine is installed, its registries learn the backbone, the
necks, the data sets and the tools of training, and checkpoints are from then on read by the loader in
:mod:`vim_mm.engine.checkpoint`, which never runs code from a file.
"""

from importlib.util import find_spec

from vim_mm import ops

__version__ = '0.1.0'
__all__ = ['ops']

if find_spec('mmengine') is not None:
    from vim_mm import datasets, engine, models

    __all__ += ['datasets', 'engine', 'models']
