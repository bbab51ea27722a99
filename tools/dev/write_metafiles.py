"""Writes model-index.yml and configs/*/metafile.yml: the configs, for OpenMMLab's tools."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/, for _command_line
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
COLLECTIONS = {
    'seg': ('UPerNet with Vision Mamba', 'ADE20K', 'seg/README.md'),
    'det': ('Mask R-CNN with Vision Mamba', 'COCO', 'det/README.md'),
}
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


def model(path: Path, collection: str, data: str) -> dict:
    """The entry of a config. It has no results before weights are published."""
    cfg = Config.fromfile(ROOT / path)
    return {
        'Name': path.stem,
        'In Collection': collection,
        'Config': path.as_posix(),
        'Metadata': {
            'Training Data': data,
            'Iterations': cfg.train_cfg.max_iters,
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


def main(args: Namespace) -> None:
    # For the bases mmdet:: and mmseg::, which MMEngine alone does not find in every distribution.
    vim_mm.activate()
    for name, content in files().items():
        (ROOT / name).write_text(yaml.safe_dump(content, sort_keys=False, width=100))


if __name__ == '__main__':
    end(main, ARGUMENTS)
