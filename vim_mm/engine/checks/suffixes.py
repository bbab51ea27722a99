"""Whether data sets find the files of their folders by the suffixes that they look for."""

import os
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from vim_mm.engine.batches.samples import lists_as

# What an image ends in; other files of a folder are nobody's loss.
_SUFFIXES = {'.jpg', '.jpeg', '.png', '.bmp', '.tif', '.tiff', '.webp', '.ppm', '.pgm', '.jp2'}
# Files of a folder that are looked at.
_MOST = 100_000


def check_suffixes(dataset, name: str, labels: bool) -> None:
    """Look whether the folders of a data set have images and labels of its suffixes.

    Says nothing of data sets that do not list folders as MMSegmentation's ``BaseSegDataset``, and
    of files that are not on this machine.

    Args:
        dataset: As its config makes it; nothing needs to be read.
        name (str): What the config calls it, for the message.
        labels (bool): Whether the pipeline reads maps of labels.

    Raises:
        FileNotFoundError: There is no image, or an image has no map of labels.
    """
    if not _lists_segmentation(dataset):
        return
    folder, suffix = Path(dataset.data_prefix['img_path']), dataset.img_suffix
    files = [*_files(folder)]
    images = [file for file in files if file.name.endswith(suffix)]
    if not images:
        raise FileNotFoundError(_none(folder, suffix, files, f'{name}.img_suffix'))
    place = dataset.data_prefix.get('seg_map_path')
    if not labels or not place or len(files) == _MOST:
        return
    there = {file.as_posix() for file in _files(Path(place))}
    wanted = [
        Path(place, str(image.relative_to(folder))[: -len(suffix)] + dataset.seg_map_suffix)
        for image in images
    ]
    missing = [path for path in wanted if path.as_posix() not in there]
    if len(missing) == len(wanted) and not any(n.endswith(dataset.seg_map_suffix) for n in there):
        found, setting = [*map(Path, there)], f'{name}.seg_map_suffix'
        raise FileNotFoundError(_none(Path(place), dataset.seg_map_suffix, found, setting))
    if missing:
        first = next(image for image, path in zip(images, wanted) if path == missing[0])
        hint = _called_otherwise(first.name[: -len(suffix)], missing[0], there, name)
        raise FileNotFoundError(
            f'{len(missing)} of {len(wanted)} images of {name} in {folder} have no map of labels, '
            f'such as {missing[0]}{hint}'
        )


def _called_otherwise(stem: str, missing: Path, there: set[str], name: str) -> str:
    """The end of a sentence on a missing map of labels: a file that is called like its image."""
    like = min((Path(path) for path in there if stem in Path(path).name), default=None)
    if like is None:
        return ''
    if like.parent == missing.parent and like.name.startswith(stem):
        return f'; found {like.name}: set {name}.seg_map_suffix={like.name[len(stem) :]!r}'
    return f'; found {like}: it must lie and be called as its image'


def left_out(dataset, name: str) -> str | None:
    """What to say of images in the folders of a data set that it does not take; None if it does.

    Args:
        dataset: Of MMSegmentation, or of MMPretrain's ``CustomDataset``.
        name (str): What the config calls it.
    """
    if _lists_segmentation(dataset):
        folder, suffixes = Path(dataset.data_prefix['img_path']), (dataset.img_suffix,)
        with_labels = Path(dataset.data_prefix.get('seg_map_path') or '') == folder
        labels = (dataset.seg_map_suffix,) if with_labels else ()
        setting = f'img_suffix={dataset.img_suffix!r}'
    elif getattr(dataset, 'extensions', None) and not getattr(dataset, 'ann_file', ''):
        folder, suffixes, labels = Path(dataset.img_prefix), dataset.extensions, ()
        setting = f'extensions={sorted(suffixes)}'
    else:
        return None
    if getattr(dataset, 'backend_args', None) or not folder.is_dir():
        return None
    taken = (*suffixes, *labels)
    valid = getattr(dataset, 'is_valid_file', lambda path: path.endswith(taken))
    # A suffix such as '_left.png' is a part of the name, too: '_right.png' is left out on purpose.
    stems = tuple({suffix[: suffix.rindex('.')] for suffix in suffixes if '.' in suffix})
    others = [
        file
        for file in _files(folder)
        if _is_image(file) and not valid(file.name) and file.stem.endswith(stems)
        and file.suffix not in {Path(f'a{suffix}').suffix for suffix in taken}
    ]  # fmt: skip
    if not others:
        return None
    return (
        f'{name}: {_counted(others)} in {folder} are left out ({others[0].name}), because it takes '
        f'{setting}.'
    )


def _lists_segmentation(dataset) -> bool:
    return (
        lists_as(dataset, 'BaseSegDataset')
        and not dataset.ann_file
        and not dataset.backend_args
        and isinstance(dataset.img_suffix, str)
    )


def _files(folder: Path) -> Iterator[Path]:
    """The files in a folder and below it that are not hidden, as MMEngine lists them."""
    below = (
        Path(place, name)
        for place, _, names in os.walk(folder, followlinks=True)
        for name in sorted(names)
        if not name.startswith('.')
    )
    return islice(below, _MOST)


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in _SUFFIXES


def _counted(files: list[Path]) -> str:
    counts = Counter(file.suffix for file in files)
    return ' and '.join(f'{count} *{suffix}' for suffix, count in counts.most_common(3))


def _none(folder: Path, suffix: str, files: list[Path], setting: str) -> str:
    found = [file for file in files if _is_image(file)]
    if not found:
        return f'no *{suffix} in {folder}, and no other image'
    ((common, _),) = Counter(file.suffix for file in found).most_common(1)
    return f'no *{suffix} in {folder}; found {_counted(found)}: set {setting}={common!r}'
