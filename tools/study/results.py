"""Results: a line of JSON each where they are made, a file each in docs/study/results.

A GPU machine gives back few files, so a run appends a line to ``OUT/<task>.jsonl``;
``run.py import`` spreads the lines to ``docs/study/results/<task>/<arm>_<seed>.json``.
"""

import json
import os
from collections.abc import Iterator, Mapping
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


def is_of_length(record: dict[str, Any], steps: Mapping[str, int]) -> bool:
    """Whether a record is of a run with the steps of its task; a cost has none."""
    found = record.get('settings', {}).get('steps')
    return 'seed' not in record or found == steps.get(record['task'])


def trial(record: dict[str, Any], steps: Mapping[str, int]) -> str | None:
    """Why a record is none of the study's results, None if it is one."""
    from vim_mm.analysis.study.comparison import PLANNED_SEEDS

    if record['task'] not in steps:
        return f'the study has no task {record["task"]!r}'
    if not 0 <= record.get('seed', 0) < PLANNED_SEEDS:
        return f'its seed is {record["seed"]}, and the study has 0 to {PLANNED_SEEDS - 1}'
    if not is_of_length(record, steps):
        found = record.get('settings', {}).get('steps')
        return f'it has {found} steps, and the task {steps[record["task"]]}'
    return None


def spread(out: Path, results: Path, steps: Mapping[str, int]) -> tuple[int, int, list[str]]:
    """Write a file for each record of a folder but those of trials. What is there already stays.

    Args:
        out (Path): Folder of the lines.
        results (Path): Folder of the files.
        steps (Mapping): Of each task of the study, by name.

    Returns:
        tuple: Files written, records that were there, and a line for each that is left out.

    Raises:
        FileNotFoundError: There are no lines in ``out``.
    """
    if not any(out.glob('*.jsonl')):
        raise FileNotFoundError(f'{out} holds no results: no file *.jsonl is there')
    written, kept, left_out = 0, 0, []
    for record in read_lines(out):
        file = results / file_name(record)
        if reason := trial(record, steps):
            left_out.append(f'left out: {file_name(record)}, {reason}.')
        elif file.exists():
            kept += 1
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(record, indent=1) + '\n')
            written += 1
    return written, kept, left_out


def finished(out: Path, results: Path, steps: Mapping[str, int]) -> set[str]:
    """Names of the files that there are, and of the lines in ``out`` of runs with these steps."""
    there = {str(file.relative_to(results)) for file in results.glob('*/*.json')}
    return there | {file_name(record) for record in read_lines(out) if is_of_length(record, steps)}
