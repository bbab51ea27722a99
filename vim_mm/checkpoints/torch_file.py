"""Files of ``torch.save``, read as data: a zip archive, or before torch 1.6 pickles in a row.

``torch.load(weights_only=True)`` is not used, for three reasons. It believes a file: a storage may
claim more bytes than its record has, and a tensor more elements than its storage, up to any size.
It does not compare the checksums of the archive, so changed weights load without a word. And its
releases differ in what they run: before 2.6 they read archives of TorchScript and tar past the
argument. Here every record's checksum is verified, every size is one that the file has, and what
may be named is this module's list.
"""

import math
import struct
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from vim_mm.checkpoints.unpickle import (
    PLAIN,
    Known,
    Ordered,
    Refused,
    check_sizes,
    read_pickle,
    taking,
)

# torch's pickles before 1.6 begin with a pickle of this number, in any protocol.
MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_BLOCK = 2**20  # bytes

_DTYPES = {
    name: getattr(torch, name)
    for name in (
        *('float64', 'float32', 'float16', 'bfloat16', 'complex128', 'complex64', 'complex32'),
        *('int64', 'int32', 'int16', 'int8', 'uint64', 'uint32', 'uint16', 'uint8', 'bool'),
        *('float8_e4m3fn', 'float8_e5m2', 'float8_e4m3fnuz', 'float8_e5m2fnuz'),
    )
    if hasattr(torch, name)
}
_STORAGES = dict(
    DoubleStorage=torch.float64,
    FloatStorage=torch.float32,
    HalfStorage=torch.float16,
    BFloat16Storage=torch.bfloat16,
    ComplexDoubleStorage=torch.complex128,
    ComplexFloatStorage=torch.complex64,
    LongStorage=torch.int64,
    IntStorage=torch.int32,
    ShortStorage=torch.int16,
    CharStorage=torch.int8,
    ByteStorage=torch.uint8,
    BoolStorage=torch.bool,
)


class _Storage(NamedTuple):
    """Elements of a file.

    Attributes:
        content (Tensor): uint8, all bytes.
        dtype (torch.dtype): Of an element.
        numel (int): How many there are.
    """

    content: Tensor
    dtype: torch.dtype
    numel: int


def read_zip(path: Path) -> Any:
    """What an archive of ``torch.save`` holds, with stand-ins; tensors are on the CPU.

    Raises:
        UnpicklingError: It holds more than data, or is an archive of TorchScript.
        Exception: It is damaged; of almost any class.
    """
    with zipfile.ZipFile(path) as archive:
        records = _records(archive, path.stat().st_size)
        if 'byteorder' in records and archive.read(records['byteorder']) != b'little':
            raise Refused('it was written by a machine with another order of bytes')
        read: dict[str, Tensor] = {}

        def load(key: str, nbytes: int) -> Tensor:
            record = records.get(f'data/{key}')
            if record is None or record.file_size != nbytes:
                held = 'none' if record is None else record.file_size
                raise ValueError(f'a storage of {nbytes} bytes has {held} in the file')
            if key not in read:
                read[key] = _read_record(archive, record)
            return read[key]

        value = read_pickle(BytesIO(archive.read(records['data.pkl'])), _KNOWN, _persistent(load))
        for name, record in records.items():
            if name.removeprefix('data/') not in read:
                _read_record(archive, record)  # for its checksum
    return value


