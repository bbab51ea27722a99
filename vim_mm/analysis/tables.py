"""Tables as ``tools/`` print them: to be read in a terminal and pasted into a document."""

from pathlib import Path


def markdown_table(rows: list[dict[str, str]]) -> str:
    """Rows of the same columns as an aligned Markdown table; the first column is text."""
    columns = list(rows[0])
    widths = [max(len(name), *(len(row[name]) for row in rows)) for name in columns]
    lines = [columns, ['-' * width for width in widths], *([*row.values()] for row in rows)]
    return '\n'.join(
        f'| {first:{widths[0]}} | '
        + ' | '.join(f'{cell:>{width}}' for cell, width in zip(rest, widths[1:], strict=True))
        + ' |'
        for first, *rest in lines
    )


def figures(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, never with an exponent: 0.0123, 4.56, 12300."""
    rounded = float(f'{value:.{digits - 1}e}')
    return f'{rounded:.{digits}g}' if abs(rounded) < 10**digits else f'{rounded:.0f}'


def write_text(path: Path, text: str) -> None:
    """Write a text and the end of its line, in a folder that need not be there yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + '\n')
