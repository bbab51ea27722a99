"""Vision Mamba for MMDetection and MMSegmentation: importing this registers everything.

The models and operators need PyTorch, timm and einops. timm learns the classifiers ``vim_*``. Where
MMEngine is installed, its registries learn the backbone, the neck and what trains them; nothing
else in it changes before :func:`activate` is called.
"""

import sys
from importlib import import_module
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


def _is_for_a_command() -> bool:
    """Whether Python imports this package in order to find a command, ``python -m vim_mm.doctor``.

    Such a command answers ``--help``, or draws data, before anything needs PyTorch. Python has not
    replaced '-m' by the path of the command yet; what follows it are the command's arguments.
    """
    command = sys.orig_argv[-len(sys.argv)] if sys.argv[:1] == ['-m'] else ''
    return command.removeprefix('-m').startswith('vim_mm.')


if not _is_for_a_command():
    from vim_mm import public
    from vim_mm.public import *  # noqa: F403

    __all__ += public.__all__


def __getattr__(name: str) -> Any:
    """A public name that a command had not imported before, or why there is none."""
    public = import_module('vim_mm.public')
    if name in public.__dict__:
        return public.__dict__[name]
    reason = ': it needs MMEngine, which is not installed' if name in _OF_MMENGINE else ''
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}{reason}')
