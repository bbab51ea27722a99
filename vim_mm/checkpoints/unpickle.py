"""A pickle read as data: nothing that it names is imported or called.

Python's unpickler calls whatever a pickle names, and gives whatever state to what comes of it. This
one knows a table of names, and has a strict function of its own for each: it takes what torch,
NumPy, MMEngine and argparse write for a container, a number, an array or a tensor, and refuses
everything else. The opcodes are parsed by :mod:`pickletools`. Keys of dicts are plain, because
Python would call a key's methods, and an index of the memo costs nothing, however large it is.
"""

import math
import pickle
import pickletools
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, NamedTuple

import numpy as np

from vim_mm.errors import brief

Refused = pickle.UnpicklingError


class Known:
    """What a file names: no class and no function, only the right to have ``make`` called.

    Args:
        name (str): In the file, with the module.
        make (Callable, optional): Builds what a call of it gives. None: it is never called, as the
            class of a tensor that stands among the arguments of another call.
        value: What the name is worth as it stands, such as a dtype.
    """

    def __init__(self, name: str, make: Callable | None = None, value: Any = None) -> None:
        self.name, self.make, self.value = name, make, value


class Stateful:
    """What a file makes and then gives a state."""

    def set_state(self, state: Any) -> None:
        """Take the state that the file gives, once."""
        raise NotImplementedError

    def settled(self) -> Any:
        """What it stands for, after the whole file was read."""
        raise NotImplementedError


class History(NamedTuple):
    """What a file holds of a HistoryBuffer of MMEngine: values of a log and their counts.

    Attributes:
        values (np.ndarray): Numbers, (N,).
        counts (np.ndarray): Numbers, (N,).
        max_length (int): How many of them are kept.
    """

    values: np.ndarray
    counts: np.ndarray
    max_length: int


class Ordered(OrderedDict, Stateful):
    """An OrderedDict, which keeps of its attributes the one that torch writes."""

    note: Any = None

    def set_state(self, state: Any) -> None:
        if type(state) is not dict:
            raise Refused(f'Unsupported state of an OrderedDict: a {type(state).__name__}')
        self.note = state.get('_metadata')


class _Arguments(Stateful):
    """Stands in for argparse.Namespace, by which DeiT's code keeps the arguments of a training."""

    def __init__(self) -> None:
        self.arguments: dict = {}

    def set_state(self, state: Any) -> None:
        if type(state) is not dict or not all(type(name) is str for name in state):
            raise Refused('Unsupported state of an argparse.Namespace')
        self.arguments = state

    def settled(self) -> dict:
        return self.arguments


class _DType(Stateful):
    """Stands in for ``np.dtype``: the type of a number, whose state is the order of its bytes."""

    def __init__(self, code: Any, *flags: Any) -> None:
        code = code.decode('ascii') if type(code) is bytes else code
        if type(code) is not str or not re.fullmatch(r'[biufc](1|2|4|8|16|32)', code):
            raise Refused(f'Unsupported numpy.dtype {brief(code)}, which is no number')
        if not all(type(flag) in (bool, int) for flag in flags):
            raise Refused('Unsupported flags of a numpy.dtype')
        self.dtype = np.dtype(code)

    def set_state(self, state: Any) -> None:
        if type(state) is not tuple or state[2:] != (None, None, None, -1, -1, 0):
            raise Refused('Unsupported state of a numpy.dtype')
        if state[1] not in ('<', '>', '=', '|'):
            raise Refused('Unsupported order of bytes of a numpy.dtype')
        self.dtype = self.dtype.newbyteorder(state[1])

    def settled(self) -> np.dtype:
        return self.dtype


class _Array(Stateful):
    """Stands in for an array of numbers."""

    def __init__(self) -> None:
        self.array = np.empty(0)

    def set_state(self, state: Any) -> None:
        if type(state) is not tuple or len(state) != 5:
            raise Refused('Unsupported state of an array')
        _version, shape, dtype, is_fortran, data = state
        self.array = _frombuffer(data, dtype, shape, 'F' if is_fortran else 'C').array

    def settled(self) -> np.ndarray:
        return self.array


