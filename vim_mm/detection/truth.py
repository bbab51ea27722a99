"""The ground truth of a batch of images in tensors whose sizes do not change with every batch.

MMDetection keeps it image by image. Here that of all images lies in one tensor, padded to a power
of two, so that assigning, sampling and the losses need no loop and no count on the CPU.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from mmdet.models.utils import unpack_gt_instances
from mmdet.structures import SampleList
from mmdet.structures.bbox import get_box_tensor
from mmdet.structures.mask import BitmapMasks
from torch import Tensor

# Objects that an image is padded to at least: smaller batches share their shapes.
LEAST_OBJECTS = 16
# Objects of an image on average, about COCO's: masks of a batch are padded to as many at least.
USUAL_OBJECTS = 8


class GroundTruth(NamedTuple):
    """Objects of B images, at most G in each.

    Attributes:
        boxes: (B, G, 4), corners in pixels, zero where there is no object.
        labels: (B, G), int64.
        number: (B,), int64, how many of them there are; the others are padding.
        ignored: (B, I, 4), boxes whose surroundings are no background; I may be zero.
        ignored_number: (B,), int64, how many of them there are.
        sizes: (B, 4), float32: height and width of the image, then with its padding.
        masks: (N, H, W), of the objects of all images one after the other; N may be zero. Uint8,
            or float32 where they are other numbers.
        first_mask: (B,), int64, index in ``masks`` of the first object of each image.
    """

    boxes: Tensor
    labels: Tensor
    number: Tensor
    ignored: Tensor
    ignored_number: Tensor
    sizes: Tensor
    masks: Tensor
    first_mask: Tensor

    @property
    def is_object(self) -> Tensor:
        """(B, G), False where there is padding."""
        places = torch.arange(self.labels.shape[1], device=self.labels.device)
        return places < self.number[:, None]

    @property
    def limits(self) -> Tensor:
        """(B, 1, 4): the largest x, y, x, y of a box that lies in its image."""
        return self.sizes[:, :2].flip(1).repeat(1, 2)[:, None]


def bucket(number: int) -> int:
    """The power of two that ``number`` objects are padded to."""
    return max(LEAST_OBJECTS, 1 << max(number - 1, 0).bit_length())


def why_not_packed(samples: SampleList, with_masks: bool) -> str | None:
    """Why :func:`pack` cannot take the masks of these samples, None if it can."""
    if not with_masks:
        return None
    masks = [sample.gt_instances.get('masks') for sample in samples]
    for each in masks:
        if not isinstance(each, BitmapMasks):
            return f'masks are {type(each).__name__}, which are cut out on the CPU'
    if len({(each.height, each.width) for each in masks}) > 1:
        return 'masks of a batch differ in size: set pad_mask=True in the data_preprocessor'
    return None


def pack(
    samples: SampleList, device: torch.device, with_ignored: bool, with_masks: bool
) -> GroundTruth:
    """The ground truth of samples on a device, without a wait for it.

    Args:
        samples: As MMDetection's data preprocessor hands them over.
        device: Of the model.
        with_ignored: Whether boxes to ignore are needed.
        with_masks: Whether masks are needed; :func:`why_not_packed` must have no objection.
    """
    truth, ignored, metas = unpack_gt_instances(samples)
    boxes = [get_box_tensor(each.bboxes) for each in truth]
    counts = [len(each) for each in boxes]
    none = boxes[0].new_zeros(0, 4)
    others = [
        none if each is None or not with_ignored else get_box_tensor(each.bboxes)
        for each in ignored
    ]
    firsts = np.cumsum([0, *counts[:-1]]).tolist()
    numbers = [
        [count, len(other), first, *meta['img_shape'][:2], *meta['pad_shape'][:2]]
        for count, other, first, meta in zip(counts, others, firsts, metas, strict=True)
    ]
    table = _to_device(torch.tensor(numbers), device)
    largest, most_ignored = bucket(max(counts)), max(map(len, others))
    return GroundTruth(
        boxes=_stack(boxes, largest),
        labels=_stack([each.labels for each in truth], largest),
        number=table[:, 0],
        ignored=_stack(others, bucket(most_ignored) if most_ignored else 0),
        ignored_number=table[:, 1],
        sizes=table[:, 3:].float(),
        masks=_stack_masks([each.masks for each in truth] if with_masks else [], device),
        first_mask=table[:, 2],
    )


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on the device; from memory that is not pinned a copy would wait."""
    if device.type != 'cuda':
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def _stack(tensors: Sequence[Tensor], length: int) -> Tensor:
    first = tensors[0]
    stacked = first.new_zeros(len(tensors), length, *first.shape[1:])
    for own, given in zip(stacked, tensors, strict=True):
        own[: len(given)] = given
    return stacked


def _stack_masks(masks: Sequence[BitmapMasks], device: torch.device) -> Tensor:
    if not masks:
        return torch.zeros(0, 1, 1, dtype=torch.uint8, device=device)
    number = sum(map(len, masks))
    size = (masks[0].height, masks[0].width)
    whole = all(each.masks.dtype in (np.uint8, np.bool_) for each in masks if len(each))
    dtype = torch.uint8 if whole else torch.float32
    # As many as usual at least: each other number is a shape, and another CUDA graph.
    number = bucket(max(number, USUAL_OBJECTS * len(masks)))
    stacked = torch.zeros(number, *size, dtype=dtype, device=device)
    start = 0
    for each in masks:
        if len(each):
            host = torch.from_numpy(np.ascontiguousarray(each.masks))
            stacked[start : start + len(each)].copy_(_to_device(host, device))
            start += len(each)
    return stacked
