"""Whether the first samples of a data set are, when they are loaded, what their files hold.

Transforms that read files run here by themselves, of some samples from all over the data set; what
they give is compared with the files. Augmentation does not run, and no random number is drawn.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from PIL.ImageOps import exif_transpose

from vim_mm.engine.batches.files import (
    orientation,
    stored_size,
    why_unreadable,
    wide_values,
    wrapped_label,
)
from vim_mm.engine.batches.samples import (
    SampleError,
    classes_of,
    leaves,
    lists_as,
    loading_transforms,
    out_of_range,
)
from vim_mm.engine.checks.suffixes import left_out
from vim_mm.errors import UserValueError

# Samples of a data set that are loaded, those whose files' headers are read, and those whose label
# of classification is looked up.
_LOADED, _HEADERS, _LABELS = 8, 64, 10_000
# Below this part of 8 bits an image is dark to a model that expects all of them.
_DARK = 64
# Annotation files up to this many bytes are read once more, to say why objects are missing.
_READ_AGAIN = 64 << 20
# Part of the objects of a file that may be left out without a word.
_LEFT_OUT = 0.1
_COLOR = "color_type='color_ignore_orientation' in the LoadImageFromFile of every pipeline"


@dataclass
class Findings:
    """What the samples of a data set have in common.

    Attributes:
        lines (list[str]): Of what is doubtful, a sentence each.
        labels (Counter): Pixels of each label of segmentation, as loaded.
        maps (int): Maps of labels among the samples.
        images (int): Images whose label of classification was looked up.
        classes (set[int]): Those labels.
        complete (bool): Whether the samples, or the images, are all that there are.
    """

    lines: list[str] = field(default_factory=list)
    labels: Counter = field(default_factory=Counter)
    maps: int = 0
    images: int = 0
    classes: set[int] = field(default_factory=set)
    complete: bool = True


def look_at_samples(
    dataset, name: str, learns: bool = True, ignored: Sequence[int] | None = None
) -> Findings:
    """Compare what is loaded of a data set with its files.

    Args:
        dataset: Of MMSegmentation, MMDetection or MMPretrain, or one around such; nothing is said
            of others.
        name (str): What the config calls it, for the messages.
        learns (bool): Whether a model is to learn from it. One that has learnt is tested on images
            as it had them.
        ignored (Sequence[int], optional): Labels of pixels that are of no class; None where
            whoever draws the samples looks for others soon.

    Raises:
        SampleError: A label does not fit 8 bits or is none of the classes, an image lies otherwise
            than its annotation, or 16 bits are loaded as a few values.
    """
    findings = Findings()
    for inner, its_name in leaves(dataset, name):
        if not hasattr(inner, 'get_data_info') or len(inner) == 0:
            continue
        _look_at_headers(inner, its_name, findings)
        if line := left_out(inner, its_name):
            findings.lines.append(line)
        crushed = [
            depth
            for index in _spread(len(inner), _LOADED)
            if (depth := look_at_loaded(inner, index, findings, ignored)) is not None
        ]
        findings.lines += of_depth(crushed, its_name, learns)
        look_at_classes(inner, findings)
        findings.complete &= len(inner) <= (_LABELS if findings.images else _LOADED)
    return findings


def look_at_classes(dataset, findings: Findings) -> None:
    """Look up the labels of classification; images of several, or of none, have no one label."""
    if not isinstance(dataset.get_data_info(0).get('gt_label'), int | np.integer):
        return
    for index in _spread(len(dataset), _LABELS):
        label = dataset.get_data_info(index).get('gt_label')
        if isinstance(label, int | np.integer):
            findings.images += 1
            findings.classes.add(int(label))


def one_class(findings: Findings, dataset, name: str, ignored: Sequence[int]) -> str | None:
    """What is wrong with samples of one class where there are several; None if nothing is.

    Args:
        findings (Findings): Of the samples of ``dataset``.
        dataset: Its ``metainfo`` names the classes.
        name (str): What the config calls it.
        ignored (Sequence[int]): Labels of pixels that are of no class.
    """
    classes = classes_of(dataset) or ()
    if len(classes) < 2 or not (findings.maps or findings.images):
        return None
    if not findings.maps:
        if len(findings.classes) > 1:
            return None
        (label,) = findings.classes
        return (
            f'{name}: all {findings.images} images are of the class {label} '
            f'({_class(classes, label)}), of {len(classes)}; there is nothing to tell apart'
        )
    found = {label for label in findings.labels if label not in ignored}
    if len(found) > 1:
        return None
    held = ' and '.join(f'{label} ({_class(classes, label)})' for label in found) or 'no class'
    void = sorted(label for label in findings.labels if label in ignored)
    rest = f' besides {", ".join(map(str, void))}, which is ignored' if void else ''
    every = 'all' if findings.complete else 'the first'
    remedy = ''
    if void:
        remedy = f': number the classes from 0 to {len(classes) - 1} in the files'
        if any(getattr(inner, 'reduce_zero_label', False) for inner, _ in leaves(dataset, name)):
            remedy = ': reduce_zero_label=True ignores the label 0 of the files'
    return (
        f'{name}: {every} {findings.maps} maps of labels hold {held}{rest}, of {len(classes)} '
        f'classes; there is nothing to tell apart{remedy}'
    )


def _class(classes: Sequence[str], label: int) -> str:
    return str(classes[label]) if 0 <= label < len(classes) else 'none of the classes'


def _spread(length: int, most: int) -> list[int]:
    """Up to ``most`` indices, from all over the data set."""
    return [*range(0, length, -(-length // most))]


def _look_at_headers(dataset, name: str, findings: Findings) -> None:
    """Say which images EXIF turns where their annotations may not be turned with them."""
    indices = _spread(len(dataset), _HEADERS)
    turned = [path for index in indices if (path := look_at_header(dataset, index)) is not None]
    if turned:
        findings.lines.append(
            f'{name}: EXIF turns {len(turned)} of {len(indices)} images as they are loaded '
            f'({turned[0]}), and their annotations stay: if those were drawn on the pixels as they '
            f'are stored, set {_COLOR}.'
        )


def look_at_header(dataset, index: int) -> str | None:
    """The path of an image that EXIF turns, if its annotation may be made for it unturned.

    Raises:
        SampleError: The image is missing, or its annotation has the size of the unturned one.
    """
    info = dataset.get_data_info(index)
    path = info.get('img_path')
    if not isinstance(path, str):
        return None
    here = not getattr(dataset, 'backend_args', None)
    if here and (reason := _missing(path)):
        raise SampleError(f'{path}: {reason}')
    label = info.get('seg_map_path') if _loads_labels(dataset) else None
    if here and isinstance(label, str) and (reason := _missing(label)):
        raise SampleError(f'{label}: {reason}')
    if not (label or info.get('instances')) or (way := orientation(path)) == 1:
        return None
    stored, shown, size = _sizes(path, way, info)
    if not _is_turned(dataset, index, stored, shown):
        return None
    if stored == shown or size is None:
        return path
    if size == stored:
        what = info.get('seg_map_path') or dataset.ann_file
        raise SampleError(
            f'{path}: its EXIF orientation is {way}, so that it is loaded as {_by(shown)} pixels, '
            f'and {what} is made for the {_by(stored)} as they are stored: set {_COLOR}'
        )
    return None


def _missing(path: str) -> str | None:
    return None if Path(path).is_file() else why_unreadable(path)


def _loads_labels(dataset) -> bool:
    return any('Annotations' in type(load).__name__ for load in loading_transforms(dataset))


def _is_turned(dataset, index: int, stored: tuple | None, shown: tuple | None) -> bool:
    """Whether an image is loaded as EXIF has it shown, and not as it is stored."""
    image = (_load(dataset, index) or {}).get('img')
    if not isinstance(image, np.ndarray):
        return False
    if stored != shown:
        return tuple(image.shape[:2]) == shown
    with Image.open(dataset.get_data_info(index)['img_path']) as picture:
        ways = [np.asarray(each.convert('L'), float) for each in (picture, exif_transpose(picture))]
    grey = image.reshape(*image.shape[:2], -1).mean(-1)
    as_stored, as_shown = (np.abs(grey - way).mean() for way in ways)
    return bool(as_shown < as_stored)


def _sizes(path: str, way: int, info: Mapping) -> tuple:
    """Sizes (H, W) of an image as stored and as shown, and of its annotation (None if unknown)."""
    stored = stored_size(path)
    shown = stored if stored is None or way < 5 else stored[::-1]
    label = info.get('seg_map_path')
    if isinstance(label, str):
        annotated = stored_size(label)
    else:
        size = info.get('height'), info.get('width')
        annotated = None if None in size else size
    return stored, shown, annotated


def look_at_loaded(
    dataset, index: int, findings: Findings, ignored: Sequence[int] | None = None
) -> tuple[str, int, int] | None:
    """Load a sample; path and greatest values, in the file and as loaded, of a crushed image.

    Raises:
        SampleError: A label does not fit 8 bits or is none of the classes (with ``ignored``), or
            the image has not the size of its annotation.
    """
    results = _load(dataset, index)
    if results is None:
        return None
    path, image = results.get('img_path'), results.get('img')
    size = (results.get('height'), results.get('width'))
    boxes = 'instances' in results and isinstance(image, np.ndarray) and None not in size
    if boxes and tuple(image.shape[:2]) != size:
        raise SampleError(
            f'{path}: it is loaded as {_by(image.shape)} pixels (height x width; its EXIF '
            f'orientation is {orientation(path)}), and {dataset.ann_file} says {_by(size)}: its '
            'boxes would lie elsewhere'
        )
    if isinstance(labels := results.get('gt_seg_map'), np.ndarray):
        file = results.get('seg_map_path')
        if labels.dtype == np.uint8 and isinstance(file, str) and (problem := wrapped_label(file)):
            raise SampleError(f'{file}: {problem}')
        findings.maps += 1
        values, counts = np.unique(labels, return_counts=True)
        findings.labels.update(dict(zip(values.tolist(), counts.tolist())))
        if ignored is not None and labels.ndim == 2 and 'instances' not in results:
            reduced = results.get('reduce_zero_label')
            if problem := outside_of_classes(dataset, values, ignored, reduced):
                raise SampleError(f'{file}: {problem}')
    return lost_depth(path, image)


def lost_depth(path: str | None, image: np.ndarray | None) -> tuple[str, int, int] | None:
    """Path and greatest values, in the file and as loaded, of an image of 8 bits from more."""
    if isinstance(path, str) and isinstance(image, np.ndarray) and image.dtype == np.uint8:
        stored = wide_values(path)
        if stored is not None:
            return path, stored.max(), int(image.max())
    return None


def outside_of_classes(
    dataset, labels: np.ndarray, ignored: Sequence[int], reduced: bool | None
) -> str | None:
    """What is wrong with labels that are neither classes of a data set nor ignored."""
    classes = classes_of(dataset)
    kept = torch.from_numpy(labels[~np.isin(labels, ignored)].astype(np.int64))
    return None if classes is None else out_of_range(kept, len(classes), reduced)


def _load(dataset, index: int) -> dict | None:
    """A sample after the transforms that read files; None if one of them fails.

    Whoever draws the sample for a batch says why, and names its files.
    """
    try:
        results = dataset.get_data_info(index)
        for transform in loading_transforms(dataset):
            results = transform(results)
    except Exception:
        return None
    return results


def of_depth(crushed: list[tuple[str, int, int]], name: str, learns: bool = True) -> list[str]:
    """What to say of images of more than 8 bits that are loaded in 8.

    Raises:
        SampleError: Few of the 8 bits are used, and a model is to learn from that.
    """
    if not crushed:
        return []
    path, stored, _ = max(crushed, key=lambda each: each[1])
    loaded = max(each[2] for each in crushed)
    line = (
        f'images of more than 8 bits (values up to {stored:g}) are loaded in 8, as values up to '
        f"{loaded}: set color_type='unchanged' and to_float32=True in the LoadImageFromFile of "
        'every pipeline, and mean and std of model.data_preprocessor in the units of the files'
    )
    if learns and loaded < _DARK:
        raise SampleError(f'{path}: {line}')
    return [f'{name}: {line}.']


def _by(size: Sequence[int]) -> str:
    return f'{size[0]} x {size[1]}'


def lost_objects(dataset, name: str) -> Iterator[str]:
    """Compare the objects of annotation files in COCO's format with those that remain.

    Yields:
        str: Of a data set that leaves out more than a tenth of its file's objects, why.

    Raises:
        ValueError: No object remains that could be learnt.
    """
    for inner, its_name in leaves(dataset, name):
        if not lists_as(inner, 'CocoDataset') or not len(inner):
            continue
        file = Path(inner.ann_file)
        if not file.is_file():
            continue
        if file.stat().st_size > _READ_AGAIN and _has_objects(inner, _spread(len(inner), _HEADERS)):
            continue
        content = json.loads(file.read_text())
        objects = [*_objects(content, inner)]
        reasons = _why_left_out(objects, inner)
        yield from (f'{its_name}: {line}.' for line in _of_other_units(objects, file))
        lost = sum(reasons.values())
        if lost <= _LEFT_OUT * len(objects):
            continue
        line = f'{its_name}: {lost} of {len(objects)} objects of {file} are left out: ' + ', '.join(
            f'{count} with {reason}' for reason, count in reasons.most_common()
        )
        if lost == len(objects):
            raise UserValueError(f'{line}; none is left to be learnt')
        yield f'{line}.'


def _objects(content: Mapping, dataset) -> Iterator[tuple[Mapping, Mapping]]:
    """The annotations of the classes of a data set, each behind its image."""
    images = {image['id']: image for image in content.get('images', ())}
    for each in content.get('annotations', ()):
        image = images.get(each.get('image_id'))
        if image is not None and each.get('category_id') in dataset.cat_ids:
            yield image, each


def _of_other_units(objects: Sequence[tuple[Mapping, Mapping]], file: Path) -> Iterator[str]:
    """What to say of boxes and polygons that are not what MMDetection takes them for."""
    beyond = thin = 0
    for image, each in objects:
        x, y, width, height = each['bbox']
        beyond += x + width > image['width'] + 1 or y + height > image['height'] + 1
        polygons = each.get('segmentation')
        if isinstance(polygons, list) and any(polygons) and min(width, height) > 1:
            thin += max(max(polygon) for polygon in polygons if polygon) <= 1
    if beyond > _LEFT_OUT * len(objects):
        yield (
            f'{beyond} of {len(objects)} boxes of {file} reach beyond their images: bbox must be '
            '[x, y, width, height] in pixels'
        )
    if thin > _LEFT_OUT * len(objects):
        yield (
            f'{thin} of {len(objects)} objects of {file} have polygons in 0..1 and boxes in '
            'pixels: segmentation must be in pixels'
        )


def _has_objects(dataset, indices: Sequence[int]) -> bool:
    return any(
        not instance.get('ignore_flag')
        for index in indices
        for instance in dataset.get_data_info(index).get('instances', ())
    )


def _why_left_out(objects: Sequence[tuple[Mapping, Mapping]], dataset) -> Counter:
    """How many objects MMDetection leaves out or ignores, by reason."""
    smallest = 0 if dataset.test_mode else (dataset.filter_cfg or {}).get('min_size', 0)
    reasons: Counter = Counter()
    for image, each in objects:
        x, y, width, height = each['bbox']
        if min(image['width'], image['height']) < smallest:
            reasons[f'an image below filter_cfg.min_size = {smallest}'] += 1
        elif each.get('ignore'):
            reasons['ignore set'] += 1
        elif width < 1 or height < 1:
            reasons['a side below a pixel (bbox must be [x, y, width, height] in pixels)'] += 1
        elif each['area'] <= 0:
            reasons['an area of 0 (area must be in pixels)'] += 1
        elif x >= image['width'] or y >= image['height'] or x + width <= 0 or y + height <= 0:
            reasons['a box outside of its image'] += 1
        elif each.get('iscrowd'):
            reasons['iscrowd=1'] += 1
    return reasons
