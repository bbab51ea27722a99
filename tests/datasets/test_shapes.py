"""The shapes data set: what is drawn, what is written, and that mm's own classes read it."""

import json
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import cv2
import numpy as np
import pytest
from mmengine.config import Config

from vim_mm.config import config_path
from vim_mm.datasets import layouts, shapes
from vim_mm.datasets.shapes import SEG_CLASSES, SHAPES, ShapesConfig, draw_scene, write_dataset

CONFIG = ShapesConfig(train=60, val=12, size=96, seed=5)


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    out = tmp_path_factory.mktemp('data') / 'shapes'
    assert write_dataset(out, CONFIG)
    return out


@pytest.fixture(scope='module')
def coco_json(root):
    return json.loads((root / 'annotations/instances_train2017.json').read_text())


def _files(root):
    return {
        path.relative_to(root): path.read_bytes()
        for path in sorted(root.rglob('*'))
        if path.is_file()
    }


def _decode(segmentation):
    lengths = segmentation['counts']
    flat = np.repeat(np.arange(len(lengths)) % 2, lengths).astype(bool)
    return flat.reshape(segmentation['size'], order='F')


def test_same_seed_same_bytes(root, tmp_path):
    write_dataset(tmp_path / 'again', CONFIG)
    assert _files(tmp_path / 'again') == _files(root)


def test_seed_split_and_index_change_the_scene(root, tmp_path):
    write_dataset(tmp_path / 'other', ShapesConfig(train=2, val=2, size=96, seed=40))
    images = [
        root / 'images/training/000001.jpg',
        root / 'images/training/000002.jpg',
        root / 'images/validation/000001.jpg',
        tmp_path / 'other/images/training/000001.jpg',
    ]
    assert len({image.read_bytes() for image in images}) == len(images)


def test_larger_data_set_extends_smaller_one(root, tmp_path):
    write_dataset(tmp_path / 'fewer', ShapesConfig(train=5, val=2, size=96, seed=5))
    all_files = _files(root)
    for path, content in _files(tmp_path / 'fewer').items():
        if path.suffix != '.json':
            assert all_files[path] == content, path


def test_reuses_an_identical_data_set(root, capsys):
    before = {path: path.stat().st_mtime_ns for path in root.rglob('*')}
    options = [f'--{name}={getattr(CONFIG, name)}' for name in ('train', 'val', 'size', 'seed')]
    shapes.main([f'--out={root}', *options])
    assert capsys.readouterr().out.startswith('Reusing')
    assert {path: path.stat().st_mtime_ns for path in root.rglob('*')} == before


def test_other_parameters_replace_it(tmp_path, capsys):
    for train in (3, 2):
        shapes.main([f'--out={tmp_path / "set"}', f'--train={train}', '--val=1', '--size=32'])
        assert capsys.readouterr().out.startswith('Made')
    assert len(list((tmp_path / 'set/images/training').iterdir())) == 2
    assert [path.name for path in tmp_path.iterdir()] == ['set']


def test_interrupted_run_leaves_no_data_set(tmp_path, monkeypatch):
    def fail(*args):
        raise KeyboardInterrupt

    config = ShapesConfig(train=2, val=1, size=32)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(layouts, '_coco_annotation', fail)
        write_dataset(tmp_path / 'set', config)
    assert not (tmp_path / 'set').exists()
    assert write_dataset(tmp_path / 'set', config)


def test_two_processes_do_not_make_one_data_set(tmp_path):
    """The one would delete what the other has written, and both would end well."""
    out, manifest = tmp_path / 'set', {'seed': 1}

    def write(folder):
        (folder / 'images').mkdir(parents=True)
        with pytest.raises(FileExistsError, match=r'another process is making .*set: wait for its'):
            layouts.write_once(out, manifest, write, 'set')
        (folder / 'images/1.jpg').touch()

    assert layouts.write_once(out, manifest, write, 'set')
    assert not layouts.write_once(out, manifest, write, 'set')
    assert [path.name for path in tmp_path.iterdir()] == ['set']
    assert (out / 'images/1.jpg').exists()


