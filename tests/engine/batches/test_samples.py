"""Samples of a run: drawn by their number, and named by their files where they are at fault."""

import json
import pickle
import random
import shutil

import numpy as np
import pytest
import torch
from mmengine.registry import DATASETS
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from vim_mm.datasets.shapes import ShapesConfig, write_dataset
from vim_mm.engine import VimRunner
from vim_mm.engine.batches.randomness import NumberedIndex
from vim_mm.engine.batches.samples import SampleError, ignored_labels

mmseg = pytest.importorskip('mmseg.datasets')


@DATASETS.register_module()
class Noise(Dataset):
    """Ten samples: the index, and a number from each generator."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return [index, random.random(), np.random.rand(), torch.rand(()).item()]


def draw(batches: int, workers: int, skip: int = 0, seed: int = 0, **sampler) -> list:
    loader = VimRunner.build_dataloader(
        dict(
            dataset=dict(type='Noise'),
            sampler=dict(**{'type': 'InfiniteSampler', 'shuffle': True, **sampler}),
            batch_size=4,
            num_workers=workers,
            collate_fn=dict(type='pseudo_collate'),
        ),
        seed=seed,
    )
    if skip:
        loader.sampler.skip(skip * 4)
    batches = zip(range(batches), loader)
    return [[list(map(float, row)) for row in zip(*batch)] for _, batch in batches]


def test_samples_do_not_depend_on_workers_nor_on_a_restart():
    whole = draw(6, workers=0)
    assert len({tuple(row) for batch in whole for row in batch}) == 24, 'each draws anew'
    assert draw(6, workers=2) == whole
    assert draw(3, workers=1, skip=3) == whole[3:]
    assert draw(6, workers=0, seed=1) != whole


def test_epochs_differ_and_repeat():
    loader = VimRunner.build_dataloader(
        dict(dataset=dict(type='Noise'), sampler=dict(type='DefaultSampler'), batch_size=10), seed=0
    )
    seen = []
    for epoch in (0, 1, 1):
        loader.sampler.set_epoch(epoch)
        seen.append([list(map(float, column)) for batch in loader for column in batch])
    assert seen[0] != seen[1] == seen[2]


def test_numbered_indices_reach_workers_by_pickling():
    index = pickle.loads(pickle.dumps(NumberedIndex(3, 7, 1)))
    assert (int(index), index.number, index.epoch) == (3, 7, 1)


@pytest.fixture(scope='module')
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp('drawn') / 'shapes'
    write_dataset(folder, ShapesConfig(train=2, val=1, size=32))
    return folder


@pytest.fixture
def shapes(drawn, tmp_path):
    """To be spoilt."""
    return shutil.copytree(drawn, tmp_path / 'shapes')


def first_sample(root, workers=0, loader=(), **options):
    """The first training sample, as the shipped configs of the shapes read it."""
    dataset = dict(
        type='mmseg.BaseSegDataset',
        data_root=str(root),
        data_prefix=dict(img_path='images/training', seg_map_path='annotations/training'),
        metainfo=dict(classes=tuple('abcdefg')),
        reduce_zero_label=True,
        pipeline=[
            dict(type='mmcv.transforms.LoadImageFromFile'),
            dict(type='mmseg.LoadAnnotations'),
            dict(type='mmseg.PackSegInputs'),
        ],
    )
    cfg = dict(
        dataset={**dataset, **options},
        sampler=dict(type='InfiniteSampler', shuffle=False),
        batch_size=1,
        num_workers=workers,
        **dict(loader),
    )
    return next(iter(VimRunner.build_dataloader(cfg, seed=0)))


def files(root):
    return [next((root / kind / 'training').iterdir()) for kind in ('images', 'annotations')]


def spoil(path, how):
    for other in sorted(path.parent.iterdir()):
        data = other.read_bytes()
        if how == 'empty':
            other.write_bytes(b'')
        elif how == 'text':
            other.write_text('not a picture')
        elif how == 'cut off':
            other.write_bytes(data[: len(data) * 3 // 4])


@pytest.mark.parametrize('how', ['empty', 'text', 'cut off'])
@pytest.mark.parametrize('which', [0, 1], ids=['picture', 'annotation'])
@pytest.mark.parametrize('workers', [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_corrupt_file_is_named(which, how, workers, shapes):
    path = sorted(files(shapes)[which].parent.iterdir())[0]
    first_sample(shapes)
    spoil(path, how)
    with pytest.raises(SampleError) as caught:
        first_sample(shapes, workers=workers)
    assert f'{path}: ' in str(caught.value)


def test_a_jpeg_that_opencv_would_fill_in_is_not_taken(shapes):
    path, _ = (sorted(path.parent.iterdir())[0] for path in files(shapes))
    assert path.suffix == '.jpg'
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(SampleError, match=r'cut off|truncated') as caught:
        first_sample(shapes)
    assert str(caught.value).startswith(str(path))


def test_a_label_beyond_the_classes_is_named(shapes):
    _, labels = (sorted(path.parent.iterdir())[0] for path in files(shapes))
    pixels = np.array(Image.open(labels))
    pixels[3, 3] = 9
    Image.fromarray(pixels).save(labels)
    with pytest.raises(
        SampleError, match=r'the label 9; .* a label is 8, but there are 7 classes'
    ) as caught:
        first_sample(shapes)
    assert str(caught.value).startswith(str(labels))


class Segmentor(nn.Module):
    def __init__(self, *ignored):
        super().__init__()
        first, *others = (nn.Identity() for _ in ignored)
        for head, label in zip((first, *others), ignored, strict=True):
            head.ignore_index = label
        self.decode_head, self.auxiliary_head = first, nn.ModuleList(others)


def test_what_all_heads_ignore():
    assert ignored_labels(nn.Identity()) == [255]
    assert ignored_labels(Segmentor(3, 3)) == [3]
    assert ignored_labels(Segmentor(3, 255)) == []
    # Losses of masks leave out what is no class.
    assert ignored_labels(Segmentor(None)) == ignored_labels(Segmentor(None, 255)) == [255]


@pytest.mark.parametrize('pack', ['mmseg.PackSegInputs', 'FastPackSegInputs'])
@pytest.mark.parametrize('ignored', [3, -1])  # of which 255 are the lowest 8 bits
def test_a_label_that_the_heads_do_not_ignore_is_named(ignored, pack, shapes):
    """Which would be an index out of bounds, on a GPU without a word of where."""
    _, labels = (sorted(path.parent.iterdir())[0] for path in files(shapes))
    pixels = np.array(Image.open(labels))
    pixels[3, 3] = 0  # of reduce_zero_label: 255
    Image.fromarray(pixels).save(labels)
    loading = [dict(type='mmcv.transforms.LoadImageFromFile'), dict(type='mmseg.LoadAnnotations')]
    options = dict(pipeline=[*loading, dict(type=pack)])
    first_sample(shapes, **options)
    line = rf'a label is 255, .* heads ignore \[{ignored}\]'
    with pytest.raises(SampleError, match=line) as caught:
        first_sample(shapes, loader=dict(ignored=[ignored]), **options)
    assert str(caught.value).startswith(str(labels))


def test_labels_of_another_size_are_named(shapes):
    _, labels = (sorted(path.parent.iterdir())[0] for path in files(shapes))
    Image.open(labels).resize((16, 32)).save(labels)
    with pytest.raises(SampleError, match=r'has \(32, 16\) pixels, the picture'):
        first_sample(shapes)


def test_labels_in_colours_are_named(shapes):
    _, labels = (sorted(path.parent.iterdir())[0] for path in files(shapes))
    Image.open(labels).convert('RGB').save(labels)
    with pytest.raises(SampleError, match='the map of labels has 3 channels; it must be a grey'):
        first_sample(shapes)


def coco_sample(folder, **annotation):
    """The first sample of a picture with one object, or with none if nothing is said of it."""
    pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
    pytest.importorskip('mmdet.datasets')
    Image.new('RGB', (32, 32)).save(folder / '1.png')
    square = {'id': 1, 'image_id': 1, 'category_id': 1, 'bbox': [4, 4, 8, 8], 'area': 64,
              'iscrowd': 0, 'segmentation': [[4, 4, 12, 4, 12, 12, 4, 12]]}  # fmt: skip
    square.update(annotation)
    content = {
        'images': [{'id': 1, 'file_name': '1.png', 'width': 32, 'height': 32}],
        'annotations': [{k: v for k, v in square.items() if v is not None}] if annotation else [],
        'categories': [{'id': 1, 'name': 'a'}],
    }
    (folder / 'ann.json').write_text(json.dumps(content))
    dataset = dict(
        type='mmdet.CocoDataset', data_root=str(folder), ann_file='ann.json',
        data_prefix=dict(img=''), metainfo=dict(classes=('a',)),
        filter_cfg=dict(filter_empty_gt=True),
        pipeline=[
            dict(type='mmcv.transforms.LoadImageFromFile'),
            dict(type='mmdet.LoadAnnotations', with_bbox=True, with_mask=True),
            dict(type='mmdet.PackDetInputs', meta_keys=()),
        ],
    )  # fmt: skip
    cfg = dict(dataset=dataset, sampler=dict(type='InfiniteSampler'), batch_size=1, num_workers=0)
    return next(iter(VimRunner.build_dataloader(cfg, seed=0)))


def test_objects_that_are_missing_are_named(tmp_path):
    coco_sample(tmp_path, iscrowd=0)
    with pytest.raises(SampleError, match=r'1\.png: an object of it has no segmentation'):
        coco_sample(tmp_path, segmentation=None)
    with pytest.raises(SampleError, match=r'ann\.json: no picture with an object of the classes'):
        coco_sample(tmp_path)


@pytest.mark.parametrize('text', ['{"images": [', json.dumps({'images': []})])
def test_an_annotation_file_is_named(text, tmp_path):
    pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
    pytest.importorskip('mmdet.datasets')
    (tmp_path / 'ann.json').write_text(text)
    cfg = dict(
        dataset=dict(type='mmdet.CocoDataset', data_root=str(tmp_path), ann_file='ann.json'),
        sampler=dict(type='InfiniteSampler'),
        batch_size=1,
    )
    with pytest.raises(SampleError, match=r'ann\.json'):
        VimRunner.build_dataloader(cfg, seed=0)
