"""Arrays in pickles, read without running anything: what stands for NumPy's names in a file.

Python's unpickler calls whatever a pickle names, and sets whatever state it gives. NumPy's own
classes are no safe answer to that: ``np.ndarray`` takes a buffer for addresses of objects, and the
state of a dtype its memory layout. So nothing of NumPy is within reach of a file. What stands here
takes what arrays of numbers are pickled as, and refuses all else.

Plain pickles, such as detectron2's model zoo has, are read by :func:`read_arrays`. torch reads its
own files, and is given :data:`NUMPY_FUNCTIONS` and :data:`CLASSES`.
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


def _latin1(text: str, encoding: str) -> bytes:
    """Bytes in the protocols below 3, which Python writes as an encoding of text."""
    if encoding != 'latin1':
        raise pickle.UnpicklingError(f'Unsupported encoding {encoding!r}')
    return text.encode('latin1')


def _no_bytes(*arguments: Any) -> bytes:
    if arguments:
        raise pickle.UnpicklingError('Unsupported call of bytes')
    return b''


class _DType:
    """Stands in for ``np.dtype``: the type of a number, whose state is the order of its bytes."""

    def __init__(self, code: str, *flags: bool) -> None:
        self.dtype = np.dtype(code if isinstance(code, str) else 'O')
        if self.dtype.kind not in 'biufc':
            raise pickle.UnpicklingError(f'Unsupported numpy.dtype {code!r}, which is no number')

    def __setstate__(self, state: tuple) -> None:
        _version, order, *layout = state
        if layout != [None, None, None, -1, -1, 0]:
            raise pickle.UnpicklingError(f'Unsupported state of a numpy.dtype: {state}')
        self.dtype = self.dtype.newbyteorder(order)


class _Array(np.ndarray):
    """Stands in for ``np.ndarray``: an array of numbers, which pickles as a plain one."""

    def __new__(cls, *arguments: Any) -> '_Array':
        if arguments:
            raise pickle.UnpicklingError('Unsupported call of an array')
        return super().__new__(cls, 0)

    def __setstate__(self, state: tuple) -> None:
        _version, shape, dtype, is_fortran, data = state
        array = _frombuffer(data, dtype, shape, 'F' if is_fortran else 'C')
        super().__setstate__(array.__reduce__()[2])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.view(np.ndarray).__reduce_ex__(protocol)


def _ndarray(*arguments: Any) -> None:
    """A file names the class as an argument of :func:`_reconstruct`, never to call it."""
    raise pickle.UnpicklingError('Unsupported call of numpy.ndarray')


def _reconstruct(*arguments: Any) -> _Array:
    """What arrays are built by: it makes an empty one, which the file then gives its state."""
    return _Array()


def _scalar(dtype: _DType, data: bytes) -> np.generic:
    return _frombuffer(data, dtype, (), 'C')[()]


def _frombuffer(buffer: bytes | bytearray, dtype: _DType, shape: tuple, order: str) -> np.ndarray:
    """What arrays of protocol 5 are built by."""
    if not isinstance(buffer, bytes | bytearray) or not isinstance(dtype, _DType):
        raise pickle.UnpicklingError('Unsupported array, which is not of numbers')
    return np.frombuffer(buffer, dtype.dtype).reshape(shape, order=order).copy(order=order)


# By the full name in a file; the module has one name under numpy 2 and another under numpy 1.
_CORES = ('numpy._core', 'numpy.core')
NUMPY_FUNCTIONS: dict[str, Callable] = {
    '_codecs.encode': _latin1,
    '__builtin__.bytes': _no_bytes,
    'builtins.bytes': _no_bytes,
    'numpy.ndarray': _ndarray,
    'numpy.dtype': _DType,
    **{f'{core}.multiarray._reconstruct': _reconstruct for core in _CORES},
    **{f'{core}.multiarray.scalar': _scalar for core in _CORES},
}
# What the functions make and the file then gives a state.
CLASSES = (_DType, _Array)

_KNOWN: dict[str, Callable] = {
    'collections.OrderedDict': OrderedDict,
    'builtins.bytearray': bytearray,
    'builtins.set': set,
    '__builtin__.set': set,
    **NUMPY_FUNCTIONS,
    **{f'{core}.numeric._frombuffer': _frombuffer for core in _CORES},
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable:
        known = _KNOWN.get(f'{module}.{name}')
        if known is None:
            raise pickle.UnpicklingError(f'Unsupported global: {module}.{name}')
        return known

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError('Unsupported reference to an object outside of the file')
