"""What a file given as a checkpoint is: torch's formats, safetensors, pickled arrays, or none."""

import json
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vim_mm.checkpoints.plain import plain
from vim_mm.checkpoints.torch_file import MAGIC, read_arrays, read_legacy, read_zip
from vim_mm.checkpoints.unpickle import Refused
from vim_mm.errors import UserError

_HEAD = 512  # bytes of a file that tell what it is
_LONGEST = 300  # characters of a reason


class NotACheckpointError(UserError, ValueError):
    """A file given as a checkpoint is something else, or only a part of one."""


class UnsafeCheckpointError(UserError, RuntimeError):
    """A checkpoint holds something other than tensors and plain data; nothing of it was run."""


def read_file(
    path: str | Path, map_location: str | torch.device | None = None, name: str | None = None
) -> dict:
    """Read a file of ``torch.save``, of safetensors or of pickled arrays, as data.

    What comes out is made of dict, OrderedDict, list, tuple, set, Counter, numbers, text, bytes,
    arrays of NumPy, tensors and :class:`~vim_mm.checkpoints.unpickle.History`, each exactly of its
    class. Nothing that the file names is imported, called or evaluated. This is the one place where
    the package reads such files, in the same way with every release of torch.

    Args:
        path (str | Path): An existing file.
        map_location: The device of the tensors; None for the CPU.
        name (str, optional): What messages call the file, such as its URL.

    Raises:
        NotACheckpointError: The file is something else, or damaged; the message says what.
        UnsafeCheckpointError: It holds more than data, or is an archive of TorchScript or tar.
    """
    path = Path(path)
    name = name or str(path)
    head = _head(path)
    try:
        kind = 'checkpoint'
        try:
            reader = _reader(path, head, name)
            kind = 'safetensors file' if reader is load_file else kind
            value = reader(path)
        except (Refused, NotACheckpointError):
            raise
        except Exception as error:  # of damaged bytes, almost any
            reason = _line(error) or 'it ends too early'
            raise NotACheckpointError(f'{name} is a damaged {kind}: {reason}') from error
        content = plain(value, map_location or 'cpu')
    except Refused as error:
        raise UnsafeCheckpointError(
            f'{name} was not loaded, because only tensors and plain data of the usual kinds and '
            f'sizes are read, and nothing that could run code: {_line(error)}'
        ) from None
    if type(content) not in _DICTS:
        kind = 'nothing (None)' if content is None else f'a {type(content).__name__}'
        raise NotACheckpointError(f'{name} is no checkpoint: it holds {kind}, not a dict')
    return content


_DICTS = (dict, OrderedDict)


def _line(error: Exception) -> str:
    """The message of an error, which may quote the file: one line that can be printed."""
    line = ' '.join(str(error)[:_LONGEST].split())
    return ''.join(letter if letter.isprintable() else '?' for letter in line)


def _head(path: Path) -> bytes:
    with path.open('rb') as file:
        return file.read(_HEAD)


def _reader(path: Path, head: bytes, name: str) -> Callable[[Path], Any]:
    """What reads such a file; of others NotACheckpointError, of a tar archive UnpicklingError."""
    # Eight bytes with the length of a JSON object, and its first brace.
    if len(head) > 8 and head[8:9] == b'{' and int.from_bytes(head[:8], 'little') < 2**27:
        return load_file
    if head[257:262] == b'ustar':
        raise Refused('it is a tar archive, as PyTorch wrote before 0.1.10')
    if head[:1] == b'\x80':
        return read_legacy if MAGIC.to_bytes(10, 'little') in head[:32] else read_arrays
    if (what := _foreign(path, head)) is not None:
        raise NotACheckpointError(f'{name} is no checkpoint: {what}')
    return read_zip


def _foreign(path: Path, head: bytes) -> str | None:
    """What the file is, if torch.save did not write it."""
    if not head:
        return 'the file is empty (did a download or a full disk cut it?)'
    if head.startswith(b'PK'):
        if not zipfile.is_zipfile(path):
            return (
                f'the file is cut off after {path.stat().st_size} bytes: copy or download it again'
            )
        with zipfile.ZipFile(path) as archive:
            if not any(name.endswith('data.pkl') for name in archive.namelist()):
                return 'it is a zip archive that torch.save did not write'
        return None
    if head.lstrip()[:1] == b'<':
        return 'it is an HTML page (a download link that needs a login, or a wrong address?)'
    if head.startswith(b'version https://git-lfs'):
        return 'it is a pointer of Git LFS: run `git lfs pull`'
    try:
        text = head.decode(errors='strict' if len(head) < _HEAD else 'ignore')
    except UnicodeDecodeError:
        text = '\0'
    if text.replace('\n', '').replace('\r', '').replace('\t', '').isprintable():
        return f'it is a text file that starts with {json.dumps(text[:40])}'
    return f'it starts with the bytes {head[:8].hex(" ")}, which are not those of torch.save'
