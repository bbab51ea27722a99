"""The data set that tools read, and the image that they draw over."""

import numpy as np
import pytest
from mmengine.config import Config
from mmengine.dataset import BaseDataset, Compose

from vim_mm.engine.reader import (
    Loaded,
    class_meta,
    displayed,
    distinct_colours,
    keep_loaded,
    leaf_dataset,
    prediction_pipeline,
)

LEAF = dict(type='BaseDataset', pipeline=[], ann_file='a.json')
WRAPPED = {
    'itself': LEAF,
    'Concat': dict(type='ConcatDataset', datasets=[LEAF, dict(LEAF, ann_file='b.json')]),
    'Repeat': dict(type='RepeatDataset', times=2, dataset=LEAF),
    'ClassBalanced': dict(type='ClassBalancedDataset', oversample_thr=0.1, dataset=LEAF),
    'KFold': dict(type='KFoldDataset', fold=0, num_splits=2, dataset=LEAF),
    'of each other': dict(type='RepeatDataset', dataset=dict(type='Concat', datasets=[LEAF])),
}


def config(dataset, **more):
    return Config(dict(default_scope='mmengine', test_dataloader=dict(dataset=dataset), **more))


@pytest.mark.parametrize('name', WRAPPED)
def test_the_leaf_of_wrapped_data(name):
    assert leaf_dataset(config(WRAPPED[name])).ann_file == 'a.json'


def test_a_config_without_test_data():
    with pytest.raises(ValueError, match=r'test_dataloader\.dataset must be a data set'):
        leaf_dataset(Config(dict(test_dataloader=None)))


class Named(BaseDataset):
    METAINFO = dict(classes=('a', 'b'))


class LoadAnnotations:
    def __call__(self, results):
        raise AssertionError('no annotations are asked for')


class LoadNothing:
    def __call__(self, results):
        return results


def test_types_may_be_classes():
    pipeline = [dict(type=LoadNothing), dict(type=LoadAnnotations)]
    cfg = config(dict(type=Named, pipeline=pipeline))
    assert class_meta(cfg)['classes'] == ('a', 'b')
    assert [type(t) for t in prediction_pipeline(cfg).transforms] == [LoadNothing]


def test_classes_of_a_checkpoint_where_the_config_has_none():
    checkpoint = dict(meta=dict(dataset_meta=dict(classes=['x', 'y', 'z'])))
    meta = class_meta(config(LEAF), checkpoint)
    assert meta['classes'] == ['x', 'y', 'z'] and len(meta['palette']) == 3
    assert class_meta(config(dict(type=Named)), checkpoint)['classes'] == ('a', 'b')
    assert 'classes' not in class_meta(config(LEAF))


def test_colours_are_distinct():
    colours = np.array(distinct_colours(30))
    distance = np.abs(colours[:, None] - colours[None]).max(-1) + 255 * np.eye(30)
    assert distance.min() > 15


def test_three_bands_of_bytes_stay():
    image = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    assert np.array_equal(displayed(image), image[..., ::-1])
    assert np.array_equal(displayed(image, rgb=True), image)
    assert np.array_equal(displayed(image.astype(np.float32)), image[..., ::-1])
    assert np.array_equal(displayed(image[..., 0]), np.repeat(image[..., :1], 3, 2))


@pytest.mark.parametrize('count', [2, 5, 13])
def test_other_bands_are_chosen(count):
    image = np.random.default_rng(0).integers(0, 256, (4, 5, count), dtype=np.uint8)
    with pytest.raises(ValueError, match=rf'{count} bands cannot be drawn: --bands R G B'):
        displayed(image)
    assert np.array_equal(displayed(image, [1, 0, 1]), image[..., [1, 0, 1]])
    assert np.array_equal(displayed(image, [1]), image[..., [1, 1, 1]])
    with pytest.raises(ValueError, match=rf'--bands must be below {count}, .* got {count}'):
        displayed(image, [0, 1, count])


@pytest.mark.parametrize('dtype', [np.uint16, np.int16, np.float32, np.float64])
def test_other_numbers_are_stretched(dtype):
    ramp = np.linspace(0, 4000, 64 * 64).reshape(64, 64).astype(dtype)
    drawn = displayed(ramp)
    assert drawn.dtype == np.uint8 and drawn.shape == (64, 64, 3)
    assert drawn.min() == 0 and drawn.max() == 255
    assert (np.diff(drawn[:, 0, 0].astype(int)) >= 0).all() and len(np.unique(drawn)) > 200


@pytest.mark.parametrize('value', [0, 7, 40_000, float('nan'), float('inf')])
def test_constant_images_are_drawn(value):
    image = np.full((3, 4, 3), value, np.float32)
    assert displayed(image).shape == (3, 4, 3)


class LoadImageFromRamp:
    def __init__(self, backend='cv2'):
        self.imdecode_backend = backend

    def __call__(self, results):
        return {**results, 'img': np.arange(12, dtype=np.uint8).reshape(2, 2, 3)}


def blacken(results):
    results['img'][:] = 0
    return results


@pytest.mark.parametrize('backend', ['cv2', 'tifffile'])
def test_what_was_loaded_is_kept_from_later_transforms(backend):
    pipeline, loaded = Compose([LoadImageFromRamp(backend), blacken]), Loaded()
    loaded.put_into(pipeline)
    assert not pipeline({})['img'].any()
    ramp = np.arange(12).reshape(2, 2, 3)
    assert np.array_equal(loaded.displayed(), ramp if backend == 'tifffile' else ramp[..., ::-1])


def test_images_of_data_within_others():
    class Leaf:
        def __init__(self):
            self.pipeline = Compose([LoadImageFromRamp(), blacken])

    class Within:
        def __init__(self, *inner):
            self.datasets = inner

    one, other = Leaf(), Leaf()
    loaded = keep_loaded(Within(one, Within(other)))
    for leaf in (one, other):
        loaded.image = None
        leaf.pipeline({})
        assert loaded.image.any()
