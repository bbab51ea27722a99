"""From the command line to MMEngine's Runner: finds shipped configs, merges options into them."""

import ast
import difflib
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.runner import Runner

from vim_mm.errors import UserTypeError, UserValueError, did_you_mean

# A link to configs/ in a checkout, a directory in an installed package.
_CONFIGS = Path(__file__).parent / '.mim' / 'configs'
_SCHEME = 'vim_mm::'
# What MMEngine reads from a config besides the arguments of its Runner.
_OTHER_TOP_LEVEL = {
    'activation_checkpointing',
    'compile',
    'custom_imports',
    'efficient_conv_bn_eval',
    'find_unused_parameters',
    'model_wrapper_cfg',
    'runner_type',
    'strategy',
    'sync_bn',
    'tta_model',
    'tta_pipeline',
}
# Above the likeness of what libraries' configs keep for themselves: mmseg's 'models' has 0.91.
_MISSPELLED = 0.92


def config_names() -> list[str]:
    """Names of the configs that come with the package, such as ``seg/upernet_vim_t_bilinear.py``.

    Returns:
        list[str]: Sorted; without those under ``_base_``, which are parts of the others.
    """
    names = (path.relative_to(_CONFIGS).as_posix() for path in _CONFIGS.glob('*/*.py'))
    return sorted(name for name in names if not name.startswith('_base_/'))


def config_path(name: str) -> str:
    """Absolute path of a config that comes with the package.

    Args:
        name (str): One of :func:`config_names`, or a part such as
            ``_base_/models/upernet_vim_t.py``.

    Raises:
        FileNotFoundError: There is no such config; the message holds similar names.

    Example:
        >>> cfg = Config.fromfile(config_path('seg/upernet_vim_t_bilinear.py'))
    """
    path = _CONFIGS / name
    if not path.is_file():
        similar = difflib.get_close_matches(name, config_names(), n=3)
        hint = f'did you mean {" or ".join(similar)}?' if similar else 'see vim_mm.config_names()'
        raise FileNotFoundError(f'vim_mm has no config {name!r}: {hint}')
    return str(path.resolve())


def _read_by_mmengine() -> set[str]:
    """Top-level names of a config that have an effect."""
    arguments = {*inspect.signature(Runner.__init__).parameters} - {'self', 'cfg'}
    return arguments | _OTHER_TOP_LEVEL


def check_names(cfg: Config) -> None:
    """Find a misspelled top-level name, which MMEngine would ignore.

    Other names that MMEngine does not read are notes of the config (``crop_size``,
    ``val_dataloader_2``) or its own variables: ``custom_hook`` in ``[custom_hook]``.

    Args:
        cfg (Config): As it was read from a file.

    Raises:
        ValueError: A name is nearly one that MMEngine reads; the message holds both.
    """
    read = _read_by_mmengine()
    for name in sorted({*cfg} - read):
        for similar in difflib.get_close_matches(name, read, n=1, cutoff=_MISSPELLED):
            if re.search(rf'(^|_){similar}(_|\d|$)', name) or name in _variables_read(cfg.text):
                continue
            raise UserValueError(
                f'{cfg.filename}: nothing reads {name!r}; did you mean {similar!r}?'
            )


def _variables_read(text: str) -> set[str]:
    """Variables of the files of a config, in Python, that these files read themselves."""
    names = set()
    # MMEngine's Config has the files one after the other, the path above each.
    for file in re.split(r'^/.*$', text, flags=re.MULTILINE):
        with suppress(SyntaxError):  # a base in YAML
            for node in ast.walk(ast.parse(file)):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                    names.add(node.id)
                elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == '_base_':
                    names.add(node.attr)
    return names


def merge_options(cfg: Config, options: dict) -> None:
    """Merge ``--cfg-options`` into a config so that none of them is without effect.

    As ``cfg.merge_from_dict``, with two differences. ``data_root`` moves every path that lies in
    the config's ``data_root``: datasets and evaluators hold copies of it. If there are none, that
    is an error. And a top-level name that neither the config nor MMEngine knows is an error, where
    MMEngine would ignore it.

    Args:
        cfg (Config): Changed in place.
        options (dict): Values by dotted name, as MMEngine's ``DictAction`` parses them.

    Raises:
        ValueError: An option that nothing would read.
        TypeError: ``data_root`` is no path.
    """
    known = {*cfg, *_read_by_mmengine()}
    for name in options:
        top_level = name.split('.')[0]
        if top_level not in known:
            hint = did_you_mean(top_level, known)
            if places := [*_places(cfg.to_dict(), name)]:
                hint = f' at the top; the config has {", ".join(places)}'
            raise UserValueError(f'nothing reads {top_level!r}{hint}')
    if 'data_root' in options:
        new = options['data_root']
        if not isinstance(new, str) or not new:
            raise UserTypeError(f'data_root must be a path, got {new!r}')
        rest = _rest_of_paths(cfg)
        if rest is None:
            raise UserValueError(unused_data_root(cfg))
        cfg.merge_from_dict(_moved(cfg.to_dict(), rest, new))
    cfg.merge_from_dict(options)


def entry(cfg: object, name: str, default: Any = None) -> Any:
    """What a config has under a dotted name, whose parts may be places in a list."""
    for key in name.split('.'):
        if isinstance(cfg, Mapping | Config) and key in cfg:
            cfg = cfg[key]
        elif isinstance(cfg, list | tuple) and key.isdecimal() and int(key) < len(cfg):
            cfg = cfg[int(key)]
        else:
            return default
    return cfg


