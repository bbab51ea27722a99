"""Files with a record of JSON a line, as a training writes its log."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The records of a file. A line that was cut off, as by a kill, is left out."""
    for line in file.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue
