"""The tools on data within others, images of five bands, several labels and types as classes."""

import csv
import json

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import Registry, init_default_scope, root
from PIL import Image

from tests.field.base import CONFIG, coco, each_image, train, write_data
from tests.field.test_files import IGNORE, JPG, as_jpeg, classifier, widened
from tests.tools.conftest import run_tool
from vim_mm.engine.cli import import_task_library

pytestmark = pytest.mark.slow

SHORT = """
train_cfg = dict(max_iters=1, val_interval=1)
default_hooks = dict(checkpoint=dict(interval=1))
"""
LEAF = """
leaf = {key: value for key, value in val_dataloader['dataset'].items() if key != '_delete_'}
prefix = dict(img_path='images/training', seg_map_path='annotations/training')
other = dict(leaf, data_prefix=prefix)
test_dataloader = dict(num_workers=0, persistent_workers=False, dataset=dict(_delete_=True, {}))
"""
WRAPPED = {
    'ConcatDataset': "type='ConcatDataset', datasets=[leaf, other]",
    'RepeatDataset': "type='RepeatDataset', times=2, dataset=leaf",
    'of each other': "type='RepeatDataset', times=1, dataset=dict(type='ConcatDataset', "
    'datasets=[leaf, other])',
}


def every_tool(folder, *bands, stream: bool = True) -> dict:
    """Run infer.py, stream.py, visualize.py and test.py --out; what the last one wrote."""
    config, checkpoint = folder / 'config.py', folder / 'run0/iter_1.pth'
    pictures = folder / 'pictures'
    options = ['--bands', *bands] if bands else []
    out = run_tool(
        'infer.py', config, checkpoint, pictures, '--out', folder / 'o', *options, cwd=folder
    )
    for picture in pictures.iterdir():
        overlay = folder / 'o' / f'{picture.stem}.png'
        assert str(overlay) in out and cv2.imread(str(overlay)) is not None
    what = ['predictions', 'features']
    for each in what:
        run_tool(
            'visualize.py', each, config, checkpoint, '--out', folder / 'v', '--images', 2,
            *options, cwd=folder,
        )  # fmt: skip
        assert cv2.imread(str(folder / f'v/{each}.png')) is not None
    if stream:
        run_tool('stream.py', config, checkpoint, pictures, '--out', folder / 'o.mp4', cwd=folder)
        assert cv2.VideoCapture(str(folder / 'o.mp4')).read()[0]
    run_tool('test.py', config, checkpoint, '--out', folder / 'out', cwd=folder)
    return {path.relative_to(folder / 'out').as_posix() for path in (folder / 'out').rglob('*.*')}


def pictures_of(folder, paths) -> None:
    (folder / 'pictures').mkdir()
    for path in paths:
        (folder / 'pictures' / path.name).write_bytes(path.read_bytes())


@pytest.mark.parametrize('name', WRAPPED)
def test_segmentation(name, folder):
    train(folder, rest=SHORT)
    text = CONFIG.format(root=str(folder / 'data'), rest=SHORT + LEAF.replace('{}', WRAPPED[name]))
    (folder / 'config.py').write_text(text)
    pictures_of(folder, [folder / f'data/images/validation/00{i}.png' for i in range(2)])
    found = every_tool(folder)
    names = {f'00{i}.png' for i in range(4)}
    if 'other' in WRAPPED[name]:  # whose images are called alike
        names = {f'validation/{each}' for each in names}
        names |= {f'training/00{i}.png' for i in range(8)}
    assert found == names


@pytest.mark.parametrize(
    'wrapped',
    [
        "type='ClassBalancedDataset', oversample_thr=0.1, dataset=leaf",
        "type='ConcatDataset', datasets=[leaf]",
    ],
)
def test_detection(wrapped, tmp_path):
    pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
    text = coco(tmp_path) + SHORT
    train(tmp_path, text)
    leaf = Config.fromfile(tmp_path / 'config.py').test_dataloader.dataset
    leaf.pop('_scope_', None)
    (tmp_path / 'config.py').write_text(
        f'{text}\nleaf = {leaf.to_dict()!r}\n'
        f'test_dataloader = dict(dataset=dict(_delete_=True, {wrapped}))\n'
    )
    pictures_of(tmp_path, [tmp_path / 'data/0.jpg'])
    assert 'predictions.bbox.json' in every_tool(tmp_path)


