"""What is loaded of the first samples is compared with their files."""

import json
import re
import shutil

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.field.base import coco, each_image, each_label, train, write_data
from vim_mm.engine.batches.samples import SampleError

EACH = """
for loader in (train_dataloader, val_dataloader):
    loader['dataset'].update({})
del loader
"""
JPG = EACH.format("img_suffix='.jpg'")
IGNORE = """
pipeline[0] = dict(type='LoadImageFromFile', color_type='color_ignore_orientation')
for loader in (train_dataloader, val_dataloader):
    loader['dataset']['pipeline'] = pipeline
del loader
"""


def as_jpeg(path, way: int = 1, suffix: str = '.jpg') -> None:
    exif = Image.Exif()
    exif[0x0112] = way
    Image.open(path).convert('RGB').save(path.with_suffix('.tmp'), 'JPEG', exif=exif)
    path.with_suffix('.tmp').rename(path.with_suffix(suffix))
    if suffix != path.suffix:
        path.unlink()


def widened(path, factor: int) -> None:
    cv2.imwrite(str(path), cv2.imread(str(path)).astype(np.uint16) * factor)


def test_labels_of_16_bits(folder):
    def many(labels):
        return np.array([0, 257, 258], np.uint16)[labels]

    each_label(folder / 'data', many)
    with pytest.raises(SampleError, match=r'000\.png: the label 25[78] of this 16-bit .* as [12],'):
        train(folder)


def test_labels_of_16_bits_that_fit_8(folder):
    """65535 becomes 255: of no class in either."""
    each_label(folder / 'data', lambda labels: np.array([0, 1, 2], np.uint16)[labels])
    path = folder / 'data/annotations/training/001.png'
    labels = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    labels[:4] = 65535
    cv2.imwrite(str(path), labels)
    train(folder)


@pytest.mark.parametrize(
    ('values', 'said'),
    [
        ((0, 257, 258), r'the label 25[78] of this 32-bit file is loaded as [12],'),
        ((0, -254, 1), r'the label -254 of this 32-bit file is loaded as 2,'),
        ((0, 1.5, 1), r'the label 1\.5 of this file of 32-bit floats is no whole number'),
        ((float('nan'), 1, 2), r'the label nan of this file of 32-bit floats is no whole number'),
    ],
)
def test_labels_of_floats(values, said, folder):
    for path in sorted((folder / 'data/annotations').rglob('*.png')):
        labels = np.array(values, np.float32)[np.array(Image.open(path))]
        cv2.imwrite(str(path.with_suffix('.tif')), labels)
        path.unlink()
    with pytest.raises(SampleError, match=rf'000\.tif: {said}'):
        train(folder, rest=EACH.format("seg_map_suffix='.tif'"))