def test_what_another_process_made_meanwhile_is_taken(tmp_path, monkeypatch):
    out, manifest = tmp_path / 'set', {'seed': 1}

    @contextmanager
    def later(out):
        out.mkdir()
        (out / 'manifest.json').write_text(json.dumps(manifest))
        yield

    monkeypatch.setattr(layouts, '_locked', later)
    assert not layouts.write_once(out, manifest, lambda folder: pytest.fail('made again'), 'set')


def test_a_folder_with_the_ending_of_a_part_is_left_alone(tmp_path):
    mine = tmp_path / 'set.partial' / 'mine.txt'
    mine.parent.mkdir()
    mine.write_text('mine')
    assert layouts.write_once(tmp_path / 'set', {'seed': 1}, Path.mkdir, 'set')
    assert mine.read_text() == 'mine'


@pytest.mark.parametrize('there', [True, False])
def test_a_link_with_the_name_of_the_lock_is_not_followed(there, tmp_path):
    mine = tmp_path / 'mine.txt'
    if there:
        mine.write_text('mine')
    (tmp_path / '.set.lock').symlink_to(mine)
    with pytest.raises(OSError, match=r'set\.lock'):
        layouts.write_once(tmp_path / 'set', {'seed': 1}, Path.mkdir, 'set')
    assert mine.exists() == there and (not there or mine.read_text() == 'mine')


@pytest.mark.parametrize('another', [False, True])
def test_a_lock_that_was_taken_away_is_none(another, tmp_path, monkeypatch):
    """By the process that held it; a third one may have made another."""
    out = tmp_path / 'set'
    lock = tmp_path / '.set.lock'

    def flock(*args):
        lock.rename(tmp_path / 'old')
        if another:
            lock.touch()

    monkeypatch.setattr(layouts.fcntl, 'flock', flock)
    with pytest.raises(FileExistsError, match='another process is making'):
        layouts.write_once(out, {'seed': 1}, lambda folder: pytest.fail('made'), 'set')


@pytest.mark.parametrize('manifest', [None, '{"name": "webapp"}', 'not JSON'])
def test_foreign_directory_is_left_alone(tmp_path, manifest):
    (tmp_path / 'precious.txt').write_text('mine')
    if manifest is not None:
        (tmp_path / 'manifest.json').write_text(manifest)
    with pytest.raises(FileExistsError, match='holds no shapes data set'):
        write_dataset(tmp_path, ShapesConfig(train=1, val=1, size=32))
    assert (tmp_path / 'precious.txt').read_text() == 'mine'


@pytest.mark.parametrize('name', ['train', 'val', 'size', 'seed'])
def test_bad_parameter_is_named(name):
    with pytest.raises(ValueError, match=f'{name} must be at least .*, got -1'):
        ShapesConfig(**{name: -1})


def test_scene_masks_are_exact():
    rng = np.random.default_rng(0)
    for _ in range(40):
        scene = draw_scene(rng, 64)
        assert scene.image.dtype == np.uint8 and scene.image.shape[2] == 3
        assert max(scene.image.shape[:2]) == 64
        assert scene.masks.shape == (len(scene.labels), *scene.image.shape[:2])
        assert scene.masks.sum(axis=0).max(initial=0) <= 1
        assert scene.masks.any(axis=(1, 2)).all()
        foreground = scene.masks.any(axis=0)
        assert ((scene.seg_map > 1) == foreground).all() and scene.seg_map.min() == 1


def test_shapes_differ_in_outline_not_in_colour():
    """The mean colour of a class says nothing: class means lie close to the mean of all."""
    rng = np.random.default_rng(1)
    colours = {label: [] for label in range(len(SHAPES))}
    for _ in range(300):
        scene = draw_scene(rng, 64)
        for mask, label in zip(scene.masks, scene.labels, strict=True):
            colours[int(label)].append(scene.image[mask].mean(axis=0))
    everything = np.concatenate([np.array(each) for each in colours.values()])
    for each in colours.values():
        # Standard error of a class mean: a colour's deviation is 56, a class has over 100 samples.
        assert np.abs(np.mean(each, axis=0) - everything.mean(axis=0)).max() < 4 * 56 / 10
    assert everything.std(axis=0).min() > 40


