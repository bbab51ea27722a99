"""The results of the study, read from the lines in ``runs``: a file for each task and setting."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.comparison.results import CONTROL, FAMILY, TaskResults
from benchmarks.comparison.run_folders import find_runs, read_runs
from studies.discretization.results import RUNS
from vim_mm.json_lines import read_json_lines

SECONDARY = (  # exploratory: A against B
    ('foh_matched', CONTROL),
    ('foh_matched', 'foh'),
    ('zoh_exact_averaged', CONTROL),
    ('poly', 'zoh_exact_averaged'),
)
ARMS = (*FAMILY, CONTROL, 'foh_matched', 'zoh_exact_averaged')
PEERS = ('deit', 'resnet18')  # other people's models, of the same recipe
TITLES = {
    'foh_matched': 'foh, matched',
    'zoh_exact_averaged': 'zoh_exact, averaged',
    'deit': 'DeiT',
    'resnet18': 'ResNet-18',
}
LONG = 'long'  # the task of one longer run, which compares nothing
DETECTION = 'detection'  # its file has what run_all_methods.py left
# Of a task on which many runs stay at chance: chance, and percentages above which runs are counted.
CHANCE = {'recall': 100 / 15}
ABOVE = (10.0, 50.0)
# What the records of all runs of a task have in common.
_ALIKE: dict[str, Callable[[dict[str, Any]], Any]] = {
    'settings': lambda record: record.get('settings'),
    'data': lambda record: record.get('data'),
    'torch': lambda record: record.get('versions', {}).get('torch'),
}


@dataclass
class StudyTask(TaskResults):
    """The runs of a task of the study, whose name ends with the setting if that is not the primary.

    Attributes:
        peers (dict): As ``runs``, of other people's models.
    """

    peers: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The name without the setting."""
        return self.name.partition('_')[0]

    @property
    def chance(self) -> float | None:
        return CHANCE.get(self.kind)

    @property
    def unit(self) -> str:
        return 'mIoU, percent' if self.kind == 'scenes' else 'accuracy, percent'

    @property
    def arms(self) -> list[str]:
        return [arm for arm in ARMS if arm in self.runs] + sorted(self.runs.keys() - {*ARMS})

    def title(self, arm: str) -> str:
        return TITLES.get(arm, arm)


def read_results(folder: Path = RUNS) -> dict[str, StudyTask]:
    """All tasks of a folder by name, from ``<task>.jsonl`` or ``<task>_<setting>.jsonl``.

    Raises:
        FileNotFoundError: There are no runs.
        ValueError: A line holds something else, or the runs of a task differ in their settings, the
            digest of their data or torch; names the file.
    """
    tasks: dict[str, StudyTask] = {}
    for file in sorted(folder.glob('*.jsonl')):
        if file.stem == DETECTION:
            continue
        task, first = StudyTask(file.stem), {}
        for record in read_json_lines(file):
            if 'arm' not in record:
                raise ValueError(f'{file} holds a line without arm: {str(record)[:80]}')
            if 'seed' not in record:
                task.costs[record['arm']] = record
                continue
            for key, look_up in _ALIKE.items():
                value, name = look_up(record), f'{record["arm"]} {record["seed"]}'
                other, like = first.setdefault(key, (value, name))
                if value != other:
                    raise ValueError(
                        f'runs of {task.name} that are compared must have the same {key}: in '
                        f'{file} {name} has {value}, {like} has {other}'
                    )
            runs = task.peers if record['arm'] in PEERS else task.runs
            runs.setdefault(record['arm'], {})[record['seed']] = record
        if task.runs:
            tasks[task.name] = task
    if not tasks:
        raise FileNotFoundError(f'{folder} holds no results of runs')
    return tasks


def read_detectors(file: Path = RUNS / f'{DETECTION}.jsonl') -> list[TaskResults]:
    """The detectors, a task for each metric. Each line has the record and the logs of a run."""
    with TemporaryDirectory() as name:
        for line in read_json_lines(file):
            folder = Path(name, line['folder'])
            for log, records in line['logs'].items():
                path = folder / log
                path.parent.mkdir(parents=True)
                path.write_text(''.join(f'{json.dumps(record)}\n' for record in records))
            (folder / 'run.json').write_text(json.dumps(line['run']))
        tasks, left_out = read_runs(find_runs([Path(name)]))
    if left_out:
        raise ValueError(f'{file}: {left_out[0]}')
    return tasks
