"""Whether the heads of a model have the classes of the data set."""

import re
from collections.abc import Iterator

from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from torch import nn

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
        ValueError: They differ; the message names both.
    """
    classes = (getattr(dataset, 'metainfo', None) or {}).get('classes')
    if classes is None:
        return
    rest = ' after reduce_zero_label' if getattr(dataset, 'reduce_zero_label', False) else ''
    for head, num_classes in _heads(model):
        if num_classes != len(classes):
            raise ValueError(
                f'model.{head}.num_classes is {num_classes}, but {name} has {len(classes)} '
                f'classes{rest} ({_shown(classes)})'
            )


def _heads(model: nn.Module) -> Iterator[tuple[str, int]]:
    model = model.module if is_model_wrapper(model) else model
    for name, module in model.named_modules():
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
    """Calls :func:`check_classes` before the first iteration of a training or a test."""

    priority = 'VERY_HIGH'

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
        loop = getattr(runner, f'{phase}_loop')
        check_classes(runner.model, loop.dataloader.dataset, f'{phase}_dataloader.dataset')
