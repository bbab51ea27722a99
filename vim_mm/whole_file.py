"""Files that appear whole or not at all."""

import errno
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_TOKEN = 8  # random bytes in the name of a part
# Folders of some file systems cannot be synchronized, or not be opened: there is no more to be had.
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)


@contextmanager
def whole_file(path: Path, follow_links: bool = True) -> Iterator[Path]:
    """Where to write a file, which takes its name ``path`` when the block ends.

    Whenever the process is killed, or the machine goes down, ``path`` is what it was before or the
    whole new file: the part is on the disk before it gets the name. If the block raises, what it
    has written is removed. What a killed process leaves, :func:`remove_parts` removes.
    A private file of the user stays private.

    Args:
        path (Path): Its folder exists.
        follow_links (bool): Whether a link stays, and the file that it leads to is written. Then
            devices and pipes, which are no files that could be replaced, are written into. False
            replaces whatever has the name, and nothing outside of the folder changes.

    Yields:
        Path: An empty file in the same folder, whose name nobody could foresee and ends in '.part';
        of a device or a pipe ``path``.

    Raises:
        OSError: The block or the renaming raised one, as on a full disk; names file and reason.
    """
    try:
        if follow_links and _is_special(path):
            yield path
            return
        file = Path(os.path.realpath(path)) if follow_links else path
        part = file.with_name(f'{file.name}.{secrets.token_hex(_TOKEN)}.part')
        try:
            # Never through a link, nor into a file that is there.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            os.close(os.open(part, flags, _mode(file)))
            yield part
            _synchronize(part)
            part.replace(file)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise
        try:
            _synchronize(file.parent)
        except OSError as error:
            if error.errno not in _NO_SYNC:
                raise
    except OSError as error:
        raise OSError(f'{path} cannot be written ({error.strerror or error})') from None


def remove_parts(folder: Path, names: Collection[str]) -> None:
    """Remove what killed processes have left of files; nobody may be writing one of them.

    Args:
        folder (Path): Where the files are, or may be.
        names (Collection[str]): Of the whole files.
    """
    for part in folder.glob('*.part'):
        name, _, token = part.stem.rpartition('.')
        if name in names and re.fullmatch(rf'[0-9a-f]{{{2 * _TOKEN}}}', token):
            part.unlink()


def _mode(file: Path) -> int:
    """The mode, before the umask, of what replaces a file: the file's own, if the user owns it.

    That of another's file is not taken: only its bits would be, so its owner could lose access.
    """
    with suppress(FileNotFoundError):
        before = file.lstat()
        if stat.S_ISREG(before.st_mode) and before.st_uid == os.geteuid():
            return before.st_mode & 0o666 | stat.S_IRUSR | stat.S_IWUSR  # to write the part
    return 0o666


def _synchronize(path: Path) -> None:
    """Wait until the content of a file or a folder is on the disk."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _is_special(path: Path) -> bool:
    """Whether it is a device or a pipe, or one of the links in /dev, such as /dev/stdout."""
    there = path.exists() and not path.is_file() and not path.is_dir()
    return there or path.absolute().parent == Path('/dev')