def test_layouts_agree(root, coco_json):
    """ADE20K's maps are COCO's masks painted on background, over the same images."""
    by_image = {image['id']: [] for image in coco_json['images']}
    for annotation in coco_json['annotations']:
        by_image[annotation['image_id']].append(annotation)
    assert len(by_image) == CONFIG.train
    for image in coco_json['images']:
        name = Path(image['file_name'])
        assert (root / 'train2017' / name).read_bytes() == (
            root / 'images/training' / name
        ).read_bytes()
        expected = np.ones((image['height'], image['width']), np.uint8)
        for annotation in by_image[image['id']]:
            expected[_decode(annotation['segmentation'])] = annotation['category_id'] + 1
        seg_map = root / 'annotations/training' / name.with_suffix('.png')
        np.testing.assert_array_equal(cv2.imread(str(seg_map), cv2.IMREAD_UNCHANGED), expected)


def test_boxes_and_areas_fit_the_masks(coco_json):
    for annotation in coco_json['annotations']:
        mask = _decode(annotation['segmentation'])
        left, top, width, height = annotation['bbox']
        assert annotation['area'] == mask.sum() > 0
        assert (left, top, width, height) == cv2.boundingRect(mask.astype(np.uint8))


def test_variety(root, coco_json):
    sizes = {(image['height'], image['width']) for image in coco_json['images']}
    assert any(h == w for h, w in sizes)
    assert any(h < w for h, w in sizes) and any(h > w for h, w in sizes)
    per_image = Counter(annotation['image_id'] for annotation in coco_json['annotations'])
    assert len(per_image) < CONFIG.train, 'some image holds no object'
    assert max(per_image.values()) == 3
    per_class = Counter(annotation['category_id'] for annotation in coco_json['annotations'])
    mean = len(coco_json['annotations']) / len(SHAPES)
    assert all(0.5 * mean < per_class[index + 1] < 2 * mean for index in range(len(SHAPES)))


def test_mmseg_reads_it(root):
    from mmseg.datasets import BaseSegDataset

    dataset = BaseSegDataset(
        data_root=str(root),
        data_prefix={'img_path': 'images/validation', 'seg_map_path': 'annotations/validation'},
        metainfo={'classes': SEG_CLASSES},
        reduce_zero_label=True,
        pipeline=[{'type': 'LoadImageFromFile'}, {'type': 'mmseg.LoadAnnotations'}],
    )
    assert len(dataset) == CONFIG.val
    for sample in dataset:
        assert sample['img'].shape[:2] == sample['gt_seg_map'].shape
        assert set(np.unique(sample['gt_seg_map'])) <= set(range(len(SEG_CLASSES)))


def test_mmdet_reads_it(root, coco_json):
    from mmdet.datasets import CocoDataset

    dataset = CocoDataset(
        data_root=str(root),
        ann_file='annotations/instances_train2017.json',
        data_prefix={'img': 'train2017/'},
        metainfo={'classes': SHAPES},
        pipeline=[
            {'type': 'LoadImageFromFile'},
            {'type': 'mmdet.LoadAnnotations', 'with_bbox': True, 'with_mask': True},
        ],
    )
    assert len(dataset) == CONFIG.train
    boxes = 0
    for sample in dataset:
        assert sample['img'].shape[:2] == (sample['height'], sample['width'])
        for box, mask in zip(sample['gt_bboxes'].numpy(), sample['gt_masks'].masks, strict=True):
            left, top, width, height = cv2.boundingRect(mask)
            np.testing.assert_array_equal(box, [left, top, left + width, top + height])
            boxes += 1
    assert boxes == len(coco_json['annotations'])


def test_configs_name_its_classes():
    seg = Config.fromfile(config_path('_base_/datasets/shapes_seg.py')).metainfo
    det = Config.fromfile(config_path('_base_/datasets/shapes_det.py')).metainfo
    assert (seg.classes, det.classes) == (SEG_CLASSES, SHAPES)
    assert [tuple(colour) for colour in seg.palette[1:]] == det.palette
