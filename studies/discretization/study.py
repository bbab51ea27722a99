"""The results of the study, read from the lines in ``runs``: a file for each task and setting."""

import json
from collections.abc import Callable, Sequence
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
    **{f'{name}_published': f'{name}, published range' for name in FAMILY if name != 'zoh'},
    'zoh_exact_again': 'zoh_exact, again',
    'zoh_exact_plain': 'zoh_exact, plain block',
    'exp_trapezoidal': 'exp-trapezoidal',
    'exp_trapezoidal_channel': 'exp-trapezoidal, weight of a channel',
    'exp_trapezoidal_token': 'exp-trapezoidal, weight of a token',
    'foh_two_sample': 'two-sample FOH',
}
LONG = 'long'  # the task of one longer run, which compares nothing
DETECTION = 'detection'  # its file has what run_all_methods.py left
# Points within which methods count as equal. Of round one chosen when its runs had been seen.
MARGINS = {'fashion': 0.3, 'scenes': 0.7}
# What the records of all runs of a task have in common.
ALIKE: dict[str, Callable[[dict[str, Any]], Any]] = {
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
    def unit(self) -> str:
        return 'mIoU, percent' if self.kind in ('scenes', 'spacing') else 'accuracy, percent'

    @property
    def arms(self) -> list[str]:
        """Those of round one and unknown ones; what round two adds is compared in second.py."""
        others = self.runs.keys() - {*ARMS} - {*TITLES}
        return [arm for arm in ARMS if arm in self.runs] + sorted(others)

    def pairs(self, a: str, b: str) -> list[int]:
        """The seeds that both arms have."""
        return sorted(self.runs.get(a, {}).keys() & self.runs.get(b, {}).keys())

    def losses(self, arm: str, seeds: Sequence[int] | None = None) -> list[float]:
        """The training loss of the last fifth by seed, of the seeds of the tables or others."""
        chosen = self.seeds if seeds is None else seeds
        return [self.runs[arm][seed]['curve'][-1][2] for seed in chosen]

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
            for key, look_up in ALIKE.items():
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
