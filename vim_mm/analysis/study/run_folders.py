"""The runs that ``tools/run_all_methods.py`` made, read for the comparison of methods."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vim_mm.analysis.runs.work_dir import read_history
from vim_mm.analysis.study.comparison import TaskResults

# What all runs of a comparison must have in common, and where their records have it.
_ALIKE = {
    'path of the scans': ('ran', 'path'),
    'commit': ('commit',),
    'torch': ('ran', 'versions', 'torch'),
    'machine': ('ran', 'card'),
    'arguments': ('arguments',),
    'threads': ('ran', 'threads'),
}
# A run whose loss became NaN counts; its spoilt weights predict nothing.
DIVERGED_METRIC = 0.0


class UnlikeRunsError(ValueError):
    """Runs differ in more than the method and the seed."""


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The folders with a record among ``paths`` and right below them."""
    found: dict[Path, None] = {}
    for path in paths:
        records = [path / 'run.json', *sorted(path.glob('*/run.json'))]
        found.update(dict.fromkeys(record.parent for record in records if record.exists()))
    return [*found]


def read_runs(
    folders: Iterable[Path], allow_unlike: bool = False
) -> tuple[list[TaskResults], list[str]]:
    """The results of runs: a task for each config and metric.

    Args:
        folders (Iterable[Path]): As :func:`find_runs` gives them.
        allow_unlike (bool): Take runs of another path, commit, torch or machine as well.

    Returns:
        tuple: The tasks, and a line for each run that is left out because it has not ended.

    Raises:
        UnlikeRunsError: Runs of a task differ in what ``_ALIKE`` names.
        ValueError: A run has no seed, or two have the same method and seed.
    """
    grouped: dict[str, list[dict[str, Any]]] = {}
    left_out = []
    for folder in folders:
        record = json.loads((folder / 'run.json').read_text()) | {'folder': folder}
        if record.get('status') in ('finished', 'diverged'):
            grouped.setdefault(record['task'], []).append(record)
        else:
            left_out.append(f'left out: {folder} is {record.get("status", "unfinished")}.')
    tasks = []
    for name, records in grouped.items():
        if not allow_unlike:
            _insist_on_likeness(name, records)
        tasks += _tasks(name, records)
    return tasks, left_out


def _insist_on_likeness(task: str, records: list[dict[str, Any]]) -> None:
    for words, keys in _ALIKE.items():
        values = {str(_look_up(record, keys)): record['folder'] for record in records}
        if len(values) > 1:
            examples = ', '.join(f'{value} in {folder}' for value, folder in values.items())
            raise UnlikeRunsError(
                f'the runs of {task} differ in more than method and seed: {words} is {examples}. '
                'Insist with --allow-unlike.'
            )


def _look_up(record: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        record = record.get(key, {}) if isinstance(record, dict) else None
    return record


def _tasks(name: str, records: list[dict[str, Any]]) -> list[TaskResults]:
    """One for each metric that the runs logged."""
    histories = {record['folder']: _history(record) for record in records}
    metrics = dict.fromkeys(metric for _, found in histories.values() for metric in found)
    if not metrics:
        raise ValueError(f'no run of {name} has logged a metric')
    tasks = []
    for metric in metrics:
        task = TaskResults(f'{name} {metric}', planned=None)
        longest = max((found.get(metric, []) for _, found in histories.values()), key=len)
        for record in records:
            arm, seed = record['method'], record['seed']
            if seed is None:
                raise ValueError(f'{record["folder"]} has no seed, so it has no pair')
            runs = task.runs.setdefault(arm, {})
            if seed in runs:
                raise ValueError(f'{name} has two runs of {arm} with seed {seed}')
            points = histories[record['folder']][1].get(metric, [])
            runs[seed] = _result(record, points, [step for step, _ in longest])
        tasks.append(task)
    return tasks


def _history(record: dict[str, Any]) -> tuple[list, dict[str, list[tuple[int, float]]]]:
    try:
        return read_history(record['folder'])
    except FileNotFoundError:  # diverged before the first line of its log
        return [], {}


def _result(
    record: dict[str, Any], points: list[tuple[int, float]], steps: list[int]
) -> dict[str, Any]:
    """A run as ``TaskResults`` has it; one that diverged has its value from then on."""
    diverged = record['status'] == 'diverged'
    curve = [[step, value] for step, value in points]
    if diverged:
        curve += [[step, DIVERGED_METRIC] for step in steps[len(curve) :]]
    elif not curve:
        raise ValueError(f'{record["folder"]} has logged no metric')
    ran = record.get('ran', {})
    return {
        'metric': DIVERGED_METRIC if diverged else curve[-1][1],
        'curve': curve,
        'diverged': diverged,
        'settings': {'steps': steps[-1]},
        'card': ran.get('card', 'unknown'),
        'commit': record['commit'],
        'date': ran.get('date', 'unknown'),
    }