def test_a_wide_label_of_a_later_sample(tmp_path):
    """Which is not among the first samples: it is found as it is loaded."""
    write_data(tmp_path / 'data', train=12)
    path = tmp_path / 'data/annotations/training/003.png'
    cv2.imwrite(str(path), np.full((64, 64), 300, np.uint16))
    with pytest.raises(
        SampleError, match=r'003\.png: the label 300 of this 16-bit file is loaded as 44'
    ):
        train(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize('bits', [12, 16])
def test_images_of_16_bits(bits, folder):
    each_image(folder / 'data', lambda path: widened(path, 2 ** (bits - 8)))
    if bits == 12:
        with pytest.raises(
            SampleError, match=r"loaded in 8, as values up to 1\d: set color_type='un"
        ):
            train(folder)
    else:
        assert len(re.findall('WARNING - .*more than 8 bits', train(folder))) == 2
    whole = IGNORE.replace("'color_ignore_orientation'", "'unchanged', to_float32=True")
    assert 'more than 8 bits' not in train(folder, rest=whole)


def test_a_png_is_turned_as_a_jpeg_is(tmp_path):
    write_data(tmp_path / 'data', size=(48, 64))
    exif = Image.Exif()
    exif[0x0112] = 8
    each_image(tmp_path / 'data', lambda path: Image.open(path).save(path, exif=exif))
    with pytest.raises(SampleError, match=r'000\.png: its EXIF orientation is 8, .* as 64 x 48'):
        train(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize('way', [pytest.param(3, marks=pytest.mark.slow), 6])
def test_images_that_exif_turns_without_their_labels(way, folder):
    """A square one may fit, or not: a line says what to do if it does not."""
    each_image(folder / 'data', lambda path: as_jpeg(path, way))
    log = train(folder, rest=JPG)
    line = 'WARNING - {}_dataloader.dataset: EXIF turns {} of {} images'
    assert line.format('train', 8, 8) in log and line.format('val', 4, 4) in log
    assert 'EXIF' not in train(folder, rest=JPG + IGNORE).rpartition('Config:')[2]


@pytest.mark.slow
def test_an_image_that_exif_turns_away_from_its_labels(tmp_path):
    write_data(tmp_path / 'data', size=(48, 64))
    each_image(tmp_path / 'data', lambda path: as_jpeg(path, 6))
    with pytest.raises(
        SampleError, match=r'orientation is 6, .* as 64 x 48 .* 48 x 64 .* set color_'
    ):
        train(tmp_path, rest=JPG)
    train(tmp_path, rest=JPG + IGNORE)


@pytest.mark.slow
def test_labels_that_are_turned_with_their_image(tmp_path):
    write_data(tmp_path / 'data', size=(48, 64))
    each_image(tmp_path / 'data', lambda path: as_jpeg(path, 6))
    each_label(tmp_path / 'data', lambda labels: np.rot90(labels, -1))
    assert 'EXIF' not in train(tmp_path, rest=JPG)


def test_suffixes_that_nobody_looks_for(folder):
    with pytest.raises(
        FileNotFoundError,
        match=r"no \*\.jpg in .*training; found 8 \*\.png: set .*img_suffix='\.png'",
    ):
        train(folder, rest=JPG)
    each_image(folder / 'data', lambda path: as_jpeg(path, suffix='.JPG'))
    with pytest.raises(FileNotFoundError, match=r"found 8 \*\.JPG: set train_.*img_suffix='\.JPG'"):
        train(folder, rest=JPG)
    shutil.rmtree(folder / 'data/images/training')
    (folder / 'data/images/training').mkdir()
    with pytest.raises(FileNotFoundError, match=r'no \*\.jpg in .*training, and no other image'):
        train(folder, rest=JPG)
    assert not [*folder.glob('run*')]


@pytest.mark.slow
def test_images_that_are_left_out(folder):
    images = folder / 'data/images/training'
    as_jpeg(images / '004.png', suffix='.JPG')
    (images / '001.png').rename(images / '001.PNG')
    log = train(folder)
    line = r'WARNING - train_dataloader.dataset: 1 \*\.PNG and 1 \*\.JPG in .* are left out \(001'
    assert re.search(line, log)


def test_images_without_labels(folder):
    (folder / 'data/annotations/training/003.png').unlink()
    with pytest.raises(
        FileNotFoundError, match=r'1 of 8 images of .* no map of labels, such as .*003'
    ):
        train(folder)
    for path in (folder / 'data/annotations/training').iterdir():
        path.rename(path.with_suffix('.tif'))
    with pytest.raises(
        FileNotFoundError, match=r"no \*\.png .* 7 \*\.tif: set .*seg_map_suffix='\.tif'"
    ):
        train(folder)


@pytest.mark.parametrize(
    ('name', 'said'),
    [
        (
            '{}_labelIds.png',
            r"found 000_labelIds\.png: set train_.*seg_map_suffix='_labelIds\.png'",
        ),
        ('mask_{}.png', r'found .*training/mask_000\.png: it must lie and be called as its image'),
        ('sub/{}.png', r'found .*training/sub/000\.png: it must lie and be called as its image'),
    ],
)
def test_labels_of_other_names(name, said, folder):
    labels = folder / 'data/annotations/training'
    (labels / 'sub').mkdir()
    for path in [*labels.glob('*.png')]:
        path.rename(labels / name.format(path.stem))
    with pytest.raises(FileNotFoundError, match=rf'8 of 8 images of .* no map of labels, .*{said}'):
        train(folder)


@pytest.mark.slow
def test_files_of_a_list(folder):
    """Names of a split: nothing is listed, and the first samples are looked for."""
    (folder / 'data/split.txt').write_text('000\n001\n009\n')
    rest = "train_dataloader['dataset']['ann_file'] = 'split.txt'"
    with pytest.raises(SampleError, match=r'images/training/009\.png: there is no such file\.'):
        train(folder, rest=rest)
    shutil.copy(folder / 'data/images/training/000.png', folder / 'data/images/training/009.png')
    with pytest.raises(SampleError, match=r'annotations/training/009\.png: there is no such file'):
        train(folder, rest=rest)


def test_images_of_several_sizes_in_a_batch(folder):
    for kind in ('images', 'annotations'):
        path = folder / 'data' / kind / 'training/003.png'
        Image.open(path).resize((96, 80), Image.Resampling.NEAREST).save(path)
    with pytest.raises(
        ValueError, match=r'one size, got .*00\d\.png\) and .*00\d\.png\): crop them'
    ):
        train(folder)


def test_images_of_several_sizes_in_a_batch_of_mmsegmentation(folder):
    """Whose preprocessor asserts in testing, in the middle of the loop."""
    for kind in ('images', 'annotations'):
        path = folder / 'data' / kind / 'validation/003.png'
        Image.open(path).resize((96, 80), Image.Resampling.NEAREST).save(path)
    rest = "model['data_preprocessor'] = dict(type='SegDataPreProcessor')\n"
    rest += "val_dataloader['batch_size'] = 4\n"
    with pytest.raises(SampleError, match=r'must have one size: .*\(The image size in a batch'):
        train(folder, rest=rest, test=True)


def test_a_pipeline_that_loads_no_labels(folder):
    pipeline = "[dict(type='LoadImageFromFile'), dict(type='PackSegInputs')]"
    with pytest.raises(SampleError, match=r'the sample has no gt_sem_seg: .*LoadAnnotations'):
        train(folder, rest=f"train_dataloader['dataset']['pipeline'] = {pipeline}")


def test_a_data_set_without_samples(folder):
    (folder / 'data/split.txt').write_text('')
    with pytest.raises(SampleError, match=r'split\.txt: no picture .* is left'):
        train(folder, rest="train_dataloader['dataset']['ann_file'] = 'split.txt'")


needs_mmdet = pytest.mark.skipif(
    not pytest.importorskip('importlib.util').find_spec('mmdet'), reason='needs MMDetection'
)
CROWD = dict(iscrowd=1, segmentation=dict(size=[48, 64], counts=[0, 48 * 64]))


@pytest.mark.slow
@needs_mmdet
@pytest.mark.parametrize(
    ('change', 'reason'),
    [
        (lambda each: dict(area=0), r'8 with an area of 0'),
        (lambda each: dict(bbox=[n / 64 for n in each['bbox']]), r'8 with a side below a pixel'),
        (lambda each: CROWD, r'8 with iscrowd=1'),
        (lambda each: dict(bbox=[100, 100, 16, 16]), r'8 with a box outside of its image'),
        (lambda each: dict(ignore=1), r'8 with ignore set'),
    ],
)
def test_objects_that_do_not_remain(change, reason, tmp_path):
    pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
    text = coco(tmp_path, change=lambda each: each | change(each))
    with pytest.raises(ValueError, match=rf'8 of 8 objects of .*ann\.json are left out: {reason}'):
        train(tmp_path, text)


@pytest.mark.slow
@needs_mmdet
def test_some_objects_that_do_not_remain(tmp_path):
    pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
    text = coco(tmp_path, change=lambda each: each | (dict(area=0) if each['id'] % 2 else {}))
    log = train(tmp_path, text)
    assert re.search(
        r'WARNING - train_dataloader.dataset: 4 of 8 objects of .* 4 with an area', log
    )


@needs_mmdet
@pytest.mark.parametrize(
    ('change', 'line'),
    [
        (lambda x, y: dict(bbox=[x + 20, y + 15, x + 40, y + 35]), r'\d of 8 boxes of .* beyond'),
        (
            lambda x, y: dict(bbox=[x, y, 16, 16], segmentation=[[0.1, 0.1, 0.4, 0.1, 0.4, 0.4]]),
            r'8 of 8 objects of .* have polygons in 0\.\.1',
        ),
    ],
)
def test_objects_in_other_units(change, line, tmp_path):
    pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
    text = coco(tmp_path, change=lambda each: each | change(*each['bbox'][:2]))
    assert re.search(f'WARNING - train_dataloader.dataset: {line}', train(tmp_path, text))


@needs_mmdet
@pytest.mark.parametrize(
    ('content', 'reason'),
    [
        ([], r'AssertionError: .*list'),
        (dict(images=[]), r"CocoDataset asks for '\w+', which it does not have"),
        (
            dict(images=[dict(id=0, file_name='0.jpg')], annotations=[], categories=[]),
            'Coco.* asks',
        ),
    ],
)
def test_annotations_of_another_format(content, reason, tmp_path):
    pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
    text = coco(tmp_path)
    (tmp_path / 'data/ann.json').write_text(json.dumps(content))
    with pytest.raises(SampleError, match=rf'ann\.json: {reason}'):
        train(tmp_path, text)


@needs_mmdet
def test_a_detector_without_annotations(tmp_path):
    pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
    steps = "[dict(type='LoadImageFromFile'), dict(type='PackDetInputs', meta_keys=())]"
    text = coco(tmp_path) + f"train_dataloader['dataset'] = dict(dataset, pipeline={steps})\n"
    with pytest.raises(SampleError, match=r'\d\.jpg: the sample has no gt_instances nor'):
        train(tmp_path, text)


@pytest.mark.slow
@needs_mmdet
def test_images_of_another_size_than_their_annotations(tmp_path):
    pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
    text = coco(tmp_path)
    assert 'objects of' not in train(tmp_path, text)
    pictures = sorted((tmp_path / 'data').glob('*.jpg'))
    for path in pictures:
        as_jpeg(path, 6)
    with pytest.raises(
        SampleError, match=r'0\.jpg: its EXIF orientation is 6, .*ann\.json is made'
    ):
        train(tmp_path, text)
    for path in pictures:
        Image.open(path).resize((128, 96)).save(path)
    with pytest.raises(
        SampleError, match=r'0\.jpg: it is loaded as 96 x 128 .*ann\.json says 48 x 64'
    ):
        train(tmp_path, text)
    pictures[1].rename(pictures[1].with_suffix('.JPG'))
    Image.new('RGB', (64, 48)).save(pictures[0])
    with pytest.raises(SampleError, match=r'1\.jpg: there is no such file; there is 1\.JPG'):
        train(tmp_path, text)


CLASSIFIER = """
_base_ = 'vim_mm::cls/vim_t_zoh.py'
model = dict(
    backbone=dict(arch=dict(_delete_=True, embed_dims=8, num_layers=2), img_size=32, patch_size=8),
    head=dict(in_channels=8, num_classes={classes}),
    data_preprocessor=dict(num_classes={classes}),
    train_cfg=None,
)
pipeline = [
    dict(type='LoadImageFromFile'),
    {resize}
    dict(type='PackInputs'),
]
dataset = dict(
    _delete_=True, type='CustomDataset', data_prefix={folder!r}, pipeline=pipeline, {options}
)
train_dataloader = dict(
    batch_size=4, num_workers=0, persistent_workers=False, dataset=dataset,
    sampler=dict(_delete_=True, type='InfiniteSampler', shuffle=True),
)
val_dataloader = dict(num_workers=0, persistent_workers=False, dataset=dataset)
val_evaluator = dict(topk=(1,))
test_dataloader, test_evaluator = val_dataloader, val_evaluator
auto_scale_lr = dict(base_batch_size=4)
param_scheduler = [dict(type='CosineAnnealingLR', by_epoch=False)]
train_cfg = dict(max_iters=2, val_interval=2)
custom_hooks = []
"""
RESIZE = "dict(type='Resize', scale=(32, 32)),"


def classifier(folder, classes=2, options='', resize=RESIZE):
    folder = str(folder / 'fruit')
    return CLASSIFIER.format(classes=classes, folder=folder, options=options, resize=resize)


@pytest.fixture
def fruit(tmp_path):
    """Four images of two classes, one of them larger."""
    pytest.importorskip('mmpretrain')
    for name in ('apple', 'pear'):
        (tmp_path / 'fruit' / name).mkdir(parents=True)
        for i in range(2):
            size = (48, 40) if (name, i) == ('pear', 1) else (32, 32)
            Image.new('RGB', size).save(tmp_path / 'fruit' / name / f'{i}.png')
    return tmp_path


@pytest.mark.slow
def test_images_of_no_class(fruit):
    train(fruit, classifier(fruit))
    with pytest.raises(SampleError, match=r'\d\.png: the sample has no gt_label nor gt_score'):
        train(
            fruit, classifier(fruit, options="with_label=False, metainfo=dict(classes=('a', 'b'))")
        )


def test_a_classifier_of_one_class(fruit):
    shutil.rmtree(fruit / 'fruit/pear')
    with pytest.raises(ValueError, match=r'head\.num_classes is 1, .* needs 2 classes'):
        train(fruit, classifier(fruit, classes=1))


def annotated(fruit, *labels) -> str:
    """The config of a classifier whose images have these labels in a file."""
    images = sorted((fruit / 'fruit').rglob('*.png'))
    names = [path.relative_to(fruit / 'fruit') for path in images]
    lines = (f'{name} {label}'.strip() for name, label in zip(names, labels, strict=True))
    (fruit / 'ann.txt').write_text('\n'.join(lines))
    classes = "metainfo=dict(classes=('apple', 'pear'))"
    return classifier(fruit, options=f'ann_file={str(fruit / "ann.txt")!r}, {classes}')


def test_images_of_one_class(fruit):
    with pytest.raises(
        ValueError, match=r'all 4 images are of the class 1 \(pear\), of 2; there is'
    ):
        train(fruit, annotated(fruit, 1, 1, 1, 1))
    assert 'nothing to tell apart' not in train(fruit, annotated(fruit, 1, 1, 1, 0))


def test_a_label_beyond_the_classes_of_classification(fruit):
    with pytest.raises(SampleError, match=r'pear/\d\.png: a label is 2, but there are 2 classes'):
        train(fruit, annotated(fruit, 0, 0, 2, 2))


def test_images_of_several_sizes_in_a_batch_of_classification(fruit):
    said = r'must have one size: crop them .*\(stack expects each'
    for split in ('train', 'val'):
        collate = f"{split}_dataloader['collate_fn'] = dict(type='default_collate')\n"
        collate += f"{split}_dataloader['batch_size'] = 4\n"
        with pytest.raises(SampleError, match=said):
            train(fruit, classifier(fruit, resize='') + collate, test=split == 'val')


def test_images_that_no_class_takes(fruit):
    Image.new('RGB', (32, 32)).save(fruit / 'fruit/pear/2.webp')
    assert re.search(r'1 \*\.webp in .*fruit are left out', train(fruit, classifier(fruit)))