class _History(Stateful):
    """Stands in for MMEngine's HistoryBuffer."""

    def __init__(self) -> None:
        self.state: dict = {}

    def set_state(self, state: Any) -> None:
        names = {'max_length', '_log_history', '_count_history', 'statistics_methods'}
        if type(state) is not dict or not state.keys() <= names:
            raise Refused('Unsupported state of a HistoryBuffer')
        # Which are the class's own four, see _STATISTICS.
        self.state = {k: v for k, v in state.items() if k != 'statistics_methods'}

    def settled(self) -> History:
        arrays = []
        for name in ('_log_history', '_count_history'):
            stand_in = self.state.get(name)
            array = stand_in.array if type(stand_in) is _Array else None
            if array is None or array.ndim != 1 or array.dtype.kind not in 'biuf':
                raise Refused(f'Unsupported {name} of a HistoryBuffer')
            arrays.append(array)
        length = self.state.get('max_length', 1000000)
        if len(arrays[0]) != len(arrays[1]) or type(length) is not int or length < 1:
            raise Refused('Unsupported lengths of a HistoryBuffer')
        return History(*arrays, length)


def taking(make: Callable, *kinds: type, least: int | None = None) -> Callable:
    """``make``, called with arguments of just these classes, of which ``least`` need be there."""

    def checked(*arguments: Any) -> Any:
        fewest = len(kinds) if least is None else least
        fits = fewest <= len(arguments) <= len(kinds)
        if not fits or any(type(given) is not kind for given, kind in zip(arguments, kinds)):
            raise Refused(f'Unsupported call of {make.__name__.strip("_")}')
        return make(*arguments)

    return checked


def _latin1(text: str, encoding: str) -> bytes:
    """Bytes in the protocols below 3, which Python writes as an encoding of text."""
    if encoding != 'latin1':
        raise Refused(f'Unsupported call of _codecs.encode with {brief(encoding)}')
    return text.encode('latin1')


def _set(items: Iterable[Any] = ()) -> set:
    return {check_key(item) for item in items}


def _frozenset(items: Iterable[Any] = ()) -> frozenset:
    return frozenset(_set(items))


def _ordered(pairs: Iterable[Any] = ()) -> Ordered:
    """OrderedDict(), or as Python 2 wrote it OrderedDict([[key, value], ...])."""
    made = Ordered()
    for pair in pairs:
        if type(pair) not in (list, tuple) or len(pair) != 2:
            raise Refused('Unsupported call of collections.OrderedDict')
        made[check_key(pair[0])] = pair[1]
    return made


def _reconstruct(*arguments: Any) -> _Array:
    """What arrays are built by: it makes an empty one, which the file then gives its state."""
    rest = (((0,), b'b'), ((0,), 'b'))
    if not arguments or arguments[0] is not _NDARRAY or arguments[1:] not in rest:
        raise Refused('Unsupported call of numpy _reconstruct')
    return _Array()


