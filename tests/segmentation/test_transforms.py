"""FastRandomCrop and FastPackSegInputs against MMSegmentation's transforms."""

import numpy as np
import pytest
import torch
from mmengine.registry import TRANSFORMS, DefaultScope

pytest.importorskip('mmseg')


def crops(kind, labels, times=20, **cfg):
    """What so many crops of an image are, after the same random numbers."""
    import vim_mm  # noqa: F401

    image = np.arange(labels.size * 3, dtype=np.int64).reshape(*labels.shape, 3)
    np.random.seed(0)
    with DefaultScope.overwrite_default_scope('mmseg'):
        crop = TRANSFORMS.build(dict(type=kind, **cfg))
    results = [
        crop(dict(img=image, gt_seg_map=labels, seg_fields=['gt_seg_map'])) for _ in range(times)
    ]
    return results, np.random.get_state()[1].tolist()


def patches(dtype=np.uint8):
    """Labels of which most of a crop often is of one class, or not labelled."""
    labels = np.random.default_rng(0).choice([0, 0, 0, 1, 2, 255], size=(6, 8))
    return labels.repeat(8, 0).repeat(8, 1).astype(dtype)


@pytest.mark.parametrize('ignore_index', [255, 0, -100, 300])
@pytest.mark.parametrize('cat_max_ratio', [0.5, 0.75, 1.0])
@pytest.mark.parametrize('dtype', [np.uint8, np.int64])
@pytest.mark.parametrize('crop_size', [(16, 24), 100])
def test_crops_are_the_same(crop_size, dtype, cat_max_ratio, ignore_index):
    cfg = dict(crop_size=crop_size, cat_max_ratio=cat_max_ratio, ignore_index=ignore_index)
    (expected, after), (ours, ours_after) = (
        crops(kind, patches(dtype), **cfg) for kind in ('RandomCrop', 'FastRandomCrop')
    )
    for one, other in zip(expected, ours, strict=True):
        assert one['img_shape'] == other['img_shape']
        for key in ('img', 'gt_seg_map'):
            assert np.array_equal(one[key], other[key])
    assert after == ours_after


def test_a_crop_of_one_class_is_drawn_again():
    """Or the comparison above would compare nothing."""
    chosen, _ = crops('FastRandomCrop', patches(), crop_size=(16, 24), cat_max_ratio=0.6)
    any_crop, _ = crops('FastRandomCrop', patches(), crop_size=(16, 24))
    shares = [
        np.mean([(x['gt_seg_map'] == 0).mean() for x in results]) for results in (chosen, any_crop)
    ]
    assert shares[0] < shares[1]


@pytest.mark.parametrize('cfg', [dict(crop_size=(0, 4)), dict(crop_size=4.5), dict()])
def test_bad_arguments_end_as_in_mmseg(cfg):
    errors = []
    for kind in ('RandomCrop', 'FastRandomCrop'):
        with pytest.raises((AssertionError, TypeError)) as error:
            crops(kind, patches(), **cfg)
        errors.append(error.type)
    assert errors[0] is errors[1]


@pytest.mark.parametrize('more', [dict(), dict(meta_keys=('img_path',))], ids=['plain', 'keys'])
@pytest.mark.parametrize(
    'labels',
    [patches(), patches()[::-1, ::2], patches(np.int64), patches(np.uint16), None],
    ids=['uint8', 'flipped', 'int64', 'uint16', 'none'],
)
def test_packed_samples_differ_in_the_dtype_of_labels_alone(labels, more):
    image = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    results = dict(img=image, img_path='a.png', img_shape=(48, 64), flip=True)
    if labels is not None:
        results |= dict(gt_seg_map=labels, gt_edge_map=patches())
    with DefaultScope.overwrite_default_scope('mmseg'):
        theirs, ours = (
            TRANSFORMS.build(dict(type=kind, **more))(dict(results))
            for kind in ('PackSegInputs', 'FastPackSegInputs')
        )
    assert torch.equal(ours['inputs'], theirs['inputs'])
    one, other = ours['data_samples'], theirs['data_samples']
    assert one.metainfo == other.metainfo
    assert set(one.keys()) == set(other.keys())  # a list, in the order of a set of strings
    for key in other.keys():  # noqa: SIM118 - not those of metainfo
        assert torch.equal(one.get(key).data.long(), other.get(key).data)
    if labels is not None:
        given = labels.copy()
        one.gt_sem_seg.data.fill_(7)
        assert np.array_equal(labels, given), 'labels that a data set keeps are its own'
        narrow = torch.uint8 if labels.dtype == np.uint8 else torch.int64
        assert one.gt_sem_seg.data.dtype is narrow
