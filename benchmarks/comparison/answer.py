"""The answer to the study's primary hypothesis, in short: which methods differ from the control."""

from collections.abc import Sequence

import numpy as np

from benchmarks.comparison.comparison import (
    CONTROL,
    FAMILY,
    INTERVAL,
    LEVEL,
    PRIMARY,
    TaskResults,
    can_differ,
    detectable,
    deviation,
    family,
    furthest,
    least_p,
    title,
)
from benchmarks.comparison.statistics import Comparison, compare


def is_tested(task: TaskResults) -> bool:
    """Whether the protocol's test of the primary hypothesis has been made on this task."""
    as_planned = task.name in PRIMARY and task.control == CONTROL and not task.interim
    return as_planned and can_differ(len(task.seeds), len(FAMILY))


def short_rows(tasks: Sequence[TaskResults]) -> list[dict[str, str]]:
    """The control's mean on each task, and of each method its difference from it and Holm's p.

    Args:
        tasks (Sequence): Tested ones.
    """
    rows: dict[str, dict[str, str]] = {}
    for task in tasks:
        values = task.metrics(task.control)
        rows.setdefault(CONTROL, {'method': title(CONTROL)}).update(
            {
                task.name: f'{np.mean(values):.2f} ({deviation(values)})',
                f'{task.name}, interval': '',
                f'{task.name}, p': '',
            }
        )
        for arm, (found, p) in family(task).items():
            row = rows.setdefault(arm, {'method': title(arm)})
            row[task.name] = f'{found.mean:+.2f}'
            row[f'{task.name}, interval'] = f'{found.low:+.2f} to {found.high:+.2f}'
            row[f'{task.name}, p'] = f'**{_digits(p)}**' if p < LEVEL else _digits(p)
    return [*rows.values()]


def short_verdict(task: TaskResults) -> str:
    """One sentence or two on all methods of a tested task."""
    found = family(task)
    differ = {arm: comparison for arm, (comparison, p) in found.items() if p < LEVEL}
    same = [comparison for arm, (comparison, _) in found.items() if arm not in differ]
    within = f'intervals lie within ±{max(map(furthest, same), default=0.0):.2f} points'
    if not differ:
        return f'`{task.name}`: no difference from `{task.control}` was found. All {within}.'
    parts = []
    for word, sign in (('worse', -1), ('better', 1)):
        arms = [arm for arm, comparison in differ.items() if sign * comparison.mean > 0]
        named = [f'`{title(arm)}` ({differ[arm].mean:+.2f} points)' for arm in arms]
        if arms:
            verb = 'is' if len(arms) == 1 else 'are'
            parts.append(f'{_listed(named)} {verb} {word} than `{task.control}`')
    text = f'`{task.name}`: {", and ".join(parts)}.'
    if same:
        text += f' For the other methods no difference was found; their {within}.'
    return text


def best_found(tasks: Sequence[TaskResults]) -> str:
    """The answer in one sentence: which methods were found to be better than the control.

    Args:
        tasks (Sequence): Tested ones.
    """
    better = {
        f'`{title(arm)}`': None
        for task in tasks
        for arm, (comparison, p) in family(task).items()
        if p < LEVEL and comparison.mean > 0
    }
    return (
        f'{_listed([*better]) if better else "No method"} was found to be better than the control.'
    )


def cautions(tasks: Sequence[TaskResults]) -> list[str]:
    """What a reader of :func:`short_rows` would stumble over, in sentences.

    Args:
        tasks (Sequence): Tested ones.
    """
    found = [(task, arm, *both) for task in tasks for arm, both in family(task).items()]
    lines = [
        'p is corrected for the comparisons of each task (Holm), not across tasks. Where it is '
        f'below {LEVEL}, in bold, a difference was found. The intervals are not corrected, and '
        'somewhat too narrow.'
    ]
    unclear = [
        f'`{title(arm)}` on `{task.name}`'
        for task, arm, comparison, p in found
        if p >= LEVEL and comparison.low * comparison.high > 0
    ]
    if unclear:
        that, exclude = ('That', 'excludes') if len(unclear) == 1 else ('Those', 'exclude')
        lines[0] += f' {that} of {_listed(unclear)} {exclude} 0, but no difference was found there.'
    for pairs in {len(task.seeds): None for task in tasks}:
        least = len(FAMILY) * least_p(pairs)
        if sum(np.isclose(p, least) for *_, p in found) > 1:
            lines[0] += (
                f' With {pairs} pairs {_digits(least)} is the smallest corrected p possible. It '
                'comes about when all differences have one sign, so it does not tell their size.'
            )
    if powers := ' '.join(filter(None, map(_power, tasks))):
        lines.append(
            f'"No difference was found" does not mean "equal". {powers} Smaller differences may '
            'exist.'
        )
    if with_poly := [task for task in tasks if 'poly' in task.compared]:
        lines.append(_scans_of_poly(with_poly))
    return lines


def _scans_of_poly(tasks: Sequence[TaskResults]) -> str:
    """How much of the difference of ``poly`` comes from its scans, as far as runs tell."""
    variant = 'zoh_exact_averaged'
    text = (
        '`poly` differs from the control in its coefficients and in its scans: it scans each '
        f'direction in both orders. `{title(variant)}` has these scans and the coefficients of the '
        'control'
    )
    unfinished = []
    for task in tasks:
        if variant not in task.arms:
            has = f'{task.waiting.get(variant, 0)} of {len(task.seeds)} seeds on `{task.name}`'
            unfinished.append(has)
            continue
        scans, rest = (
            compare(task.metrics(a), task.metrics(b))
            for a, b in ((variant, task.control), ('poly', variant))
        )
        text += (
            f'. On `{task.name}` it differs from the control by {_effect(scans)}, and `poly` from '
            f'it by {_effect(rest)}'
        )
    if len(unfinished) < len(tasks):
        text += '. These p are not corrected'
    if unfinished:
        text += (
            f'. So far `{title(variant)}` has {_listed(unfinished)}; how much each contributes is '
            'open there'
        )
    return f'{text}.'


def _effect(found: Comparison) -> str:
    return (
        f'{found.mean:+.2f} points ({INTERVAL} {found.low:+.2f} to {found.high:+.2f}, '
        f'p {_digits(found.p)})'
    )


def _power(task: TaskResults) -> str:
    """Which differences would have been found, in a sentence."""
    found = [c for c, p in family(task).values() if p >= LEVEL]
    if not found:
        return ''
    effects = [detectable(c, len(FAMILY), c.count) for c in found]
    return (
        f'On `{task.name}` a true difference of about {min(effects):.2f} to {max(effects):.2f} '
        'points, depending on the method, would have been found with a probability of 0.8.'
    )


def _digits(p: float) -> str:
    return f'{p:.4f}' if p < 0.01 else f'{p:.2f}'


def _listed(names: list[str]) -> str:
    *first, last = names
    return f'{", ".join(first)} and {last}' if first else last
