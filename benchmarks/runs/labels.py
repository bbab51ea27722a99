"""What a classifier makes of its test set, and pictures of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import DATASETS

from benchmarks.runs.work_dir import spread_evenly
from vim_mm.engine.cli import load_model
from vim_mm.engine.label_file import as_labels
from vim_mm.engine.reader import keep_loaded
from vim_mm.progress import progress
from vim_mm.stream.lettering import drawable_names

_BATCH = 250
_INCHES = 1.25
_DPI = 120


# A class, or those of an image that has several or none.
Labels = int | tuple[int, ...]


@dataclass
class Labelled:
    """An image of a test set: its index there, its class, the predicted one and its score.

    Of several classes each has its score; the truth of an image without labels is None.
    """

    index: int
    truth: Labels | None
    prediction: Labels
    score: float | tuple[float, ...]

    @property
    def wrong(self) -> bool:
        """Whether the truth is known and another one."""
        return self.truth is not None and self.truth != self.prediction


def predict_labels(
    cfg: Config, checkpoint: str | Path, count: int | None = None
) -> tuple[list[Labelled], torch.utils.data.Dataset]:
    """Run a trained classifier on its test set.

    Args:
        cfg (Config): Config of a classification run.
        checkpoint (str | Path): Weights; all of the model's and no others.
        count (int, optional): Images, spread evenly over the test set; None is all.

    Returns:
        tuple: The predictions in order, and the test set.
    """
    model, _ = load_model(cfg, checkpoint)
    dataset = DATASETS.build(cfg.test_dataloader.dataset)
    indices = spread_evenly(len(dataset), count)
    found = []
    for start in progress(range(0, len(indices), _BATCH), 'batches'):
        chosen = indices[start : start + _BATCH]
        with torch.no_grad():
            results = model.test_step(pseudo_collate([dataset[i] for i in chosen]))
        for index, result in zip(chosen, results, strict=True):
            labels = as_labels(result.pred_label)
            scores = [float(result.pred_score[label]) for label in labels]
            several = len(result.get('gt_label', labels)) != 1 or len(labels) != 1
            truth = None
            if 'gt_label' in result:
                truth = _one(as_labels(result.gt_label), several)
            found.append(Labelled(index, truth, _one(labels, several), _one(scores, several)))
    return found, dataset


def _one(values: list, several: bool):
    return tuple(values) if several else values[0]


def names_of(labels: Labels, classes: Sequence[str] | None) -> str:
    """The names of classes in words, or their numbers where they have none."""
    several = labels if isinstance(labels, tuple) else (labels,)
    return ', '.join(str(classes[label] if classes else label) for label in several) or 'none'


def confusions(
    found: Sequence[Labelled], classes: Sequence[str], count: int
) -> list[tuple[str, str, int]]:
    """The mistakes that are made most often: true class, predicted class, how many."""
    pairs: dict[tuple[Labels, Labels], int] = {}
    for each in found:
        if each.wrong:
            pair = each.truth, each.prediction
            pairs[pair] = pairs.get(pair, 0) + 1
    ranked = sorted(pairs.items(), key=lambda item: -item[1])[:count]
    return [
        (names_of(truth, classes), names_of(label, classes), number)
        for (truth, label), number in ranked
    ]


def pictures_of(
    dataset: torch.utils.data.Dataset,
    found: Sequence[Labelled],
    bands: Sequence[int] | None = None,
) -> list[np.ndarray]:
    """The images of predictions as they were loaded, (H, W, 3) uint8 RGB.

    Args:
        dataset: The test set; its pipeline is run again.
        found: Which images.
        bands: See :func:`vim_mm.engine.reader.displayed`.
    """
    loaded = keep_loaded(dataset)
    pictures = []
    for each in found:
        dataset[each.index]
        pictures.append(loaded.displayed(bands))
    return pictures


def plot_labels(
    pictures: Sequence[np.ndarray],
    found: Sequence[Labelled],
    classes: Sequence[str] | None,
    path: str | Path,
    columns: int = 8,
) -> None:
    """Draw images, each under the predicted class with its score, and the true one if it differs.

    Args:
        pictures: (H, W, 3) uint8 RGB each, at least one.
        found: The prediction of each.
        classes: Their names.
        path: Picture to write.
        columns: Images in a row.
    """
    names = drawable_names(classes) if classes else None
    columns = min(columns, len(found))
    rows = math.ceil(len(found) / columns)
    size = (_INCHES * columns, (_INCHES + 0.4) * rows)
    figure = Figure(figsize=size, dpi=_DPI, layout='constrained')
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat:
        axes.set_axis_off()
    for axes, picture, each in zip(panels.flat, pictures, found, strict=False):
        axes.imshow(picture)
        scores = each.score if isinstance(each.score, tuple) else (each.score,)
        title = ' '.join([names_of(each.prediction, names), *(f'{score:.2f}' for score in scores)])
        if each.wrong:
            title += f'\nis {names_of(each.truth, names)}'
        axes.set_title(title, fontsize=7, color='tab:red' if each.wrong else 'black')
    figure.savefig(path)
