"""Whether the data that a config names are there, before a run writes anything."""

import ast
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.fileio import exists
from mmengine.registry import DATASETS

from vim_mm.config import dataset_options, type_name, unused_data_root, uses_data_root
from vim_mm.engine.checks.suffixes import check_suffixes
from vim_mm.errors import UserValueError
from vim_mm.outputs import check_outputs

# Where the layouts are described, by task.
_PAGES = {
    'mmseg': 'seg/README.md',
    'mmdet': 'det/README.md',
    'mmpretrain': 'docs/classification.md',
}


def check_data(cfg: Config, *splits: str) -> None:
    """Look for the folders and annotation files of the datasets, of which none is read.

    Says nothing of datasets that download what is missing, and of classes that are no datasets of
    MMEngine.

    Args:
        cfg (Config): Its task library is imported, so that its datasets are registered.
        *splits (str): Of 'train', 'val' and 'test'; those that the config lacks are not looked at.

    Raises:
        FileNotFoundError: One is missing; the message says which, what sets its place, and the page
            that describes the layout. Or no file of a folder has the suffix that is looked for.
        ValueError: No evaluator has the annotation file of the dataset, and some have another.
    """
    for split in splits:
        datasets = [
            _check_dataset(cfg, name, options) for name, options in dataset_options(cfg, split)
        ]
        if len(datasets) == 1 and datasets[0] is not None:
            _check_evaluators(cfg, split, datasets[0])


def check_outputs_of(cfg: Config, outputs: Iterable[str | Path]) -> None:
    """Look whether outputs would replace files of the data sets, or lie among these.

    Args:
        cfg (Config): As for :func:`check_data`.
        outputs: Files or folders that will be written.

    Raises:
        ValueError: An output is a file that a data set or an evaluator reads, or is inside of a
            folder of a data set; the message says which.
    """
    outputs = [*outputs]
    if not outputs:
        return
    read = []
    for split in ('train', 'val', 'test'):
        read += _evaluated_files(cfg, split).items()
        for name, options in dataset_options(cfg, split):
            with suppress(Exception):  # a data set that cannot be built is told where it is needed
                read += _paths_of(_lazy_dataset(cfg, options), name)
    check_outputs(outputs, read)
    for name, folder in read:
        inside = Path(folder).resolve()
        # A data set whose folder holds the working directory has all else in it as well.
        if not inside.is_dir() or Path.cwd().is_relative_to(inside):
            continue
        for output in outputs:
            if Path(output).resolve().is_relative_to(inside):
                raise UserValueError(
                    f'the output must be outside of {folder}, which is {name}, got {output}'
                )


def check_data_root(cfg: Config, file: Path) -> None:
    """Look whether a config that inherits from another one has a ``data_root`` without effect.

    Datasets hold copies of the base's, which Python has put into them before.

    Args:
        cfg (Config): What the file holds, with its bases.
        file (Path): Only Python is looked at.

    Raises:
        ValueError: The file sets ``data_root``, and no path of a dataset begins with it.
    """
    if file.suffix != '.py':
        return
    own = {
        node.id
        for statement in ast.parse(file.read_text()).body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    if {'_base_', 'data_root'} <= own and not uses_data_root(cfg):
        raise UserValueError(f'{file}: {unused_data_root(cfg)}')


def _check_evaluators(cfg: Config, split: str, dataset: BaseDataset) -> None:
    """ValueError if every evaluator reads the annotations of other pictures.

    One of several may read its own file: of panoptic data, boxes have another than segments.
    """
    if not dataset.ann_file:
        return
    files = _evaluated_files(cfg, split)
    its_own = os.path.realpath(dataset.ann_file)
    if files and its_own not in map(os.path.realpath, files.values()):
        name, file = next(iter(files.items()))
        raise UserValueError(
            f'{name} is {file}, but {split}_dataloader.dataset has the annotations '
            f'{dataset.ann_file}: predictions would be compared with those of other pictures'
        )


def _evaluated_files(cfg: Config, split: str) -> dict[str, str]:
    """The annotation files that predictions are compared with, by their names in the config."""
    evaluators = cfg.get(f'{split}_evaluator')
    several = isinstance(evaluators, list | tuple)
    files = {}
    for i, evaluator in enumerate(evaluators if several else [evaluators]):
        # With format_only predictions are written, and compared with nothing.
        if isinstance(evaluator, Mapping) and not evaluator.get('format_only'):
            name = f'{split}_evaluator' + (f'.{i}' if several else '')
            files[f'{name}.ann_file'] = evaluator.get('ann_file')
    return {name: file for name, file in files.items() if file}


def _lazy_dataset(cfg: Config, options: Mapping) -> BaseDataset | None:
    """A dataset, of which nothing is read; None of what is no dataset of MMEngine."""
    with DATASETS.switch_scope_and_registry(cfg.default_scope) as registry:
        kind = options.get('type')
        kind = registry.get(kind) if isinstance(kind, str) else kind
        if not (isinstance(kind, type) and issubclass(kind, BaseDataset)):
            return None
        # The class knows best which paths its arguments make.
        return registry.build({**options, 'pipeline': [], 'lazy_init': True})


def _paths_of(dataset: BaseDataset | None, name: str) -> list[tuple[str, str]]:
    """What a dataset reads: names in the config, and paths of files and folders."""
    if dataset is None:
        return []
    paths = [(f'{name}.ann_file', dataset.ann_file)]
    paths += [(f'{name}.data_prefix.{key}', path) for key, path in dataset.data_prefix.items()]
    return [(key, path) for key, path in paths if path]


def _check_dataset(cfg: Config, name: str, options: Mapping) -> BaseDataset | None:
    """A dataset whose files are there, with nothing read; None of what is not known."""
    try:
        dataset = _lazy_dataset(cfg, options)
    except AssertionError as error:  # so some of MMSegmentation's look for their files
        raise FileNotFoundError(
            f'{type_name(options)} does not find its files for {name} in '
            f'{options.get("data_root")}: --cfg-options {name}.data_root=... sets the place'
        ) from error
    if dataset is None or getattr(dataset, 'download', False):
        return None
    for key, path in _paths_of(dataset, name):
        if not exists(path, backend_args=getattr(dataset, 'backend_args', None)):
            what = 'annotation file' if key.endswith('.ann_file') else 'folder'
            root = options.get('data_root')
            setting = f'{name}.data_root' if root else key
            if root and root == cfg.get('data_root'):
                setting = 'data_root'
            now = f', now {root},' if root else ''
            raise FileNotFoundError(
                f'there is no {path}, the {what} {key.removeprefix(f"{name}.")} of {name}: '
                f'--cfg-options {setting}=... sets the place{now} and '
                f'{_PAGES[cfg.default_scope]} describes the layout'
            )
    reads_labels = 'LoadAnnotations' in str(options.get('pipeline'))
    check_suffixes(dataset, name, reads_labels)
    return dataset
