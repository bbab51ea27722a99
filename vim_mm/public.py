"""The names of ``import vim_mm``. Importing this registers everything with timm and MMEngine."""

from vim_mm import models, ops, timm_models
from vim_mm.acceleration import accelerate
from vim_mm.models import Mamba, VisionMamba, vim_base, vim_small, vim_tiny

__all__ = [
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
    from vim_mm.engine.mmengine_patches import activate

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
