"""Tables as ``tools/`` print them: to be read in a terminal and pasted into a document."""

import json
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vim_mm.whole_file import whole_file


def markdown_table(rows: list[dict[str, str]]) -> str:
    """Rows of the same columns as an aligned Markdown table; the first column is text.

    '' of no rows.
    """
    if not rows:
        return ''
    columns = list(rows[0])
    widths = [max(len(name), *(len(row[name]) for row in rows)) for name in columns]
    lines = [columns, ['-' * width for width in widths], *([*row.values()] for row in rows)]
    return '\n'.join(
        f'| {first:{widths[0]}} | '
        + ' | '.join(f'{cell:>{width}}' for cell, width in zip(rest, widths[1:], strict=True))
        + ' |'
        for first, *rest in lines
    )


def pivot(
    records: list[dict[str, Any]],
    head: Callable[[dict[str, Any]], dict[str, str]],
    column: str,
    cell: Callable[[dict[str, Any]], str],
) -> str:
    """A table with a row for each case, a column for each of what was measured, and gaps.

    Args:
        records: What was measured, in the order of the table.
        head: From a record to the cells that name its case, by their columns.
        column: The field of a record that names its column.
        cell: From a record to its cell.
    """
    gaps = dict.fromkeys((record[column] for record in records), '')
    rows: dict[tuple, dict[str, str]] = {}
    for record in records:
        case = head(record)
        rows.setdefault(tuple(case.values()), case | gaps)[record[column]] = cell(record)
    return markdown_table([*rows.values()])


def without_empty_columns(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Rows without the columns that no row has."""
    used = [name for name in (rows[0] if rows else ()) if any(row[name] for row in rows)]
    return [{name: row[name] for name in used} for row in rows]


def bullets(lines: Iterable[str]) -> str:
    """Sentences as a list of Markdown."""
    return '\n'.join(f'* {line}' for line in lines)


def latex_table(rows: list[dict[str, str]]) -> str:
    """Rows of the same columns as a tabular of booktabs."""
    escape = str.maketrans({'_': r'\_', '%': r'\%', '>': r'$>$', '&': r'\&'})
    lines = [[*rows[0]], *([*row.values()] for row in rows)]
    head, *body = (' & '.join(cell.translate(escape) for cell in line) + r' \\' for line in lines)
    columns = 'l' + 'r' * (len(rows[0]) - 1)
    inner = [r'\toprule', head, r'\midrule', *body, r'\bottomrule']
    return '\n'.join([rf'\begin{{tabular}}{{{columns}}}', *inner, r'\end{tabular}'])


def figures(value: float, digits: int = 3) -> str:
    """A number of so many significant digits at most: 0.0123, 4.56, 2, 12300; 1.2e-05 if small."""
    rounded = float(f'{value:.{digits - 1}e}')
    return f'{rounded:.{digits}g}' if abs(rounded) < 10**digits else f'{rounded:.0f}'


def write_text(path: Path, text: str) -> None:
    """Write a text and the end of its line, in a folder that need not be there yet.

    A process that is killed leaves the old file or the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part:
        part.write_text(text + '\n')


def publish(args: Namespace, text: str, result: dict[str, Any]) -> None:
    """Print a text, and write it and its figures to the files of ``--markdown`` and ``--out``."""
    print(text)
    if args.markdown:
        write_text(args.markdown, text)
    if args.out:
        write_text(args.out, json.dumps(result, indent=2))
