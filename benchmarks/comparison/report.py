"""The comparison of a user's runs in Markdown: tables and a picture for each task."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.comparison.figure import plot_task
from benchmarks.comparison.results import (
    Rows,
    TaskResults,
    alike_rows,
    diverged,
    facts,
    mixed_seeds,
    summary_rows,
    verdict_rows,
)
from benchmarks.measure.tables import markdown_table, without_empty_columns, write_text


def sections(task: TaskResults) -> list[tuple[str, Rows]]:
    """Titles and tables of a task, those that are not empty."""
    found = [(f'Against {task.control}', verdict_rows(task)), ('Each method', summary_rows(task))]
    if any(mixed_seeds(task).values()):
        pairs = [(arm, task.control) for arm in task.compared]
        found.append(('Pairs of one commit and card alone', alike_rows(task, pairs)))
    return [(name, without_empty_columns(rows)) for name, rows in found if rows]


def describe(task: TaskResults, picture: str | None = None) -> str:
    """The tables of one task, and what they were made from.

    Args:
        task (TaskResults): Its runs.
        picture (str, optional): Its address, relative to the page.
    """
    noted = {'seeds': task.seeds, **facts(run for *_, run in task.entries)}
    noted |= {f'seeds of several {key}s': seeds for key, seeds in mixed_seeds(task).items()}
    noted['diverged, counted with their value'] = diverged(task)
    lines = [f'{key}: {listed(values)}' for key, values in noted.items() if values]
    parts = [f'## {task.name}', '\n'.join(f'* {line}' for line in lines)]
    if picture:
        parts.append(f'![{task.name}]({picture})')
    for name, rows in sections(task):
        parts += [f'### {name}', markdown_table(rows)]
    return '\n\n'.join(parts)


def listed(values: Iterable[int | str]) -> str:
    """With commas."""
    return ', '.join(map(str, values))


def write_page(tasks: Sequence[TaskResults], page: Path) -> None:
    """The tables in Markdown, and the pictures in ``images`` beside the page."""
    texts = ['# Methods compared']
    for task in tasks:
        picture = page.parent / 'images' / f'{task.name.replace(" ", "_")}.png'
        plot_task(task, picture)
        texts.append(describe(task, os.path.relpath(picture, page.parent)))
    write_text(page, '\n\n'.join(texts))
