"""Vision Mamba for MMDetection and MMSegmentation: importing this registers everything.

The models and operators need PyTorch, timm and einops. timm learns the classifiers ``vim_*``. Where
MMEngine is installed, its registries learn the backbone, the neck and what trains them; nothing
else in it changes before :func:`activate` is called.
"""

import sys
from typing import NoReturn

from vim_mm.version import __version__

__all__ = ['__version__']
_OF_MMENGINE = (
    'activate',
    'config_names',
    'config_path',
    'datasets',
    'detection',
    'engine',
    'registered',
    'segmentation',
)

# `python -m vim_mm.datasets.shapes` imports this package first, and draws without PyTorch.
_DRAWS_DATA = sys.argv[:1] == ['-m'] and any('vim_mm.datasets.' in a for a in sys.orig_argv)

if not _DRAWS_DATA:
    from vim_mm import models, ops, timm_models
    from vim_mm.acceleration import accelerate
    from vim_mm.models import Mamba, VisionMamba, vim_base, vim_small, vim_tiny

    __all__ += [
        'Mamba',
        'VisionMamba',
        'accelerate',
        'models',
        'ops',
        'timm_models',
        'vim_base',
        'vim_small',
        'vim_tiny',
    ]

    try:
        import mmengine as _  # noqa: F401
    except ModuleNotFoundError as _error:
        if _error.name != 'mmengine':  # it is there, and lacks something itself
            raise
    else:
        from vim_mm import datasets, detection, engine, registered, segmentation
        from vim_mm.config import config_names, config_path
        from vim_mm.engine.activation import activate

        __all__ += [
            'activate',
            'config_names',
            'config_path',
            'datasets',
            'detection',
            'engine',
            'registered',
            'segmentation',
        ]


def __getattr__(name: str) -> NoReturn:
    """Say why a name is missing where MMEngine is."""
    reason = ': it needs MMEngine, which is not installed' if name in _OF_MMENGINE else ''
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}{reason}')
