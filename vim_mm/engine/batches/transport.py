"""A batch on its way from a loader's worker: one piece of shared memory instead of one a tensor.

PyTorch shares each tensor by a file of its own, for which the training process asks the worker by a
socket, and sends arrays through a pipe. A batch of eight pictures with labels has sixteen tensors,
and masks of objects are arrays of megabytes.
"""

import io
import pickle
from collections.abc import Callable, Sequence
from copy import deepcopy
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

_ALIGNMENT = 64  # bytes, of where a value begins: enough for elements of every dtype
# Up to so many bytes a value is copied where it arrives: a label or a box that a metric or a hook
# keeps would keep the memory of its batch.
_COPIED = 1 << 16


class SharedBatches:
    """A collate function whose batches leave a worker in one piece of shared memory.

    What arrives is what ``collate`` returns. Large tensors and arrays lie in that memory, each with
    a storage and an autograd version of its own: one may be written to, copied deeply or saved as
    if there were no other. What cannot lie there (tensors that are not contiguous or sparse, arrays
    in Fortran's order or of Python objects) goes as without this.

    Args:
        collate (Callable): The loader's own. Without workers it alone is called.
    """

    def __init__(self, collate: Callable[[Sequence], Any]):
        self.collate = collate

    def __call__(self, samples: Sequence) -> Any:
        batch = self.collate(samples)
        return batch if get_worker_info() is None else _Parcel(batch)


class _Parcel:
    """What a worker sends. Unpickling it gives the batch.

    It is packed here, where an error reaches the training process; the thread that pickles for the
    queue would print it, and the loader would wait for ever.
    """

    def __init__(self, batch: Any):
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(batch)
        self.others = file.getvalue()
        storage = torch.UntypedStorage._new_shared(max(pickler.end, 1))
        self.memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        memory = self.memory.numpy()
        for place, values in pickler.found.values():
            if isinstance(values, Tensor):
                _at(memory, place).copy_(values)
            else:
                _at(memory, place)[...] = values

    def __reduce__(self) -> tuple:
        return _unpack, (self.memory, self.others)


class _Place(NamedTuple):
    begin: int
    bytes: int
    dtype: torch.dtype | np.dtype
    shape: tuple[int, ...]


def _at(memory: np.ndarray, place: _Place) -> Any:
    piece = memory[place.begin : place.begin + place.bytes]
    if isinstance(place.dtype, torch.dtype):
        # By NumPy: a slice of a tensor has the storage and the version of the whole.
        return torch.from_numpy(piece).view(place.dtype).view(place.shape)
    return piece.view(place.dtype).reshape(place.shape)


class _Pickler(ForkingPickler):
    """Gives tensors and arrays places in memory, which ends at ``end``."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.end = 0
        # By identity: what is in a batch twice arrives so. Values are kept alive by it.
        self.found: dict[int, tuple[_Place, Any]] = {}

    def persistent_id(self, obj: Any) -> _Place | None:
        if type(obj) is not Tensor and type(obj) is not np.ndarray:
            return None
        if id(obj) not in self.found:
            if not _is_plain(obj):
                return None
            place = _Place(self.end, obj.nbytes, obj.dtype, tuple(obj.shape))
            self.found[id(obj)] = place, obj
            self.end += -(-obj.nbytes // _ALIGNMENT) * _ALIGNMENT
        return self.found[id(obj)][0]


def _is_plain(values: Tensor | np.ndarray) -> bool:
    """Whether a copy in C's order is what else would arrive, and there are any values."""
    if isinstance(values, np.ndarray):
        fortran = values.flags.f_contiguous and not values.flags.c_contiguous
        return values.nbytes > 0 and not (fortran or values.dtype.hasobject)
    return (
        values.layout is torch.strided
        and values.device.type == 'cpu'
        and values.is_contiguous()
        and values.numel() > 0
        and not (values.requires_grad or values.is_quantized)
    )


class _Unpickler(pickle.Unpickler):
    def __init__(self, memory: Tensor, others: bytes):
        super().__init__(io.BytesIO(others))
        self.memory = memory.numpy()
        self.found: dict[_Place, Any] = {}

    def persistent_load(self, place: _Place) -> Any:
        if place not in self.found:
            values = _at(self.memory, place)
            self.found[place] = deepcopy(values) if place.bytes <= _COPIED else values
        return self.found[place]


def _unpack(memory: Tensor, others: bytes) -> Any:
    return _Unpickler(memory, others).load()
