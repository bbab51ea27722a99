"""The page of the regression with a known answer: its main points, part A and part B."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from convergence import STEPS
from convergence_page import HEAD as CONVERGENCE_HEAD
from convergence_page import (
    SHOWN_RATE,
    convergence_of,
    describe_convergence,
    plot_convergence,
    shown,
)
from recovery_page import HEAD as RECOVERY_HEAD
from recovery_page import (
    describe_recovery,
    errors_by_rate,
    in_ranges,
    mean_error,
    plot_recovery,
    records_of,
    task_of,
)
from signals import INPUTS

from benchmarks.comparison.comparison import CONTROL, FAMILY, TaskResults
from benchmarks.measure.tables import bullets, write_text

_HEAD = """# A regression with a known answer

Do not edit. Made from the results of the runs, `docs/study/known_answer.json`, by

```bash
python tools/study/known_answer.py --results docs/study/known_answer.json \\
    --page docs/known_answer.md
```

With `--out` in place of `--results` the same command makes the runs again, in some minutes on one
core. [The protocol](study_protocol.md#a-regression-with-a-known-answer-secondary-cpu) says what is
simulated, learned and expected. It was committed before the runs.

The system is x' = a x + u with x(0) = 0, the simplest that has a state. Its exact states are known.
The package's scan computes them from samples of the input, in float64. An error is the root mean
square of the difference from the exact states, relative to that of the exact states.

| word | meaning |
| --- | --- |
| smooth | the input is the sum of four sines |
| held | the input is piecewise constant and changes at samples only |
| noisy | the input is a smooth one and white noise |
| gain | one number that multiplies all states of a method |
| factor | one number that multiplies all steps; two variants, named after it, learn it |"""


def summary(results: dict[str, Any], tasks: list[TaskResults]) -> list[str]:
    """The main points, with their figures."""
    smooth, _, noisy = tasks
    records = convergence_of(results, 'smooth', SHOWN_RATE)
    without = {m: shown(r['error'][STEPS.index(1 / 64)]) for m, r in records.items()}
    biased = [run['a'] for run in records_of(results, 'smooth', CONTROL)]
    first, *_, last = np.median(biased, axis=0)
    exact = errors_by_rate(results, 'smooth', CONTROL)
    apart = {arm: np.abs(errors_by_rate(results, 'smooth', arm) - exact) for arm in FAMILY}
    ratios = [f'`{arm}` {points[0] / points[-1]:.2g}' for arm, points in apart.items()]
    arms = (CONTROL, 'bilinear', 'rk4', 'highorder', 'zoh', 'foh', 'poly')
    trained = '; '.join(f'`{arm}` {in_ranges(smooth, arm)}' for arm in arms)
    control = mean_error(noisy, CONTROL)
    near = [f'`{arm}` {mean_error(noisy, arm) - control:+.2f}' for arm in ('bilinear', 'rk4')]
    return [
        'On smooth inputs no method is better than first order, because each reads one sample a '
        f'step. With a = -4 and dt = 1/64 the error of `zoh_exact` is {without[CONTROL]}, of '
        f'`bilinear` {without["bilinear"]}, of `zoh` {without["zoh"]}.',
        'At one fixed step length a trained gain makes `zoh`, `foh`, `highorder`, `rk4` and '
        '`zoh_exact` the same method. They can differ only where the step varies, as it does in '
        'Mamba.',
        'Where the step varies, training does not make them equal. Errors in percent on smooth '
        f'inputs as trained, with half, with twice the steps: {trained}.',
        'How far a method is from `zoh_exact` depends on the rate. On smooth inputs its difference '
        f'at a = -1 divided by that at a = -16 is: {", ".join(ratios)}. Far below 1, the '
        'difference comes from stiff systems. The gain of `foh` goes with the square of the step, '
        'and `poly` reads the future.',
        'With noise most of the error comes from the samples themselves: that of `zoh_exact` is '
        f'{control:.1f} %. The difference from it is small for some: {", ".join(near)} points.',
        'A good fit does not find the true a. On smooth inputs `zoh_exact` learns '
        f'{first:.2f} times a at a = -1 and {last:.2f} times a at a = -16. The sample at the end '
        'of a step stands for all of it, so the input comes half a step early, and a slower state '
        'makes up for that. On held inputs it finds a.',
        'This is a linear system with given steps. A network chooses its steps and has gates, so '
        'nothing follows for its accuracy.',
    ]


def describe(results: dict[str, Any], pictures: tuple[str, str] | None = None) -> str:
    """All that there is to say, in Markdown.

    Args:
        results (dict): What the tool measured.
        pictures (tuple, optional): Addresses of the two pictures; without them the text is for a
            terminal.
    """
    tasks = [task_of(results, name) for name in INPUTS]
    facts = (
        f'{len(results["seeds"])} seeds, {results["iterations"]} iterations of training; commit '
        f'{results["commit"]}, torch {results["torch"]}, {results["date"]}.'
    )
    parts = [describe_convergence(results), describe_recovery(results, tasks)]
    if pictures:
        heads = (CONVERGENCE_HEAD, RECOVERY_HEAD)
        parts = [
            '\n\n'.join([head.replace('PICTURE', picture), part])
            for head, picture, part in zip(heads, pictures, parts)
        ]
        parts = [_HEAD, facts, '## In short', bullets(summary(results, tasks)), *parts]
    return '\n\n'.join(parts)


def write_page(results: dict[str, Any], page: Path) -> None:
    """The page in Markdown, and the pictures in ``images`` beside it."""
    pictures = [
        page.parent / 'images' / f'known_answer_{part}.png' for part in ('convergence', 'recovery')
    ]
    plot_convergence(results, pictures[0])
    plot_recovery([task_of(results, name) for name in INPUTS], pictures[1])
    first, second = (os.path.relpath(picture, page.parent) for picture in pictures)
    write_text(page, describe(results, (first, second)))