def fruit(folder, count: int = 4) -> None:
    for i, name in enumerate(('apple', 'pear')):
        (folder / 'fruit' / name).mkdir(parents=True)
        for k in range(count):
            color = (200, 20 * k, 90 * i)
            Image.new('RGB', (32, 32), color).save(folder / 'fruit' / name / f'{k}.png')


@pytest.mark.parametrize(
    'wrapped',
    [
        "type='KFoldDataset', fold=0, num_splits=2, test_mode=True, dataset=leaf",
        "type='ClassBalancedDataset', oversample_thr=0.1, dataset=leaf",
        "type='RepeatDataset', times=2, dataset=leaf",
        "type='ConcatDataset', datasets=[leaf, leaf]",
    ],
)
def test_classification(wrapped, tmp_path):
    pytest.importorskip('mmpretrain')
    fruit(tmp_path)
    text = classifier(tmp_path) + SHORT
    train(tmp_path, text)
    (tmp_path / 'config.py').write_text(
        f'{text}\nleaf = {{k: v for k, v in dataset.items() if k != "_delete_"}}\n'
        f'test_dataloader = dict(dataset=dict(_delete_=True, {wrapped}))\n'
    )
    pictures_of(tmp_path, [tmp_path / 'fruit/pear/0.png'])
    config, checkpoint = tmp_path / 'config.py', tmp_path / 'run0/iter_1.pth'
    run_tool('infer.py', config, checkpoint, tmp_path / 'pictures', cwd=tmp_path)
    run_tool('visualize.py', 'predictions', config, checkpoint, cwd=tmp_path)
    run_tool('test.py', config, checkpoint, '--out', tmp_path / 'out', cwd=tmp_path)
    rows = [*csv.DictReader((tmp_path / 'out/labels.csv').open())]
    assert len(rows) == (4 if 'KFold' in wrapped else 8 if 'ClassB' in wrapped else 16)
    assert {row['truth'] for row in rows} <= {'apple', 'pear'}


MULTI = """
model['head'] = dict(
    _delete_=True, type='MultiLabelLinearClsHead', in_channels=8, num_classes=3, thr=0.5
)
model['data_preprocessor'] = dict(num_classes=3, to_onehot=True)
dataset.update(type='MultiLabelDataset', ann_file={file!r}, data_prefix={images!r})
for loader in (train_dataloader, val_dataloader):
    loader['dataset'] = dataset
del loader
val_evaluator = dict(_delete_=True, type='MultiLabelMetric')
test_evaluator = val_evaluator
"""


def test_several_labels(tmp_path):
    pytest.importorskip('mmpretrain')
    fruit(tmp_path)
    labels = [[], [0], [1, 2], [0, 1, 2]]
    content = dict(
        metainfo=dict(classes=['яблоко', 'pear', 'quince']),
        data_list=[dict(img_path=f'{i}.png', gt_label=each) for i, each in enumerate(labels)],
    )
    (tmp_path / 'ann.json').write_text(json.dumps(content))
    images = str(tmp_path / 'fruit/apple')
    text = classifier(tmp_path, classes=3)
    train(tmp_path, text + MULTI.format(file=str(tmp_path / 'ann.json'), images=images) + SHORT)
    pictures_of(tmp_path, [tmp_path / 'fruit/pear/0.png'])
    config, checkpoint = tmp_path / 'config.py', tmp_path / 'run0/iter_1.pth'
    run_tool('infer.py', config, checkpoint, tmp_path / 'pictures', cwd=tmp_path)
    run_tool('visualize.py', 'predictions', config, checkpoint, cwd=tmp_path)
    run_tool('test.py', config, checkpoint, '--out', tmp_path / 'out', cwd=tmp_path)
    rows = [*csv.DictReader((tmp_path / 'out/labels.csv').open())]
    assert [row['truth'] for row in rows] == ['', 'яблоко', 'pear;quince', 'яблоко;pear;quince']


BANDS = """
model['backbone']['in_channels'] = 5
model['data_preprocessor'] = dict(mean=[50.0], std=[60.0], bgr_to_rgb=False)
pipeline[0] = dict(type='LoadImageFromFile', imdecode_backend='tifffile', color_type='unchanged')
for loader in (train_dataloader, val_dataloader):
    loader['dataset'].update(pipeline=pipeline, img_suffix='.tif')
del loader
"""


