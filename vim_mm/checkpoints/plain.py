"""What a file holds, rebuilt: plain containers, numbers, text, arrays of numbers and tensors.

Nothing else leaves this module. Of a container that torch or MMEngine wrote with attributes, such
as the OrderedDict of a state dict, the only one that is kept is ``_metadata``, whose entries are
checked.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vim_mm.checkpoints.unpickle import History, Ordered, Refused, Stateful

_DEEPEST = 64  # levels of containers; a checkpoint of MMEngine has six
_EXPANDED = 10**7  # entries and characters; what is shared counts each time
_BITS = 1024  # of an integer; the state of a generator of random numbers has 128
_LONGEST_NOTE = 200  # characters


def plain(value: Any, device: str | torch.device = 'cpu') -> Any:
    """Rebuild what :func:`vim_mm.checkpoints.unpickle.read_pickle` has made.

    What is shared stays shared. Nothing of the value is called.

    Args:
        value: Containers, stand-ins and tensors.
        device: Where tensors go.

    Raises:
        UnpicklingError: It holds something else, or itself, or parts so often that no code could go
            through it.
    """
    return _Rebuild(torch.device(device)).of(value, 0)


class _Rebuild:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        # By identity: the value, kept so that no other gets its identity; what was rebuilt; its
        # size.
        self.done: dict[int, tuple[Any, Any, int]] = {}
        self.open: set[int] = set()
        self.size = 0  # expanded, of all so far

    def of(self, value: Any, level: int) -> Any:
        kind = type(value)
        self._count(len(value) if kind in (str, bytes) else 1)
        if kind in (bool, float, complex, bytes, torch.dtype) or value is None:
            return value
        if kind is int:
            return _checked_int(value)
        if kind is str:
            return _checked_text(value)
        if isinstance(value, np.generic) and value.dtype.kind in 'biufc':
            return value
        if isinstance(value, np.dtype) and value.kind in 'biufc':
            return value
        if id(value) in self.done:
            _, made, size = self.done[id(value)]
            self._count(size)
            return made
        if level > _DEEPEST or id(value) in self.open:
            raise Refused(f'it holds a {kind.__name__} in itself, or in too many others')
        self.open.add(id(value))
        before = self.size
        made = self._container(kind, value, level + 1)
        self.open.remove(id(value))
        self.done[id(value)] = value, made, self.size - before
        return made

    def _count(self, size: int) -> None:
        self.size += size
        if self.size > _EXPANDED:
            raise Refused(f'it holds more than {_EXPANDED} entries, or the same ones too often')

    def _container(self, kind: type, value: Any, level: int) -> Any:
        if kind is torch.Tensor:
            return value.to(self.device)
        if kind is np.ndarray and value.dtype.kind in 'biufc':
            return value
        if kind in (dict, Ordered, Counter):
            pairs = [(self.of(k, level), self.of(v, level)) for k, v in value.items()]
            if kind is dict:
                return dict(pairs)
            if kind is Counter:
                if not all(type(count) is int for _, count in pairs):
                    raise Refused('Unsupported items of a Counter')
                return Counter(dict(pairs))
            made = OrderedDict(pairs)
            if value.note is not None:
                made._metadata = checked_notes(self.of(value.note, level))
            return made
        if kind in (list, tuple, set, frozenset):
            return kind(self.of(item, level) for item in value)
        if isinstance(value, Stateful):
            settled = value.settled()
            return settled if type(settled) is History else self.of(settled, level)
        raise Refused(f'Unsupported object, a {getattr(value, "name", kind.__name__)}')


def _checked_int(value: int) -> int:
    if value.bit_length() > _BITS:
        raise Refused(f'Unsupported integer of {value.bit_length()} bits')
    return value


def _checked_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Refused('Unsupported text, which is not Unicode') from None
    return value


def checked_notes(notes: Any) -> OrderedDict:
    """What torch notes of modules in a state dict: plain values by name, by the module's name.

    Raises:
        UnpicklingError: They are no such notes.
    """
    if not isinstance(notes, Mapping) or not all(type(name) is str for name in notes):
        raise Refused('Unsupported _metadata of a state dict')
    for module, note in notes.items():
        if not is_note(note) or type(note.get('version', 0)) not in (int, type(None)):
            raise Refused(f'Unsupported _metadata of the module {module!r:.100}')
    # torch.load_state_dict(assign=True) leaves its order in the notes, where the next load of the
    # same weights would follow it and replace parameters that an optimizer has.
    orders = ('assign_to_params_buffers',)
    return OrderedDict(
        (module, {name: value for name, value in note.items() if name not in orders})
        for module, note in notes.items()
    )


def is_note(note: Any) -> bool:
    """Whether it is a mapping of names to numbers, words, and lists and mappings of such."""
    return (
        isinstance(note, Mapping)
        and all(type(name) is str and name.isidentifier() for name in note)
        and all(map(_is_note_value, note.values()))
    )


def _is_note_value(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_note_value, value))
    if isinstance(value, Mapping):
        return is_note(value)
    if type(value) is str:
        return len(value) <= _LONGEST_NOTE and value.isprintable()
    return value is None or type(value) in (bool, int, float)
