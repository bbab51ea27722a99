"""Progress of long work: a bar on a terminal, nothing in a file."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar('T')


def progress(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Go through the items, with a bar where the error output is a terminal.

    Args:
        items (Iterable): What the work goes through.
        what (str): What the items are, in front of the bar: 'pictures'.
        total (int, optional): Their number, where ``items`` has no length.
    """
    yield from tqdm(items, desc=what, total=total, disable=None, leave=False)


def say(line: str) -> None:
    """Print a line to the output, above a bar if there is one."""
    tqdm.write(line)