def test_five_bands(folder):
    tifffile = pytest.importorskip('tifffile')

    def widen(path):
        image = np.array(Image.open(path)).astype(np.float32)
        tifffile.imwrite(path.with_suffix('.tif'), np.concatenate([image, image[..., :2] / 2], 2))
        path.unlink()

    each_image(folder / 'data', widen)
    train(folder, rest=BANDS + SHORT)
    pictures_of(folder, [folder / f'data/images/validation/00{i}.tif' for i in range(2)])
    assert every_tool(folder, 0, 1, 4, stream=False) == {f'00{i}.png' for i in range(4)}
    for tool in (['visualize.py', 'predictions'], ['visualize.py', 'features']):
        args = (*tool, folder / 'config.py', folder / 'run0/iter_1.pth')
        said = run_tool(*args, cwd=folder, fails=True).splitlines()[-1]
        assert 'an image of 5 bands cannot be drawn: --bands R G B says which' in said


def test_a_picture_of_12_bits(folder):
    """Of which 8 bits keep little: a line says so, once for all pictures."""
    train(folder, rest=SHORT)
    pictures_of(folder, [folder / f'data/images/validation/00{i}.png' for i in range(3)])
    for path in sorted((folder / 'pictures').iterdir())[:2]:
        widened(path, 16)
    args = (folder / 'config.py', folder / 'run0/iter_1.pth', folder / 'pictures')
    out = run_tool('infer.py', *args, cwd=folder)
    (line,) = (line for line in out.splitlines() if 'more than 8 bits' in line)
    assert line.startswith(f'{folder}/pictures: images of more than 8 bits (values up to ')


def test_images_as_they_are_stored(tmp_path):
    """Overlays lie as the labels do, whatever EXIF says."""
    write_data(tmp_path / 'data', size=(48, 64))
    each_image(tmp_path / 'data', lambda path: as_jpeg(path, 6))
    train(tmp_path, rest=IGNORE + JPG + SHORT)
    pictures_of(tmp_path, [tmp_path / 'data/images/validation/000.jpg'])
    assert every_tool(tmp_path, stream=False) == {f'00{i}.png' for i in range(4)}
    height, width = cv2.imread(str(tmp_path / 'o/000.png')).shape[:2]
    assert height < width  # 48 x 64 enlarged, and a legend below


def as_classes(value, imports: dict[str, str], scope: str):
    """A config's text, with each type that a registry knows as the class itself."""
    if isinstance(value, dict):
        items = []
        for key, item in value.items():
            text = as_classes(item, imports, scope)
            if key == 'type' and isinstance(item, str) and (kind := find(item, scope)):
                text = imports.setdefault(
                    f'{kind.__module__}.{kind.__qualname__}', f'T{len(imports)}'
                )
            items.append(f'{key!r}: {text}')
        return f'dict(**{{{", ".join(items)}}})'
    if isinstance(value, list | tuple):
        inner = ', '.join(as_classes(item, imports, scope) for item in value)
        return f'[{inner}]' if isinstance(value, list) else f'({inner},)' if value else '()'
    return repr(value)


def find(name: str, scope: str):
    for registry in vars(root).values():
        if isinstance(registry, Registry):
            with registry.switch_scope_and_registry(scope) as inner:
                kind = inner.get(name)
            if isinstance(kind, type) and '<locals>' not in kind.__qualname__:
                return kind
    return None


def test_types_as_classes(folder):
    """A flattened config in pure Python."""
    train(folder, rest=SHORT)
    cfg = Config.fromfile(folder / 'config.py')
    import_task_library(cfg)
    init_default_scope('mmseg')
    imports: dict[str, str] = {}
    lines = [
        f'{name} = {as_classes(value, imports, "mmseg")}' for name, value in cfg.to_dict().items()
    ]
    assert len(imports) > 15
    head = [
        'from {} import {} as {}'.format(*path.rsplit('.', 1), short)
        for path, short in imports.items()
    ]
    (folder / 'config.py').write_text('\n'.join([*head, *lines]) + '\n')
    pictures_of(folder, [folder / 'data/images/validation/000.png'])
    assert every_tool(folder) == {f'00{i}.png' for i in range(4)}
    run_tool('train.py', folder / 'config.py', '--work-dir', folder / 'again', cwd=folder)
    before, after = (
        torch.load(folder / name / 'iter_1.pth', weights_only=False)['state_dict']
        for name in ('run0', 'again')
    )
    assert before.keys() == after.keys()
