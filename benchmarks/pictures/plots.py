"""Pictures for ``tools/``: training curves, predictions beside the ground truth, and benchmarks."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from benchmarks.pictures.palette import LOSS, METRICS, styles_of

_PANEL_INCHES = 1.9
_DPI = 120
_OPACITY = 0.6
_SHORT_SIDE = 256  # pixels that a panel has at least, so that outlines stay thin


@dataclass
class Region:
    """A part of an image that has a class.

    Attributes:
        mask (np.ndarray): (H, W) bool.
        label (int): Index of the class.
        box (Sequence[float], optional): Left, top, right, bottom in pixels, of detections.
        score (float, optional): Confidence in [0, 1], of predicted detections.
    """

    mask: np.ndarray
    label: int
    box: Sequence[float] | None = None
    score: float | None = None


@dataclass
class Sample:
    """An image, (H, W, 3) uint8 RGB, with what is on it and what the model finds on it.

    Attributes:
        ignored (np.ndarray, optional): (H, W) bool, the pixels that have no label.
    """

    image: np.ndarray
    truth: list[Region]
    prediction: list[Region]
    ignored: np.ndarray | None = None


@dataclass
class Line:
    """Values over something, of one name."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def plot_lines(panels: dict[str, Sequence[Line]], xlabel: str, path: str | Path) -> None:
    """Draw panels side by side, both axes logarithmic, each name in one style throughout.

    Args:
        panels (dict): By title, lines of positive values.
        xlabel (str): What x is, in all panels.
        path (str | Path): Picture to write.
    """

    def draw(axes: Axes, line: Line, style: dict[str, Any]) -> Line2D:
        (handle,) = axes.plot(line.x, line.y, marker='o', markersize=3.5, **style)
        return handle

    named = {title: {line.name: line for line in lines} for title, lines in panels.items()}
    figure, grid = _draw_panels(named, draw, 3.8)
    for axes, lines in zip(grid, panels.values(), strict=True):
        axes.set(xlabel=xlabel, xscale='log')
        _log_values(axes)
        ticks = sorted({x for line in lines for x in line.x})
        axes.set_xticks(ticks, [f'{tick:g}' for tick in ticks], fontsize=7)
        axes.set_xticks([], minor=True)
    figure.savefig(path)


def plot_losses(runs: dict[str, dict[str, Sequence[tuple[int, float]]]], path: str | Path) -> None:
    """Draw the training losses of runs over one another, a panel for each group of them.

    Args:
        runs (dict): By title of the panel and name of the run, iteration and training loss.
        path (str | Path): Picture to write.
    """

    def draw(axes: Axes, points: Sequence[tuple[int, float]], style: dict[str, Any]) -> Line2D:
        (handle,) = axes.plot(*_columns(points), **style)
        return handle

    figure, grid = _draw_panels(runs, draw, 3.6)
    for axes in grid:
        axes.set(xlabel='iteration', ylabel='training loss')
        _log_values(axes)
    figure.savefig(path)


def _log_values(axes: Axes) -> None:
    """A logarithmic y axis whose figures are plain numbers, as few as can be read."""
    axes.set_yscale('log')
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(
        MaxNLocator(6) if high < 10 * low else LogLocator(subs=(1, 2, 5), numticks=30)
    )
    axes.yaxis.set_major_formatter('{x:g}')
    axes.yaxis.set_minor_locator(NullLocator())


def _draw_panels(
    panels: dict[str, dict[str, Any]],
    draw: Callable[[Axes, Any, dict[str, Any]], Line2D],
    height: float,
) -> tuple[Figure, list[Axes]]:
    """A panel for each title, side by side; what has one name has one style in all of them.

    ``draw`` puts one thing into a panel in a style; ``height`` is in inches.
    """
    figure = Figure(figsize=(4.2 * len(panels), height), dpi=_DPI, layout='constrained')
    names = [*dict.fromkeys(name for group in panels.values() for name in group)]
    grid = [*figure.subplots(1, len(panels), squeeze=False)[0]]
    handles, styles = {}, styles_of(names)
    for axes, (title, group) in zip(grid, panels.items(), strict=True):
        for name, thing in group.items():
            handles[name] = draw(axes, thing, styles[name])
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.3, which='both')
        axes.spines[['top', 'right']].set_visible(False)
    figure.legend(
        [handles[name] for name in names], names, loc='outside lower center',
        ncols=len(names), frameon=False, handlelength=4,
    )  # fmt: skip
    return figure, grid


def plot_curves(
    losses: Sequence[tuple[int, float]],
    metrics: dict[str, Sequence[tuple[int, float]]],
    path: str | Path,
) -> None:
    """Draw training loss and validation metrics over the iterations.

    Args:
        losses (Sequence[tuple[int, float]]): Iteration and training loss; empty if none was logged.
        metrics (dict): By name, iteration and metric in percent; empty without a validation.
        path (str | Path): Picture to write.
    """
    figure = Figure(figsize=(9, 3.4), dpi=_DPI, layout='constrained')
    left, right = figure.subplots(1, 2)
    left.plot(*_columns(losses), color=LOSS, linewidth=1.2)
    left.set(title='Training', ylabel='training loss')
    for i, (name, points) in enumerate(metrics.items()):
        steps, values = _columns(points)
        right.plot(
            steps,
            values,
            marker='o',
            markersize=3.5,
            color=METRICS[i % len(METRICS)],
            label=f'{name}, last {values[-1]:.1f}',
        )
    right.set(title='Held-out images', ylabel=f'{", ".join(metrics) or "metric"}, %', ylim=(0, 100))
    if metrics:
        right.legend(loc='lower right')
    last = max(step for points in (losses, *metrics.values()) for step, _ in points)
    for axes in (left, right):
        axes.set(xlabel='iteration', xlim=(0, last * 1.02))
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[['top', 'right']].set_visible(False)
    figure.savefig(path)


