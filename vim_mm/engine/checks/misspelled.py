"""Names in a config that nothing has: types, arguments of what is built, levels, files."""

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from mmengine.config import Config
from mmengine.registry import (
    DATASETS,
    HOOKS,
    LOOPS,
    METRICS,
    MODELS,
    OPTIM_WRAPPER_CONSTRUCTORS,
    OPTIMIZERS,
    TASK_UTILS,
    WEIGHT_INITIALIZERS,
    Registry,
)
from torch import nn

from vim_mm.config import dataset_options, type_name
from vim_mm.mistakes import did_you_mean

_LEVELS = ('DEBUG', 'INFO', 'WARNING', 'ERROR', 'CRITICAL')
# Of paramwise_cfg, by MMEngine's own constructor.
_PARAMWISE = {
    'custom_keys', 'bias_lr_mult', 'bias_decay_mult', 'norm_decay_mult', 'flat_decay_mult',
    'dwconv_decay_mult', 'dcn_offset_lr_mult', 'bypass_duplicate',
}  # fmt: skip
_LAYER_DECAY = {'layer_decay_rate', 'marked_decay_mult'}
_LOOPS = {'train_cfg': 'IterBasedTrainLoop', 'val_cfg': 'ValLoop', 'test_cfg': 'TestLoop'}
# What MMEngine takes from a config before it builds the rest.
_TAKEN = {'type', '_scope_', 'priority', 'by_epoch', 'constructor', 'paramwise_cfg'}


def check_misspelled(cfg: Config) -> None:
    """Look up the types of a config, and the arguments of what they build, before anything runs.

    MMEngine finds them after hundreds of lines of a log, and some never. Nothing is built.

    Args:
        cfg (Config): Its task library is imported, so that its types are registered.

    Raises:
        ValueError: A name is unknown; the message has its place, and the name most like it.
        TypeError: Learning rates are to shrink by layer, and the backbone tells no depths.
    """
    level = cfg.get('log_level', 'INFO')
    if isinstance(level, str) and level not in (*_LEVELS, 'NOTSET', 'WARN', 'FATAL'):
        hint = did_you_mean(level.upper(), _LEVELS)
        raise ValueError(f'log_level must be one of {[*_LEVELS]}, got {level!r}{hint}')
    scope = cfg.get('default_scope')
    for name, options, registry in _parts(cfg):
        kind = _found(name, options, registry, scope)
        if kind is not None:
            check_arguments_of(kind, name, options)
    _check_paramwise(cfg, scope)


def _parts(cfg: Config) -> Iterator[tuple[str, Mapping, Registry]]:
    """Names, options and registries of what a config builds, as far as these are looked at."""
    model = cfg.get('model')
    if isinstance(model, Mapping):
        yield 'model', model, MODELS
        for key, value in model.items():
            many = value if isinstance(value, list | tuple) else [value]
            for i, part in enumerate(many):
                if isinstance(part, Mapping) and 'type' in part:
                    name = f'model.{key}' + (f'.{i}' if many is value else '')
                    yield name, part, MODELS
    for name, default in _LOOPS.items():
        options = cfg.get(name)
        if isinstance(options, Mapping) and options:
            if name == 'train_cfg' and options.get('by_epoch'):
                default = 'EpochBasedTrainLoop'
            yield name, {'type': default, **options}, LOOPS
    optimizer = _part(cfg.get('optim_wrapper'), 'optimizer')
    if 'type' in optimizer:
        yield 'optim_wrapper.optimizer', optimizer, OPTIMIZERS
    hooks = cfg.get('default_hooks') or {}
    for key, options in hooks.items() if isinstance(hooks, Mapping) else ():
        if isinstance(options, Mapping) and 'type' in options:
            yield f'default_hooks.{key}', options, HOOKS
    for name, registry in (
        ('custom_hooks', HOOKS),
        ('val_evaluator', METRICS),
        ('test_evaluator', METRICS),
    ):
        given = cfg.get(name) or []
        many = given if isinstance(given, list | tuple) else [given]
        for i, options in enumerate(many):
            if isinstance(options, Mapping) and 'type' in options:
                yield name + (f'.{i}' if many is given else ''), options, registry
    for name, options in dataset_options(cfg, 'train', 'val', 'test'):
        if 'type' in options:
            yield name, options, DATASETS


def _part(options, name: str) -> Mapping:
    part = options.get(name) if isinstance(options, Mapping) else None
    return part if isinstance(part, Mapping) else {}


def _found(name: str, options: Mapping, registry: Registry, scope: str | None) -> type | None:
    """The class or function of a type; None of what is no text or class."""
    kind = options.get('type')
    if not isinstance(kind, str):
        return kind if isinstance(kind, type) else None
    others = (MODELS, TASK_UTILS, WEIGHT_INITIALIZERS) if registry is MODELS else (registry,)
    known: set[str] = set()
    for each in others:
        with each.switch_scope_and_registry(scope) as found_in:
            found = found_in.get(kind)
            if found is not None:
                return found
            while found_in is not None:
                known |= {*found_in.module_dict}
                found_in = found_in.parent
    hint = did_you_mean(kind.rpartition('.')[2], known)
    raise ValueError(f'{name}.type must name a registered class, got {kind!r}{hint}')


