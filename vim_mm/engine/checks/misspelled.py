"""Names in a config that nothing has: types, arguments of what is built, levels, files."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Generic

from mmengine.config import Config
from mmengine.registry import (
    DATA_SAMPLERS,
    DATASETS,
    EVALUATOR,
    FUNCTIONS,
    HOOKS,
    LOG_PROCESSORS,
    LOOPS,
    METRICS,
    MODELS,
    OPTIM_WRAPPER_CONSTRUCTORS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    PARAM_SCHEDULERS,
    TASK_UTILS,
    TRANSFORMS,
    VISUALIZERS,
    WEIGHT_INITIALIZERS,
    Registry,
)
from torch import nn
from torch.utils.data import DataLoader

from vim_mm.config import dataset_options, entry, part, type_name
from vim_mm.engine.checks.unread import VERY_LIKE, check_unread
from vim_mm.errors import UserTypeError, UserValueError, did_you_mean

_LEVELS = ('DEBUG', 'INFO', 'WARNING', 'ERROR', 'CRITICAL')
# Of paramwise_cfg, by MMEngine's own constructor.
_PARAMWISE = {
    'custom_keys', 'bias_lr_mult', 'bias_decay_mult', 'norm_decay_mult', 'flat_decay_mult',
    'dwconv_decay_mult', 'dcn_offset_lr_mult', 'bypass_duplicate',
}  # fmt: skip
_LAYER_DECAY = {'layer_decay_rate', 'marked_decay_mult'}
_LOOPS = {'train_cfg': 'IterBasedTrainLoop', 'val_cfg': 'ValLoop', 'test_cfg': 'TestLoop'}
# Where nested parts begin, and the types of those that need not name one.
_ROOTS = {
    'model': MODELS,
    'data_preprocessor': MODELS,
    'param_scheduler': PARAM_SCHEDULERS,
    'optim_wrapper': OPTIM_WRAPPERS,
    'visualizer': VISUALIZERS,
    'log_processor': LOG_PROCESSORS,
    'custom_hooks': HOOKS,
    'tta_model': MODELS,
}
_TYPES = {'optim_wrapper': 'OptimWrapper', 'log_processor': 'LogProcessor'}
_LOADERS = ('train_dataloader', 'val_dataloader', 'test_dataloader')
_OF_A_LOADER = {
    'sampler': DATA_SAMPLERS,
    'batch_sampler': DATA_SAMPLERS,
    'dataset': DATASETS,
    'collate_fn': FUNCTIONS,
}
_LIKE = 0.6  # of difflib
_OF_BUILDERS = {'optimizer', 'requires_grad', 'name', 'override', 'position', 'stages', 'priority'}
_OF_LOADERS = {*inspect.signature(DataLoader).parameters, 'num_batch_per_epoch'}
# Parts without a type, and what is read of them.
_PLAIN = {
    **dict.fromkeys(_LOADERS, _OF_LOADERS),
    'optim_wrapper.clip_grad': {
        *('type', 'max_norm', 'norm_type', 'error_if_nonfinite', 'foreach', 'clip_value'),
    },
    'auto_scale_lr': {'enable', 'base_batch_size'},
    'env_cfg': {'cudnn_benchmark', 'mp_cfg', 'dist_cfg', 'resource_limit'},
    'env_cfg.dist_cfg': {'backend', 'init_backend', 'init_method', 'timeout', 'port'},
    'model.data_preprocessor.test_cfg': {'size', 'size_divisor'},
    'data_preprocessor.test_cfg': {'size', 'size_divisor'},
    'env_cfg.mp_cfg': {'mp_start_method', 'opencv_num_threads'},
}
# Parts of a model that are looked up among models whatever the model is.
_OF_MODELS = re.compile(r'model\.(backbone|neck|\w*head|data_preprocessor)(\.\d+)?')
# What MMEngine takes from a config before it builds the rest.
_TAKEN = {'type', '_scope_', 'priority', 'by_epoch', 'constructor', 'paramwise_cfg', 'of'}


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
        raise UserValueError(f'log_level must be one of {[*_LEVELS]}, got {level!r}{hint}')
    check_unread(cfg)
    for name, options, registry in _parts(cfg):
        within = _scope_at(cfg, name)
        kind = _found(name, options, registry, within)
        if kind is not None:
            owner = cfg.model.get('type') if name.startswith('model.') else None
            owner = _find(owner, MODELS, _scope_at(cfg, 'model'))[0]
            check_arguments_of(_original(kind, options, within), name, options, owner)
    for name, options, registry, owner in _nested_parts(cfg):
        within = _scope_at(cfg, name)
        kind, known = _find(options.get('type'), registry, within)
        if kind is None and isinstance(options.get('type'), str):
            _check_type(name, options['type'], known)
        elif kind is not None:
            kind = _original(kind, options, within)
            outer = _scope_at(cfg, name.rpartition('.')[0])
            _check_likely(kind, name, options, _find(owner, registry, outer)[0])
    hooks = part(cfg, 'default_hooks')
    for key, options in hooks.items():
        if isinstance(options, Mapping) and 'type' not in options:
            hint = did_you_mean(key, {*hooks} - {key})
            raise UserValueError(f'default_hooks.{key} has no type{hint}')
    for name, known in _PLAIN.items():
        for key in part(cfg, name):
            if hint := did_you_mean(key, known) if key not in known else '':
                raise UserValueError(f'{name} has no {key!r}{hint}')
    _check_paramwise(cfg)


def _parts(cfg: Config) -> Iterator[tuple[str, Mapping, Registry]]:
    """Names, options and registries of what a config builds, as far as these are looked at."""
    model = cfg.get('model')
    if isinstance(model, Mapping):
        yield 'model', model, MODELS
        for key, value in model.items():
            if key == 'tokenizer':  # of a registry that only some libraries have
                continue
            many = value if isinstance(value, list | tuple) else [value]
            for i, options in enumerate(many):
                if isinstance(options, Mapping) and 'type' in options:
                    name = f'model.{key}' + (f'.{i}' if many is value else '')
                    if key == 'init_cfg':  # whose override is taken before it is built
                        options = {k: v for k, v in options.items() if k != 'override'}
                    yield name, options, MODELS
    for name, default in _LOOPS.items():
        options = cfg.get(name)
        if isinstance(options, Mapping) and options:
            if name == 'train_cfg' and options.get('by_epoch', 'max_epochs' in options):
                default = 'EpochBasedTrainLoop'
            yield name, {'type': default, **options}, LOOPS
    optimizer = part(cfg, 'optim_wrapper.optimizer')
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
        if registry is METRICS and isinstance(given, Mapping) and 'metrics' in given:
            yield name, {'type': 'Evaluator', **given}, EVALUATOR  # as MMEngine tells them apart
            name, given = f'{name}.metrics', given['metrics'] or []
        many = given if isinstance(given, list | tuple) else [given]
        for i, options in enumerate(many):
            if isinstance(options, Mapping) and 'type' in options:
                yield name + (f'.{i}' if many is given else ''), options, registry
    for name, options in dataset_options(cfg, 'train', 'val', 'test'):
        if 'type' in options:
            yield name, options, DATASETS


def _nested_parts(cfg: Config) -> Iterator[tuple[str, Mapping, Registry, object]]:
    """As :func:`_parts`, of what is built inside of these or by loaders, wrappers and schedules.

    The last value is the type of what each lies in, None of the outermost.
    """
    for name, registry in _ROOTS.items():
        value = cfg.get(name)
        default = _TYPES.get(name)
        if default is not None and isinstance(value, Mapping):
            yield name, {'type': default, **value}, registry, None
        yield from _typed(name, value, registry)
    for loader in _LOADERS:
        for key, registry in _OF_A_LOADER.items():
            yield from _typed(f'{loader}.{key}', part(cfg, f'{loader}.{key}'), registry)


def _typed(
    name: str, value, registry: Registry, owner: object = None
) -> Iterator[tuple[str, Mapping, Registry, object]]:
    """Every part of a nested value that has a type."""
    if isinstance(value, Mapping):
        if 'type' in value:
            yield name, value, registry, owner
            owner = value['type']
        if 'albu' in type_name(value).lower():  # it holds Albumentations' own classes
            return
        for key, each in value.items():
            # Pipelines, and transforms that hold others.
            of_data = registry in (DATASETS, TRANSFORMS)
            other = TRANSFORMS if of_data and key in ('pipeline', 'transforms') else registry
            yield from _typed(f'{name}.{key}', each, other, owner)
    elif isinstance(value, list | tuple):
        for i, each in enumerate(value):
            yield from _typed(f'{name}.{i}', each, registry, owner)


def _scope_at(cfg: Config, name: str) -> str | None:
    """The library in which a part's type is looked up: of the innermost ``_scope_`` around it."""
    scope, keys = cfg.get('default_scope'), name.split('.')
    for end in range(1, len(keys) + 1):
        scope = part(cfg, '.'.join(keys[:end])).get('_scope_', scope)
    return scope


