"""MMSegmentation's RandomCrop without sorting labels, its PackSegInputs without widening them."""

from typing import Any

import numpy as np
import torch
from mmcv.transforms.utils import cache_randomness
from mmengine.structures import PixelData
from mmseg.datasets.transforms import PackSegInputs, RandomCrop


class FastRandomCrop(RandomCrop):
    """A ``RandomCrop`` with the same crops for the same random numbers.

    To see that no class takes more than ``cat_max_ratio`` of a crop, MMSegmentation sorts its
    labels, which for 512 x 512 takes a fourth of the time of a usual pipeline. Here those of 8 bits
    are counted.
    """

    @cache_randomness
    def crop_bbox(self, results: dict[str, Any]) -> tuple[int, int, int, int]:
        """As in ``RandomCrop``: (y1, y2, x1, x2)."""
        if self.cat_max_ratio >= 1 or results['gt_seg_map'].dtype != np.uint8:
            return super().crop_bbox(results)
        box = self._draw(results['img'])
        for _ in range(10):
            counts = np.bincount(self.crop(results['gt_seg_map'], box).ravel(), minlength=256)
            if 0 <= self.ignore_index < 256:
                counts[self.ignore_index] = 0
            if np.count_nonzero(counts) > 1 and counts.max() / counts.sum() < self.cat_max_ratio:
                break
            box = self._draw(results['img'])
        return box

    def _draw(self, image: np.ndarray) -> tuple[int, int, int, int]:
        """A box of the crop's size inside of the image, or of the image's where that is smaller."""
        top, left = (
            np.random.randint(0, max(image.shape[axis] - self.crop_size[axis], 0) + 1)
            for axis in (0, 1)
        )
        return top, top + self.crop_size[0], left, left + self.crop_size[1]


class FastPackSegInputs(PackSegInputs):
    """A ``PackSegInputs`` that leaves labels of 8 bits in 8 bits.

    MMSegmentation widens them to 64 bits, eight times as much to carry to the training process and
    to the GPU as the files have. ``FastSegDataPreProcessor`` widens them there.
    """

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        """As in ``PackSegInputs``, with ``gt_sem_seg`` (1, H, W) in uint8 if the labels are."""
        labels = results.get('gt_seg_map')
        if labels is None or labels.ndim != 2 or labels.dtype != np.uint8:
            return super().transform(results)
        packed = super().transform({k: v for k, v in results.items() if k != 'gt_seg_map'})
        data = torch.from_numpy(labels[None].copy())  # which a dataset may keep, or map from a file
        packed['data_samples'].gt_sem_seg = PixelData(data=data)
        return packed