def check_arguments_of(kind, name: str, options: Mapping) -> None:
    """Raise ValueError for an argument that a class has not, by its name in the config.

    Says nothing where the class may take it all the same, from arguments of any name.
    """
    known, complete = _arguments(kind)
    for key in options:
        if key in known or key in _TAKEN:
            continue
        hint = did_you_mean(key, known)
        if complete or (hint and not _mentions(kind, key)):
            raise ValueError(f'{name} ({type_name(dict(type=kind))}) has no {key!r}{hint}')


def _arguments(kind) -> tuple[set[str], bool]:
    """Names of the arguments of a class, and whether there are no others."""
    known: set[str] = set()
    for each in inspect.getmro(kind) if isinstance(kind, type) else [kind]:
        if each in (object, nn.Module):
            break
        if isinstance(kind, type) and '__init__' not in vars(each):
            continue
        try:
            parameters = inspect.signature(vars(each).get('__init__', each)).parameters
        except (TypeError, ValueError):  # of a compiled class
            return known, False
        known |= {*parameters} - {'self', 'args', 'kwargs', 'runner', 'dataloader'}
        if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            return known, True
    return known, False


def _mentions(kind, key: str) -> bool:
    """Whether the source of a class, or of one that it inherits from, holds a name."""
    for each in inspect.getmro(kind) if isinstance(kind, type) else [kind]:
        try:
            source = '' if each in (object, nn.Module) else inspect.getsource(each)
            if re.search(rf'\b{re.escape(key)}\b', source):
                return True
        except (OSError, TypeError):  # there is none
            return True
    return False


def _check_paramwise(cfg: Config, scope: str | None) -> None:
    """The options of parameter groups, which MMEngine's constructor ignores where it has none."""
    wrapper = cfg.get('optim_wrapper')
    given = _part(wrapper, 'paramwise_cfg')
    constructor = type_name(dict(type=wrapper.get('constructor'))) if wrapper else ''
    if constructor in ('', 'DefaultOptimWrapperConstructor'):
        for key in given:
            if key in _LAYER_DECAY:
                raise ValueError(
                    f'optim_wrapper.paramwise_cfg.{key} needs '
                    "optim_wrapper.constructor='LayerDecayOptimWrapperConstructor'"
                )
    elif constructor != 'LayerDecayOptimWrapperConstructor':
        with OPTIM_WRAPPER_CONSTRUCTORS.switch_scope_and_registry(scope) as registry:
            if registry.get(constructor) is None:
                hint = did_you_mean(constructor, OPTIM_WRAPPER_CONSTRUCTORS.module_dict)
                raise ValueError(
                    f'optim_wrapper.constructor must be registered, got {constructor!r}{hint}'
                )
        return
    known = _PARAMWISE | (_LAYER_DECAY if constructor.startswith('LayerDecay') else set())
    for key in given:
        if key not in known:
            raise ValueError(
                f'optim_wrapper.paramwise_cfg has no {key!r}{did_you_mean(key, known)}'
            )
    rate = given.get('layer_decay_rate', 1.0)
    backbone = _part(cfg.get('model'), 'backbone')
    if rate != 1 and backbone:
        kind = _found('model.backbone', backbone, MODELS, scope)
        if kind is not None and not hasattr(kind, 'get_layer_depth'):
            raise TypeError(
                f'optim_wrapper.paramwise_cfg.layer_decay_rate is {rate}, but the backbone '
                f'{type_name(backbone)} has no get_layer_depth(), which tells depths'
            )


def check_checkpoint(checkpoint: str | Path | None) -> None:
    """Raise FileNotFoundError for a local file that is not there, with those beside it.

    What has a scheme, such as https://, is left to who reads it.
    """
    if checkpoint is None or '://' in str(checkpoint):
        return
    path = Path(checkpoint).expanduser()
    if path.exists():
        return
    others = sorted(path.parent.glob(f'*{path.suffix}')) if path.suffix else []
    names = ', '.join(other.name for other in others[:8]) + ', ...' * (len(others) > 8)
    there = f'{path.parent} has {names}' if others else f'{path.parent} has no such files'
    if not path.parent.is_dir():
        there = f'there is no folder {path.parent} either'
    raise FileNotFoundError(f'there is no checkpoint {checkpoint}; {there}')


def similar_file(path: Path) -> str:
    """The end of a message on a file that is not there: the one beside it that is most like it."""
    if not path.parent.is_dir():
        return ''
    hint = did_you_mean(path.name, [each.name for each in path.parent.glob(f'*{path.suffix}')])
    return f'{hint} (in {path.parent})' if hint else ''
