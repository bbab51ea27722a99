"""How files wrap their weights: DeiT and detectron2 in ``model``, MMCV in ``state_dict``."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# Where weights stand, in this order. Not in an average: what was published was measured, and what
# was fine-tuned started, from ``model``.
_WRAPPERS = ('state_dict', 'model', 'module')
_AVERAGES = ('model_ema', 'state_dict_ema', 'ema_state_dict', 'ema')
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
    while isinstance(inner, Mapping):  # a tensor may stand beside the weights, such as a score
        key = next((key for key in _WRAPPERS if isinstance(inner.get(key), Mapping)), None)
        if key is None:
            break
        left += [str(name) for name in inner if name not in (key, 'meta')]
        inner = inner[key]
    arrays = inner if isinstance(inner, Mapping) else {}
    weights = {
        name: _tensor(name, value)
        for name, value in arrays.items()
        if isinstance(name, str) and _is_array(value)
    }
    if not weights:
        raise ConversionError(_nothing(checkpoint))
    left += [str(name) for name in arrays if name not in weights]
    note = getattr(inner, '_metadata', None) or {}
    for prefix in _strip_prefixes(weights):
        note = {f'{name}.'.removeprefix(prefix).rstrip('.'): v for name, v in note.items() if name}
    outer = checkpoint if isinstance(checkpoint, Mapping) else {}
    meta = outer.get('meta')
    arguments = outer.get('args')  # a Namespace, or what is left of one that was read as data
    arguments = vars(arguments) if isinstance(arguments, Namespace) else arguments
    return Contents(
        weights,
        dict(note),
        dict(meta) if isinstance(meta, Mapping) else {},
        dict(arguments) if isinstance(arguments, Mapping) else {},
        left,
    )


def require(weights: Mapping[str, Tensor], ranks: Mapping[str, int]) -> None:
    """Insist on the weights whose shapes tell the sizes of a model.

    Args:
        weights (Mapping): By name.
        ranks (Mapping): How many dimensions each of them has.

    Raises:
        ConversionError: One is missing, or has another number of dimensions; it is named.
    """
    if lacking := [name for name in ranks if name not in weights]:
        raise ConversionError(f'it lacks {", ".join(lacking)}, whose shape tells the sizes')
    for name, rank in ranks.items():
        shape = tuple(weights[name].shape)
        if len(shape) != rank or 0 in shape:
            raise ConversionError(f'its {name} has the shape {shape}, where a Vim has {rank} sizes')


def _nothing(checkpoint: Any) -> str:
    """What a file without weights holds instead."""
    if not isinstance(checkpoint, Mapping):
        return f'there are no weights in it: it holds {type(checkpoint).__name__}'
    if average := next((name for name in _AVERAGES if name in checkpoint), None):
        return (
            f'there are no weights in it but their average {average!r}, which is not taken: the '
            "published figures are those of 'model'. To take it, save it under that name"
        )
    return f'there are no weights in it: it holds {[*checkpoint][:5]}'


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _tensor(name: str, value: Tensor | np.ndarray) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        return torch.from_numpy(np.array(value, value.dtype.newbyteorder('=')))
    except TypeError as error:
        raise ConversionError(f'{name} is of {value.dtype}, which torch has not') from error


def _strip_prefixes(weights: dict[str, Tensor]) -> list[str]:
    """Take prefixes that all names have off the names, and return them."""
    stripped = []
    while prefix := next((p for p in _PREFIXES if all(n.startswith(p) for n in weights)), None):
        for name in [*weights]:
            weights[name.removeprefix(prefix)] = weights.pop(name)
        stripped.append(prefix)
    return stripped
