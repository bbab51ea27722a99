"""What a training run left in its working directory, read for pictures and tables."""

from pathlib import Path

import cv2
import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import DATASETS

from vim_mm.analysis.pictures.plots import Region, Sample
from vim_mm.engine.checkpoints.reading import last_checkpoint
from vim_mm.engine.cli import load_model
from vim_mm.json_lines import read_json_lines
from vim_mm.progress import progress

# Metrics by their name in the log: how to call them, and what makes them percent.
_METRICS = {
    'accuracy/top1': ('top-1 accuracy', 1),
    'mIoU': ('mIoU', 1),
    'coco/bbox_mAP': ('box AP', 100),
    'coco/segm_mAP': ('mask AP', 100),
}


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


def read_log(
    work_dir: str | Path,
) -> tuple[list[tuple[int, float]], dict[str, list[tuple[int, float]]]]:
    """Losses and metrics of a run by iterations, over all times it was resumed.

    Args:
        work_dir (str | Path): Working directory of an iteration-based run.

    Returns:
        tuple: (iteration, training loss) in order, none of a run that is shorter than the logger's
        interval; and by name of the metric (iteration, percent) in order, no names before the first
        validation.

    Raises:
        ValueError: A file of the log holds something else; names the file.
    """
    losses, metrics = {}, {}
    for log in sorted(Path(work_dir).glob('*/vis_data/scalars.json')):
        for record in read_json_lines(log):
            if 'loss' in record:
                losses[record['step']] = record['loss']
            for key, (name, factor) in _METRICS.items():
                if key in record:
                    metrics.setdefault(name, {})[record['step']] = factor * record[key]
    return sorted(losses.items()), {name: sorted(each.items()) for name, each in metrics.items()}


def read_history(
    work_dir: str | Path,
) -> tuple[list[tuple[int, float]], dict[str, list[tuple[int, float]]]]:
    """As :func:`read_log`, of a run that has logged a loss or a metric.

    Raises:
        FileNotFoundError: It has logged neither.
    """
    losses, metrics = read_log(work_dir)
    if not losses and not metrics:
        raise FileNotFoundError(f'{work_dir} holds no log of training')
    return losses, metrics


def predict_samples(
    cfg: Config,
    checkpoint: str | Path,
    count: int,
    score_threshold: float = 0.5,
    any_method: bool = False,
) -> tuple[list[Sample], tuple[str, ...], list[tuple[int, int, int]]]:
    """Run a trained model on images spread evenly over the test set.

    Args:
        cfg (Config): Config of a segmentation or detection run.
        checkpoint (str | Path): Weights; all of the model's and no others.
        count (int): Number of images.
        score_threshold (float): Least score of a detection.
        any_method (bool): As in :func:`load_model`.

    Returns:
        tuple: The samples, and names and RGB colours of the classes.
    """
    model, _ = load_model(cfg, checkpoint, any_method)
    dataset = DATASETS.build(cfg.test_dataloader.dataset)
    samples = []
    for index in progress(spread_evenly(len(dataset), count), 'pictures'):
        with torch.no_grad():
            result = model.test_step(pseudo_collate([dataset[index]]))[0]
        image = cv2.cvtColor(cv2.imread(result.img_path), cv2.COLOR_BGR2RGB)
        if 'pred_sem_seg' in result:
            truth = _segments(result.gt_sem_seg.data[0])
            prediction = _segments(result.pred_sem_seg.data[0])
        else:
            found = result.pred_instances.cpu()
            truth = _instances(result.gt_instances)
            prediction = _instances(found[found.scores >= score_threshold])
        samples.append(Sample(image, truth, prediction))
    return samples, dataset.metainfo['classes'], dataset.metainfo['palette']


def _segments(seg_map):
    """Regions of a map (H, W) of class indices."""
    seg_map = seg_map.cpu().numpy()
    return [Region(seg_map == label, int(label)) for label in np.unique(seg_map) if label != 255]


def _instances(instances):
    """Regions of mmdet's InstanceData; ground truth has no scores."""
    count = len(instances)
    masks = instances.masks.masks if hasattr(instances.masks, 'masks') else instances.masks
    scores = instances.scores.tolist() if 'scores' in instances else [None] * count
    boxes = instances.bboxes.tensor if hasattr(instances.bboxes, 'tensor') else instances.bboxes
    return [
        Region(np.asarray(mask, bool), int(label), box, score)
        for mask, label, box, score in zip(
            masks, instances.labels, boxes.tolist(), scores, strict=True
        )
    ]
