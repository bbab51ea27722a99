"""Files of JSON: whole ones, and those with a record a line, as a training writes its log."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vim_mm.errors import UserValueError


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        ValueError: It holds something else; names the file.
    """
    try:
        found = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:  # of the text's encoding as well
        raise UserValueError(f'{file} is no JSON file: {error}') from None
    return _object(found, str(file))


def read_json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The records of a file. A line that was cut off, as by a kill, is left out.

    Raises:
        ValueError: A line is JSON and no record, or is more than Python reads, or the file is no
            text; names the file.
    """
    try:
        text = file.read_text()
    except UnicodeDecodeError as error:
        raise UserValueError(f'{file} is no JSON file: {error}') from None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue
        except (ValueError, RecursionError) as error:
            raise UserValueError(f'{file}, line {number}, is no JSON: {error}') from None
        yield _object(found, f'{file}, line {number},')


def _object(found: Any, name: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise UserValueError(f'{name} holds no JSON object: {str(found)[:40]!r}')
    return found
