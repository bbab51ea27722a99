"""From a frame to what a model takes, on its device, as a config's test pipeline does it by OpenCV.

The values are the same: :func:`resize` has OpenCV's fixed-point arithmetic.
"""

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor, nn

from vim_mm.compat import without_channel_swap
from vim_mm.errors import UserError, UserValueError

# OpenCV's weights of a bilinear interpolation are multiples of 1/2048.
_ONE = 2048
# Of a transform of the pipeline, the values that OpenCV's reading and resizing stand for.
_READING = {'to_float32': False, 'color_type': 'color', 'imdecode_backend': 'cv2'}
_RESIZING = {'interpolation': 'bilinear', 'backend': 'cv2'}


class FrameError(UserError, ValueError):
    """A frame has a size that the pipeline cannot take."""


class Resize(nn.Module):
    """``cv2.resize`` with INTER_LINEAR of pictures (H, W, C), uint8, on any device.

    Equal to OpenCV's on x86 bit for bit. The sum of products is a fixed-point number, of which the
    vertical pass drops bits at the same places; exact halves are means of four pixels.

    Args:
        size (tuple[int, int]): (H, W) of the pictures.
        target (tuple[int, int]): (H', W').
        device: Of the pictures.
    """

    def __init__(self, size: tuple[int, int], target: tuple[int, int], device: torch.device):
        super().__init__()
        self.size, self.target = tuple(size), tuple(target)
        for axis, name in enumerate(('row', 'column')):
            first, second, weights = _taps(self.size[axis], self.target[axis], clamp=axis == 1)
            shape = (-1, 1, 1) if axis == 0 else (1, -1, 1)
            for key, value in (('first', first), ('second', second)):
                self.register_buffer(f'{name}_{key}', value.to(device), persistent=False)
            for key, value in zip(('weight_0', 'weight_1'), weights, strict=True):
                self.register_buffer(f'{name}_{key}', value.view(shape).to(device), False)

    def forward(self, picture: Tensor) -> Tensor:
        """(H, W, C) to (H', W', C), uint8."""
        height, width = self.target
        if self.size == self.target:
            return picture
        if self.size == (2 * height, 2 * width):
            blocks = picture.int().view(height, 2, width, 2, -1)
            return ((blocks.sum((1, 3)) + 2) >> 2).to(torch.uint8)
        x = picture.int()
        rows = x[:, self.column_first] * self.column_weight_0
        rows = (rows + x[:, self.column_second] * self.column_weight_1) >> 4
        upper = (rows[self.row_first] * self.row_weight_0) >> 16
        lower = (rows[self.row_second] * self.row_weight_1) >> 16
        return ((upper + lower + 2) >> 2).clamp(0, 255).to(torch.uint8)


def _taps(size: int, target: int, clamp: bool) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Of each target pixel the two source pixels and their weights.

    Beyond the border both are the outermost pixel. Along columns (``clamp``) that one has all of
    the weight, along rows the weights stay, and their rounding with them.
    """
    scale = 1.0 / (target / size)
    place = ((torch.arange(target, dtype=torch.float64) + 0.5) * scale - 0.5).float()
    first = place.floor().long()
    fraction = place - first
    if clamp:
        fraction = torch.where((first < 0) | (first >= size - 1), 0.0, fraction)
        first = first.clamp(0, size - 1)
    weights = tuple((w * _ONE).round().int() for w in (1 - fraction, fraction))
    return first.clamp(0, size - 1), (first + 1).clamp(0, size - 1), weights


class Preprocessing:
    """A test pipeline and a ``data_preprocessor`` for frames of one size.

    Args:
        transforms (Sequence): Of the config's test pipeline, built: the first reads a picture, the
            last packs it, between them is nothing but Resize.
        data_preprocessor (nn.Module): Of the model, on its device.
        size (tuple[int, int]): (H, W) of the frames.

    Attributes:
        sample: The data sample of every frame, without predictions; complete after a call.

    Raises:
        ValueError: The pipeline does something else.
        FrameError: It makes a picture without pixels of such frames.
    """

    def __init__(self, transforms: Sequence, data_preprocessor: nn.Module, size: tuple[int, int]):
        check_transforms(transforms)
        # Its own would index by a list, which waits for the device.
        self.normalize, self.reverse = without_channel_swap(data_preprocessor)
        results: dict[str, Any] | None = dict(
            img=np.zeros((*size, 3), np.uint8),
            img_shape=size,
            ori_shape=size,
            img_id=0,
            img_path='',
        )
        try:
            for transform in transforms[1:]:
                results = transform(results)
        except cv2.error as error:
            raise FrameError(
                f'frames of {size[0]} x {size[1]} pixels cannot be resized: {error.err}'
            ) from error
        self.sample = results['data_samples']
        target = tuple(results['inputs'].shape[1:])
        self.resize = Resize(size, target, data_preprocessor.device)

    def __call__(self, frame: Tensor) -> Tensor:
        """(H, W, 3), uint8, BGR, to the model's input (1, 3, H', W')."""
        channels = self.resize(frame).permute(2, 0, 1)
        if self.reverse:
            channels = channels.flip(0)
        packed = self.normalize({'inputs': [channels], 'data_samples': [self.sample]}, False)
        (self.sample,) = packed['data_samples']  # a copy, which knows of padding
        return packed['inputs']


def check_transforms(transforms: Sequence) -> None:
    """Raise ValueError unless a test pipeline is one that :class:`Preprocessing` knows."""
    names = [type(transform).__name__ for transform in transforms]
    known = (
        len(names) > 1
        and names[0] == 'LoadImageFromFile'
        and names[-1].startswith(('Pack', 'FastPack'))
        and {*names[1:-1]} <= {'Resize'}
    )
    if not known:
        raise UserValueError(
            'A stream knows test pipelines of LoadImageFromFile, Resize and Pack...Inputs, '
            f'got {", ".join(names)}; tools/infer.py takes any.'
        )
    for transform in transforms[:-1]:
        name = type(transform).__name__
        for key, value in (_READING if name != 'Resize' else _RESIZING).items():
            if getattr(transform, key, value) != value:
                raise UserValueError(
                    f'A stream knows {name} with {key}={value!r} only, because it decodes frames '
                    'of three bands of 8 bits by itself; tools/infer.py takes any.'
                )
