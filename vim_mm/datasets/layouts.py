"""Scenes on disk, in the layouts of ADE20K and COCO under one root, complete or not at all.

ADE20K: images/{training,validation}/*.jpg and annotations/{training,validation}/*.png; COCO:
{train,val}2017/*.jpg and annotations/instances_{train,val}2017.json. manifest.json holds the
parameters and is written last.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vim_mm.errors import UserRuntimeError, UserValueError

COCO_SPLITS = {'training': 'train2017', 'validation': 'val2017'}


@dataclass
class Scene:
    """One drawn image and what is on it.

    Attributes:
        image (np.ndarray): (H, W, 3) uint8, BGR.
        masks (np.ndarray): (N, H, W) bool, the visible pixels of each object, from back to front.
            No two of them overlap and none is empty.
        labels (np.ndarray): (N,) int64, indices into the classes of objects.
    """

    image: np.ndarray
    masks: np.ndarray
    labels: np.ndarray

    @property
    def seg_map(self) -> np.ndarray:
        """(H, W) uint8: 0 is unlabelled as in ADE20K (no pixel is), 1 ground, 2 + label objects."""
        seg_map = np.ones(self.image.shape[:2], np.uint8)
        for mask, label in zip(self.masks, self.labels, strict=True):
            seg_map[mask] = label + 2
        return seg_map


def insist_on_least(config: Any, **least: int) -> None:
    """Compare attributes of a config with the least values that they may have.

    Raises:
        ValueError: One is below; the message names it.
    """
    for name, value in least.items():
        given = getattr(config, name)
        if given < value:
            raise UserValueError(f'{name} must be at least {value}, got {given}')


def write_once(
    out: Path, manifest: dict[str, Any], write: Callable[[Path], None], name: str
) -> bool:
    """Write a data set unless ``out`` already holds it.

    It is made in a directory beside ``out`` and moved there when complete, so an interrupted run
    leaves nothing that looks like a data set.

    Args:
        out (Path): Root of the data set.
        manifest (dict): The parameters that determine it.
        write (Callable): Writes it into the folder that it is given.
        name (str): What to call it.

    Returns:
        bool: True if it was made, False if an identical one was there.

    Raises:
        FileExistsError: ``out`` holds something else than such a data set, or another process is
            making one there.
    """
    if _is_there(out, manifest, name):
        return False
    with _locked(out):
        if _is_there(out, manifest, name):  # another process has made it
            return False
        partial = out.with_name(f'.{out.name}.partial')  # hidden: NAME.partial may be somebody's
        if partial.exists():
            shutil.rmtree(partial)
        write(partial)
        (partial / 'manifest.json').write_text(json.dumps(manifest))
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
    return True


def _is_there(out: Path, manifest: dict[str, Any], name: str) -> bool:
    """Whether ``out`` holds the data set of this manifest; FileExistsError for something else."""
    if not out.exists():
        return False
    present = _read_manifest(out)
    if present.keys() != manifest.keys():
        raise FileExistsError(f'{out} exists and holds no {name}: name another place')
    return present == manifest


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Keep other processes from making a data set in the same place, as long as this one lives."""
    out.parent.mkdir(parents=True, exist_ok=True)
    path = out.with_name(f'.{out.name}.lock')
    # Through no link: what it leads to is not ours.
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have taken the file away when it ended.
            ours = path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat())
        except BlockingIOError:
            ours = False
        if not ours:
            raise FileExistsError(f'another process is making {out}: wait for its end')
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _read_manifest(root: Path) -> dict[str, Any]:
    """What the manifest of a data set says; empty where there is none."""
    try:
        manifest = json.loads((root / 'manifest.json').read_text())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def write_split(root: Path, split: str, scenes: Iterable[Scene], classes: Sequence[str]) -> None:
    """Write scenes in both layouts under ``root``.

    Args:
        root (Path): Root of the data set.
        split (str): 'training' or 'validation'.
        scenes (Iterable[Scene]): What to write, numbered from 1.
        classes (Sequence[str]): Names of the objects' classes.
    """
    coco_split = COCO_SPLITS[split]
    folders = [root / 'images' / split, root / 'annotations' / split, root / coco_split]
    for folder in folders:
        folder.mkdir(parents=True)
    image_folder, seg_folder, coco_folder = folders
    images, annotations = [], []
    for image_id, scene in enumerate(scenes, 1):
        stem = f'{image_id:06d}'
        jpeg = encode('.jpg', scene.image, quality=95)
        (image_folder / f'{stem}.jpg').write_bytes(jpeg)
        (coco_folder / f'{stem}.jpg').write_bytes(jpeg)
        (seg_folder / f'{stem}.png').write_bytes(encode('.png', scene.seg_map))
        height, width = scene.image.shape[:2]
        images.append(
            {'id': image_id, 'file_name': f'{stem}.jpg', 'height': height, 'width': width}
        )
        for mask, label in zip(scene.masks, scene.labels, strict=True):
            annotation_id = len(annotations) + 1
            annotations.append(_coco_annotation(annotation_id, image_id, mask, int(label)))
    categories = [{'id': index, 'name': name} for index, name in enumerate(classes, 1)]
    coco = {'images': images, 'annotations': annotations, 'categories': categories}
    (root / 'annotations' / f'instances_{coco_split}.json').write_text(json.dumps(coco))


def encode(extension: str, image: np.ndarray, quality: int | None = None) -> bytes:
    """An image as a file of that kind; ``quality``, to 100, is that of a JPEG."""
    import cv2  # here, so that a command without OpenCV ends in one sentence

    options = [] if quality is None else [cv2.IMWRITE_JPEG_QUALITY, quality]
    encoded, buffer = cv2.imencode(extension, image, options)
    if not encoded:
        raise UserRuntimeError(f'OpenCV could not encode a {extension} image')
    return buffer.tobytes()


def _coco_annotation(annotation_id, image_id, mask, label):
    """COCO's entry for one object. Its mask is run-length encoded: polygons cannot say holes."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    top, left = int(rows[0]), int(columns[0])
    return {
        'id': annotation_id,
        'image_id': image_id,
        'category_id': label + 1,
        'bbox': [left, top, int(columns[-1]) + 1 - left, int(rows[-1]) + 1 - top],
        'area': int(mask.sum()),
        'iscrowd': 0,
        'segmentation': {'size': list(mask.shape), 'counts': _run_lengths(mask)},
    }


def _run_lengths(mask):
    """COCO's uncompressed run lengths of a mask: column by column, starting with zeros."""
    pixels = np.concatenate([[False], mask.ravel(order='F'), [False]])
    changes = np.flatnonzero(pixels[1:] != pixels[:-1])
    lengths = np.diff(np.concatenate([[0], changes, [mask.size]]))
    return lengths.tolist()
