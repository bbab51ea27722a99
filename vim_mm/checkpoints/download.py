"""Checkpoints by their URL: downloaded once, whole, under a name that no other URL has."""

import hashlib
import http.client
import re
import uuid
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import torch

from vim_mm.checkpoints.file import NotACheckpointError, read_file
from vim_mm.progress import progress

_BLOCK = 2**20  # bytes
_TIMEOUT = 60  # seconds without a byte


def read_downloaded(url: str, map_location: str | None = None) -> dict:
    """:func:`vim_mm.checkpoints.file.read_file` of a URL; what is no whole checkpoint is not kept.

    Not every server tells the length of a file, so that a part can look like a whole download.
    """
    path = downloaded(url)
    try:
        return read_file(path, map_location, url)
    except NotACheckpointError:
        path.unlink(missing_ok=True)
        raise


def downloaded(url: str) -> Path:
    """The file of a URL, from the cache in torch.hub's directory, or from the net into it.

    Args:
        url (str): Of http or https.

    Raises:
        OSError: It cannot be downloaded, or is shorter than the server says; nothing is kept.
    """
    # The whole URL makes the name: many models are called model.pth.
    name = re.sub(r'[^\w.-]', '_', Path(urlsplit(url).path).name)[-100:]
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    path = Path(torch.hub.get_dir()) / 'checkpoints' / f'{digest}-{name}'
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f'{path.name}.{uuid.uuid4().hex}.part')
        try:
            _download(url, part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    return path


def _download(url: str, path: Path) -> None:
    try:
        with urlopen(Request(url, headers={'User-Agent': 'vim_mm'}), timeout=_TIMEOUT) as answer:
            length = answer.headers.get('Content-Length') or ''
            expected = int(length) if re.fullmatch(r'\d{1,18}', length) else None
            blocks = None if expected is None else -(-expected // _BLOCK)
            with path.open('xb') as file:
                parts = iter(lambda: answer.read(_BLOCK), b'')
                for block in progress(parts, f'{url}, in MiB', blocks):
                    file.write(block)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, 'reason', None) or error
        raise OSError(f'{url} cannot be downloaded: {reason}') from error
    size = path.stat().st_size
    if expected is not None and size != expected:
        raise OSError(f'{url} cannot be downloaded: {size} of {expected} bytes came')
