"""Configs by name, found before anything is imported that takes seconds."""

from importlib.util import find_spec
from pathlib import Path


def find_config(name: str) -> Path:
    """The file of a config: a path, 'mmseg::swin/...' of a library, or one that vim_mm ships.

    Raises:
        FileNotFoundError: There is none.
    """
    if Path(name).is_file():
        return Path(name)
    scope, _, rest = name.rpartition('::')
    library = scope or 'vim_mm'
    spec = find_spec(library)  # of a library, which it does not import
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f'{name}: {library} is not installed')
    file = Path(spec.origin).parent / '.mim/configs' / rest
    if file.is_file():
        return file.resolve() if library == 'vim_mm' else file
    if library != 'vim_mm':
        raise FileNotFoundError(f'{library} has no config {rest}')
    raise FileNotFoundError(f'there is no file {name}, and vim_mm ships no such config')


def missing_config(names: list[str]) -> str | None:
    """Why one of the names is no config; None if all are, or are folders or patterns of names."""
    try:
        for name in names:
            if '{method}' not in name and not Path(name).is_dir():
                find_config(name)
    except FileNotFoundError as error:
        return str(error)
    return None
