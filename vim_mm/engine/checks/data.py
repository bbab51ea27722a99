"""Whether the data that a config names are there, before a run writes anything."""

from collections.abc import Iterator, Mapping

from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.fileio import exists
from mmengine.registry import DATASETS

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
            that describes the layout.
    """
    for split in splits:
        loader = cfg.get(f'{split}_dataloader')
        if isinstance(loader, Mapping) and isinstance(loader.get('dataset'), Mapping):
            for name, options in _leaves(f'{split}_dataloader.dataset', loader['dataset']):
                _check_dataset(cfg, name, options)


def _leaves(name: str, options: Mapping) -> Iterator[tuple[str, Mapping]]:
    """The datasets within those that repeat, join or mix others, by their names in the config."""
    inner = options.get('dataset')
    if isinstance(inner, Mapping):
        yield from _leaves(f'{name}.dataset', inner)
    elif isinstance(options.get('datasets'), list | tuple):
        for i, each in enumerate(options['datasets']):
            yield from _leaves(f'{name}.datasets.{i}', each)
    else:
        yield name, options


def _check_dataset(cfg: Config, name: str, options: Mapping) -> None:
    with DATASETS.switch_scope_and_registry(cfg.default_scope) as registry:
        kind = options.get('type')
        kind = registry.get(kind) if isinstance(kind, str) else kind
        if not (isinstance(kind, type) and issubclass(kind, BaseDataset)):
            return
        # The class knows best which paths its arguments make.
        dataset = registry.build({**options, 'pipeline': [], 'lazy_init': True})
    if getattr(dataset, 'download', False):
        return
    paths = dict(ann_file=dataset.ann_file)
    paths |= {f'data_prefix.{key}': path for key, path in dataset.data_prefix.items()}
    for key, path in paths.items():
        if path and not exists(path, backend_args=getattr(dataset, 'backend_args', None)):
            what = 'annotation file' if key == 'ann_file' else 'folder'
            root = options.get('data_root')
            setting = f'{name}.{"data_root" if root else key}'
            if root and root == cfg.get('data_root'):
                setting = 'data_root'
            now = f', now {root},' if root else ''
            raise FileNotFoundError(
                f'there is no {path}, the {what} {key} of {name}: --cfg-options {setting}=...'
                f' sets the place{now} and {_PAGES[cfg.default_scope]} describes the layout'
            )
