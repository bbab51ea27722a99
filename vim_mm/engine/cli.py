"""What the command lines in tools/ share: from arguments to a config that VimRunner takes.

The arguments themselves are in tools/_command_line.py, which imports nothing heavy.
"""

import logging
import os
import re
from argparse import Namespace
from collections.abc import Mapping
from hashlib import sha256
from importlib import import_module
from pathlib import Path

from mmengine.config import Config
from mmengine.device import get_device
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from vim_mm.checkpoints.provenance import check_switches
from vim_mm.checkpoints.reading import load_whole_model
from vim_mm.compat import DISTRIBUTIONS
from vim_mm.config import check_names, entry, merge_options
from vim_mm.engine.checks.channels import check_channels
from vim_mm.engine.checks.data import check_data_root, check_outputs_of
from vim_mm.engine.checks.misspelled import check_misspelled
from vim_mm.engine.checks.settings import check_settings
from vim_mm.engine.mmengine_patches import activate
from vim_mm.engine.reader import follow_test_data
from vim_mm.engine.screen import catch_prints, expect_no_loss, open_screen
from vim_mm.errors import UserError, UserValueError
from vim_mm.mistakes import check_checkpoint, check_config, sentence
from vim_mm.outputs import written_by

# By task: segmentation, detection, classification.
TASK_LIBRARIES = ('mmseg', 'mmdet', 'mmpretrain')
_METHOD = 'model.backbone.discretization_method'  # what --discretization-method is short for
_LONGEST_PART, _MOST_PARTS = 40, 4  # of a folder's name
_MISSING = object()


class ConfigError(UserError, ValueError):
    """A config, or an option that changes it, cannot be used."""


def read_config(args: Namespace, import_library: bool = True) -> Config:
    """Read the config that the arguments name, with their changes, and import the task's library.

    Args:
        args (Namespace): Of tools/_command_line.py.
        import_library (bool): False leaves the import out, for who builds nothing.

    Raises:
        SystemExit: The config is of no such task, or the task's library is missing.
        ConfigError: The config fails when it is read, or with an option.
        ValueError: Parts of the model do not fit each other, a setting cannot be used, a top-level
            name is misspelled, or an output would replace data.
        TypeError: A setting is of a wrong type.
    """
    check_config(args.config)
    # A log file on a full disk loses lines; without this each line would be a traceback.
    logging.raiseExceptions = False
    activate()
    try:
        cfg = Config.fromfile(args.config)
    except ModuleNotFoundError as error:
        # A base such as mmdet::_base_/..., which lies in a library.
        raise ConfigError(f'{args.config} needs {_distribution(error)}: {error}') from error
    except Exception as error:  # a config is a program, and the user's
        kind = '' if isinstance(error, OSError | UserError) else f'{type(error).__name__}: '
        raise ConfigError(f'{args.config}: {kind}{sentence(error)}') from error
    check_names(cfg)
    check_data_root(cfg, Path(args.config))  # options may give each dataset a place of its own
    options = dict(args.cfg_options)
    if getattr(args, 'discretization_method', None) is not None:
        method = options.setdefault(_METHOD, args.discretization_method)
        if method != args.discretization_method:
            raise ConfigError(
                f'--discretization-method is {args.discretization_method!r}, and --cfg-options '
                f'sets {_METHOD}={method}'
            )
    before = cfg.to_dict()
    try:
        merge_options(cfg, options)
    except Exception as error:
        raise ConfigError(f'--cfg-options {" ".join(options)}: {sentence(error)}') from error
    given = [name for name in options if name.partition('.')[0] == 'data_preprocessor']
    if given and entry(cfg, 'model.data_preprocessor') is not None:
        raise ConfigError(
            f'--cfg-options {given[0]}: nothing reads it, because the model has its own; give '
            f'model.{given[0]}'
        )
    if not isinstance(cfg.get('model'), dict):
        raise UserValueError(f'{args.config}: model must be a dict, got {cfg.get("model")!r}')
    check_channels(cfg.model)
    cfg.allow_mismatch = getattr(args, 'allow_mismatch', False)
    if 'launcher' in args:
        os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
        cfg.launcher = args.launcher
        if args.work_dir is not None:
            cfg.work_dir = args.work_dir
        elif 'work_dir' not in options or cfg.get('work_dir') is None:
            named = cfg.get('work_dir') or Path('work_dirs') / Path(args.config).stem
            cfg.work_dir = f'{named}{_suffix(before, options)}'
        # Jobs that are queued again, and their other nodes, may start elsewhere.
        cfg.work_dir = str(Path(cfg.work_dir).expanduser().absolute())
    if import_library:
        # Before the library, which says much when it is imported.
        if not getattr(args, 'verbose', True):
            open_screen(cfg, getattr(args, 'amp', False))
        import_task_library(cfg)
        catch_prints()
        check_misspelled(cfg)
        check_settings(cfg)
        follow_test_data(cfg)
        check_checkpoint(getattr(args, 'checkpoint', None))
        check_outputs_of(cfg, written_by(args))
    return cfg


