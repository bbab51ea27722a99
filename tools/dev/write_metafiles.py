"""Writes model-index.yml and configs/*/metafile.yml: the configs, for OpenMMLab's tools."""

import argparse
from pathlib import Path

import yaml
from mmengine.config import Config

import vim_mm

ROOT = Path(__file__).resolve().parents[2]
COLLECTIONS = {
    'cls': ('Vision Mamba', 'ImageNet-1k', 'docs/classification.md'),
    'seg': ('UPerNet with Vision Mamba', 'ADE20K', 'seg/README.md'),
    'det': ('Mask R-CNN with Vision Mamba', 'COCO', 'det/README.md'),
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
    # Drawn shapes and scenes of garments are for demos, tests and studies.
    own = ('_shapes', '_fashion')
    return [path.relative_to(ROOT) for path in paths if not any(o in path.stem for o in own)]


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
    name, data, readme = COLLECTIONS[task]
    collection = {
        'Name': name,
        'Metadata': {
            'Training Data': [data],
            'Architecture': ['Vision Mamba', 'Selective State Space Model'],
        },
        'Paper': PAPER,
        'README': readme,
        'Code': {'Version': vim_mm.__version__},
    }
    return {
        'Collections': [collection],
        'Models': [model(path, name, data) for path in recipes(task)],
    }


def files() -> dict[str, dict]:
    """The content of every file by its name."""
    metafiles = {f'configs/{task}/metafile.yml': metafile(task) for task in COLLECTIONS}
    return {'model-index.yml': {'Import': [*metafiles]}, **metafiles}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    # For the bases mmdet:: and mmseg::, which MMEngine alone does not find in every distribution.
    vim_mm.activate()
    for name, content in files().items():
        (ROOT / name).write_text(yaml.safe_dump(content, sort_keys=False, width=100))


if __name__ == '__main__':
    main()
