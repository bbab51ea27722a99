"""The runs of the protocol's second part, in the order in which they are made."""

from collections.abc import Iterator
from dataclasses import dataclass

from studies.discretization.models.arms import AGAIN, ARMS, SPACED
from studies.discretization.results import Job
from studies.discretization.tasks import SECOND, TASKS

_PUBLISHED = tuple(arm for arm in SECOND if arm not in AGAIN)


@dataclass(frozen=True)
class Part:
    """Runs of one task: of each seed all arms with each of the settings, before the next seed."""

    task: str
    arms: tuple[str, ...]
    labels: tuple[str, ...] = ('',)

    def jobs(self) -> Iterator[Job]:
        """In their order."""
        for seed in range(TASKS[self.task].seeds):
            for label in self.labels:
                for arm in self.arms:
                    yield Job(self.task, arm, seed, label)


PLANS = {
    'second': (
        Part('spacing', SPACED, ('dt1',)),
        Part('scenes', _PUBLISHED),
        Part('scenes', AGAIN),
        Part('spacing', SPACED),
        Part('fashion', _PUBLISHED),
        Part('fashion', AGAIN),
    )
}


def gpu_seconds(job: Job) -> float:
    """About what a run takes of an H100 with three side by side.

    Of one scan by the fused block and of the plain block from runs; of the rules of two samples,
    compiled, from the bytes that their operators move.
    """
    arm = ARMS[job.arm]
    seconds = 36.0
    if arm.rule or arm.plain:
        seconds = {'foh_two_sample': 125.0, 'exp_trapezoidal': 75.0}.get(arm.rule, 55.0)
    return seconds * (1.15 if job.task == 'fashion' else 1.0)
