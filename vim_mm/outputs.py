"""Whether a command would write over what it reads."""

from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path

from vim_mm.errors import UserValueError

# Arguments of the commands that name what they write, and what they read.
_WRITTEN = ('out', 'output', 'markdown', 'latex', 'page', 'picture', 'record')
_READ = (
    'config', 'configs', 'checkpoint', 'checkpoints', 'resume', 'input', 'source', 'video',
    'results', 'work_dirs',
)  # fmt: skip


def check_outputs(outputs: Iterable[str | Path], inputs: Iterable[tuple[str, str | Path]]) -> None:
    """Raise ValueError if an output is an input, also by another path or through links.

    Args:
        outputs: Files or folders that will be written; what is not there yet replaces nothing.
        inputs: What a file or folder is that is read ('the checkpoint'), and its path.
    """
    read: dict[tuple[int, int], str] = {}
    for name, path in inputs:
        if (found := _identity(path)) is not None:
            read.setdefault(found, name)
    for output in outputs:
        found = _identity(output)
        if found in read:
            kind = 'folder' if Path(output).is_dir() else 'file'
            raise UserValueError(
                f'the output must be another {kind} than {read[found]}, got {output}'
            )


def written_by(args: Namespace) -> list[str | Path]:
    """The paths that the arguments of a command name for what it writes."""
    return [path for name in _WRITTEN for path in _paths(getattr(args, name, None))]


def check_arguments(args: Namespace) -> None:
    """:func:`check_outputs` of the paths among the arguments of a command.

    Raises:
        ValueError: What is written by one is read by another, such as ``--out`` and ``config``.
    """
    inputs = [
        (f'the {name.replace("_", " ")}', path)
        for name in _READ
        for path in _paths(getattr(args, name, None))
    ]
    check_outputs(written_by(args), inputs)


def _paths(value: object) -> Iterator[str | Path]:
    """The texts that may be paths: one, those of a list, and what follows NAME=."""
    if isinstance(value, str | Path):
        yield value
        if '=' in str(value):
            yield str(value).partition('=')[2]
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _paths(each)


def _identity(path: str | Path) -> tuple[int, int] | None:
    """What all paths and links to one file or folder have in common; None if it is not there."""
    try:
        found = Path(path).stat()
    except (OSError, ValueError):  # a null character
        return None
    return found.st_dev, found.st_ino
