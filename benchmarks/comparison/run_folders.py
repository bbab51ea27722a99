"""The runs that ``tools/run_all_methods.py`` made, read for the comparison of methods."""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.comparison.results import TaskResults
from benchmarks.runs.work_dir import DETECTION_METRICS, Log, read_log
from vim_mm.engine.saving.written import PointerError, last_checkpoint
from vim_mm.engine.watching.run_record import status_of
from vim_mm.json_lines import read_json

# What all runs of a comparison must have in common, and where their records have it.
_ALIKE = {
    'path of the scans': ('ran', 'path'),
    'commit': ('commit',),
    'torch': ('ran', 'versions', 'torch'),
    'machine': ('ran', 'card'),
    'arguments': ('arguments',),
    'threads': ('ran', 'threads'),
    'number of processes': ('processes',),
    'config without method and seed (its digest)': ('shared_sha256',),
}
_LONG_HASH = re.compile(r'\b([0-9a-f]{7})[0-9a-f]{33}\b')
_NEEDED = ('task', 'method', 'seed', 'commit')  # of a record
# A run whose loss became NaN counts; its spoilt weights predict nothing.
DIVERGED_METRIC = 0.0
NOTHING_FOUND = 0.0  # the AP of a detector without a detection, of which MMDetection logs none


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
        allow_unlike (bool): Take runs that differ in what ``_ALIKE`` names as well.

    Returns:
        tuple: The tasks, and a line for each run that is left out because it has not ended, or has
        no metric of the last step of training.

    Raises:
        UnlikeRunsError: Runs of a task differ in what ``_ALIKE`` names.
        ValueError: A run has no seed, or two have the same method and seed, or the last metric of
            one is not finite; or a file holds something else than it should, and is named.
    """
    grouped: dict[str, list[dict[str, Any]]] = {}
    left_out = []
    for folder in folders:
        record = read_json(folder / 'run.json') | {'folder': folder}
        record['status'] = status_of(record)
        if record['status'] in ('finished', 'diverged'):
            if missing := [name for name in _NEEDED if name not in record]:
                raise ValueError(f'{folder / "run.json"} lacks {", ".join(missing)}')
            grouped.setdefault(record['task'], []).append(record)
        else:
            left_out.append(f'left out: {folder} is {record["status"] or "unfinished"}.')
    tasks = []
    for name, records in grouped.items():
        if not allow_unlike:
            _insist_on_likeness(name, records)
        found, without_end = _tasks(name, records)
        tasks += found
        left_out += without_end
    return tasks, left_out


def _insist_on_likeness(task: str, records: list[dict[str, Any]]) -> None:
    for words, keys in _ALIKE.items():
        values = {
            str(_look_up(record | {'ran': ran}, keys)): record['folder']
            for record in records
            for ran in _starts(record)
        }
        if len(values) > 1:
            examples = ', '.join(f'{value} in {folder}' for value, folder in values.items())
            raise UnlikeRunsError(
                f'the runs of {task} differ in more than method and seed: {words} is {examples}. '
                'Insist with --allow-unlike.'
            )


def _starts(record: dict[str, Any]) -> list[dict[str, Any]]:
    """What ran when the run began, and each time that it went on by something else."""
    ran = record.get('ran', {})
    return [ran, *(ran | changed for changed in record.get('resumed', []))]


def _look_up(record: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        record = record.get(key, {}) if isinstance(record, dict) else None
    return record


def _tasks(name: str, records: list[dict[str, Any]]) -> tuple[list[TaskResults], list[str]]:
    """One for each metric that the runs logged, and a line for each run that is left out."""
    logs = {record['folder']: read_log(record['folder']) for record in records}
    metrics = dict.fromkeys(metric for log in logs.values() for metric in log.metrics)
    if not metrics:
        raise ValueError(f'no run of {name} has logged a metric')
    end = max(_last_step(folder, log) for folder, log in logs.items())
    tasks, left_out = [], []
    for metric in metrics:
        task = TaskResults(f'{name} {metric}')
        points = {folder: dict(log.metrics.get(metric, [])) for folder, log in logs.items()}
        if metric in DETECTION_METRICS:
            for folder, log in logs.items():
                points[folder] = dict.fromkeys(log.validated, NOTHING_FOUND) | points[folder]
        finished = [points[r['folder']] for r in records if r['status'] == 'finished']
        # A run that was killed in a validation lacks that point of its curve: then all do.
        shared = set.intersection(*([{*each} for each in finished if end in each] or [{end}]))
        for record in records:
            folder, arm, seed = record['folder'], record['method'], record['seed']
            if seed is None:
                raise ValueError(f'{folder} has no seed, so it has no pair')
            if record['status'] == 'finished' and end not in points[folder]:
                last = f'only of step {max(points[folder])}' if points[folder] else 'and no other'
                left_out.append(
                    f'left out: {folder} has no {metric} of step {end}, the last one, {last}.'
                )
                continue
            if record['status'] == 'finished' and not math.isfinite(points[folder][end]):
                raise ValueError(f'{folder}: {metric} of step {end} is {points[folder][end]}')
            runs = task.runs.setdefault(arm, {})
            if seed in runs:
                raise ValueError(f'{name} has two runs of {arm} with seed {seed}')
            runs[seed] = _result(record, points[folder], sorted(shared))
        if task.runs:
            tasks.append(task)
    return tasks, left_out


def _last_step(folder: Path, log: Log) -> int:
    """The last step of a run that its log or its checkpoint knows, in the unit of its metrics.

    That is epochs in a loop by epochs, whose losses have iterations. In a loop by iterations
    MMEngine's own log notes epoch 0 with all metrics; the shipped configs change that.
    """
    trained = [step for step, _ in log.losses]
    try:
        checkpoint = last_checkpoint(folder)
    except PointerError:  # it was deleted
        checkpoint = None
    unit, _, count = checkpoint.stem.partition('_') if checkpoint else ('', '', '')
    # Losses are logged at intervals. The checkpoint is of the end.
    saved = [int(count)] if count.isdecimal() else []
    if log.validated and not any(log.validated):
        return 0
    # The log of a loop by iterations may count epochs as well, and checkpoints iterations.
    by_epoch = log.epoch is not None and max(log.validated, default=0) <= log.epoch
    if unit == 'epoch' or by_epoch:
        ended = [log.epoch] if by_epoch else []
        return max([*log.validated, *ended, *(saved if unit == 'epoch' else [])], default=0)
    if unit == 'iter':
        return max([*log.validated, *trained, *saved], default=0)
    return max([*log.validated, *(trained if {*log.validated} & {*trained} else [])], default=0)


def _result(record: dict[str, Any], points: dict[int, float], steps: list[int]) -> dict[str, Any]:
    """A run as ``TaskResults`` has it; one that diverged has its value from then on."""
    diverged = record['status'] == 'diverged'
    curve = [[step, points.get(step, DIVERGED_METRIC)] for step in steps]
    ran = record.get('ran', {})
    return {
        'metric': DIVERGED_METRIC if diverged else curve[-1][1],
        'curve': curve,
        'diverged': diverged,
        'settings': {'steps': steps[-1]},
        'card': ran.get('card', 'unknown'),
        'commit': _LONG_HASH.sub(r'\1', record['commit'] or 'unknown'),
        'date': ran.get('date', 'unknown'),
    }
