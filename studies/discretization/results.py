"""Results as lines of JSON: where they are made, and in ``runs``, a file for each task and setting.

A GPU machine gives back few files, so a run appends a line to ``OUT/<task>.jsonl``;
``run.py import`` appends those of the study to ``runs/<task>.jsonl`` or
``runs/<task>_<setting>.jsonl``.
"""

import errno
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from studies.discretization.tasks import Task

RUNS = Path(__file__).parent / 'runs'
Key = tuple[str, str, int | str]


@dataclass(frozen=True)
class Job:
    """A run to make. ``label`` is empty for the primary setting, else it names the grid's point."""

    task: str
    arm: str
    seed: int
    label: str = ''

    @property
    def key(self) -> Key:
        """Of its result, see :func:`key`."""
        return key(vars(self))


def key(record: Mapping[str, Any]) -> Key:
    """What a record is of: task with its setting, arm, and the seed or 'cost'."""
    label = record.get('label', '')
    name = f'{record["task"]}_{label}' if label else record['task']
    return name, record['arm'], record.get('seed', 'cost')


def append(file: Path, record: Mapping[str, Any]) -> None:
    """Add a record to a file of lines, beside other processes.

    Raises:
        OSError: The disk was full within the line, which is then no record. The next one has a line
            of its own.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record, allow_nan=False).encode() + b'\n'
    number = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(number).st_size
        if size and os.pread(number, 1, size - 1) != b'\n':  # one that was cut off
            line = b'\n' + line
        if os.write(number, line) < len(line) - 1:  # without its end it is a record
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
    finally:
        os.close(number)


def read_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """The records in a folder's .jsonl files; a line that was cut off is left out."""
    from vim_mm.json_lines import read_json_lines  # after the arguments: --help takes no PyTorch

    for file in sorted(folder.glob('*.jsonl')):
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


def take(
    out: Path, runs: Path, tasks: Mapping[str, 'Task'], labels: Collection[str]
) -> tuple[int, int, list[str]]:
    """Append the records of a folder to the files of the study, but for those of trials.

    A run that is there already stays. A cost that was measured again comes after the older one,
    and the last one counts.

    Args:
        out (Path): Folder of the lines.
        runs (Path): Folder of the study's files.
        tasks (Mapping): Of the study, by name.
        labels (Collection): Of its settings.

    Returns:
        tuple: Records taken, records that were there, and a line for each that is left out.

    Raises:
        FileNotFoundError: There are no lines in ``out``.
        ValueError: A line is no record.
    """
    if not any(out.glob('*.jsonl')):
        raise FileNotFoundError(f'{out} holds no results: no file *.jsonl is there')
    there = {key(record): record for record in read_lines(runs) if 'arm' in record}
    taken, kept, left_out = 0, 0, []
    for record in read_lines(out):
        if not {'task', 'arm'} <= record.keys():
            raise ValueError(f'{out} holds a line without task or arm: {str(record)[:80]}')
        name, arm, which = key(record)
        if reason := trial(record, tasks, labels):
            left_out.append(f'left out: {name} {arm} {which}, {reason}.')
        elif key(record) in there and ('seed' in record or record == there[key(record)]):
            kept += 1
        else:
            append(runs / f'{name}.jsonl', record)
            there[key(record)] = record
            taken += 1
    return taken, kept, left_out


def finished(out: Path, runs: Path | None, steps: Mapping[str, int]) -> set[Key]:
    """The results of the study, and those in ``out`` of runs with these steps.

    Without ``runs``, the latter alone.
    """
    there = {key(record) for record in read_lines(runs) if 'arm' in record} if runs else set()
    return there | {key(record) for record in read_lines(out) if is_of_length(record, steps)}
