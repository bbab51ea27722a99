"""FastSegDataPreProcessor against MMSegmentation's: the same bits, without a wait for the GPU."""

import copy

import pytest
import torch
from mmengine.registry import init_default_scope
from mmengine.structures import PixelData

pytest.importorskip('mmseg')
from mmseg.registry import MODELS
from mmseg.structures import SegDataSample

NORMALIZED = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375])


def build(kind, device='cpu', **options):
    init_default_scope('mmseg')
    options = NORMALIZED | dict(bgr_to_rgb=True, seg_pad_val=255) | options
    return MODELS.build(dict(type=kind, **options)).to(device)


def batch(sizes, channels=3):
    labels = [SegDataSample(gt_sem_seg=PixelData(data=torch.ones(1, *size))) for size in sizes]
    inputs = [torch.randint(256, (channels, *size), dtype=torch.uint8) for size in sizes]
    return dict(inputs=inputs, data_samples=labels)


@pytest.mark.parametrize(
    'options',
    [
        dict(),
        dict(bgr_to_rgb=False),
        dict(bgr_to_rgb=False, rgb_to_bgr=True),
        dict(size=(16, 16), test_cfg=dict(size_divisor=8)),
    ],
    ids=['bgr_to_rgb', 'neither', 'rgb_to_bgr', 'padded'],
)
@pytest.mark.parametrize('training', [True, False])
def test_the_same_bits(options, training):
    data = batch([(9, 12), (9, 12)])
    given = copy.deepcopy(data)
    theirs, ours = (
        build(kind, **dict(size=(9, 12)) | options)(copy.deepcopy(data), training)
        for kind in ('SegDataPreProcessor', 'FastSegDataPreProcessor')
    )
    assert torch.equal(ours['inputs'], theirs['inputs'])
    for mine, other in zip(ours['data_samples'], theirs['data_samples'], strict=True):
        assert mine.metainfo == other.metainfo
        assert torch.equal(mine.gt_sem_seg.data, other.gt_sem_seg.data)
    build('FastSegDataPreProcessor', size=(9, 12))(data, training)
    assert torch.equal(data['inputs'][0], given['inputs'][0])


def test_labels_of_8_bits_become_those_of_64():
    wide = batch([(9, 12), (5, 7)])
    for sample in wide['data_samples']:
        sample.gt_sem_seg.data = torch.randint(256, sample.gt_sem_seg.data.shape)
    narrow = copy.deepcopy(wide)
    for sample in narrow['data_samples']:
        sample.gt_sem_seg.data = sample.gt_sem_seg.data.byte()
    # Padded by a label that 8 bits do not have.
    build_ours = build('FastSegDataPreProcessor', size=(9, 12), seg_pad_val=-100)
    expected, ours = (build_ours(data, True)['data_samples'] for data in (wide, narrow))
    for one, other in zip(ours, expected, strict=True):
        assert one.gt_sem_seg.data.dtype is torch.int64
        assert torch.equal(one.gt_sem_seg.data, other.gt_sem_seg.data)
    assert narrow['data_samples'][0].gt_sem_seg.data.dtype is torch.uint8


def test_other_numbers_of_channels_stay():
    data = batch([(9, 12)], channels=1)
    options = dict(mean=[127.0], std=[50.0], size=(9, 12))
    theirs, ours = (
        build(kind, **options)(data, True)['inputs']
        for kind in ('SegDataPreProcessor', 'FastSegDataPreProcessor')
    )
    assert torch.equal(ours, theirs)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_the_host_does_not_wait():
    """Of a batch in pinned memory, as the loader gives it. MMSegmentation's does."""
    data = batch([(64, 64)] * 2)
    data['inputs'] = [image.pin_memory() for image in data['inputs']]
    for sample in data['data_samples']:
        sample.gt_sem_seg.data = sample.gt_sem_seg.data.pin_memory()
    waits = {}
    for kind in ('SegDataPreProcessor', 'FastSegDataPreProcessor'):
        preprocess = build(kind, 'cuda', size=(64, 64))
        preprocess._non_blocking = True  # as VimRunner sets it
        preprocess(data, True)
        torch.cuda.set_sync_debug_mode('error')
        try:
            preprocess(data, True)
            waits[kind] = False
        except RuntimeError:
            waits[kind] = True
        finally:
            torch.cuda.set_sync_debug_mode('default')
    assert waits == {'SegDataPreProcessor': True, 'FastSegDataPreProcessor': False}
