"""Makes the real data set: Fashion-MNIST as classification, and scenes of its garments.

Three forms under one root, each read by the mm libraries' own dataset classes::

    idx/                                    the four files as published, unpacked
    classes/{train,test}/<garment>/*.png    mmpretrain's CustomDataset, torchvision's ImageFolder
    scenes/                                 ADE20K and COCO, see layouts.py

Usage: ``python -m vim_mm.datasets.fashion --out data/fashion``
"""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

from vim_mm.datasets.garments import GARMENTS, SPLITS, fetch_garments, load_garments
from vim_mm.datasets.layouts import COCO_SPLITS, encode, insist_on_least, write_once, write_split
from vim_mm.datasets.scenes import Garments, scene
from vim_mm.mistakes import end
from vim_mm.progress import progress

# Raise when the scenes or the files change, so that older data sets are made anew.
_VERSION = 1


@dataclass(frozen=True)
class FashionConfig:
    """What determines the scenes, down to the pixel, besides the garments.

    Attributes:
        train (int): Number of training scenes.
        val (int): Number of validation scenes, of garments of the test split.
        height (int): Of the canvas in pixels, at least 32.
        width (int): Likewise.
        seed (int): Seed, at least 0.
    """

    train: int = 8000
    val: int = 2000
    height: int = 128
    width: int = 128
    seed: int = 0

    def __post_init__(self):
        insist_on_least(self, train=1, val=1, height=32, width=32, seed=0)


def write_scenes(out: Path, idx: Path, config: FashionConfig) -> bool:
    """Write scenes in both layouts unless ``out`` holds them, see :func:`write_once`."""

    def write(root: Path) -> None:
        counts = (config.train, config.val)
        for split, folder, count in zip(SPLITS, COCO_SPLITS, counts, strict=True):
            garments = Garments(*load_garments(idx, split))
            size = (config.height, config.width)
            numbers = progress(range(count), f'{folder} scenes')
            scenes = (scene(config.seed, split, i, garments, size) for i in numbers)
            write_split(root, folder, scenes, GARMENTS)

    manifest = {'version': _VERSION, 'kind': 'garments', **asdict(config)}
    return write_once(out, manifest, write, 'scenes of garments')


def write_classes(out: Path, idx: Path) -> bool:
    """Write every photograph as a file in the folder of its class, unless ``out`` holds them."""

    def write(root: Path) -> None:
        for split in SPLITS:
            images, labels = load_garments(idx, split)
            # Folders sort as the classes are numbered.
            folders = [root / split / class_folder(label) for label in range(len(GARMENTS))]
            for folder in folders:
                folder.mkdir(parents=True)
            pairs = progress(zip(images, labels, strict=True), f'{split} photographs', len(images))
            for i, (image, label) in enumerate(pairs):
                (folders[label] / f'{i:05d}.png').write_bytes(encode('.png', image))

    return write_once(out, {'version': _VERSION, 'kind': 'classes'}, write, 'folders of garments')


def class_folder(label: int) -> str:
    """Name of the folder of a class, such as '9_ankle_boot'."""
    return f'{label}_{GARMENTS[label].replace(" ", "_")}'


def main(argv: list[str] | None = None) -> None:
    """Get the files and write what the command line asks for, or say that it is there."""
    defaults = FashionConfig()
    parser = argparse.ArgumentParser(description='Make Fashion-MNIST and scenes of its garments.')
    parser.add_argument('--out', type=Path, default=Path('data/fashion'), help='root')
    parser.add_argument('--source', type=Path, help='folder of the IDX files, packed or not')
    parser.add_argument('--train', type=int, default=defaults.train, help='training scenes')
    parser.add_argument('--val', type=int, default=defaults.val, help='validation scenes')
    parser.add_argument(
        '--size', type=int, nargs=2, metavar=('HEIGHT', 'WIDTH'),
        default=(defaults.height, defaults.width), help='of a scene in pixels',
    )  # fmt: skip
    parser.add_argument('--seed', type=int, default=defaults.seed)
    parser.add_argument('--only', choices=('classes', 'scenes'), help='write one of the forms')
    parser.add_argument('--debug', action='store_true', help='show the traceback of a mistake')
    end(make, parser.parse_args(argv))


def make(args: argparse.Namespace) -> None:
    """Make the forms of the arguments."""
    config = FashionConfig(args.train, args.val, *args.size, args.seed)
    origin = fetch_garments(args.out / 'idx', args.source)
    print(f'Fashion-MNIST from {origin}')
    forms = {
        'classes': lambda out: write_classes(out, args.out / 'idx'),
        'scenes': lambda out: write_scenes(out, args.out / 'idx', config),
    }
    for name, write in forms.items():
        if args.only in (None, name):
            made = write(args.out / name)
            print(f'{"Made" if made else "Reusing"} {args.out / name}')


if __name__ == '__main__':
    main()
