"""The runs of the protocol's second part, in the order in which they are made."""

from collections.abc import Iterator
from dataclasses import dataclass

from studies.discretization.models.arms import AGAIN, ARMS, SPACED
from studies.discretization.results import Job
from studies.discretization.tasks import SECOND, TASKS

_PUBLISHED = tuple(arm for arm in SECOND if arm not in AGAIN)
# A run of a rule of two samples takes as long as three to five of the others.
_ONE_SAMPLE = tuple(arm for arm in SPACED if not ARMS[arm].rule)


@dataclass(frozen=True)
class Part:
    """Runs of one task with one setting: of each seed all arms, before the next seed."""

    task: str
    arms: tuple[str, ...]
    label: str = ''

    def jobs(self) -> Iterator[Job]:
        """In their order."""
        for seed in range(TASKS[self.task].seeds):
            for arm in self.arms:
                yield Job(self.task, arm, seed, self.label)


PLANS = {
    'second': (
        Part('spacing', _ONE_SAMPLE, 'dt1'),
        Part('spacing', ('exp_trapezoidal',), 'dt1'),
        Part('scenes', _PUBLISHED),
        Part('scenes', AGAIN),
        Part('spacing', ('foh_two_sample',), 'dt1'),
        Part('spacing', SPACED),
        Part('fashion', _PUBLISHED),
        Part('fashion', AGAIN),
    )
}


def gpu_seconds(job: Job) -> float:
    """About what a run takes of an H100 with three side by side.

    From runs, compilation included; of ``foh_two_sample`` from those of ``exp_trapezoidal`` and the
    bytes that the operators of both move.
    """
    arm = ARMS[job.arm]
    seconds = 36.0
    if arm.rule or arm.plain:
        seconds = {'foh_two_sample': 175.0, 'exp_trapezoidal': 105.0}.get(arm.rule, 55.0)
    return seconds * (1.15 if job.task == 'fashion' else 1.0)
