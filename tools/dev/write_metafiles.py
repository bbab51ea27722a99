"""Writes model-index.yml and configs/*/metafile.yml: the configs, for OpenMMLab's tools."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from _command_line import add_debug, end, parse_first


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    add_debug(parser)
    return parser.parse_args()


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

import yaml
from mmengine.config import Config

import vim_mm

ROOT = Path(__file__).resolve().parents[2]
# Data set and page of a task.
TASKS = {
    'cls': ('ImageNet-1k', 'docs/classification.md'),
    'seg': ('ADE20K', 'seg/README.md'),
    'det': ('COCO', 'det/README.md'),
}
# A collection has the configs of one head. Their names begin with it; classifiers have none.
COLLECTIONS = {
    'cls': {'': 'Vision Mamba'},
    'seg': {
        'linear': 'Linear head with Vision Mamba',
        'mask2former': 'Mask2Former with Vision Mamba',
        'upernet': 'UPerNet with Vision Mamba',
    },
    'det': {
        'cascade_mask_rcnn': 'Cascade Mask R-CNN with Vision Mamba',
        'dino': 'DINO with Vision Mamba',
        'mask_rcnn': 'Mask R-CNN with Vision Mamba',
        'retinanet': 'RetinaNet with Vision Mamba',
    },
}
# By the class of the data set, where it is not the one of the task.
OTHER_DATA = {'CIFAR100': 'CIFAR-100'}
PAPER = {
    'URL': 'https://arxiv.org/abs/2401.09417',
    'Title': 'Vision Mamba: Efficient Visual Representation Learning with Bidirectional State '
    'Space Model',
}


def recipes(task: str) -> list[Path]:
    """The configs of a task that train on its data set, relative to the root of the repository."""
    paths = sorted((ROOT / 'configs' / task).glob('*.py'))
    # Drawn shapes, scenes of garments and the Earth are for demos, tests and studies.
    own = ('_shapes', '_fashion', '_earth')
    return [path.relative_to(ROOT) for path in paths if not any(o in path.stem for o in own)]


def head(path: Path) -> str:
    """The head that the name of a config begins with: 'upernet' of upernet_vim_t_zoh.py."""
    return path.stem.partition('vim_')[0].rstrip('_')


def length(train_cfg: dict) -> dict:
    """How long a config trains."""
    if 'max_epochs' in train_cfg:
        return {'Epochs': train_cfg['max_epochs']}
    return {'Iterations': train_cfg['max_iters']}


def model(path: Path, collection: str, data: str) -> dict:
    """The entry of a config. It has no results before weights are published."""
    cfg = Config.fromfile(ROOT / path)
    return {
        'Name': path.stem,
        'In Collection': collection,
        'Config': path.as_posix(),
        'Metadata': {
            'Training Data': OTHER_DATA.get(cfg.train_dataloader.dataset.type, data),
            **length(cfg.train_cfg),
            'Batch Size': cfg.auto_scale_lr.base_batch_size,
            'Discretization': cfg.model.backbone.discretization_method,
        },
    }


def metafile(task: str) -> dict:
    """What configs/<task>/metafile.yml holds."""
    data, readme = TASKS[task]
    collections = [
        {
            'Name': name,
            'Metadata': {
                'Training Data': [data],
                'Architecture': ['Vision Mamba', 'Selective State Space Model'],
            },
            'Paper': {**PAPER},  # a copy, which YAML writes out
            'README': readme,
            'Code': {'Version': vim_mm.__version__},
        }
        for name in COLLECTIONS[task].values()
    ]
    models = [model(path, COLLECTIONS[task][head(path)], data) for path in recipes(task)]
    return {'Collections': collections, 'Models': models}


def files() -> dict[str, dict]:
    """The content of every file by its name."""
    metafiles = {f'configs/{task}/metafile.yml': metafile(task) for task in TASKS}
    return {'model-index.yml': {'Import': [*metafiles]}, **metafiles}


def main(args: Namespace) -> None:
    # For the bases mmdet:: and mmseg::, which MMEngine alone does not find in every distribution.
    vim_mm.activate()
    for name, content in files().items():
        (ROOT / name).write_text(yaml.safe_dump(content, sort_keys=False, width=100))


if __name__ == '__main__':
    end(main, ARGUMENTS)
