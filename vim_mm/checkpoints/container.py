"""How files wrap their weights: DeiT and detectron2 in ``model``, MMCV in ``state_dict``.

And how modules do: a module within another one, such as ``torch.compile`` makes, has the name of
its attribute in the names of all its weights.
"""

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vim_mm.errors import UserError

# Where weights stand, in this order. Not in an average: what was published was measured, and what
# was fine-tuned started, from ``model``.
_WRAPPERS = ('state_dict', 'model', 'module')
_AVERAGES = ('model_ema', 'state_dict_ema', 'ema_state_dict', 'ema')
# The parts of names that wrappers of a module make: data parallelism, DeepSpeed and averages;
# torch.compile; FSDP; checkpointed activations; and Lightning's modules, which call theirs so.
_OF_WRAPPERS = frozenset(
    ('module', '_orig_mod', '_fsdp_wrapped_module', '_checkpoint_wrapped_module', 'model')
)


class ConversionError(UserError, ValueError):
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
    named = OrderedDict(
        (name, _tensor(name, value))
        for name, value in arrays.items()
        if isinstance(name, str) and isinstance(value, Tensor | np.ndarray)
    )
    if not named:
        raise ConversionError(_nothing(checkpoint))
    left += [str(name) for name in arrays if name not in named]
    named._metadata = getattr(inner, '_metadata', None) or {}
    weights = without_wrappers(named)
    outer = checkpoint if isinstance(checkpoint, Mapping) else {}
    meta = outer.get('meta')
    arguments = outer.get('args')  # a Namespace, or what is left of one that was read as data
    arguments = vars(arguments) if isinstance(arguments, Namespace) else arguments
    return Contents(
        dict(weights),
        dict(weights._metadata),
        dict(meta) if isinstance(meta, Mapping) else {},
        dict(arguments) if isinstance(arguments, Mapping) else {},
        left,
    )


def bare_name(name: str) -> str:
    """The name of a weight or a module without the parts that wrappers put into it."""
    return '.'.join(part for part in name.split('.') if part not in _OF_WRAPPERS)


class _Own:
    """Names of a module: which of them another name is, once it is without wrappers."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = {*names}
        self.by_bare: dict[str, list[str]] = {}
        for name in self.names:
            self.by_bare.setdefault(bare_name(name), []).append(name)

    def of(self, name: str) -> str:
        bare = bare_name(name)
        found = self.by_bare.get(bare, [bare])
        return name if name in self.names or len(found) > 1 else found[0]


def without_wrappers(state_dict: Mapping[str, Any], own: Iterable[str] = ()) -> Mapping[str, Any]:
    """Weights under the names that they have in a module, whatever wrapped it when they were saved.

    Args:
        state_dict (Mapping): With its notes, ``_metadata``, which are by the names of modules.
        own (Iterable[str]): The names of the weights of the module that is to load them. A part of
            these that is called as a wrapper is one of the module's own.

    Returns:
        Mapping: The same one, where all names stay.

    Raises:
        ConversionError: Two names become one.
    """
    own = [*own]
    names = _Own(own)
    renamed: OrderedDict[str, Any] = OrderedDict()
    before: dict[str, str] = {}
    for name, value in state_dict.items():
        new = names.of(name)
        if new in before:
            raise ConversionError(
                f'{before[new]} and {name} are both {new}, without the names of wrappers in them: '
                'leave one of them out'
            )
        before[new] = name
        renamed[new] = value
    if all(new == name for new, name in before.items()):
        return state_dict
    notes = getattr(state_dict, '_metadata', None)
    if notes is not None:
        modules = _Own(name[:end] for name in own for end, c in enumerate(name) if c == '.')
        renamed._metadata = OrderedDict()
        for module, note in notes.items():  # of a wrapper first, then of what it holds
            renamed._metadata.setdefault(modules.of(module), {}).update(note)
    return renamed


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


def _tensor(name: str, value: Tensor | np.ndarray) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        return torch.from_numpy(np.array(value, value.dtype.newbyteorder('=')))
    except TypeError as error:
        raise ConversionError(f'{name} is of {value.dtype}, which torch has not') from error
