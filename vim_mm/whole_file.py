"""Files that appear whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write a file, which takes its name ``path`` when the block ends.

    Whenever the process is killed, ``path`` is what it was before or the whole new file. If the
    block raises, what it has written is removed. For one writer at a time.

    A link stays, and the file that it leads to is written. Devices and pipes are no files that
    could be replaced: there the block writes into ``path`` itself.

    Args:
        path (Path): Its folder exists.

    Yields:
        Path: The file with '.part' added, in the same folder; of a device or a pipe ``path``.

    Raises:
        OSError: The block or the renaming raised one, as on a full disk; names file and reason.
    """
    try:
        if _is_special(path):
            yield path
            return
        file = Path(os.path.realpath(path))
        part = file.with_name(f'{file.name}.part')
        try:
            yield part
            part.replace(file)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise
    except OSError as error:
        raise OSError(f'{path} cannot be written ({error.strerror or error})') from None


def _is_special(path: Path) -> bool:
    """Whether it is a device or a pipe, or one of the links in /dev, such as /dev/stdout."""
    there = path.exists() and not path.is_file() and not path.is_dir()
    return there or path.absolute().parent == Path('/dev')
