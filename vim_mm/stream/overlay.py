"""Predictions drawn over frames, by OpenCV on the CPU."""

from collections.abc import Sequence

import cv2
import numpy as np

from vim_mm.stream.lettering import drawable_names, put_name
from vim_mm.stream.predictor import Instances, Prediction

_LETTERS = 11  # pixels


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