def _frombuffer(buffer: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    """What arrays of protocol 5 are built by."""
    if type(buffer) is not bytes or type(dtype) is not _DType or order not in ('C', 'F'):
        raise Refused('Unsupported array, which is not of numbers')
    if len(buffer) != math.prod(check_sizes(shape)) * dtype.dtype.itemsize:
        raise Refused(f'Unsupported array of the shape {shape} in {len(buffer)} bytes')
    made = _Array()
    flat = np.frombuffer(buffer, dtype.dtype).astype(dtype.dtype.newbyteorder('='))
    made.array = flat.reshape(shape, order=order)
    return made


def _scalar(dtype: Any, data: Any) -> np.generic:
    return _frombuffer(data, dtype, (), 'C').array[()]


def _statistic(owner: Any, name: Any) -> None:
    """``getattr``, by which a pickled HistoryBuffer names its own four methods."""
    if owner is not _HISTORY or name not in _STATISTICS:
        owner = owner.name if type(owner) is Known else type(owner).__name__
        raise Refused(f'Unsupported getattr({owner}, {brief(name)})')


def check_sizes(sizes: Any) -> tuple[int, ...]:
    """The sizes or strides of an array, which are whole numbers from 0.

    Raises:
        UnpicklingError: They are not.
    """
    if type(sizes) is not tuple or len(sizes) > 32:
        raise Refused('Unsupported shape of an array')
    if not all(type(size) is int and 0 <= size < 2**62 for size in sizes):
        raise Refused('Unsupported shape of an array')
    return sizes


_KEYS = (str, int, float, bool, bytes, type(None))
# Tuples and integers are hashed anew each time that one is a key.
_PARTS = 100  # of a tuple
_BITS = 64  # of an integer


def check_key(key: Any) -> Any:
    """A key of a dict or an element of a set, whose hash calls nothing of the file.

    Raises:
        UnpicklingError: It is neither text, a number nor a tuple of these, or it is too long.
    """
    parts = key if type(key) is tuple else (key,)
    if not all(type(part) in _KEYS for part in parts):
        raise Refused(f'Unsupported key, a {type(key).__name__}')
    if len(parts) > _PARTS or any(type(p) is int and p.bit_length() > _BITS for p in parts):
        raise Refused(f'too long a key, a {type(key).__name__}')
    return key


_STATISTICS = ('min', 'max', 'current', 'mean')
_BUFFER = 'mmengine.logging.history_buffer.HistoryBuffer'
_NDARRAY = Known('numpy.ndarray')
_HISTORY = Known(_BUFFER, taking(_History))
# The module has one name under numpy 2 and another under numpy 1.
_CORES = ('numpy._core', 'numpy.core')
_BUILTINS: dict[str, Callable] = {
    'bytes': taking(bytes),
    'set': taking(_set, list, least=0),
    'frozenset': taking(_frozenset, list, least=0),
    'complex': taking(complex, float, float),
    'getattr': _statistic,
}
_CALLS: dict[str, Callable] = {
    '_codecs.encode': taking(_latin1, str, str),
    'builtins.bytearray': taking(bytes, bytes, least=0),
    **{f'builtins.{name}': make for name, make in _BUILTINS.items()},
    **{f'__builtin__.{name}': make for name, make in _BUILTINS.items()},  # in protocols below 3
    'collections.OrderedDict': taking(_ordered, list, least=0),
    'collections.Counter': taking(Counter, dict, least=0),  # of milestones; plain() looks at it
    'argparse.Namespace': taking(_Arguments),
    # In a note of a data set that was given by its config.
    'mmengine.config.config.ConfigDict': taking(dict, dict),
    'numpy.dtype': _DType,
    **{f'{core}.multiarray._reconstruct': _reconstruct for core in _CORES},
    **{f'{core}.multiarray.scalar': _scalar for core in _CORES},
    **{f'{core}.numeric._frombuffer': _frombuffer for core in _CORES},
}
PLAIN: dict[str, Known] = {
    **{name: Known(name, make) for name, make in _CALLS.items()},
    _NDARRAY.name: _NDARRAY,
    _HISTORY.name: _HISTORY,
    **{f'{_BUFFER}.{name}': Known(f'{_BUFFER}.{name}') for name in _STATISTICS},
}

# The most bytes that calls are given: _GIVEN for each byte read so far, and _MORE. In protocol 2
# torch's files give an array twice, first as text.
_GIVEN, _MORE = 4, 2**20
_ENTRY = 16  # bytes that an entry of a container counts for

_MARK = object()
_SCALARS = {
    *('INT', 'BININT', 'BININT1', 'BININT2', 'LONG', 'LONG1', 'LONG4', 'FLOAT', 'BINFLOAT'),
    *('STRING', 'BINSTRING', 'SHORT_BINSTRING', 'UNICODE', 'BINUNICODE', 'SHORT_BINUNICODE'),
    *('BINUNICODE8', 'BINBYTES', 'SHORT_BINBYTES', 'BINBYTES8'),
}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    'NONE': lambda: None,
    'NEWTRUE': lambda: True,
    'NEWFALSE': lambda: False,
    'EMPTY_TUPLE': tuple,
    'EMPTY_LIST': list,
    'EMPTY_DICT': dict,
    'EMPTY_SET': set,
}


def read_pickle(
    file: IO[bytes], known: Mapping[str, Known] = PLAIN, persistent: Callable | None = None
) -> Any:
    """What one pickle holds, of stand-ins where :func:`vim_mm.checkpoints.plain.plain` has to look.

    Args:
        file: Stands at the pickle, and afterwards behind it.
        known (Mapping): What it may name.
        persistent (Callable, optional): Of the identifier of an object outside of the pickle.

    Raises:
        UnpicklingError: It names or does anything else.
        Exception: It is damaged; of almost any class.
    """
    return _Machine(known, persistent).run(file)


