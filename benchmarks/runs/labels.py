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
from vim_mm.progress import progress

_BATCH = 250
_INCHES = 1.25
_DPI = 120


@dataclass
class Labelled:
    """An image of a test set: its index there, its class, the predicted one and its score."""

    index: int
    truth: int
    prediction: int
    score: float


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
            label = int(result.pred_label)
            score = float(result.pred_score[label])
            found.append(Labelled(index, int(result.gt_label), label, score))
    return found, dataset


def confusions(
    found: Sequence[Labelled], classes: Sequence[str], count: int
) -> list[tuple[str, str, int]]:
    """The mistakes that are made most often: true class, predicted class, how many."""
    pairs: dict[tuple[int, int], int] = {}
    for each in found:
        if each.truth != each.prediction:
            pair = each.truth, each.prediction
            pairs[pair] = pairs.get(pair, 0) + 1
    ranked = sorted(pairs.items(), key=lambda item: -item[1])[:count]
    return [(classes[truth], classes[label], number) for (truth, label), number in ranked]


def pictures_of(
    cfg: Config, dataset: torch.utils.data.Dataset, found: Sequence[Labelled]
) -> list[np.ndarray]:
    """The images of predictions as the model gets them, (H, W, 3) uint8 RGB."""
    pictures = [dataset[each.index]['inputs'].permute(1, 2, 0).numpy() for each in found]
    if cfg.model.data_preprocessor.to_rgb:  # they are as OpenCV reads them
        return [picture[..., ::-1] for picture in pictures]
    return pictures


def plot_labels(
    pictures: Sequence[np.ndarray],
    found: Sequence[Labelled],
    classes: Sequence[str],
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
    columns = min(columns, len(found))
    rows = math.ceil(len(found) / columns)
    size = (_INCHES * columns, (_INCHES + 0.4) * rows)
    figure = Figure(figsize=size, dpi=_DPI, layout='constrained')
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat:
        axes.set_axis_off()
    for axes, picture, each in zip(panels.flat, pictures, found, strict=False):
        axes.imshow(picture)
        title = f'{classes[each.prediction]} {each.score:.2f}'
        wrong = each.truth != each.prediction
        if wrong:
            title += f'\nis {classes[each.truth]}'
        axes.set_title(title, fontsize=7, color='tab:red' if wrong else 'black')
    figure.savefig(path)
