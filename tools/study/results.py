"""Results: a line of JSON each where they are made, a file each in docs/study/results.

A GPU machine gives back few files, so a run appends a line to ``OUT/<task>.jsonl``;
``run.py import`` spreads the lines to ``docs/study/results/<task>/<arm>_<seed>.json``.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / 'docs/study/results'


@dataclass(frozen=True)
class Job:
    """A run to make. ``label`` is empty for the primary setting, else it names the grid's point."""

    task: str
    arm: str
    seed: int
    label: str = ''

    @property
    def file(self) -> str:
        """Of its result, see :func:`file_name`."""
        return file_name(vars(self))


def file_name(record: dict[str, Any]) -> str:
    """Where a record stands under the folder of results."""
    label = record.get('label', '')
    folder = f'{record["task"]}_{label}' if label else record['task']
    ending = record.get('seed', 'cost')
    return f'{folder}/{record["arm"]}_{ending}.json'


def append(out: Path, record: dict[str, Any]) -> None:
    """Add a record to the lines of its task, whole or not at all, beside other processes."""
    out.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record, allow_nan=False) + '\n'
    file = os.open(out / f'{record["task"]}.jsonl', os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def read_lines(out: Path) -> Iterator[dict[str, Any]]:
    """The records in a folder's .jsonl files; a line that was cut off is left out."""
    from vim_mm.json_lines import read_json_lines

    for file in sorted(out.glob('*.jsonl')):
        yield from read_json_lines(file)


def spread(out: Path, results: Path = RESULTS) -> tuple[int, int]:
    """Write a file for each record of a folder. What is there already stays.

    Returns:
        tuple: Files written, and records that were there.
    """
    written = kept = 0
    for record in read_lines(out):
        file = results / file_name(record)
        if file.exists():
            kept += 1
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record, indent=1) + '\n')
        written += 1
    return written, kept


def finished(out: Path, results: Path = RESULTS) -> set[str]:
    """Names of the files that there are, or will be once ``out`` is spread."""
    there = {str(file.relative_to(results)) for file in results.glob('*/*.json')}
    return there | {file_name(record) for record in read_lines(out)}
