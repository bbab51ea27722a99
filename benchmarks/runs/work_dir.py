"""What a training run left in its working directory, read for pictures and tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import DATASETS

from benchmarks.pictures.plots import Region, Sample
from vim_mm.engine.cli import load_model
from vim_mm.engine.reader import class_meta, keep_loaded
from vim_mm.engine.saving.written import last_checkpoint
from vim_mm.json_lines import read_json_lines
from vim_mm.progress import progress
from vim_mm.stream.lettering import drawable_names

# Metrics by their name in the log: how to call them, and what makes them percent.
_METRICS = {
    'accuracy/top1': ('top-1 accuracy', 1),
    'mIoU': ('mIoU', 1),
    'coco/bbox_mAP': ('box AP', 100),
    'coco/segm_mAP': ('mask AP', 100),
}
DETECTION_METRICS = ('box AP', 'mask AP')


def spread_evenly(length: int, count: int | None = None) -> list[int]:
    """Indices of so many of ``length`` things, the first and the last among them; None is all."""
    count = length if count is None else min(count, length)
    return np.linspace(0, length - 1, count).round().astype(int).tolist()


def find_config(work_dir: str | Path) -> Path:
    """The config that the runner dumped into a working directory.

    Raises:
        FileNotFoundError: There is none, or there are several.
    """
    configs = sorted(Path(work_dir).glob('*.py'))
    if len(configs) != 1:
        raise FileNotFoundError(f'{work_dir} must hold one config of a run, found {len(configs)}')
    return configs[0]


def find_checkpoint(work_dir: str | Path) -> Path:
    """The last checkpoint in a working directory.

    Raises:
        FileNotFoundError: There is none.
    """
    checkpoint = last_checkpoint(work_dir)
    if checkpoint is None:
        raise FileNotFoundError(f'{work_dir} holds no checkpoint')
    return checkpoint


Curve = list[tuple[int, float]]


@dataclass
class Log:
    """What a run logged, over all times it was resumed. Curves are in order of their steps.

    Attributes:
        losses (list): (iteration, training loss), none of a run that is shorter than the logger's
            interval.
        metrics (dict): By name of the metric (step, percent). Steps are epochs in a loop by epochs,
            else iterations.
        validated (list[int]): The steps of all validations. MMDetection logs no metric of one in
            which nothing was detected.
        epoch (int, optional): The last epoch that has a loss, where the log counts epochs.
    """

    losses: Curve
    metrics: dict[str, Curve]
    validated: list[int]
    epoch: int | None


def read_records(work_dir: str | Path) -> Iterator[dict[str, Any]]:
    """What a run logged, in the order of the times that it was started.

    Raises:
        ValueError: A file of the log holds something else; names the file.
    """
    for log in sorted(Path(work_dir).glob('*/vis_data/scalars.json')):
        yield from read_json_lines(log)


def read_log(work_dir: str | Path) -> Log:
    """The log of a run from its working directory.

    Raises:
        ValueError: A file of the log holds something else; names the file.
    """
    losses: dict[int, float] = {}
    metrics: dict[str, dict[int, float]] = {}
    validated: set[int] = set()
    epochs: list[int] = []
    for record in read_records(work_dir):
        if 'loss' in record:
            losses[record['step']] = record['loss']
            epochs += [record['epoch']] if 'epoch' in record else []
        elif 'data_time' in record or not _METRICS.keys().isdisjoint(record):
            # Else a scalar that somebody's hook has added.
            validated.add(record['step'])
        for key, (name, factor) in _METRICS.items():
            if key in record:
                metrics.setdefault(name, {})[record['step']] = factor * record[key]
    return Log(
        losses=sorted(losses.items()),
        metrics={name: sorted(each.items()) for name, each in metrics.items()},
        validated=sorted(validated),
        epoch=max(epochs, default=None),
    )


def read_history(work_dir: str | Path) -> tuple[Curve, dict[str, Curve]]:
    """Losses and metrics as :class:`Log` has them, of a run that has logged any.

    Raises:
        FileNotFoundError: It has logged neither.
    """
    log = read_log(work_dir)
    if not log.losses and not log.metrics:
        raise FileNotFoundError(f'{work_dir} holds no log of training')
    return log.losses, log.metrics


def predict_samples(
    cfg: Config,
    checkpoint: str | Path,
    count: int,
    score_threshold: float = 0.5,
    any_method: bool = False,
    bands: Sequence[int] | None = None,
) -> tuple[list[Sample], tuple[str, ...], list[tuple[int, int, int]]]:
    """Run a trained model on images spread evenly over the test set.

    Args:
        cfg (Config): Config of a segmentation or detection run.
        checkpoint (str | Path): Weights; all of the model's and no others.
        count (int): Number of images.
        score_threshold (float): Least score of a detection.
        any_method (bool): As in :func:`load_model`.
        bands (Sequence[int], optional): See :func:`vim_mm.engine.reader.displayed`.

    Returns:
        tuple: The samples, and names and RGB colours of the classes.
    """
    model, contents = load_model(cfg, checkpoint, any_method)
    dataset = DATASETS.build(cfg.test_dataloader.dataset)
    meta = class_meta(cfg, contents)
    loaded = keep_loaded(dataset)
    samples = []
    for index in progress(spread_evenly(len(dataset), count), 'pictures'):
        with torch.no_grad():
            result = model.test_step(pseudo_collate([dataset[index]]))[0]
        image, ignored = loaded.displayed(bands), None
        if 'pred_sem_seg' in result:
            truth = _segments(result.gt_sem_seg.data[0])
            ignored = (result.gt_sem_seg.data[0] == 255).cpu().numpy()
            prediction = _segments(result.pred_sem_seg.data[0])
        else:
            found = result.pred_instances.cpu()
            size = image.shape[:2]
            truth = _instances(result.gt_instances, size)
            prediction = _instances(found[found.scores >= score_threshold], size)
        samples.append(Sample(image, truth, prediction, ignored))
    return samples, drawable_names(meta['classes']), meta['palette']


def _segments(seg_map):
    """Regions of a map (H, W) of class indices."""
    seg_map = seg_map.cpu().numpy()
    return [Region(seg_map == label, int(label)) for label in np.unique(seg_map) if label != 255]


def _instances(instances, size: tuple[int, int]):
    """Regions of mmdet's InstanceData; ground truth has no scores, and boxes may have no masks."""
    count = len(instances)
    if 'masks' not in instances:
        instances.masks = np.zeros((count, *size), bool)
    masks = instances.masks.masks if hasattr(instances.masks, 'masks') else instances.masks
    scores = instances.scores.tolist() if 'scores' in instances else [None] * count
    boxes = instances.bboxes.tensor if hasattr(instances.bboxes, 'tensor') else instances.bboxes
    return [
        Region(np.asarray(mask, bool), int(label), box, score)
        for mask, label, box, score in zip(
            masks, instances.labels, boxes.tolist(), scores, strict=True
        )
    ]