def _found(name: str, options: Mapping, registry: Registry, scope: str | None) -> type | None:
    """The class or function of a type; None of what is no text or class.

    And of a part of a model that may be for another registry, unless a known name is very like it.
    """
    kind = options.get('type')
    found, known = _find(kind, registry, scope)
    if found is None and isinstance(kind, str):
        any_registry = name.startswith('model.') and not _OF_MODELS.fullmatch(name)
        _check_type(name, kind, known, VERY_LIKE if any_registry else 0)
    return found


def _check_type(name: str, kind: str, known: set[str], least: float = VERY_LIKE) -> None:
    """Raise ValueError for a type that is not registered, if one of those known is so like it."""
    short = kind.rpartition('.')[2]
    if not least or get_close_matches(short, known, n=1, cutoff=least):
        hint = did_you_mean(short, known)
        raise UserValueError(f'{name}.type must name a registered class, got {kind!r}{hint}')


def _find(kind, registry: Registry, scope: str | None) -> tuple[type | None, set[str]]:
    """The class or function of a type, None if there is none; and the names that are known."""
    if not isinstance(kind, str):
        return kind if isinstance(kind, type) else None, set()
    others = (MODELS, TASK_UTILS, WEIGHT_INITIALIZERS) if registry is MODELS else (registry,)
    known: set[str] = set()
    for each in others:
        with each.switch_scope_and_registry(scope) as found_in:
            try:
                found = found_in.get(kind)
            except RuntimeError:  # a module of that name, which MMEngine tried, fails to import
                found = None
            if found is not None:
                return found, known
            while found_in is not None:
                known |= {*found_in.module_dict}
                found_in = found_in.parent
    return None, known


