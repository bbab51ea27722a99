"""Whether heads have the classes of the data set, and classes the names of its labels."""

import json
import re
from collections.abc import Iterator, Sequence

from mmengine.fileio import get_text
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from torch import nn

from vim_mm.checkpoints.provenance import inner_model
from vim_mm.engine.batches.samples import classes_of, leaves, lists_as
from vim_mm.errors import UserValueError

# The heads of MMSegmentation, MMDetection and MMPretrain whose num_classes are those of the data
# set; an RPN has one class, and a semantic branch of a detector has classes of its own.
_HEAD = re.compile(r'(^|\.)((decode|auxiliary|bbox|mask|panoptic)_head|head)(\.\d+)?$')


def check_classes(model: nn.Module, dataset, name: str) -> None:
    """Compare ``num_classes`` of each head with ``metainfo['classes']`` of a data set.

    Says nothing where either is unknown, or a head tells two classes by one output channel.

    Args:
        model (nn.Module): A classifier, a segmentor or a detector.
        dataset: With ``reduce_zero_label``, its classes are those that remain: metrics name label 0
            by the first of them.
        name (str): What the config calls it, for the message.

    Raises:
        ValueError: They differ, and the message names both; or the classes are a text.
    """
    classes = classes_of(dataset)
    if classes is None:
        return
    if isinstance(classes, str):  # each letter would be a class
        raise UserValueError(
            f"{name}.metainfo['classes'] must be a list of names, got {classes!r}: one class is "
            f'({classes!r},), with a comma'
        )
    rest = ' after reduce_zero_label' if getattr(dataset, 'reduce_zero_label', False) else ''
    for head, num_classes in _heads(model):
        if num_classes != len(classes):
            raise UserValueError(
                f'model.{head}.num_classes is {num_classes}, but {name} has {len(classes)} '
                f'classes{rest} ({_shown(classes)})'
            )


def check_class_names(dataset, name: str) -> None:
    """Compare the names of classes with those that the files of a data set give their labels.

    MMDetection numbers the classes of COCO's format in the order of the annotation file, and leaves
    out the objects of all others. MMPretrain numbers folders in the order of their names. Neither
    looks at the order of ``metainfo['classes']``.

    Args:
        dataset: Of MMDetection's ``CocoDataset``, of MMPretrain's ``CustomDataset``, or one around
            such datasets. Nothing is said of others.
        name (str): What the config calls it, for the message.

    Raises:
        ValueError: A class has the name of another one, or no objects at all.
    """
    for inner, its_name in leaves(dataset, name):
        classes = classes_of(inner)
        if classes is None:
            continue
        if lists_as(inner, 'CocoDataset'):
            _check_categories([*classes], inner, its_name)
        elif isinstance(folders := getattr(inner, 'folder_to_idx', None), dict):
            _check_folders([*classes], folders, its_name)


def _category_names(dataset) -> list[str] | None:
    """Of an annotation file in COCO's format, in its order; None of a file without categories."""
    text = get_text(dataset.ann_file, backend_args=getattr(dataset, 'backend_args', None))
    # Not all of the file: COCO's has 450 MB, most of them polygons.
    starts = [match.end() for match in re.finditer(r'"categories"\s*:\s*(?=\[)', text)]
    lists = [json.JSONDecoder().raw_decode(text, start)[0] for start in starts]
    named = [
        each for each in lists if each and all(isinstance(c, dict) and 'name' in c for c in each)
    ]
    if len(named) == 1:
        categories = named[0]
    else:  # pictures and objects may have lists of that name too
        categories = json.loads(text).get('categories') if lists else None
    return None if categories is None else [category['name'] for category in categories]


def _check_categories(classes: list[str], dataset, name: str) -> None:
    there = _category_names(dataset)
    if there is None:
        return
    for missing in [each for each in classes if each not in there]:
        raise UserValueError(
            f'{name}: the class {missing!r} is no category of {dataset.ann_file}, which has '
            f'{_shown(there)}; without it the labels of the others would shift'
        )
    found = [category for category in there if category in classes]
    if found != classes:
        raise UserValueError(
            f'{name}: the classes are {_shown(classes)}, but {dataset.ann_file} has them in the '
            f'order {_shown(found)}, in which their labels are numbered: name them in this order'
        )


def _check_folders(classes: Sequence[str], folders: dict[str, int], name: str) -> None:
    for folder, label in folders.items():
        if folder in classes and label < len(classes) and classes[label] != folder:
            raise UserValueError(
                f'{name}: the folder {folder!r} has the label {label}, which metainfo calls '
                f'{classes[label]!r}: name the classes in the order of the folders '
                f'({_shown(sorted(folders, key=folders.get))})'
            )


def _heads(model: nn.Module) -> Iterator[tuple[str, int]]:
    for name, module in inner_model(model).named_modules():
        num_classes = getattr(module, 'num_classes', None)
        if not _HEAD.search(name) or not isinstance(num_classes, int):
            continue
        # A mask for all classes, or one channel for background and foreground.
        if getattr(module, 'class_agnostic', False) or getattr(module, 'out_channels', None) == 1:
            continue
        yield name, num_classes


def _shown(classes) -> str:
    names = [*map(str, classes)]
    return ', '.join(names[:3] + ['...'] * (len(names) > 3))


@HOOKS.register_module()
class ClassesHook(Hook):
    """Calls :func:`check_classes` and :func:`check_class_names` before anything is computed.

    MMDetection's NumClassCheckHook and MMPretrain's ClassNumCheckHook compare numbers alone, by
    assertions: the former in the first epoch, before each validation and never in a test, and both
    refuse class-agnostic masks and RPNs of other names. MMSegmentation has none.
    """

    priority = 'VERY_HIGH'

    def __init__(self):
        self._checked: list = []  # data sets whose names have been compared

    def before_train(self, runner) -> None:
        """Compare with the data of training and of validation, which comes hours later."""
        self._check(runner, 'train')
        if runner.val_loop is not None:
            self._check(runner, 'val')

    def before_val(self, runner) -> None:
        """Compare with the data of validation."""
        self._check(runner, 'val')

    def before_test(self, runner) -> None:
        """Compare with the data of testing."""
        self._check(runner, 'test')

    def _check(self, runner, phase: str) -> None:
        dataset = getattr(runner, f'{phase}_loop').dataloader.dataset
        name = f'{phase}_dataloader.dataset'
        check_classes(runner.model, dataset, name)
        # Once: it reads annotation files, and validation comes again and again.
        if not any(dataset is each for each in self._checked):
            check_class_names(dataset, name)
            self._checked.append(dataset)
