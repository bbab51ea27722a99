"""FastEncoderDecoder against MMSegmentation's EncoderDecoder: the same labels."""

import copy

import pytest
import torch
from mmengine.config import ConfigDict
from mmengine.registry import init_default_scope
from torch import nn

pytest.importorskip('mmseg')
from mmseg.registry import MODELS
from mmseg.structures import SegDataSample

CLASSES = 7
METAS = {
    'plain': dict(img_shape=(48, 64), ori_shape=(48, 64)),
    'resized': dict(img_shape=(48, 64), pad_shape=(48, 64, 3), ori_shape=(75, 101)),
    'padded': dict(img_shape=(48, 64), ori_shape=(35, 40), img_padding_size=[0, 5, 0, 7]),
    'flipped': dict(img_shape=(48, 64), ori_shape=(60, 50), flip=True, flip_direction='horizontal'),
    'upside down': dict(
        img_shape=(48, 64), ori_shape=(60, 50), flip=True, flip_direction='vertical'
    ),
}
MODES = {
    'whole': dict(mode='whole'),
    'slide': dict(mode='slide', crop_size=(32, 32), stride=(20, 21)),
    'slide, larger crop': dict(mode='slide', crop_size=(64, 80), stride=(20, 21)),
}


@MODELS.register_module()
class _Patches(nn.Module):
    """A backbone: patches of 8 pixels."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Conv2d(3, 6, 8, stride=8)

    def forward(self, x):
        return (self.proj(x),)


def build(model_type, test_cfg, **head):
    head = dict(type='FCNHead', in_channels=6, in_index=0, channels=8, num_convs=1) | head
    head |= dict(concat_input=False, norm_cfg=dict(type='BN'))
    head.setdefault('num_classes', CLASSES)
    cfg = dict(type=model_type, backbone=dict(type='_Patches'), decode_head=head)
    return MODELS.build(cfg | dict(test_cfg=ConfigDict(test_cfg))).eval()


def pair(test_cfg, **head):
    init_default_scope('mmseg')
    theirs = build('EncoderDecoder', test_cfg, **head)
    ours = build('FastEncoderDecoder', test_cfg, **head)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


def samples(meta):
    return [SegDataSample(metainfo=copy.deepcopy(meta)) for _ in range(2)]


@pytest.fixture(params=['at once', 'chunks', 'one by one'])
def chunks(request, monkeypatch):
    from vim_mm.segmentation import segmentor

    size = {'at once': 2**28, 'chunks': 3 * 75 * 101 * 4, 'one by one': 1}[request.param]
    monkeypatch.setattr(segmentor, 'CHUNK_BYTES', size)


@pytest.mark.usefixtures('chunks')
@pytest.mark.parametrize('align_corners', [False, True])
@pytest.mark.parametrize('meta', METAS)
@pytest.mark.parametrize('mode', MODES)
@torch.no_grad()
def test_same_labels(mode, meta, align_corners):
    ours, theirs = pair(MODES[mode], align_corners=align_corners)
    inputs = torch.randn(2, 3, 48, 64)
    expected = theirs.predict(inputs, samples(METAS[meta]))
    results = ours.predict(inputs, samples(METAS[meta]))
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result.pred_sem_seg.data, other.pred_sem_seg.data)
        assert result.pred_sem_seg.data.dtype == other.pred_sem_seg.data.dtype
        assert len(other.pred_sem_seg.data.unique()) > 1
        assert 'seg_logits' not in result


@pytest.mark.parametrize('mode', MODES)
@torch.no_grad()
def test_without_data_samples(mode):
    ours, theirs = pair(MODES[mode])
    inputs = torch.randn(2, 3, 48, 64)
    for result, other in zip(ours.predict(inputs), theirs.predict(inputs), strict=True):
        assert torch.equal(result.pred_sem_seg.data, other.pred_sem_seg.data)


@pytest.mark.usefixtures('chunks')
@torch.no_grad()
def test_of_equal_logits_the_first_class_wins():
    ours, theirs = pair(MODES['whole'])
    for model in (ours, theirs):
        model.decode_head.conv_seg.weight.zero_()
        model.decode_head.conv_seg.bias.copy_(torch.tensor([0.0, 1, 3, 3, 0, 3, 2]))
    inputs = torch.randn(2, 3, 48, 64)
    for model in (ours, theirs):
        assert model.predict(inputs)[0].pred_sem_seg.data.unique().tolist() == [2]


@pytest.mark.parametrize(
    ('test_cfg', 'head'),
    [
        (dict(mode='whole', store_logits=True), {}),
        (dict(mode='whole'), dict(num_classes=2, out_channels=1, threshold=0.4)),
    ],
)
@torch.no_grad()
def test_logits_where_they_are_asked_for_or_needed(test_cfg, head):
    ours, theirs = pair(test_cfg, **head)
    inputs = torch.randn(2, 3, 48, 64)
    for result, other in zip(
        ours.predict(inputs, samples(METAS['resized'])),
        theirs.predict(inputs, samples(METAS['resized'])),
        strict=True,
    ):
        assert torch.equal(result.seg_logits.data, other.seg_logits.data)
        assert torch.equal(result.pred_sem_seg.data, other.pred_sem_seg.data)


@pytest.mark.parametrize('meta', METAS)
@pytest.mark.parametrize('mode', MODES)
@torch.no_grad()
def test_labels_by_one_kernel(mode, meta, monkeypatch):
    """Where they follow from one resize. The kernel's place is taken by PyTorch's operators."""
    from vim_mm.segmentation import segmentor

    calls = []

    def upsampled_labels(logits, size, align_corners):
        calls.append(tuple(size))
        large = nn.functional.interpolate(
            logits, tuple(size), mode='bilinear', align_corners=align_corners
        )
        return large.argmax(1)

    monkeypatch.setattr(segmentor, 'has_kernel', lambda *kind: True)
    monkeypatch.setattr(segmentor, 'upsampled_labels', upsampled_labels)
    ours, theirs = pair(MODES[mode])
    inputs = torch.randn(2, 3, 48, 64)
    given = [samples(METAS[meta]) for _ in range(2)]
    for sample in (sample for both in given for sample in both):
        if sample.metainfo.get('flip'):
            sample.set_metainfo(dict(ori_shape=(48, 64)))
        if sample.metainfo.get('img_padding_size'):
            sample.set_metainfo(dict(ori_shape=(41, 59)))
    results, expected = ours.predict(inputs, given[0]), theirs.predict(inputs, given[1])
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result.pred_sem_seg.data, other.pred_sem_seg.data)
        assert result.pred_sem_seg.data.dtype == other.pred_sem_seg.data.dtype
    one_window = mode != 'slide'
    assert calls == ([(48, 64)] if one_window and meta != 'resized' else [])