def check_arguments_of(kind, name: str, options: Mapping, owner=None) -> None:
    """Raise ValueError for an argument that a class has not, by its name in the config.

    Says nothing where the class may take it all the same, from arguments of any name, or where
    ``owner``, the class of what the part lies in, may take it before.
    """
    known, complete = _arguments(kind)
    for key in options:
        if key in known or key in _TAKEN:
            continue
        hint = did_you_mean(key, known)
        likely = get_close_matches(key, known, n=1, cutoff=VERY_LIKE)
        taken = not likely and owner is not None and _may_take(owner, key)
        if (complete and not taken) or (likely and not _mentions(kind, key)):
            raise UserValueError(f'{name} ({type_name(dict(type=kind))}) has no {key!r}{hint}')


def _original(kind, options: Mapping, scope: str | None):
    """The library's class whose arguments a function of ours passes on, such as FastUPerHead."""
    if not inspect.isfunction(kind) or not kind.__module__.startswith('vim_mm.'):
        return kind
    name = options.get('of', kind.__name__.removeprefix('Fast').removeprefix('SharedMask'))
    return _find(name, MODELS, scope)[0] or kind


def _check_likely(kind, name: str, options: Mapping, owner) -> None:
    """As :func:`check_arguments_of`, of a part that what it lies in may change before it builds it.

    Then only a name that is like an argument of the class is an error, unless ``owner`` or the
    usual builders know it. Of all others the class says so when it is built.
    """
    known, complete = _arguments(kind)
    if name.endswith('norm_cfg'):
        known = known | {'requires_grad'}  # which the builder of norms takes
    if name == 'optim_wrapper':
        known = known | {'paramwise_cfg', 'constructor'}  # which its builder does
    for key in options:
        if key in known or key in _TAKEN or key in _OF_BUILDERS:
            continue
        similar = get_close_matches(key, known, n=1, cutoff=_LIKE if complete else VERY_LIKE)
        if similar and not any(_mentions(each, key) for each in (kind, owner) if each is not None):
            raise UserValueError(
                f'{name} ({type_name(dict(type=kind))}) has no {key!r}; did you mean '
                f'{similar[0]!r}?'
            )


