"""Random inputs of the tests, in the form that data loaders hand to models."""

import torch
from mmengine.structures import PixelData

SIZE = (32, 64)
SIDE = 28  # of images to classify


def classification_batch(num_classes: int) -> dict:
    """Two images with their classes."""
    from mmpretrain.structures import DataSample

    inputs = [torch.randint(0, 256, (3, SIDE, SIDE), dtype=torch.uint8) for _ in range(2)]
    labels = torch.randint(0, num_classes, (2,)).tolist()
    data_samples = [DataSample().set_gt_label(label) for label in labels]
    return dict(inputs=inputs, data_samples=data_samples)


def segmentation_batch(num_classes: int) -> dict:
    """Two images (the norms of the heads need more than one) of ``SIZE`` with their labels."""
    from mmseg.structures import SegDataSample

    inputs = [torch.randint(0, 256, (3, *SIZE), dtype=torch.uint8) for _ in range(2)]
    labels = [torch.randint(0, num_classes, (1, *SIZE)) for _ in range(2)]
    data_samples = [
        SegDataSample(
            gt_sem_seg=PixelData(data=label), metainfo=dict(img_shape=SIZE, ori_shape=SIZE)
        )
        for label in labels
    ]
    return dict(inputs=inputs, data_samples=data_samples)


def detection_batch(num_classes: int) -> dict:
    """Two images of ``SIZE``, one with two objects, one without any."""
    from mmdet.testing import demo_mm_inputs

    return demo_mm_inputs(
        2, image_shapes=[(3, *SIZE)] * 2, num_items=[2, 0], num_classes=num_classes, with_mask=True
    )
