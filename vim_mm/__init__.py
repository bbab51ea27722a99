"""Vision Mamba for MMDetection and MMSegmentation: importing this registers everything.

The models and operators need PyTorch, timm and einops. timm learns the classifiers ``vim_*``. Where
MMEngine is installed, its registries learn the backbone, the neck and what trains them; nothing
else in it changes before :func:`activate` is called.
"""

import sys
from importlib import import_module
from types import FrameType
from typing import Any

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


# What imports a part of this package before it needs PyTorch: Python, to find the command in
# ``python -m vim_mm.doctor``, and the front door of the tools.
_FRONT_DOORS = ('runpy', '_command_line')


def _imported_by_a_front_door() -> bool:
    frame: FrameType | None = sys._getframe(2)  # what runs the import of this file
    while frame is not None and frame.f_code.co_filename.startswith('<frozen importlib'):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get('__name__') in _FRONT_DOORS


if not _imported_by_a_front_door():
    from vim_mm import public
    from vim_mm.public import *  # noqa: F403

    __all__ += public.__all__


def __getattr__(name: str) -> Any:
    """A public name that a front door had not imported, or why there is none."""
    public = import_module('vim_mm.public')
    if name in public.__dict__:
        return public.__dict__[name]
    reason = ': it needs MMEngine, which is not installed' if name in _OF_MMENGINE else ''
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}{reason}')