def _arguments(kind) -> tuple[set[str], bool]:
    """Names of the arguments of a class, and whether there are no others."""
    known: set[str] = set()
    passed_on = True
    for each in inspect.getmro(kind) if isinstance(kind, type) else [kind]:
        if each in (object, nn.Module):
            break
        if isinstance(kind, type) and '__init__' not in vars(each):
            continue
        try:
            parameters = inspect.signature(vars(each).get('__init__', each)).parameters
        except (TypeError, ValueError):  # of a compiled class
            return known, False
        rest = [p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD]
        known |= {*parameters} - {'self', 'args', 'runner', 'dataloader', *rest}
        if not rest:
            return known, passed_on
        passed_on = passed_on and _passes_on(vars(each).get('__init__'), rest[0])
    return known, False


def _passes_on(function, rest: str) -> bool:
    """Whether a constructor does nothing with its ``**rest`` but give it to ``super()``."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # there is no source
        return False
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == 'super().__init__'
        and any(k.arg is None and ast.unparse(k.value) == rest for k in node.keywords)
    ]
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == rest]
    return len(calls) == len(uses) == 1


def _may_take(owner, key: str) -> bool:
    """Whether a model may change a part's arguments: it names this one, or is open to any."""
    return not _arguments(owner)[1] or _mentions(owner, key)


def _mentions(kind, key: str) -> bool:
    """Whether the source of a class, or of one that it inherits from, holds a name."""
    for each in inspect.getmro(kind) if isinstance(kind, type) else [kind]:
        try:
            # Generic takes no arguments, and since Python 3.12 has no source.
            source = '' if each in (object, nn.Module, Generic) else inspect.getsource(each)
            if re.search(rf'\b{re.escape(key)}\b', source):
                return True
        except (OSError, TypeError):  # there is none
            return True
    return False


def _check_paramwise(cfg: Config) -> None:
    """The options of parameter groups, which MMEngine's constructor ignores where it has none."""
    given = part(cfg, 'optim_wrapper.paramwise_cfg')
    full_name = entry(cfg, 'optim_wrapper.constructor')
    constructor = type_name(dict(type=full_name)).rpartition('.')[2]
    if constructor in ('', 'DefaultOptimWrapperConstructor'):
        for key in given:
            if key in _LAYER_DECAY:
                raise UserValueError(
                    f'optim_wrapper.paramwise_cfg.{key} needs '
                    "optim_wrapper.constructor='LayerDecayOptimWrapperConstructor'"
                )
    elif constructor != 'LayerDecayOptimWrapperConstructor':
        registry, scope = OPTIM_WRAPPER_CONSTRUCTORS, _scope_at(cfg, 'optim_wrapper')
        found, names = _find(full_name, registry, scope)
        if found is None and isinstance(full_name, str):
            raise UserValueError(
                f'optim_wrapper.constructor must be registered, got {full_name!r}'
                f'{did_you_mean(constructor, names)}'
            )
        return
    known = _PARAMWISE | (_LAYER_DECAY if constructor.startswith('LayerDecay') else set())
    for key in given:
        if hint := did_you_mean(key, known) if key not in known else '':
            raise UserValueError(f'optim_wrapper.paramwise_cfg has no {key!r}{hint}')
    rate = given.get('layer_decay_rate', 1.0)
    backbone = part(cfg, 'model.backbone')
    if rate != 1 and backbone:
        kind = _found('model.backbone', backbone, MODELS, _scope_at(cfg, 'model.backbone'))
        if kind is not None and not hasattr(kind, 'get_layer_depth'):
            raise UserTypeError(
                f'optim_wrapper.paramwise_cfg.layer_decay_rate is {rate}, but the backbone '
                f'{type_name(backbone)} has no get_layer_depth(), which tells depths'
            )
