"""Results: a line of JSON each where they are made, a file each in docs/study/results.

A GPU machine gives back few files, so a run appends a line to ``OUT/<task>.jsonl``;
``run.py import`` spreads the lines to ``docs/study/results/<task>/<arm>_<seed>.json``.
"""

import errno
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasks import Task

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
    """Add a record to the lines of its task, beside other processes.

    Raises:
        OSError: The disk was full within the line, which is then no record. The next one has a line
            of its own.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / f'{record["task"]}.jsonl'
    line = json.dumps(record, allow_nan=False).encode() + b'\n'
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b'\n':  # one that was cut off
            line = b'\n' + line
        if os.write(file, line) < len(line) - 1:  # without its end it is a record
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
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


def trial(record: dict[str, Any], tasks: Mapping[str, 'Task'], labels: Collection[str]) -> str:
    """Why a record is none of the study's results, '' if it is one."""
    task, arm = tasks.get(record['task']), record['arm']
    if task is None:
        return f'the study has no task {record["task"]!r}'
    if arm not in task.arms or record.get('label', '') not in labels:
        return f'the task has no arm {arm!r} with the settings {record.get("label", "")!r}'
    seeds = task.planned_seeds(arm)
    if record.get('seed', 0) not in seeds:
        return f'its seed is {record["seed"]}, and the study has {seeds.start} to {seeds[-1]}'
    if not is_of_length(record, {task.name: task.steps}):
        return f'it has {record.get("settings", {}).get("steps")} steps, and the task {task.steps}'
    return ''


def spread(
    out: Path, results: Path, tasks: Mapping[str, 'Task'], labels: Collection[str]
) -> tuple[int, int, list[str]]:
    """Write a file for each record of a folder but those of trials.

    A run that is there already stays. A cost that was measured again replaces the older one.

    Args:
        out (Path): Folder of the lines.
        results (Path): Folder of the files.
        tasks (Mapping): Of the study, by name.
        labels (Collection): Of its settings.

    Returns:
        tuple: Files written, records that were there, and a line for each that is left out.

    Raises:
        FileNotFoundError: There are no lines in ``out``.
        ValueError: A line is no record.
    """
    if not any(out.glob('*.jsonl')):
        raise FileNotFoundError(f'{out} holds no results: no file *.jsonl is there')
    written, kept, left_out = 0, 0, []
    for record in read_lines(out):
        if not {'task', 'arm'} <= record.keys():
            raise ValueError(f'{out} holds a line without task or arm: {str(record)[:80]}')
        file = results / file_name(record)
        text = json.dumps(record, indent=1) + '\n'
        if reason := trial(record, tasks, labels):
            left_out.append(f'left out: {file_name(record)}, {reason}.')
        elif file.exists() and ('seed' in record or file.read_text() == text):
            kept += 1
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            written += 1
    return written, kept, left_out


def finished(out: Path, results: Path | None, steps: Mapping[str, int]) -> set[str]:
    """Names of the files that there are, and of the lines in ``out`` of runs with these steps.

    Without ``results``, of the lines alone.
    """
    files = results.glob('*/*.json') if results else ()
    there = {str(file.relative_to(results)) for file in files}
    return there | {file_name(record) for record in read_lines(out) if is_of_length(record, steps)}
