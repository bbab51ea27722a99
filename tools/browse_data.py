"""Shows the data of a config as they are loaded: ``python tools/browse_data.py CONFIG``.

Draws some images with their masks or boxes, counts the classes, and lists the files that look
wrong. All samples are read, by the transforms that load files; augmentation does not run.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from _command_line import add_arguments, add_bands, end, parse_first, positive

SPLITS = ('train', 'val', 'test')


def parse_args() -> Namespace:
    parser = ArgumentParser(
        description='Draw images of a config with their masks or boxes, count the classes, and '
        'list the files that look wrong.'
    )
    add_arguments(parser, launcher=False)
    parser.add_argument('--split', choices=SPLITS, default='train', help='whose loader to read')
    add_bands(parser)
    parser.add_argument('--images', type=positive, default=8, help='number, spread evenly')
    parser.add_argument(
        '--out',
        type=Path,
        default=Path('work_dirs/browse_data'),
        metavar='DIR',
        help='for the pictures (default: %(default)s)',
    )
    return parser.parse_args()


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

from collections import Counter
from collections.abc import Mapping

import mmcv
from mmengine.config import Config
from mmengine.registry import init_default_scope

from benchmarks.measure.tables import bullets, markdown_table
from benchmarks.runs.work_dir import spread_evenly
from vim_mm.config import dataset_options
from vim_mm.engine.batches.samples import (
    IGNORED_LABEL,
    CheckedDataset,
    SampleError,
    classes_of,
    leaves,
)
from vim_mm.engine.checks.data import check_data
from vim_mm.engine.checks.first_samples import (
    Findings,
    look_at_header,
    look_at_loaded,
    lost_objects,
    of_depth,
    one_class,
)
from vim_mm.engine.checks.suffixes import left_out
from vim_mm.engine.cli import read_config
from vim_mm.engine.reader import displayed
from vim_mm.progress import progress
from vim_mm.stream.overlay import build_visualizer, draw_sample


def without_augmentation(options: Mapping) -> dict:
    """Options of a data set whose pipeline loads files and packs what they hold."""
    kinds = 'Load', 'Pack', 'FastPack'
    steps = [step for step in options.get('pipeline') or () if _kind(step).startswith(kinds)]
    return {**options, 'pipeline': steps}


def _kind(step: Mapping) -> str:
    kind = step['type']
    return (kind if isinstance(kind, str) else kind.__name__).rpartition('.')[2]


def browse(
    cfg: Config, name: str, options: Mapping, args: Namespace, ignored: list[int]
) -> tuple[Counter, list[str], list[str]]:
    """Draw samples of a data set.

    Returns:
        tuple: Pixels, objects or images of each label; the classes; and what looks wrong.
    """
    checked = CheckedDataset(without_augmentation(options), seed=None, ignored=ignored)
    dataset = checked.dataset
    visualizer = build_visualizer(cfg, dataset.metainfo, name)
    drawn = {*spread_evenly(len(dataset), args.images)}
    findings, counts, problems, crushed = Findings(), Counter(), [], []
    for index in progress(range(len(dataset)), name):
        try:
            if (turned := look_at_header(dataset, index)) is not None:
                problems.append(f'{turned}: EXIF turns it, and its annotation stays')
            if (depth := look_at_loaded(dataset, index, findings)) is not None:
                crushed.append(depth)
            sample = checked[index]
        except SampleError as error:
            problems.append(str(error))
            continue
        truth = sample['data_samples']
        if 'gt_instances' in truth:
            counts.update(truth.gt_instances.labels.tolist())
            if not len(truth.gt_instances):
                problems.append(f'{truth.img_path}: no object')
        elif 'gt_label' in truth:
            counts.update(truth.gt_label.tolist())
            findings.images += len(truth.gt_label) == 1
            findings.classes.update(truth.gt_label.tolist())
        if index in drawn:
            stem = f'{index:06}_{Path(truth.get("img_path", "")).stem}'.rstrip('_')
            path = args.out / f'{stem}.png'
            picture = displayed(sample['inputs'].numpy().transpose(1, 2, 0), args.bands)
            mmcv.imwrite(draw_sample(visualizer, picture, truth, truth=True)[..., ::-1], str(path))
    if findings.maps:
        counts = Counter({n: findings.labels[n] for n in findings.labels if n not in ignored})
    problems += _of_all(dataset, name, findings, crushed, ignored)
    return counts, [*map(str, dataset.metainfo.get('classes') or ())], problems


def _of_all(dataset, name: str, findings: Findings, crushed: list, ignored: list[int]) -> list[str]:
    """What looks wrong of the samples together."""
    lines = [
        left_out(dataset, name),
        one_class(findings, dataset, name, ignored),
        _shifted(dataset, findings, ignored),
    ]
    for look in (lambda: lost_objects(dataset, name), lambda: of_depth(crushed, name)):
        try:
            lines += look()
        except (SampleError, ValueError) as error:
            lines.append(str(error))
    return [line for line in lines if line]


def _shifted(dataset, findings: Findings, ignored: list[int]) -> str | None:
    """What looks as if 0 were a class in the files: the last class has no pixel, and 0 has many."""
    classes = classes_of(dataset) or ()
    void = sum(findings.labels[label] for label in ignored)
    reduced = any(getattr(inner, 'reduce_zero_label', False) for inner, _ in leaves(dataset, ''))
    if not (reduced and void and classes) or findings.labels[len(classes) - 1]:
        return None
    return (
        f'reduce_zero_label=True: 0 in the files is ignored, {len(classes)} is {classes[-1]}. No '
        f'pixel is {classes[-1]}, and {100 * void / findings.labels.total():.1f} percent are '
        'ignored. If 0 is a class in the files, set reduce_zero_label=False'
    )


def histogram(counts: Counter, classes: list[str], what: str) -> str:
    """The classes with what was counted of them, as a table."""
    total = max(sum(counts.values()), 1)
    rows = [
        {
            'class': f'{label} {classes[label] if 0 <= label < len(classes) else "?"}',
            what: f'{counts[label]:,}',
            'percent': f'{100 * counts[label] / total:.1f}',
        }
        for label in sorted({*range(len(classes)), *counts})
    ]
    return markdown_table(rows)


def main(args: Namespace) -> None:
    cfg = read_config(args)
    init_default_scope(cfg.default_scope)
    check_data(cfg, args.split)
    args.out.mkdir(parents=True, exist_ok=True)
    head = cfg.model.get('decode_head') or {}
    given = head.get('ignore_index', IGNORED_LABEL) if isinstance(head, Mapping) else IGNORED_LABEL
    ignored = [IGNORED_LABEL if given is None else given]
    what = dict(mmseg='pixels', mmdet='objects', mmpretrain='images')[cfg.default_scope]
    found = [*dataset_options(cfg, args.split)]
    if not found:
        raise SystemExit(f'{args.split}_dataloader of {args.config} has no dataset.')
    for name, options in found:
        counts, classes, problems = browse(cfg, name, options, args, ignored)
        print(f'\n{name}\n\n{histogram(counts, classes, what)}\n')
        print(f'Suspicious:\n\n{bullets(problems)}\n' if problems else 'Nothing looks wrong.\n')
    print(f'Images are in {args.out}')


if __name__ == '__main__':
    end(main, ARGUMENTS)
