"""Predictions drawn over frames and images, on the CPU."""

from collections.abc import Mapping, Sequence

import cv2
import numpy as np
import torch
from mmengine.config import Config
from mmengine.registry import VISUALIZERS
from mmengine.structures import BaseDataElement, InstanceData
from mmengine.visualization import Visualizer
from torch import Tensor

from vim_mm.stream.lettering import draw_legend, drawable_names, put_name
from vim_mm.stream.predictor import Instances, Prediction

_LETTERS = 11  # pixels
_LEGEND = 13  # the same, below a picture
_LEAST_SIDE = 512  # pixels of the longer side of a picture; smaller images are enlarged
_DRAWN_SCORE = 0.3  # above which MMDetection's visualizer draws an instance


class Overlay:
    """Draws labels as colours, instances as masks and boxes with their names.

    Args:
        classes (Sequence[str]): Names.
        palette (Sequence): Their colours, RGB.
        alpha (float): Share of the colours in what is seen, from 0 to 1.
    """

    def __init__(self, classes: Sequence[str], palette: Sequence, alpha: float = 0.5):
        self.classes, self.alpha = drawable_names(classes), alpha
        self.colours = np.asarray(palette, np.uint8).reshape(-1, 3)[:, ::-1]
        self._table = np.zeros((256, 1, 3), np.uint8)
        shown = self.colours[:256]
        self._table[: len(shown), 0] = shown

    def __call__(self, picture: np.ndarray, prediction: Prediction) -> np.ndarray:
        """A new picture (H, W, 3), uint8, BGR."""
        if isinstance(prediction, Instances):
            return self._draw_instances(picture, prediction)
        if prediction.dtype == np.uint8:
            colours = cv2.applyColorMap(prediction, self._table)
        else:
            colours = self.colours[prediction]
        return cv2.addWeighted(picture, 1 - self.alpha, colours, self.alpha, 0, dst=colours)

    def _draw_instances(self, picture: np.ndarray, found: Instances) -> np.ndarray:
        drawn = picture.copy()
        # The best last, so that it is on top.
        for i in reversed(range(len(found.scores))):
            colour = tuple(map(int, self.colours[found.labels[i] % len(self.colours)]))
            left, top, right, bottom = (round(float(x)) for x in found.boxes[i])
            if found.masks is not None:
                self._blend(drawn, found.masks[i], colour)
            cv2.rectangle(drawn, (left, top), (right, bottom), colour, 2)
            text = f'{self.classes[found.labels[i]]} {found.scores[i]:.2f}'
            above = top - round(1.6 * _LETTERS)
            put_name(drawn, text, (left, above), _LETTERS, colour)
        return drawn

    def _blend(self, drawn: np.ndarray, mask: np.ndarray, colour: tuple[int, ...]) -> None:
        """Colour the pixels of a mask, in place, looking only at the rectangle that holds them."""
        left, top, width, height = cv2.boundingRect(mask.view(np.uint8))
        part = drawn[top : top + height, left : left + width]
        inside = mask[top : top + height, left : left + width]
        part[inside] = (1 - self.alpha) * part[inside] + self.alpha * np.array(colour)


def build_visualizer(cfg: Config, meta: Mapping, name: str = 'visualizer') -> Visualizer:
    """The config's visualizer for classes as ``vim_mm.engine.reader.class_meta`` gives them."""
    visualizer = VISUALIZERS.build({**cfg.visualizer, 'name': name, 'vis_backends': []})
    if meta.get('classes'):
        meta = {**meta, 'classes': drawable_names(meta['classes'])}
    visualizer.dataset_meta = meta
    return visualizer


def draw_sample(
    visualizer: Visualizer, image: np.ndarray, sample: BaseDataElement, truth: bool = False
) -> np.ndarray:
    """A new picture, uint8, RGB: an image with a prediction, or the truth, and a legend below.

    An image whose longer side is less than 512 pixels is enlarged by a whole number.

    Args:
        visualizer (Visualizer): Of :func:`build_visualizer`.
        image (ndarray): (H, W, 3), uint8, RGB.
        sample (BaseDataElement): Of MMSegmentation, MMDetection or MMPretrain. Boxes and masks of
            detections are scaled in place.
        truth (bool): Draw this, and not the prediction.
    """
    which = 'gt' if truth else 'pred'
    factor = -(-_LEAST_SIDE // max(image.shape[:2]))
    large = cv2.resize(image, None, fx=factor, fy=factor, interpolation=cv2.INTER_LINEAR)
    found = np.zeros(0, int)  # of a classifier the names stand in the picture
    if f'{which}_sem_seg' in sample and f'{which}_instances' not in sample:
        labels = getattr(sample, f'{which}_sem_seg').data.squeeze(0).cpu().numpy()
        drawn = _draw_segments(visualizer, large, labels.repeat(factor, 0).repeat(factor, 1))
        found = np.unique(labels)
    else:
        pictures: list[np.ndarray | None] = []
        visualizer.add_image = lambda name, image, step=0: pictures.append(image)
        if hasattr(visualizer, 'visualize_cls'):
            visualizer.visualize_cls(large, sample, draw_gt=truth, draw_pred=not truth)
        else:
            if f'{which}_instances' in sample:
                found = enlarge(getattr(sample, f'{which}_instances'), factor)
            visualizer.add_datasample(which, large, sample, draw_gt=truth, draw_pred=not truth)
        # Of a sample without truth MMSegmentation's draws nothing.
        drawn = large if pictures[-1] is None else pictures[-1]
    classes, palette = (visualizer.dataset_meta.get(key) or () for key in ('classes', 'palette'))
    named = {classes[i]: palette[i] for i in found if i < min(len(classes), len(palette))}
    return np.concatenate([drawn, draw_legend(named, drawn.shape[1], _LEGEND)])


def _draw_segments(visualizer: Visualizer, image: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """As MMSegmentation's visualizer, also over a single pixel; the names are in the legend."""
    palette = visualizer.dataset_meta['palette']
    colours = np.zeros((max(int(labels.max()) + 1, len(palette)), 3))
    colours[: len(palette)] = palette
    alpha = getattr(visualizer, 'alpha', 0.8)
    return (image * (1 - alpha) + colours[labels] * alpha).astype(np.uint8)


def enlarge(found: InstanceData, factor: int) -> np.ndarray:
    """Scale boxes and masks of detections, in place, to an image that was enlarged.

    Returns:
        np.ndarray: The labels of those that MMDetection's visualizer draws, each once.
    """
    found.bboxes = getattr(found.bboxes, 'tensor', found.bboxes) * factor
    if 'masks' in found:
        masks = found.masks
        if not isinstance(masks, Tensor):  # of the ground truth
            masks = torch.from_numpy(masks.to_ndarray())
        found.masks = masks.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
    labels = found.labels
    if 'scores' in found:
        labels = labels[found.scores > _DRAWN_SCORE]
    return np.unique(labels.cpu().numpy())
