"""Entries of a config that nothing reads, in parts that no class takes as its arguments."""

import inspect
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from mmengine.config import Config
from mmengine.hooks import CheckpointHook
from mmengine.registry import OPTIMIZERS
from mmengine.runner import Runner
from torch import nn

from vim_mm.config import dataset_options, entry, part, type_name
from vim_mm.errors import UserValueError, did_you_mean

VERY_LIKE = 0.82  # of difflib; 'in_index' and 'ignore_index' have 0.8
# Parts whose keys are names of a user's own, where 'pet' is no misspelled 'type'.
_OF_NAMES = {'metainfo', 'custom_keys', 'data_prefix'}
# Small parts of a model that make no sense without a type, which only who builds them misses.
_LAYERS = ('norm_cfg', 'act_cfg', 'conv_cfg', 'init_cfg', 'head.sampler')
# What segmentors and detectors read of train_cfg and test_cfg, where a misspelled entry has the
# default, or the value of the base, take its place.
_SETTINGS = {
    *('mode', 'crop_size', 'stride', 'threshold', 'scale_factor', 'subdivision_steps'),
    *('rpn', 'rcnn', 'rpn_proposal', 'nms_pre', 'max_per_img', 'nms', 'min_bbox_size'),
    *('score_thr', 'mask_thr_binary', 'mask_thr', 'filter_thr', 'iou_thr', 'iou_threshold'),
    *('allowed_border', 'pos_weight', 'debug', 'assigner', 'sampler', 'mask_size'),
    *('panoptic_on', 'semantic_on', 'instance_on', 'filter_low_score', 'augments'),
}
_OF_DATA = {
    'metainfo': {'classes', 'palette'},
    'data_prefix': {
        *('img', 'img_path', 'seg', 'seg_map_path', 'depth_map_path', 'sub_data_root', 'ann_path'),
    },
    'filter_cfg': {'filter_empty_gt', 'min_size'},
}
_MULTIPLIERS = {'lr_mult', 'decay_mult'}


def check_unread(cfg: Config) -> None:
    """Examine what MMEngine and the task libraries would leave out without a word, or say late.

    These are misspelled types, layers without a type, settings of training and prediction inside of
    a model, names and folders of a data set, multipliers of weights, and arguments of a checkpoint.

    Args:
        cfg (Config): Its task library is imported.

    Raises:
        ValueError: Nothing reads an entry; the message has its place, and what is most like it.
    """
    for name, options in _all(cfg, ''):
        for key in options if not _OF_NAMES & {*name.split('.')} else ():
            if _is_type(key):
                raise UserValueError(f"{name or 'the config'} has {key!r}; did you mean 'type'?")
    for name, options in _all(part(cfg, 'model'), 'model'):
        if name.endswith(_LAYERS) and options and not {'type', 'checkpoint'} & {*options}:
            raise UserValueError(f'{name} has no type: {dict(options)}')
    for name in ('model.train_cfg', 'model.test_cfg'):
        for within, options in _all(entry(cfg, name), name):
            if 'type' not in options:
                _check_like(within, options, _SETTINGS)
    for dataset, options in dataset_options(cfg, 'train', 'val', 'test'):
        for key, known in _OF_DATA.items():
            _check_like(f'{dataset}.{key}', part(options, key), known)
    _check_custom_keys(cfg)
    _check_saving(part(cfg, 'default_hooks.checkpoint'))


def misspelled_keys(optim_wrapper: object, model: nn.Module) -> Iterator[tuple[str, str]]:
    """Keys of ``paramwise_cfg.custom_keys`` in no parameter's name, and the part that is like one.

    Others that are in none are left: a schedule may serve several models.
    """
    names = [name for name, _ in model.named_parameters()]
    parts = {each for name in names for each in name.split('.')}
    for key in part(optim_wrapper, 'paramwise_cfg.custom_keys'):
        if any(key in name for name in names):
            continue
        for each in {*key.split('.')} - parts:
            for similar in get_close_matches(each, parts, n=1, cutoff=VERY_LIKE):
                yield key, similar


def _all(value: object, name: str) -> Iterator[tuple[str, Mapping]]:
    """Every part of a value, and it itself, with their dotted names."""
    if isinstance(value, Mapping | Config):
        yield name, value
        inside = value.items()
    elif isinstance(value, list | tuple):
        inside = enumerate(value)
    else:
        return
    for key, each in inside:
        yield from _all(each, f'{name}.{key}' if name else str(key))


def _is_type(key: object) -> bool:
    """Whether it is the word 'type' with letters in another order, missing or twice."""
    return (
        isinstance(key, str)
        and key != 'type'
        and key[0] in 'ty'
        and 3 <= len(key) <= 5
        and {*key} <= {*'type'}
        and len({*key}) >= 3
    )


def _check_like(name: str, options: Mapping, known: set[str]) -> None:
    """Raise ValueError for a key that is no known one, but nearly, or but for its capitals."""
    long = [each for each in known if len(each) > 3]  # 'imgs' may be somebody's own
    for key in options:
        if not isinstance(key, str) or key in known:
            continue
        for similar in get_close_matches(key.lower(), long, n=1, cutoff=VERY_LIKE):
            if re.fullmatch(rf'{similar}[_\d]\w*', key):  # so is 'img_path2'
                continue
            raise UserValueError(f'nothing reads {name}.{key}; did you mean {similar!r}?')


def _check_custom_keys(cfg: Config) -> None:
    """What a group of parameters is multiplied by; all else would be a note that nobody reads."""
    optimizer = OPTIMIZERS.module_dict.get(type_name(part(cfg, 'optim_wrapper.optimizer')))
    known = _MULTIPLIERS | ({*inspect.signature(optimizer).parameters} if optimizer else set())
    for key, options in part(cfg, 'optim_wrapper.paramwise_cfg.custom_keys').items():
        name = f'optim_wrapper.paramwise_cfg.custom_keys.{key}'
        if not isinstance(options, Mapping):
            raise UserValueError(f'{name} must be a dict of {sorted(_MULTIPLIERS)}, got {options}')
        for inner, value in options.items():
            if isinstance(value, Mapping):
                raise UserValueError(
                    f'{name} must have numbers, got {inner!r}: {dict(value)}; names of weights '
                    'with a dot can be given in a config alone, not by --cfg-options'
                )
            if hint := did_you_mean(inner, known) if inner not in known else '':
                raise UserValueError(f'{name} has no {inner!r}{hint}')


def _check_saving(options: Mapping) -> None:
    """What a checkpoint hook does not know it hands to the runner, at the first checkpoint."""
    if type_name(options) not in ('CheckpointHook', 'DurableCheckpointHook'):
        return
    known = {*inspect.signature(CheckpointHook.__init__).parameters}
    known |= {*inspect.signature(Runner.save_checkpoint).parameters}
    known -= {'self', 'kwargs', 'runner', 'filename', 'meta'}
    for key in options:
        if key not in known | {'type', '_scope_', 'priority'}:
            hint = did_you_mean(key, known)
            raise UserValueError(f'default_hooks.checkpoint has no {key!r}{hint}')
