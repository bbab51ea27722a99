"""Figures of a grid of panels, for ``tools/visualize.py``."""

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from benchmarks.pictures.plots import Region, draw_legend, draw_regions

_INCHES = 1.5
_DPI = 150
_FONT = 8


def _grid(
    rows: int, columns: int, extra: float = 0.0, inches: float = _INCHES
) -> tuple[Figure, np.ndarray]:
    """Square panels without axes, and inches below them for a legend or a colour bar."""
    size = (inches * columns, (inches + 0.05) * rows + 0.25 + extra)
    figure = Figure(figsize=size, dpi=_DPI, layout='constrained')
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat:
        axes.set_axis_off()
        axes.set_box_aspect(1)
    return figure, panels


def _show(axes: Axes, picture: np.ndarray, **options):
    handle = axes.imshow(picture, **options)
    axes.set_aspect('equal', adjustable='datalim')
    return handle


def plot_methods(
    images: Sequence[np.ndarray],
    columns: dict[str, Sequence[list[Region]]],
    classes: Sequence[str],
    palette: Sequence[Sequence[int]],
    path: str | Path,
    ignored: Sequence[np.ndarray | None] = (),
) -> None:
    """Draw images, and regions of each image in columns such as ground truth and methods.

    Args:
        images: (H, W, 3) uint8 RGB each.
        columns: By title, the regions of each image.
        classes, palette: Names and RGB of the classes; the legend has those that occur.
        path: Picture to write.
        ignored: (H, W) bool of each image, the pixels without a label, hatched in 'ground truth'.
    """
    figure, panels = _grid(len(images), 1 + len(columns), extra=0.35)
    panels[0, 0].set_title('image', fontsize=_FONT)
    for row, image in zip(panels, images, strict=True):
        _show(row[0], image)
    for k, (title, found) in enumerate(columns.items(), 1):
        panels[0, k].set_title(title, fontsize=_FONT)
        hatched = [*ignored] if title == 'ground truth' and ignored else [None] * len(images)
        for row, image, regions, mask in zip(panels, images, found, hatched, strict=True):
            draw_regions(row[k], image, regions, palette, mask)
            row[k].set_aspect('equal', adjustable='datalim')
    labels = {r.label for found in columns.values() for regions in found for r in regions}
    draw_legend(
        figure, labels, classes, palette,
        ignored=any(mask is not None and mask.any() for mask in ignored), fontsize=_FONT,
    )  # fmt: skip
    figure.savefig(path)


def plot_features(
    images: Sequence[np.ndarray], maps: dict[str, Sequence[np.ndarray]], path: str | Path
) -> None:
    """Draw images and a map (H, W, 3) in [0, 1] of each image, a column for each title."""
    figure, panels = _grid(len(images), 1 + len(maps))
    panels[0, 0].set_title('image', fontsize=_FONT)
    for k, (title, coloured) in enumerate(maps.items(), 1):
        panels[0, k].set_title(title, fontsize=_FONT)
        for row, picture in zip(panels, coloured, strict=True):
            _show(row[k], picture, interpolation='nearest')
    for row, image in zip(panels, images, strict=True):
        _show(row[0], image)
    figure.savefig(path)


def plot_receptive_fields(
    fields: dict[str, np.ndarray], patch: tuple[int, int], path: str | Path
) -> None:
    """Draw fields (H, W) side by side, as the mean of each patch by that of the strongest.

    The scale is logarithmic. It ends below where a tenth of the patches are weaker, or at 1e-6.

    Args:
        fields: By title, at least 0.
        patch: Height and width of a patch in pixels; a part of one at the edge is left out.
        path: Picture to write.
    """
    means = {}
    for title, field in fields.items():
        rows, columns = (max(n // side, 1) for n, side in zip(field.shape, patch, strict=True))
        whole = field[: rows * patch[0], : columns * patch[1]]
        mean = cv2.resize(whole, (columns, rows), interpolation=cv2.INTER_AREA)
        means[title] = mean / max(mean.max(), np.finfo(mean.dtype).tiny)
    least = np.quantile(np.concatenate([mean.ravel() for mean in means.values()]), 0.1)
    scale = LogNorm(min(max(least, 1e-6), 0.5), 1, clip=True)
    figure, panels = _grid(1, len(means), extra=0.75, inches=2.1)
    for axes, (title, mean) in zip(panels[0], means.items(), strict=True):
        axes.set_title(title, fontsize=_FONT)
        axes.set_axis_on()
        extent = (0, mean.shape[1] * patch[1], mean.shape[0] * patch[0], 0)
        shown = np.maximum(mean, scale.vmin)
        handle = axes.imshow(shown, cmap='viridis', norm=scale, extent=extent)
        axes.set_aspect('equal', adjustable='datalim')
        axes.set_xlabel('x, pixels', fontsize=_FONT)
        axes.tick_params(labelsize=_FONT - 1)
    panels[0, 0].set_ylabel('y, pixels', fontsize=_FONT)
    bar = figure.colorbar(handle, ax=panels, location='bottom', shrink=0.6, aspect=40, pad=0.02)
    bar.set_label('mean |gradient| of a patch by the largest', fontsize=_FONT)
    bar.ax.tick_params(labelsize=_FONT)
    figure.savefig(path)


def plot_directions(
    images: Sequence[np.ndarray], shares: dict[str, Sequence[np.ndarray]], path: str | Path
) -> None:
    """Draw images and the forward scan's share (H, W) of each, a column for each title."""
    figure, panels = _grid(len(images), 1 + len(shares), extra=0.5)
    panels[0, 0].set_title('image', fontsize=_FONT)
    for row, image in zip(panels, images, strict=True):
        _show(row[0], image)
    for k, (title, share) in enumerate(shares.items(), 1):
        mean = np.concatenate([picture.ravel() for picture in share]).mean()
        panels[0, k].set_title(f'{title}\nforward {mean:.0%}', fontsize=_FONT)
        for row, picture in zip(panels, share, strict=True):
            handle = _show(row[k], picture, cmap='RdBu_r', vmin=0, vmax=1, interpolation='nearest')
    bar = figure.colorbar(
        handle, ax=panels, location='bottom', shrink=0.5, aspect=40, pad=0.02,
        ticks=[0, 0.5, 1],
    )  # fmt: skip
    bar.ax.set_xticklabels(['backward alone', 'equal', 'forward alone'], fontsize=_FONT)
    figure.savefig(path)
