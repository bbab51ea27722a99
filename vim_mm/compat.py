"""What differs between the releases of PyTorch and of the OpenMMLab libraries that we run on.

The only place that knows of such differences. It asks for what it needs, never for a version:
a release that has the public function gets the public function.
"""

import copy
import inspect
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules import module as _all_modules

# The distributions that hold an OpenMMLab library: the maintained one, whose versions are pinned in
# requirements/, and the original. Both bring the same module, so only one of them can be installed.
DISTRIBUTIONS = {
    'mmengine': ('onedl-mmengine', 'mmengine', 'mmengine-lite'),
    'mmcv': ('onedl-mmcv', 'mmcv', 'mmcv-lite'),
    'mmseg': ('onedl-mmsegmentation', 'mmsegmentation'),
    'mmdet': ('onedl-mmdetection', 'mmdet'),
    'mmpretrain': ('onedl-mmpretrain', 'mmpretrain'),
}

# Functions register hooks on all modules, and none tells of them. These are the dicts that
# nn.Module.__call__ looks at; newer releases have a private function over the same four.
_HOOKS_ON_ALL = tuple(
    getattr(_all_modules, f'_global_{kind}_hooks')
    for kind in ('forward', 'forward_pre', 'backward', 'backward_pre')
)


def has_hooks_on_all_modules() -> bool:
    """Whether ``torch.nn.modules.module.register_module_*_hook`` has a hook that is called."""
    forward, forward_pre, backward, backward_pre = _HOOKS_ON_ALL
    return bool(forward or forward_pre or backward or backward_pre)


def without_channel_swap(preprocessor: nn.Module) -> tuple[nn.Module, bool]:
    """A copy of a data preprocessor that keeps the order of channels, and whether it was to swap.

    The original MMSegmentation has another name for it than MMEngine.
    """
    names = ('_channel_conversion', 'channel_conversion')
    name = next(name for name in names if hasattr(preprocessor, name))
    other = copy.copy(preprocessor)
    setattr(other, name, False)
    return other, getattr(preprocessor, name)


def before_load_state_dict(module: nn.Module, hook: Callable) -> None:
    """Call ``hook(module, state_dict, prefix, ...)`` before the module loads a state dict.

    The public function came with torch 2.5.
    """
    if hasattr(module, 'register_load_state_dict_pre_hook'):
        module.register_load_state_dict_pre_hook(hook)
    else:
        module._register_load_state_dict_pre_hook(hook, with_module=True)


def after_state_dict(module: nn.Module, hook: Callable) -> None:
    """Call ``hook(module, state_dict, prefix, local_metadata)`` on the state dict it has made.

    The public function came with torch 2.5.
    """
    if hasattr(module, 'register_state_dict_post_hook'):
        module.register_state_dict_post_hook(hook)
    else:
        module._register_state_dict_hook(hook)


def why_no_onnx_export() -> str | None:
    """Why torch's exporter to ONNX cannot be told how to translate an operator, None where it can.

    It can since torch 2.6.
    """
    if 'custom_translation_table' in inspect.signature(torch.onnx.export).parameters:
        return None
    return (
        f'torch {torch.__version__} has no torch.onnx.export(custom_translation_table=...), '
        'which an export needs: torch 2.6 and later have it, 2.11 is tested'
    )