class _Machine:
    """The stack and the memo of one pickle."""

    def __init__(self, known: Mapping[str, Known], persistent: Callable | None) -> None:
        self.known, self.persistent = known, persistent
        self.stack: list = []
        self.memo: dict[int, Any] = {}
        self.given = 0  # bytes, to calls

    def run(self, file: IO[bytes]) -> Any:
        for opcode, argument, position in pickletools.genops(file):
            name = opcode.name
            if self.given > _GIVEN * position + _MORE:
                raise Refused('it gives the same parts to calls too often')
            if name in _SCALARS:
                self.stack.append(argument)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name]())
            elif name in ('PUT', 'BINPUT', 'LONG_BINPUT'):
                self.memo[argument] = self.stack[-1]
            elif name in ('GET', 'BINGET', 'LONG_BINGET'):
                self.stack.append(self.memo[argument])
            elif name in ('TUPLE1', 'TUPLE2', 'TUPLE3'):
                self.stack[-int(name[-1]) :] = [tuple(self.stack[-int(name[-1]) :])]
            elif name not in ('PROTO', 'FRAME', 'STOP'):
                step = getattr(self, f'_{name.lower()}', None)
                if step is None:
                    raise Refused(f'Unsupported opcode {name}')
                step(argument)
        if len(self.stack) != 1:
            raise ValueError(f'its pickle ends with {len(self.stack)} objects')
        return self.stack[0]

    def _since_mark(self) -> list:
        items: list = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def _mark(self, _: Any) -> None:
        self.stack.append(_MARK)

    def _pop(self, _: Any) -> None:
        self.stack.pop()

    def _pop_mark(self, _: Any) -> None:
        self._since_mark()

    def _dup(self, _: Any) -> None:
        self.stack.append(self.stack[-1])

    def _memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _bytearray8(self, argument: bytearray) -> None:
        self.stack.append(bytes(argument))

    def _tuple(self, _: Any) -> None:
        self.stack.append(tuple(self._since_mark()))

    def _list(self, _: Any) -> None:
        self.stack.append(self._since_mark())

    def _append(self, _: Any) -> None:
        self._extend([self.stack.pop()])

    def _appends(self, _: Any) -> None:
        self._extend(self._since_mark())

    def _extend(self, items: list) -> None:
        if type(self.stack[-1]) is not list:
            raise Refused(f'Unsupported append to a {type(self.stack[-1]).__name__}')
        self.stack[-1].extend(items)

    def _dict(self, _: Any) -> None:
        items = self._since_mark()
        self.stack.append({})
        self._update(items)

    def _setitem(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def _setitems(self, _: Any) -> None:
        self._update(self._since_mark())

    def _update(self, items: list) -> None:
        target = self.stack[-1]
        if type(target) not in (dict, Ordered, Counter):
            raise Refused(f'Unsupported items of a {type(target).__name__}')
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[check_key(key)] = value

    def _additems(self, _: Any) -> None:
        items = self._since_mark()
        if type(self.stack[-1]) is not set:
            raise Refused(f'Unsupported elements of a {type(self.stack[-1]).__name__}')
        self.stack[-1].update(map(check_key, items))

    def _frozenset(self, _: Any) -> None:
        self.stack.append(frozenset(map(check_key, self._since_mark())))

    def _global(self, argument: str) -> None:
        self._name(argument.replace(' ', '.', 1))

    def _stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise Refused('Unsupported name of a global')
        self._name(f'{module}.{name}')

    def _name(self, name: str) -> None:
        known = self.known.get(name)
        if known is None:
            raise Refused(f'Unsupported global: {name:.200}')
        self.stack.append(known if known.value is None else known.value)

    def _count(self, arguments: Iterable[Any]) -> None:
        """Count what a call may copy, which a file names in a few bytes however large it is."""
        for given in arguments:
            if type(given) in (str, bytes):
                self.given += len(given)
            elif type(given) in (list, tuple, dict):
                self.given += _ENTRY * len(given)

    def _reduce(self, _: Any) -> None:
        arguments, known = self.stack.pop(), self.stack.pop()
        if type(known) is not Known or known.make is None or type(arguments) is not tuple:
            what = known.name if type(known) is Known else f'a {type(known).__name__}'
            raise Refused(f'Unsupported call of {what}')
        self._count(arguments)
        self.stack.append(known.make(*arguments))

    _newobj = _reduce

    def _build(self, _: Any) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Stateful):
            raise Refused(f'Unsupported state of a {type(self.stack[-1]).__name__}')
        self._count(state if type(state) is tuple else (state,))
        self.stack[-1].set_state(state)

    def _binpersid(self, _: Any) -> None:
        if self.persistent is None:
            raise Refused('Unsupported reference to an object outside of the file')
        self.stack.append(self.persistent(self.stack.pop()))
