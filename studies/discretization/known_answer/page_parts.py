"""Small parts of the page of the regression with a known answer."""

from collections.abc import Iterable

from matplotlib.axes import Axes

Rows = list[dict[str, str]]


def quoted(methods: Iterable[str]) -> str:
    """Names as Markdown's code, with commas."""
    return ', '.join(f'`{method}`' for method in methods)


def tidy(axes: Axes) -> None:
    """A grid, and a frame at the left and at the bottom only."""
    axes.grid(alpha=0.3)
    axes.spines[['top', 'right']].set_visible(False)
