"""Progress of long work: a bar on a terminal, nothing in a file."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import Event, Thread
from typing import Any, TypeVar

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


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show what the block does, and for how long, where the error output is a terminal.

    For work that takes more than ten seconds and has no parts that could be counted.

    Args:
        what (str): 'exporting model.onnx'.
    """
    with tqdm(desc=what, bar_format='{desc}: {elapsed}', disable=None, leave=False) as line:
        if line.disable:
            yield
            return
        done = Event()

        def tick() -> None:
            while not done.wait(1):
                line.refresh()

        ticker = Thread(target=tick, daemon=True)
        ticker.start()
        try:
            yield
        finally:
            done.set()
            ticker.join()


def slow_at_first(call: Callable[..., T], what: str) -> Callable[..., T]:
    """The same callable, whose first call, which compiles it, is shown by :func:`working`."""
    begun = False

    @wraps(call)
    def told(*args: Any, **kwargs: Any) -> T:
        nonlocal begun
        if begun:
            return call(*args, **kwargs)
        begun = True
        with working(what):
            return call(*args, **kwargs)

    return told


def say(line: str) -> None:
    """Print a line to the output, above a bar if there is one."""
    tqdm.write(line)
