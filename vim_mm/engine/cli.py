"""What the command lines in tools/ share: from arguments to a config that VimRunner takes."""

import os
from argparse import ArgumentParser, Namespace
from importlib import import_module
from pathlib import Path

from mmengine.config import Config, DictAction

from vim_mm.config import merge_options
from vim_mm.engine.activation import activate

TASK_LIBRARIES = {'mmseg': 'onedl-mmsegmentation', 'mmdet': 'onedl-mmdetection'}


def add_arguments(parser: ArgumentParser, launcher: bool = True) -> None:
    """Add the arguments that :func:`read_config` reads, named as in MMDetection's tools.

    Args:
        parser (ArgumentParser): Gets them.
        launcher (bool): Whether the tool can run in several processes.
    """
    parser.add_argument('config', help='path of a config')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=DictAction,
        default={},
        metavar='KEY=VALUE',
        help='override entries of the config: a.b=1 c="[1,2]"; data_root=DIR moves all paths in it',
    )
    parser.add_argument(
        '--allow-mismatch',
        action='store_true',
        help='test, draw or resume a checkpoint that was trained with another discretization '
        'method, or another switch that changes what its weights compute',
    )
    if launcher:
        parser.add_argument(
            '--work-dir', help='where logs and weights go (default: work_dirs/<name of the config>)'
        )
        parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm'], default='none')
        # torch.distributed.launch passes this; torchrun sets the variable.
        parser.add_argument('--local-rank', '--local_rank', type=int, default=0)


def read_config(args: Namespace) -> Config:
    """Read the config that the arguments name, with their changes, and import the task's library.

    Raises:
        SystemExit: The config is of neither task, or the task's library is missing.
    """
    activate()
    try:
        cfg = Config.fromfile(args.config)
    except ModuleNotFoundError as error:
        # A base such as mmdet::_base_/..., which lies in a library.
        raise SystemExit(f'{args.config} needs a library that is missing: {error}.') from error
    merge_options(cfg, args.cfg_options)
    cfg.allow_mismatch = args.allow_mismatch
    if 'launcher' in args:
        os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
        cfg.launcher = args.launcher
        if args.work_dir is not None:
            cfg.work_dir = args.work_dir
        elif cfg.get('work_dir') is None:
            cfg.work_dir = str(Path('work_dirs') / Path(args.config).stem)
        # Jobs that are queued again, and their other nodes, may start elsewhere.
        cfg.work_dir = str(Path(cfg.work_dir).expanduser().absolute())
    import_task_library(cfg)
    return cfg


def import_task_library(cfg: Config) -> None:
    """Import the library that ``default_scope`` of the config names, and no other.

    Raises:
        SystemExit: ``default_scope`` is neither 'mmseg' (segmentation) nor 'mmdet' (detection), or
            the library cannot be imported.
    """
    scope = cfg.get('default_scope')
    if scope not in TASK_LIBRARIES:
        raise SystemExit(
            f'{cfg.filename}: default_scope must be one of {[*TASK_LIBRARIES]}, got {scope!r}.'
        )
    try:
        import_module(f'{scope}.models')
    except ImportError as error:
        needs = ' and mmcv with compiled operators' if scope == 'mmdet' else ''
        raise SystemExit(
            f'{cfg.filename} needs {TASK_LIBRARIES[scope]}{needs}, which cannot be imported: '
            f'{error}.'
        ) from error
