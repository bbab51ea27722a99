"""MMSegmentation's SegDataPreProcessor without its waits for the device."""

from typing import Any

import torch
from mmseg.models import SegDataPreProcessor

from vim_mm.compat import without_channel_swap
from vim_mm.segmentation.guards import check_batch, check_channels_swap


class FastSegDataPreProcessor(SegDataPreProcessor):
    """A ``SegDataPreProcessor`` with the same results, bit for bit.

    MMSegmentation swaps channels by an index that is a list. PyTorch copies it to the GPU for every
    picture, and the host waits until the GPU has done all that it was given, the step before
    included. Here the channels are flipped. Labels may come in uint8, see
    :class:`vim_mm.segmentation.transforms.FastPackSegInputs`; the model gets them in int64.
    """

    def forward(self, data: dict, training: bool = False) -> dict[str, Any]:
        """As in ``SegDataPreProcessor``."""
        data = self.cast_data(data)
        check_batch(data['inputs'], data.get('data_samples'), self.size, training)
        for sample in data.get('data_samples') or ():
            if 'gt_sem_seg' in sample and sample.gt_sem_seg.data.dtype is torch.uint8:
                sample.gt_sem_seg.data = sample.gt_sem_seg.data.long()
        others, swaps_channels = without_channel_swap(self)
        if not swaps_channels or data['inputs'][0].size(0) != 3:
            return super().forward(data, training)
        check_channels_swap(data['inputs'])
        others.cast_data = lambda cast: cast  # done above
        data['inputs'] = [image.flip(0) for image in data['inputs']]
        return SegDataPreProcessor.forward(others, data, training)
