"""How files wrap their weights: DeiT's and detectron2's ``model``, MMCV's ``state_dict``, or bare."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# Where weights stand, in this order. Not ``model_ema``: what was published was measured, and what
# was fine-tuned started, from ``model``.
_WRAPPERS = ('state_dict', 'model', 'module')
# What wrappers of a whole model put before each name.
_PREFIXES = ('module.', '_orig_mod.', 'model.')


class ConversionError(ValueError):
    """A checkpoint cannot be converted: of another architecture, or without weights."""


class Contents(NamedTuple):
    """What a checkpoint holds.

    Attributes:
        weights (dict[str, Tensor]): By name.
        note (dict): What torch notes of modules by their name, see ``note_layout``.
        meta (dict): Of MMCV and MMEngine.
        arguments (dict): Of the training, where a file of DeiT's kind has them.
        left (list[str]): Names of everything else.
    """

    weights: dict[str, Tensor]
    note: dict
    meta: dict
    arguments: dict
    left: list[str]


def unwrap(checkpoint: Any) -> Contents:
    """Find the weights in what a file holds.

    Raises:
        ConversionError: There are none.
    """
    inner, left = checkpoint, []
    while isinstance(inner, Mapping) and not any(_is_array(value) for value in inner.values()):
        key = next((key for key in _WRAPPERS if isinstance(inner.get(key), Mapping)), None)
        if key is None:
            break
        left += [str(name) for name in inner if name not in (key, 'meta')]
        inner = inner[key]
    arrays = inner if isinstance(inner, Mapping) else {}
    weights = {
        name: _tensor(value)
        for name, value in arrays.items()
        if isinstance(name, str) and _is_array(value)
    }
    if not weights:
        held = [*checkpoint][:5] if isinstance(checkpoint, Mapping) else type(checkpoint).__name__
        raise ConversionError(f'there are no weights in it: it holds {held}')
    left += [str(name) for name in arrays if name not in weights]
    note = getattr(inner, '_metadata', None) or {}
    for prefix in _strip_prefixes(weights):
        note = {f'{name}.'.removeprefix(prefix).rstrip('.'): v for name, v in note.items() if name}
    outer = checkpoint if isinstance(checkpoint, Mapping) else {}
    meta = outer.get('meta')
    arguments = outer.get('args')
    return Contents(
        weights,
        dict(note),
        dict(meta) if isinstance(meta, Mapping) else {},
        dict(getattr(arguments, '__dict__', {})),
        left,
    )


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _tensor(value: Tensor | np.ndarray) -> Tensor:
    return value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))


def _strip_prefixes(weights: dict[str, Tensor]) -> list[str]:
    """Take prefixes that all names have off the names, and return them."""
    stripped = []
    while prefix := next((p for p in _PREFIXES if all(n.startswith(p) for n in weights)), None):
        for name in [*weights]:
            weights[name.removeprefix(prefix)] = weights.pop(name)
        stripped.append(prefix)
    return stripped
