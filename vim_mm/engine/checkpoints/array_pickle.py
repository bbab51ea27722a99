"""Plain pickles of arrays, such as detectron2's model zoo has, read without running anything.

Python's unpickler calls whatever a pickle names. This one knows a few names, and for each of them
what stands here: containers, NumPy's arrays and scalars, and what builds those.
"""

import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def read_arrays(path: Path) -> Any:
    """What a pickle of arrays and plain containers holds.

    Args:
        path (Path): An existing file.

    Raises:
        pickle.UnpicklingError: It names anything else, or is no whole pickle.
    """
    with path.open('rb') as file:
        try:
            return _ArrayUnpickler(file).load()
        except pickle.UnpicklingError:
            raise
        except Exception as error:  # of a damaged pickle, almost any
            raise pickle.UnpicklingError(f'it is damaged: {error}') from error


def latin1(text: str, encoding: str) -> bytes:
    """Bytes in the protocols below 3, which Python writes as an encoding of text."""
    if encoding != 'latin1':
        raise pickle.UnpicklingError(f'Unsupported encoding {encoding!r}')
    return text.encode('latin1')


def _no_bytes(*arguments: Any) -> bytes:
    if arguments:
        raise pickle.UnpicklingError('Unsupported call of bytes')
    return b''


def _dtype(code: str, *flags: bool) -> np.dtype:
    """A number's type: of objects there are no arrays here."""
    dtype = np.dtype(code) if isinstance(code, str) else np.dtype('O')
    if dtype.hasobject or dtype.names is not None:
        raise pickle.UnpicklingError(f'Unsupported dtype {code!r}')
    return dtype


def _frombuffer(buffer: Any, dtype: np.dtype, shape: tuple, order: str) -> np.ndarray:
    """What arrays of protocol 5 are built by."""
    return np.frombuffer(buffer, dtype).reshape(shape, order=order).copy(order=order)


_KNOWN: dict[tuple[str, str], Callable] = {
    ('collections', 'OrderedDict'): OrderedDict,
    ('_codecs', 'encode'): latin1,
    ('__builtin__', 'bytes'): _no_bytes,
    ('builtins', 'bytes'): _no_bytes,
    ('builtins', 'bytearray'): bytearray,
    ('builtins', 'set'): set,
    ('__builtin__', 'set'): set,
    ('numpy', 'ndarray'): np.ndarray,
    ('numpy', 'dtype'): _dtype,
}
# What pickles of arrays and of scalars call, under both names of its module: numpy 2's and 1's.
NUMPY_BUILDERS = {
    '_reconstruct': np.empty(0).__reduce__()[0],
    'scalar': np.int64().__reduce__()[0],
}
NUMPY_CORES = ('numpy._core', 'numpy.core')
for _module in NUMPY_CORES:
    for _name, _builder in NUMPY_BUILDERS.items():
        _KNOWN[f'{_module}.multiarray', _name] = _builder
    _KNOWN[f'{_module}.numeric', '_frombuffer'] = _frombuffer


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f'Unsupported global: {module}.{name}')
        return _KNOWN[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError('Unsupported reference to an object outside of the file')