def part(cfg: object, name: str) -> Mapping:
    """The part of a config under a dotted name; an empty one where there is none."""
    found = entry(cfg, name)
    return found if isinstance(found, Mapping) else {}


def type_name(options: Mapping) -> str:
    """The name of the class that a config's part is of: ``type`` is a text or the class itself."""
    kind = options.get('type', '')
    return kind.rpartition('.')[2] if isinstance(kind, str) else getattr(kind, '__name__', '')


def dataset_options(cfg: Config, *splits: str) -> Iterator[tuple[str, Mapping]]:
    """Options of the datasets of 'train', 'val' or 'test', by their names in the config.

    Of those that repeat, join or mix others, the ones within.
    """
    for split in splits:
        loader = cfg.get(f'{split}_dataloader')
        if isinstance(loader, Mapping) and isinstance(loader.get('dataset'), Mapping):
            yield from _leaves(f'{split}_dataloader.dataset', loader['dataset'])


def _leaves(name: str, options: Mapping) -> Iterator[tuple[str, Mapping]]:
    inner = options.get('dataset')
    if isinstance(inner, Mapping):
        yield from _leaves(f'{name}.dataset', inner)
    elif isinstance(options.get('datasets'), list | tuple):
        for i, each in enumerate(options['datasets']):
            yield from _leaves(f'{name}.datasets.{i}', each)
    else:
        yield name, options


def _data_roots(cfg: Config) -> dict[str, str]:
    """The places of the datasets, by name; without those of no place."""
    found = dataset_options(cfg, 'train', 'val', 'test')
    roots = {f'{name}.data_root': options.get('data_root') for name, options in found}
    return {name: root for name, root in roots.items() if root}


def uses_data_root(cfg: Config) -> bool:
    """Whether a path in the config begins with its ``data_root``, or no dataset has a place at all.

    A ``data_root`` that is no text, such as None or a list, is for the config's own use.
    """
    own_use = not isinstance(cfg.get('data_root'), str) or not cfg.data_root
    return own_use or not _data_roots(cfg) or _rest_of_paths(cfg) is not None


def unused_data_root(cfg: Config) -> str:
    """What to tell a user whose ``data_root`` no path in the config begins with."""
    line = f'no dataset lies in the data_root of the config, {cfg.data_root}'
    for name, root in _data_roots(cfg).items():
        return f'{line}: {name} is {root}, and it is set there'
    return line


def _places(value, name: str, path: str = '') -> Iterator[str]:
    """Dotted names under which entries called ``name`` lie in nested lists and dicts."""
    items = value.items() if isinstance(value, dict) else ()
    for key, item in enumerate(value) if isinstance(value, list | tuple) else items:
        if key == name:
            yield f'{path}{key}'
        yield from _places(item, name, f'{path}{key}.')


def _rest_of_paths(cfg: Config) -> Callable[[str], str | None] | None:
    """A function of a text: what it has after ``data_root``, None if it does not begin with it.

    Paths at or below ``data_root`` do. Only where the config has none of them, whatever goes on
    after it does, as 'data/streets_train' after 'data/streets_'. None if there is nothing at all.
    """
    root = cfg.get('data_root')
    if not isinstance(root, str) or not root:
        return None
    others = {key: value for key, value in cfg.to_dict().items() if key != 'data_root'}
    for rest in partial(_below, root), partial(_after, root):
        if any(rest(text) is not None for text in _texts(others)):
            return rest
    return None


def _below(root: str, path: str) -> str | None:
    for start, whole in (root.rstrip('/'), path), map(os.path.normpath, (root, path)):
        if path and (whole == start or whole.startswith(f'{start}/')):
            return whole[len(start) :]
    return None


def _after(start: str, text: str) -> str | None:
    return text[len(start) :] if text.startswith(start) else None


def _texts(value) -> Iterator[str]:
    """The texts in nested lists and dicts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _moved(value, rest: Callable[[str], str | None], new: str):
    """Copy of nested lists and dicts in which what had a ``rest`` has it after ``new``."""
    if isinstance(value, dict):
        return {key: _moved(item, rest, new) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, rest, new) for item in value)
    after = rest(value) if isinstance(value, str) else None
    if after is None:
        return value
    return (new.rstrip('/') if after[:1] in ('', '/') else new) + after


def resolve_shipped_bases() -> None:
    """Teach MMEngine's Config the scheme ``vim_mm::``; :func:`vim_mm.activate` calls this.

    Its own way for packages would mark what it finds with the scope ``vim_mm``, in which MMEngine
    then looks for EncoderDecoder and MaskRCNN. Shipped configs name their scope themselves.
    """
    resolve = Config._get_cfg_path

    @functools.cache
    def resolve_external(cfg_path: str) -> tuple[str, str | None]:
        # MMEngine reads every metafile of the package anew: a quarter of a second for mmdet.
        return resolve(cfg_path, '')

    def get_cfg_path(cfg_path: str, filename: str) -> tuple[str, str | None]:
        if cfg_path.startswith(_SCHEME):
            return config_path(cfg_path.removeprefix(_SCHEME)), None
        if '::' in cfg_path:
            return resolve_external(cfg_path)
        return resolve(cfg_path, filename)

    Config._get_cfg_path = staticmethod(get_cfg_path)
