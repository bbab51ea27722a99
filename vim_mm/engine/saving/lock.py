"""One training at a time writes into a folder.

The lock is ``flock`` of the file ``.lock``, so it ends with the process, however that ends. The
file says who holds it.
"""

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

from mmengine.logging import print_log

from vim_mm.errors import UserError

# What a process gets that trains for the one that holds the lock: its file descriptor, and the word
# that the file holds. Processes in between, such as torchrun, may have closed the descriptor.
VARIABLE = 'VIM_MM_FOLDER_LOCK'
# Some network file systems have no locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


class FolderTakenError(UserError, RuntimeError):
    """Another training writes into the folder."""


class FolderLock:
    """The right to write into a folder, until :meth:`release` or the end of the process.

    A process that was started with :attr:`variables` in its environment has it as well.

    Args:
        folder (Path): Made where there is none.

    Raises:
        FolderTakenError: Another process has it; the message says which, and since when.
        OSError: The folder cannot be written.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.number: int | None = None
        self._word = secrets.token_hex(8)
        self._is_lent = False
        folder.mkdir(parents=True, exist_ok=True)
        number = os.open(folder / '.lock', os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._introduce(number)
        except BlockingIOError:
            holder = _read(number)
            os.close(number)
            self._borrow(holder)
        except OSError as error:
            os.close(number)
            if error.errno not in _NO_LOCKS:
                raise
            print_log(
                f'{folder} cannot be locked ({error.strerror}): see to it that no other training '
                'writes there.',
                'current',
                logging.WARNING,
            )
        else:
            self.number = number
        if self.number is not None:
            _OPEN.add(self.number)

    def _introduce(self, number: int) -> None:
        since = datetime.now().astimezone().isoformat(' ', 'seconds')
        holder = dict(host=socket.gethostname(), pid=os.getpid(), since=since, word=self._word)
        os.ftruncate(number, 0)
        os.pwrite(number, f'{json.dumps(holder)}\n'.encode(), 0)

    def _borrow(self, holder: dict) -> None:
        """Train for the process that holds the lock, if it has started this one."""
        number, _, word = os.environ.get(VARIABLE, '').partition(' ')
        if not word or word != holder.get('word'):
            who = (
                'process {pid} on {host} since {since}'.format_map(holder)
                if {'pid', 'host', 'since'} <= holder.keys()
                else 'another process'
            )
            raise FolderTakenError(
                f'{self.folder} is being trained by {who}: wait for its end, or choose another '
                '--work-dir'
            )
        self._word, self._is_lent = word, True
        if number.isdecimal() and _same(int(number), self.folder / '.lock'):
            self.number = int(number)

    @property
    def numbers(self) -> list[int]:
        """File descriptors that such a process must inherit, to have it beyond the end of this."""
        return [] if self.number is None else [self.number]

    @property
    def variables(self) -> dict[str, str]:
        """For the environment of a process that trains in place of this one."""
        return {VARIABLE: f'{self.number} {self._word}'}

    def release(self) -> None:
        """Let others train here."""
        if self.number is None:
            return
        if not self._is_lent:
            fcntl.flock(self.number, fcntl.LOCK_UN)
        _OPEN.discard(self.number)
        os.close(self.number)
        self.number = None


def _read(number: int) -> dict:
    """Who holds a lock; nothing while it is being written."""
    try:
        holder = json.loads(os.pread(number, 4096, 0))
    except (ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _same(number: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(number), file.stat())
    except OSError:
        return False


# Loaders' workers outlive a process that is killed for some seconds, and shall not hold its locks.
_OPEN: set[int] = set()


def _close_all() -> None:
    for number in _OPEN:
        os.close(number)
    _OPEN.clear()


os.register_at_fork(after_in_child=_close_all)

# Locks that were taken before the runner was built, by folder.
_TAKEN: dict[Path, FolderLock] = {}


def take(*folders: Path) -> None:
    """Lock folders for the training that this process is about to begin, see :func:`locked`.

    Raises:
        FolderTakenError: Another training writes into one of them.
    """
    for folder in _distinct(folders):
        _TAKEN[folder] = FolderLock(folder)


@contextmanager
def locked(*folders: Path) -> Iterator[None]:
    """Hold the locks of folders, those that were taken before among them.

    Raises:
        FolderTakenError: Another training writes into one of them.
    """
    with ExitStack() as stack:
        for folder in _distinct(folders):
            lock = _TAKEN.pop(folder, None) or FolderLock(folder)
            stack.callback(lock.release)
        yield


def _distinct(folders: Iterable[Path]) -> Iterable[Path]:
    return dict.fromkeys(folder.resolve() for folder in folders)
