"""A few pictures in the layouts of the tasks on disk, as the tests of the configs need them.

All hold a square image, a wide one, a tall one, and one without any object.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

# (H, W) by name of the image; the last one is empty.
SIZES = {'square': (64, 64), 'wide': (48, 96), 'tall': (90, 50), 'empty': (64, 80)}
SPLITS = {'training': 'train2017', 'validation': 'val2017'}


def rectangles(name: str) -> list[tuple[int, int, int, int]]:
    """Objects of an image as (left, top, right, bottom)."""
    height, width = SIZES[name]
    if name == 'empty':
        return []
    return [
        (2, 4, width // 2, height // 2),
        (width // 2 + 2, height // 2, width - 2, height - 4),
    ]


def _picture(name: str) -> Image.Image:
    picture = np.random.default_rng(0).integers(0, 80, (*SIZES[name], 3), np.uint8)
    for i, (left, top, right, bottom) in enumerate(rectangles(name)):
        picture[top:bottom, left:right, i] += 120
    return Image.fromarray(picture)


def write_ade20k(root: Path) -> None:
    """JPEG images and PNG annotations: 0 is 'other', the objects are of classes 1 and 2."""
    for split in SPLITS:
        for kind in ('images', 'annotations'):
            (root / kind / split).mkdir(parents=True)
        for name, size in SIZES.items():
            labels = np.zeros(size, np.uint8)
            for i, (left, top, right, bottom) in enumerate(rectangles(name)):
                labels[top:bottom, left:right] = 1 + i
            _picture(name).save(root / 'images' / split / f'{name}.jpg')
            Image.fromarray(labels).save(root / 'annotations' / split / f'{name}.png')


def write_folders(root: Path, splits: Sequence[str], classes: Sequence[str]) -> None:
    """JPEG images of each class in a folder of its name."""
    for split in splits:
        for class_name in classes:
            (root / split / class_name).mkdir(parents=True)
            for name in SIZES:
                _picture(name).save(root / split / class_name / f'{name}.jpg')


def write_coco(
    root: Path,
    splits: Sequence[str] = tuple(SPLITS.values()),
    classes: Sequence[str] | None = None,
    file_name: str = 'instances_{}.json',
) -> None:
    """JPEG images and a file of annotations with polygons, of the first two categories.

    Args:
        root (Path): Gets the folders.
        splits (Sequence[str]): Names of the folders of images.
        classes (Sequence[str], optional): The categories, COCO's 80 if None.
        file_name (str): Of the annotations, with a place for the split.
    """
    if classes is None:
        from mmdet.datasets import CocoDataset

        classes = CocoDataset.METAINFO['classes']
    # COCO numbers its categories with gaps; the data set is told them by name.
    categories = [dict(id=i + 1, name=name) for i, name in enumerate(classes)]
    (root / 'annotations').mkdir(parents=True)
    for split in splits:
        (root / split).mkdir()
        images, annotations = [], []
        for image_id, (name, (height, width)) in enumerate(SIZES.items()):
            _picture(name).save(root / split / f'{name}.jpg')
            images.append(dict(id=image_id, file_name=f'{name}.jpg', height=height, width=width))
            for i, (left, top, right, bottom) in enumerate(rectangles(name)):
                corners = [left, top, right, top, right, bottom, left, bottom]
                annotations.append(
                    dict(
                        id=len(annotations) + 1,
                        image_id=image_id,
                        category_id=1 + i,
                        iscrowd=0,
                        bbox=[left, top, right - left, bottom - top],
                        area=(right - left) * (bottom - top),
                        segmentation=[corners],
                    )
                )
        content = dict(images=images, annotations=annotations, categories=categories)
        (root / 'annotations' / file_name.format(split)).write_text(json.dumps(content))