def plot_predictions(
    samples: Sequence[Sample],
    classes: Sequence[str],
    palette: Sequence[Sequence[int]],
    path: str | Path,
    samples_per_row: int = 2,
) -> None:
    """Draw image, ground truth and prediction of every sample side by side, with a legend.

    Args:
        samples (Sequence[Sample]): What to draw, at least one.
        classes (Sequence[str]): Names of the classes; the legend has those that occur.
        palette (Sequence[Sequence[int]]): RGB in 0 to 255 for every class.
        path (str | Path): Picture to write.
        samples_per_row (int): Samples, of three panels each, in a row.
    """
    across = min(samples_per_row, len(samples))
    down = -(-len(samples) // across)
    columns = 3 * across
    size = (_PANEL_INCHES * columns, _PANEL_INCHES * down + 0.75)
    figure = Figure(figsize=size, dpi=_DPI, layout='constrained')
    grid = figure.subplots(down, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
        axes.set_box_aspect(1)
    for panels, sample in zip(grid.reshape(-1, 3), samples, strict=False):
        panels[0].imshow(_enlarge(sample.image, cv2.INTER_LINEAR))
        draw_regions(panels[1], sample.image, sample.truth, palette, sample.ignored)
        draw_regions(panels[2], sample.image, sample.prediction, palette)
        for axes, title in zip(panels, ('image', 'ground truth', 'prediction'), strict=True):
            axes.set_title(title, fontsize=10)
            # Panels stay square and in line, whatever the shape of the image.
            axes.set_aspect('equal', adjustable='datalim')
    draw_legend(
        figure,
        {region.label for sample in samples for region in (*sample.truth, *sample.prediction)},
        classes,
        palette,
        ignored=any(s.ignored is not None and s.ignored.any() for s in samples),
    )
    figure.savefig(path)


def draw_legend(
    figure: Figure,
    labels: Iterable[int],
    classes: Sequence[str],
    palette: Sequence[Sequence[int]],
    ignored: bool = False,
    **options: Any,
) -> None:
    """Put the classes of these labels below a figure, and what hatched pixels are."""
    handles = [
        Patch(color=np.divide(palette[label], 255), label=classes[label])
        for label in sorted(labels)
    ]
    if ignored:
        handles.append(Patch(facecolor='white', edgecolor='0.4', hatch='////', label='ignored'))
    options = dict(ncols=10, **options)
    figure.legend(handles=handles, loc='outside lower center', frameon=False, **options)


def _columns(points):
    return zip(*points, strict=True) if points else ((), ())


def _enlarge(image, interpolation):
    factor = max(1, -(-_SHORT_SIDE // min(image.shape[:2])))
    return cv2.resize(image, None, fx=factor, fy=factor, interpolation=interpolation)


def draw_regions(axes, image, regions, palette, ignored=None):
    """Show tinted, outlined regions on the grey image; detections also get box and score.

    Pixels of ``ignored``, (H, W) bool, are hatched.
    """
    # Grey, so that every colour in the panel is that of a class.
    grey = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    canvas = _enlarge(grey, cv2.INTER_LINEAR)
    for region in regions:
        colour = np.array(palette[region.label], np.uint8)
        mask = _enlarge(region.mask.astype(np.uint8), cv2.INTER_NEAREST)
        inside = mask.astype(bool)
        canvas[inside] = ((1 - _OPACITY) * canvas[inside] + _OPACITY * colour).astype(np.uint8)
        contours, _ = cv2.findContours(mask, cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
        cv2.drawContours(canvas, contours, -1, colour.tolist(), 2)
    if ignored is not None:
        rows, columns = np.indices(canvas.shape[:2])
        hatched = _enlarge(ignored.astype(np.uint8), cv2.INTER_NEAREST).astype(bool)
        canvas[hatched] = 255
        canvas[hatched & ((rows + columns) % 12 < 3)] = 100
    axes.imshow(canvas)
    scale = canvas.shape[0] / image.shape[0]
    for region in regions:
        if region.box is not None:
            _draw_box(axes, np.multiply(region.box, scale), region.score, palette[region.label])


def _draw_box(axes, box, score, colour):
    left, top, right, bottom = box
    edge = np.divide(colour, 255)
    axes.add_patch(
        Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=edge, linewidth=1)
    )
    if score is not None:
        axes.text(
            left,
            top,
            f'{score:.2f}',
            fontsize=6,
            va='top',
            color='white',
            bbox={'facecolor': 'black', 'alpha': 0.6, 'pad': 0.6, 'linewidth': 0},
        )
