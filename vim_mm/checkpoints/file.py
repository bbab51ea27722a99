"""What a file given as a checkpoint is: torch's formats, safetensors, pickled arrays, or none."""

import json
import pickle
import tarfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from vim_mm.checkpoints.array_pickle import read_arrays

_HEAD = 512  # bytes of a file that tell what it is
# torch's pickles before 1.6 begin with a pickle of this number, in any protocol.
_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, 'little')


class NotACheckpointError(ValueError):
    """A file given as a checkpoint is something else, or only a part of one."""


def read_file(path: Path, map_location: str | None = None) -> dict:
    """Read a file of ``torch.save``, of safetensors or of pickled arrays, as data.

    Args:
        path (Path): An existing file.
        map_location: Where tensors go, as in :func:`torch.load`.

    Raises:
        NotACheckpointError: The file is something else; the message says what.
        pickle.UnpicklingError: It holds more than ``weights_only`` lets through, a pickle more than
            arrays, or it is an archive of TorchScript or tar.
    """
    head = _head(path)
    if _is_safetensors(head):
        return _read_safetensors(path, map_location)
    if head[:1] == b'\x80' and _MAGIC not in head[:32]:
        return read_arrays(path)
    what = _foreign(path, head)
    if what is not None:
        raise NotACheckpointError(f'{path} is no checkpoint: {what}')
    _refuse_code(path, head)
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except (EOFError, RuntimeError) as error:
        if 'CUDA' in str(error):  # tensors of a GPU that is not there: the file is sound
            raise
        reason = (str(error) or 'it ends too early').splitlines()[0]
        raise NotACheckpointError(f'{path} is a damaged checkpoint: {reason}') from error
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise pickle.UnpicklingError(f'it is damaged: {error}') from error


def _head(path: Path) -> bytes:
    with path.open('rb') as file:
        return file.read(_HEAD)


def _is_safetensors(head: bytes) -> bool:
    """Eight bytes with the length of a JSON object, and its first brace."""
    return len(head) > 8 and head[8:9] == b'{' and int.from_bytes(head[:8], 'little') < 2**27


def _read_safetensors(path: Path, map_location: str | None) -> dict:
    try:
        return load_file(path, device=str(map_location or 'cpu'))
    except Exception as error:  # its own class, which derives from Exception alone
        raise NotACheckpointError(f'{path} is a damaged safetensors file: {error}') from error


def _refuse_code(path: Path, head: bytes) -> None:
    """Refuse the two formats that torch.load before 2.6 reads past ``weights_only``.

    The zip archive is opened by torch's own reader, as torch.load does: another one could see
    other entries in a file that is made for it.

    Raises:
        pickle.UnpicklingError: As torch.load does for everything else that it refuses.
    """
    if head.startswith(b'PK'):
        try:
            records = torch._C.PyTorchFileReader(str(path)).get_all_records()
        except RuntimeError:  # a damaged archive: torch.load says so too
            return
        if 'constants.pkl' in records:
            raise pickle.UnpicklingError('it is a TorchScript archive, which holds a program')
    elif tarfile.is_tarfile(path):
        raise pickle.UnpicklingError('it is a tar archive, as PyTorch wrote before 0.1.10')


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
    if head[:1] == b'\x80' or tarfile.is_tarfile(path):  # formats of torch before 1.6
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
