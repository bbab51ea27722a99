"""Files that appear whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write a file, which takes its name ``path`` when the block ends.

    Whenever the process is killed, ``path`` is what it was before or the whole new file. If the
    block raises, what it has written is removed. For one writer at a time.

    Args:
        path (Path): Its folder exists.

    Yields:
        Path: ``path`` with '.part' added, in the same folder.

    Raises:
        OSError: The block or the renaming raised one, as on a full disk; names file and reason.
    """
    part = path.with_name(f'{path.name}.part')
    try:
        yield part
        part.replace(path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink()
        if isinstance(error, OSError):
            raise OSError(f'{path} cannot be written ({error.strerror or error})') from None
        raise