def _records(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    """The records by their names below the folder that holds all of them.

    Raises:
        UnpicklingError: They are those of a TorchScript program.
        ValueError: They are not those of ``torch.save``, or claim more bytes than the file has.
    """
    infos = [info for info in archive.infolist() if not info.is_dir()]
    folder = infos[0].filename.partition('/')[0]
    records = {info.filename.removeprefix(f'{folder}/'): info for info in infos}
    if 'constants.pkl' in records or any(name.startswith('code/') for name in records):
        raise Refused('it is a TorchScript archive, which holds a program')
    if len(records) < len(infos) or 'data.pkl' not in records:
        raise ValueError('its records are not those of torch.save')
    if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
        raise ValueError('its records are compressed, which torch.save does not do')
    if sum(info.file_size for info in infos) > size:
        raise ValueError('its records claim more bytes than the file has')
    return records


def _read_record(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> Tensor:
    """All bytes of a record (N,), uint8; zipfile compares the checksum at the end."""
    content = torch.empty(record.file_size, dtype=torch.uint8)
    with archive.open(record) as file:
        _fill(content, file)
        if file.read(1):
            raise EOFError('a record is longer than the archive says')
    return content


def _fill(content: Tensor, file: IO[bytes]) -> None:
    """Read all bytes of ``content`` from a file."""
    view = memoryview(content.numpy())
    while view:
        block = file.read(min(len(view), _BLOCK))
        if not block:
            raise EOFError('it ends too early')
        view[: len(block)] = block
        view = view[len(block) :]


def read_legacy(path: Path) -> Any:
    """As :func:`read_zip`, of a file of torch before 1.6, which has no checksums."""
    left = path.stat().st_size
    storages: dict[str, Tensor] = {}

    def load(key: str, nbytes: int) -> Tensor:
        nonlocal left
        if key not in storages:
            left -= nbytes
            if left < 0:
                raise ValueError('its storages claim more bytes than the file has')
            storages[key] = torch.empty(nbytes, dtype=torch.uint8)  # filled below
        if len(storages[key]) != nbytes:
            raise ValueError('a storage has two sizes')
        return storages[key]

    sizes: dict[str, int] = {}
    with path.open('rb') as file:
        bounded = _Bounded(file, left)
        if read_pickle(bounded) != MAGIC or read_pickle(bounded) != _PROTOCOL:
            raise ValueError('it does not begin as a file of torch.save')
        system = read_pickle(bounded)
        if type(system) is not dict or system.get('little_endian') is not True:
            raise Refused('it was written by a machine with another order of bytes')
        value = read_pickle(bounded, _KNOWN, _persistent(load, sizes))
        keys = read_pickle(bounded)
        fits = type(keys) is list and all(type(key) is str for key in keys)
        if not fits or sorted(keys) != sorted(storages):
            raise ValueError('its storages are not those that its tensors name')
        for key in keys:
            (numel,) = struct.unpack('<q', bounded.read(8))
            if numel != sizes[key]:
                raise ValueError('a storage has two sizes')
            _fill(storages[key], bounded)
    return value


class _Bounded:
    """A file that reserves no more memory for a read than it has bytes.

    Args:
        file: Open for reading.
        size (int): Its length in bytes.
    """

    def __init__(self, file: IO[bytes], size: int) -> None:
        self.file, self.size = file, size
        self.readline, self.tell = file.readline, file.tell

    def read(self, size: int = -1) -> bytes:
        return self.file.read(min(size, self.size) if size >= 0 else -1)


def read_arrays(path: Path) -> Any:
    """As :func:`read_zip`, of a plain pickle of arrays, such as detectron2's model zoo has."""
    with path.open('rb') as file:
        return read_pickle(_Bounded(file, path.stat().st_size))


def _persistent(
    load: Callable[[str, int], Tensor], sizes: dict[str, int] | None = None
) -> Callable[[Any], _Storage]:
    """Storages by what a pickle calls them: ('storage', type, key, location, numel[, view])."""

    def persistent(identifier: Any) -> _Storage:
        what = identifier if type(identifier) is tuple else ()
        if what and what[0] == 'module':
            raise Refused('it holds a whole module, not its state dict')
        if len(what) not in (5, 6) or what[0] != 'storage' or what[5:] not in ((), (None,)):
            raise Refused('Unsupported reference to an object outside of the pickle')
        _, kind, key, location, numel = what[:5]
        dtype = _STORAGE_TYPES.get(kind) if type(kind) is Known else None
        if dtype is None or type(key) is not str or type(location) is not str:
            raise Refused('Unsupported reference to a storage')
        if type(numel) is not int or not 0 <= numel < 2**48:
            raise Refused('Unsupported size of a storage')
        if sizes is not None:
            sizes[key] = numel
        return _Storage(load(key, numel * dtype.itemsize), dtype, numel)

    return persistent


def _tensor(storage: Any, offset: Any, sizes: Any, strides: Any, *rest: Any) -> Tensor:
    """A view of a storage, of no more elements than that has.

    Args:
        rest: requires_grad, hooks of the backward pass, and bits of a conjugated or negated view,
            which torch.save writes; only those without effect are taken.
    """
    if type(storage) is not _Storage or type(offset) is not int or offset < 0:
        raise Refused('Unsupported tensor')
    sizes, strides = check_sizes(sizes), check_sizes(strides)
    hooks, bits = rest[1:2], rest[2:]
    if len(sizes) != len(strides) or len(rest) > 3 or any(bits):
        raise Refused('Unsupported tensor')
    if not all(hook is None or (type(hook) is Ordered and not hook) for hook in hooks):
        raise Refused('Unsupported tensor with hooks')
    numel = math.prod(sizes)
    reach = sum((size - 1) * stride for size, stride in zip(sizes, strides)) + 1 if numel else 0
    if numel > storage.numel or offset + reach > storage.numel:
        raise ValueError(
            f'a tensor of the shape {sizes} has {storage.numel} elements in the file (one that was '
            'expanded has to be saved by .contiguous())'
        )
    flat = torch.empty(0, dtype=storage.dtype)
    return flat.set_(storage.content.untyped_storage(), offset, sizes, strides)


def _tensor_of_bytes(storage: Any, offset: Any, sizes: Any, strides: Any, *rest: Any) -> Tensor:
    """As :func:`_tensor`, of a storage without a type: the dtype stands behind the hooks."""
    dtype = rest[2] if len(rest) > 2 else None
    if type(storage) is not _Storage or type(dtype) is not torch.dtype:
        raise Refused('Unsupported tensor')
    if len(storage.content) % dtype.itemsize:
        raise ValueError('a storage holds no whole number of elements')
    typed = _Storage(storage.content, dtype, len(storage.content) // dtype.itemsize)
    return _tensor(typed, offset, sizes, strides, *rest[:2], *rest[3:])


def _parameter(data: Any, *_: Any) -> Tensor:
    """The weights of a parameter; whether it is trained, its hooks and its marks stay behind."""
    if type(data) is not Tensor:
        raise Refused('Unsupported parameter')
    return data


def _tensor_with_attributes(function: Any, kind: Any, arguments: Any, _: Any) -> Tensor:
    """A tensor that has attributes, without these."""
    known = type(function) is Known and function.name in _TENSORS
    if not known or type(kind) is not Known or kind not in _CLASSES:
        raise Refused('Unsupported tensor of a class of its own')
    if type(arguments) is not tuple:
        raise Refused('Unsupported tensor')
    return function.make(*arguments)


def _size(*arguments: Any) -> tuple:
    """torch.Size, as a tuple."""
    if len(arguments) != 1 or type(arguments[0]) not in (tuple, list):
        raise Refused('Unsupported call of torch.Size')
    return check_sizes(tuple(arguments[0]))


def _device(kind: str, *index: int) -> str:
    """torch.device, by its name."""
    if not kind.isidentifier():
        raise Refused('Unsupported call of torch.device')
    return ':'.join(map(str, (kind, *index)))


_TENSORS: dict[str, Callable] = {
    'torch._utils._rebuild_tensor': _tensor,
    'torch._utils._rebuild_tensor_v2': _tensor,
    'torch._utils._rebuild_tensor_v3': _tensor_of_bytes,
    'torch._utils._rebuild_parameter': _parameter,
    'torch._utils._rebuild_parameter_with_state': _parameter,
}
_CALLS: dict[str, Callable] = {
    **_TENSORS,
    'torch._tensor._rebuild_from_type_v2': _tensor_with_attributes,
    'torch.Size': _size,
    'torch.device': taking(_device, str, int, least=1),
}
_CLASSES = [Known('torch.Tensor'), Known('torch.nn.parameter.Parameter')]
_STORAGE_TYPES = {Known(f'torch.{name}'): dtype for name, dtype in _STORAGES.items()}
_STORAGE_TYPES |= {
    Known(name): torch.uint8 for name in ('torch.storage.UntypedStorage', 'torch.UntypedStorage')
}
_KNOWN: dict[str, Known] = {
    **PLAIN,
    **{name: Known(name, make) for name, make in _CALLS.items()},
    **{f'torch.{name}': Known(f'torch.{name}', None, dtype) for name, dtype in _DTYPES.items()},
    **{known.name: known for known in (*_CLASSES, *_STORAGE_TYPES)},
}
