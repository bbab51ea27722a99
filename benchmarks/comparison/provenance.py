"""By which cards and commits the figures of a comparison were made, and what that leaves open."""

import numpy as np

from benchmarks.comparison.comparison import (
    SECONDARY,
    TaskResults,
    cost_cells,
    facts,
    pair_seeds,
    title,
)
from benchmarks.measure.tables import markdown_table


def made_by(task: TaskResults) -> list[str]:
    """By which cards and commits a task's figures were made, in paragraphs."""
    found = machines(facts(run for *_, run in task.entries))
    parts = [f'### Cards and commits of `{task.name}`', f'{found}.'] if found else []
    parts += mixed(task)
    if any('card' in cost for cost in task.costs.values()):
        parts.append(
            f'The cost of a step: {machines(facts(task.costs.values()))}.{costs_alone(task)}'
        )
    return parts


def mixed(task: TaskResults) -> list[str]:
    """Which seeds have runs of several commits or cards, and what the pairs without them show."""
    lines = []
    for key in ('commit', 'card'):
        seeds = [s for s in task.seeds if len({task.runs[a][s][key] for a in task.arms}) > 1]
        if seeds:
            lines.append(f'Seeds whose runs are of several {key}s: {which(seeds)}.')
    if lines and (rows := alike_rows(task)):
        lines.append(
            'This table repeats each comparison with the pairs whose two runs have commit and card '
            'in common, where there are any. No test is made of it.'
        )
        lines.append(markdown_table(rows))
    return lines


def alike_rows(task: TaskResults) -> list[dict[str, str]]:
    """The differences of all comparisons in the pairs of one commit and card alone."""
    against_control = [(arm, task.control) for arm in task.compared]
    rows = []
    for a, b in dict.fromkeys((*against_control, *SECONDARY)):
        pairs = [(s, task.runs[a][s], task.runs[b][s]) for s in pair_seeds(task, a, b)]
        if not pairs:
            continue
        seeds = [s for s, *both in pairs if len({(r['commit'], r['card']) for r in both}) == 1]
        values = [task.metrics(arm, seeds=seeds) for arm in (a, b)]
        rows.append(
            {
                'A': title(a),
                'B': title(b),
                'pairs of one commit and card': str(len(seeds)),
                'A - B in these': f'{np.mean(np.subtract(*values)):+.3f}' if seeds else '',
            }
        )
    return rows


def costs_alone(task: TaskResults) -> str:
    """The cost of a step of what the table of costs lacks, in sentences."""
    found = ''
    for arm in sorted(task.costs.keys() - {*task.arms} - task.peers.keys()):
        cells = [cell for cell in cost_cells(task, arm).items() if cell[1]]
        found += f' `{title(arm)}`, measured beside them: '
        found += ', '.join(f'{value} {unit.removesuffix(" a step")}' for unit, value in cells) + '.'
    return found


def machines(found: dict[str, list[str]]) -> str:
    """Cards, commits and dates in words."""
    return '; '.join(f'{key}: {", ".join(values)}' for key, values in found.items() if values)


def which(seeds: list[int]) -> str:
    """'0 to 11', or each where they do not follow one another."""
    if len(seeds) > 2 and seeds == [*range(seeds[0], seeds[-1] + 1)]:
        return f'{seeds[0]} to {seeds[-1]}'
    return ', '.join(map(str, seeds))