def _suffix(before: Mapping, options: Mapping) -> str:
    """What a run's folder is called beside its config: the options that make another model.

    Such as '_foh' and '_drop_path_rate=0.1'; nothing where they say what the config says.
    """
    parts = []
    for name, value in sorted(options.items()):
        if (
            name.partition('.')[0] not in ('model', 'data_preprocessor')
            or entry(before, name, _MISSING) == value
        ):
            continue
        short = name.removeprefix('model.').removeprefix('backbone.')
        plain = f'{value}' if name == _METHOD else f'{short}={value}'
        part = re.sub(r'[^\w.=,+-]+', '-', plain)
        if part != plain or len(part) > _LONGEST_PART:  # another value may look the same
            part = f'{part[:_LONGEST_PART]}-{sha256(plain.encode()).hexdigest()[:6]}'
        parts.append(f'_{part}')
    if len(parts) > _MOST_PARTS:
        parts = [f'_model-{sha256("".join(parts).encode()).hexdigest()[:10]}']
    return ''.join(parts)


def load_model(
    cfg: Config, checkpoint: str | Path, any_method: bool = False
) -> tuple[nn.Module, dict]:
    """A trained model, ready for prediction on the default device, and what its checkpoint holds.

    Prints what is worth knowing of the checkpoint, such as that its method is unknown.

    Args:
        cfg (Config): As :func:`read_config` gives it.
        checkpoint (str | Path): Path or URL of weights that fit the whole model.
        any_method (bool): Whether the weights may be of another discretization method.

    Raises:
        CheckpointMismatchError: The weights were trained with another switch that changes what they
            compute, and ``cfg.allow_mismatch`` does not insist.
    """
    activate()
    expect_no_loss()
    init_default_scope(cfg.default_scope)
    model = revert_sync_batchnorm(MODELS.build(cfg.model))
    loaded = load_whole_model(model, checkpoint)
    allow, other = cfg.get('allow_mismatch', False), ('discretization_method',) * any_method
    for line in check_switches(model, loaded, str(checkpoint), allow, other):
        print(line)
    return model.to(get_device()).eval(), loaded


def _distribution(error: ModuleNotFoundError) -> str:
    """What to install for a base such as ``mmdet::_base_/...``, which lies in a library."""
    for module in TASK_LIBRARIES:
        if module in str(error):
            return f'{_either(module)}, which is not installed'
    return 'a library that is missing'


def _either(module: str) -> str:
    """The distributions that hold a library, in words."""
    return ' or '.join(DISTRIBUTIONS[module])


def import_task_library(cfg: Config) -> None:
    """Import the library that ``default_scope`` of the config names, and no other.

    Raises:
        SystemExit: ``default_scope`` is none of 'mmseg' (segmentation), 'mmdet' (detection) and
            'mmpretrain' (classification), or the library cannot be imported.
    """
    scope = cfg.get('default_scope')
    if scope not in TASK_LIBRARIES:
        raise SystemExit(
            f'{cfg.filename}: default_scope must be one of {[*TASK_LIBRARIES]}, got {scope!r}.'
        )
    try:
        import_module(f'{scope}.models')
    except ImportError as error:
        needs = _needed(scope, error)
        raise SystemExit(
            f'{cfg.filename} needs {needs}, which cannot be imported: {error}.'
        ) from error


def _needed(scope: str, error: ImportError) -> str:
    """What is missing, in words: the library of the task, or what that needs in turn."""
    name = error.name or scope
    missing = name.partition('.')[0]
    if missing == 'mmcv' and name != 'mmcv':  # mmcv._ext
        full = [each for each in DISTRIBUTIONS['mmcv'] if not each.endswith('lite')]
        return f'{" or ".join(full)} with compiled operators'
    if missing != scope and missing in DISTRIBUTIONS:
        return _either(missing)
    if missing != scope and isinstance(error, ModuleNotFoundError):
        return f'{missing} for {_either(scope)}'
    operators = ' and mmcv with compiled operators' if scope == 'mmdet' else ''
    return f'{_either(scope)}{operators}'
