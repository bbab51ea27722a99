"""A fast form refuses what its original refuses: both get the same bad input."""

import copy
import re
import warnings

import numpy as np
import pytest
import torch
from mmengine.config import ConfigDict
from mmengine.registry import MODELS as ALL_MODELS
from mmengine.registry import init_default_scope
from mmengine.structures import InstanceData, PixelData
from torch import nn

import vim_mm.detection
import vim_mm.segmentation

pytest.importorskip('mmseg')
from mmseg.registry import MODELS
from mmseg.structures import SegDataSample

CLASSES, SIZE = 3, (8, 8)
CE = dict(type='CrossEntropyLoss')


@MODELS.register_module(force=True)
class _Blocks(nn.Module):
    """A backbone: blocks of 4 pixels, (B, 6, h, w)."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Conv2d(3, 6, 4, stride=4)

    def forward(self, x):
        return (self.proj(x),)


@MODELS.register_module(force=True)
def _ListHead(of, **cfg):
    """A head that gives a list of logits, or some of the wrong number."""
    head = MODELS.build(dict(type=of, **FCN | cfg))
    head.forward = lambda inputs: [head.conv_seg(torch.zeros(len(inputs[0]), 8, 2, 2))]
    return head


@MODELS.register_module(force=True)
def _WideHead(of, **cfg):
    head = MODELS.build(dict(type=of, **FCN | cfg))
    head.forward = lambda inputs: torch.zeros(len(inputs[0]), CLASSES + 1, 2, 2)
    return head


FCN = dict(in_channels=6, in_index=0, channels=8, num_convs=1, concat_input=False)
UPER = dict(in_channels=[6, 6], in_index=[0, 0], channels=8, pool_scales=(1, 2))
SEGFORMER = dict(in_channels=[6, 6], in_index=[0, 0], channels=8)


def head(kind, **options):
    base = dict(FCNHead=FCN, UPerHead=UPER, SegformerHead=SEGFORMER)[kind.get('of', kind['name'])]
    of = {'of': kind['of']} if kind['type'] == 'FastHead' else {}
    return MODELS.build(dict(type=kind['type'], **of, **base | dict(num_classes=CLASSES) | options))


def sample(labels):
    return SegDataSample(gt_sem_seg=PixelData(data=labels))


def labels(batch=2, value=0, shape=(1, *SIZE), dtype=torch.int64):
    return [sample(torch.full(shape, value, dtype=dtype)) for _ in range(batch)]


def loss(truth, logits=(2, CLASSES, 4, 4), **options):
    """What a head makes of samples."""

    def run(kind):
        built = head(kind, **options)
        built.loss_by_feat(torch.randn(*logits).requires_grad_(), truth())

    return run


def construct(**options):
    return lambda kind: head(kind, **options)


def without_truth():
    return [SegDataSample(), SegDataSample()]


OF_HEADS = {
    'another number of channels': construct(out_channels=5),
    'an unknown transform': construct(input_transform='concat'),
    'maps by no index': construct(in_index=None),
    'a rate above 1': construct(dropout_ratio=1.5),
    'a loss that is a word': construct(loss_decode='CrossEntropyLoss'),
    'an unknown loss': construct(loss_decode=dict(type='NoLoss')),
    'a binary loss of masks': construct(loss_decode=dict(CE, use_sigmoid=True, use_mask=True)),
    'an unknown argument': construct(no_such_argument=1),
    'more weights': loss(labels, loss_decode=dict(CE, class_weight=[1.0] * 4)),
    'less weights': loss(labels, loss_decode=dict(CE, class_weight=[1.0, 2.0])),
    'less weights in the second loss': loss(
        labels, loss_decode=[CE, dict(CE, loss_name='loss_b', class_weight=[1.0, 2.0])]
    ),
    'weights by name': loss(labels, loss_decode=dict(CE, class_weight=dict(a=1, b=2, c=3))),
    'weights by number': loss(labels, loss_decode=dict(CE, class_weight={0: 1, 1: 2, 2: 3})),
    'weights that are words': loss(labels, loss_decode=dict(CE, class_weight=['1', '2', '3'])),
    'a table of weights': loss(labels, loss_decode=dict(CE, class_weight=np.ones((3, 2)))),
    'an unknown reduction': loss(labels, loss_decode=dict(CE, reduction='average')),
    'a label above the classes': loss(lambda: labels(value=CLASSES)),
    'a label below them': loss(lambda: labels(value=-1)),
    'a label that another head ignores': loss(lambda: labels(value=255), ignore_index=254),
    'a weighted label above them': loss(
        lambda: labels(value=CLASSES), loss_decode=dict(CE, class_weight=[1.0] * 3)
    ),
    'labels of several channels': loss(lambda: labels(shape=(3, *SIZE))),
    'labels with a row too many': loss(lambda: labels(shape=(1, 1, *SIZE))),
    'labels of no pixel': loss(lambda: labels(shape=(1, 0, 8))),
    'labels of floats': loss(lambda: labels(dtype=torch.float32)),
    'labels of int32': loss(lambda: labels(dtype=torch.int32)),
    'one sample for two images': loss(lambda: labels(batch=1)),
    'no samples': loss(list),
    'samples without labels': loss(without_truth),
    'three samples for two images': loss(lambda: labels(batch=3)),
    'two samples for one image': loss(labels, logits=(1, CLASSES, 4, 4)),
    'labels of two sizes': loss(lambda: [*labels(1), *labels(1, shape=(1, 9, 9))]),
    'logits (B, C, h)': loss(labels, logits=(2, CLASSES, 4)),
}
OF_FCN = {
    'a negative number of layers': construct(num_convs=-1),
    'no dilation': construct(dilation=0),
    'no layers and other channels': construct(num_convs=0),
    'several channels of one map': construct(in_channels=[6, 6]),
}
OF_UPER = {
    'one map': construct(in_channels=6, in_index=0),
    'another number of maps': construct(in_index=[0]),
}


def segmentor(kind, test_cfg, decode_head=None, **options):
    base = FCN | dict(type='FCNHead', num_classes=CLASSES)
    cfg = dict(type=kind['type'], backbone=dict(type='_Blocks'), decode_head=decode_head or base)
    test_cfg = None if test_cfg is None else ConfigDict(test_cfg)
    return MODELS.build(cfg | dict(test_cfg=test_cfg) | options).eval()


def metas(batch=2, **meta):
    meta = dict(img_shape=(16, 16), ori_shape=(16, 16)) | meta
    return [SegDataSample(metainfo=copy.deepcopy(meta)) for _ in range(batch)]


def predict(test_cfg, samples=metas, later=None, shape=(2, 3, 16, 16), **options):
    def run(kind):
        model = segmentor(kind, test_cfg, **options)
        model.test_cfg = model.test_cfg if later is None else ConfigDict(later)
        with torch.no_grad():
            model.predict(torch.randn(*shape), None if samples is None else samples())

    return run


def images_in_a_list(test_cfg):
    return lambda kind: segmentor(kind, test_cfg).predict([torch.randn(3, 16, 16)] * 2, metas())


WHOLE, SLIDE = dict(mode='whole'), dict(mode='slide', crop_size=(8, 8), stride=(8, 8))
APART = dict(mode='slide', crop_size=(4, 4), stride=(10, 10))
WIDE_HEAD, LIST_HEAD = dict(type='_WideHead', of='FCNHead'), dict(type='_ListHead', of='FCNHead')
OF_SEGMENTORS = {
    'a stride beyond the crop': predict(APART),
    'a stride beyond the crop in one direction': predict(APART | dict(stride=(4, 5))),
    'a stride that is changed later': predict(SLIDE, later=APART),
    'no stride': predict(SLIDE | dict(stride=(0, 8))),
    'one stride for two directions': predict(SLIDE | dict(stride=8)),
    'windows without a stride': predict(dict(mode='slide', crop_size=(8, 8))),
    'windows without a size': predict(dict(mode='slide', stride=(8, 8))),
    'another mode': predict(dict(mode='windows')),
    'a misspelled mode, changed later': predict(WHOLE, later=dict(mode='Slide')),
    'no test_cfg': predict(None),
    'less samples than images': predict(WHOLE, lambda: metas(1)),
    'no sample': predict(WHOLE, list),
    'a diagonal flip': predict(WHOLE, lambda: metas(flip=True, flip_direction='diagonal')),
    'a flip of no direction': predict(SLIDE, lambda: metas(flip=True)),
    'samples without the original size': predict(WHOLE, lambda: [SegDataSample()] * 2),
    'images in a list': images_in_a_list(WHOLE),
    'images in a list, to predict logits': images_in_a_list(WHOLE | dict(store_logits=True)),
    'images of another number of channels': predict(WHOLE, shape=(2, 4, 16, 16)),
    'windows of more logits than classes': predict(SLIDE, decode_head=WIDE_HEAD),
    'logits in a list': predict(WHOLE, decode_head=LIST_HEAD),
    'no head': lambda kind: segmentor(kind, WHOLE, decode_head=dict(type='NoHead')),
    'weights from two places': lambda kind: segmentor(
        kind, WHOLE, backbone=ConfigDict(type='_Blocks', pretrained='a.pth'), pretrained='b.pth'
    ),
}


def prepare(options=None, training=True, **data):
    """What a preprocessor makes of a batch."""

    def run(kind):
        cfg = dict(mean=[0.0] * 3, std=[1.0] * 3, bgr_to_rgb=True)
        if 'Seg' in kind['type']:
            cfg |= dict(size=SIZE, seg_pad_val=255)
        built = ALL_MODELS.build(dict(type=kind['type'], **cfg | (options or {})))
        batch = dict(inputs=[torch.zeros(3, *SIZE)] * 2, data_samples=labels()) | data
        built({key: value for key, value in batch.items() if value is not None}, training)

    return run


def images(*shapes):
    return [torch.zeros(*shape) for shape in shapes]


OF_PREPROCESSORS = {
    'both orders of channels': prepare(dict(rgb_to_bgr=True)),
    'a word for the order': prepare(dict(bgr_to_rgb='yes')),
    'a mean without a deviation': prepare(dict(std=None)),
    'two means': prepare(dict(mean=[0.0, 0.0])),
    'images of three sizes': prepare(inputs=images((3, 8, 8), (3, 10, 9))),
    'a grey image among others': prepare(inputs=images((3, 8, 8), (1, 8, 8))),
    'a grey image first': prepare(
        inputs=images((1, 8, 8), (3, 8, 8)), options=dict(mean=None, std=None)
    ),
    'images of other numbers of channels, testing': prepare(
        inputs=images((3, 8, 8), (1, 8, 8)), training=False, options=dict(mean=None, std=None)
    ),
    'images of two sizes, testing': prepare(inputs=images((3, 8, 8), (3, 9, 9)), training=False),
    'no samples': prepare(data_samples=None),
    'no images': prepare(inputs=None),
    'an empty batch': prepare(inputs=[], data_samples=[]),
    'neither a size nor a divisor': prepare(dict(size=None)),
    'a size and a divisor': prepare(dict(size_divisor=8)),
}


def roi_head(kind, stages=2, **options):
    roi = dict(type='RoIAlign', output_size=7, sampling_ratio=0)
    extractor = dict(
        type='SingleRoIExtractor', roi_layer=roi, out_channels=8, featmap_strides=[4, 8]
    )
    assigner = dict(type='MaxIoUAssigner', pos_iou_thr=0.5, neg_iou_thr=0.5, min_pos_iou=0.5)
    sampler = dict(type='RandomSampler', num=8, pos_fraction=0.25, add_gt_as_proposals=True)
    part = dict(assigner=assigner, sampler=sampler, pos_weight=-1, debug=False)
    box = dict(
        type='Shared2FCBBoxHead', in_channels=8, fc_out_channels=8, roi_feat_size=7, num_classes=3,
        reg_class_agnostic=True,
    )  # fmt: skip
    weights = {} if kind['type'] != kind['name'] else dict(stage_loss_weights=[1.0] * stages)
    cfg = dict(type=kind['type'], num_stages=stages, bbox_roi_extractor=extractor, bbox_head=box)
    cfg |= dict(train_cfg=[ConfigDict(part)] * stages, test_cfg=ConfigDict(), **weights)
    return ALL_MODELS.build(cfg | options)


def boxes(kind, proposals=2, samples=2, **options):
    from mmdet.structures import DetDataSample

    built = roi_head(kind, **options)
    corners = torch.tensor([[4.0, 4, 20, 20], [8, 8, 30, 30]])
    found = [InstanceData(bboxes=corners, scores=torch.ones(2)) for _ in range(proposals)]
    truth = InstanceData(bboxes=corners, labels=torch.tensor([0, 1]))
    made = [DetDataSample(metainfo=dict(img_shape=(32, 32))) for _ in range(samples)]
    for each in made:
        each.gt_instances = truth
    built.loss((torch.randn(2, 8, 8, 8), torch.randn(2, 8, 4, 4)), found, made)


OF_ROI_HEADS = {
    'no box head': lambda kind: roi_head(kind, bbox_head=None),
    'no extractor': lambda kind: roi_head(kind, bbox_roi_extractor=None),
    'a shared head': lambda kind: roi_head(kind, shared_head=dict(type='ResLayer', depth=50)),
    'box heads for other stages': lambda kind: roi_head(kind, bbox_head=[]),
    'settings of less stages': lambda kind: boxes(kind, train_cfg=[]),
    'less proposals than samples': lambda kind: boxes(kind, proposals=1),
    'more proposals than samples': lambda kind: boxes(kind, proposals=3),
    'samples without objects': lambda kind: roi_head(kind).loss((), [InstanceData()], [object()]),
}


def detector(change=None, objects=(2, 1), **options):
    """The loss of a detector for a batch whose samples were changed."""

    def run(kind):
        from tests.detection import fast

        model = fast.config('standard', **options)
        is_fast = kind['type'] != kind['name']
        own = dict(type=kind['type'], of=kind['name']) if is_fast else dict(type=kind['name'])
        built = ALL_MODELS.build({**model, **own}).train()
        prepared = built.data_preprocessor(fast.batch(*objects), True)
        inputs, samples = prepared['inputs'], prepared['data_samples']
        samples = samples if change is None else change(samples)
        built.loss(inputs, samples)

    return run


def objects_changed(**values):
    """Samples whose first one has other values, or lacks those that are None."""

    def change(samples):
        truth = samples[0].gt_instances
        fields = {key: truth[key] for key in truth.keys()} | values  # noqa: SIM118
        samples[0].gt_instances = InstanceData(**{k: v for k, v in fields.items() if v is not None})
        return samples

    return change


def without_instances(samples):
    del samples[0].gt_instances
    return samples


OF_DETECTORS = {
    'a label above the classes': detector(objects_changed(labels=torch.tensor([0, 9]))),
    'objects without boxes': detector(objects_changed(bboxes=None)),
    'objects without labels': detector(objects_changed(labels=None)),
    'objects without masks': detector(objects_changed(masks=None)),
    'samples without objects': detector(without_instances),
    'one sample for two images': detector(lambda samples: samples[:1]),
    'no samples': detector(lambda samples: []),
    'a box of three corners': detector(
        lambda samples: objects_changed(bboxes=torch.ones(2, 3))(samples)
    ),
    'an unknown head': detector(roi_head__type='NoHead'),
}
OF_DET_PREPROCESSORS = {
    name: run
    for name, run in OF_PREPROCESSORS.items()
    if name in ('both orders of channels', 'a word for the order', 'a mean without a deviation',
                'two means', 'no images')
}  # fmt: skip


# Of each fast form the original, and what both are given. 'FastHead' of any head has that head's.
FORMS = {
    'FastUPerHead': ('UPerHead', OF_HEADS | OF_UPER),
    'FastFCNHead': ('FCNHead', OF_HEADS | OF_FCN),
    'FastHead': ('SegformerHead', OF_HEADS),
    'FastEncoderDecoder': ('EncoderDecoder', OF_SEGMENTORS),
    'FastSegDataPreProcessor': ('SegDataPreProcessor', OF_PREPROCESSORS),
    'SharedMaskCascadeRoIHead': ('CascadeRoIHead', OF_ROI_HEADS),
    'FastDetector': ('MaskRCNN', OF_DETECTORS),
    'FastDetDataPreprocessor': ('DetDataPreprocessor', OF_DET_PREPROCESSORS),
}
OF_MMDET = ('SharedMaskCascadeRoIHead', 'FastDetector', 'FastDetDataPreprocessor')
CASES = [(form, what) for form, (_, inputs) in FORMS.items() for what in inputs]


def registered():
    """The names that the packages of fast forms have registered."""
    packages = (vim_mm.segmentation.__name__, vim_mm.detection.__name__)
    return {n for n, form in ALL_MODELS.module_dict.items() if form.__module__.startswith(packages)}


def answer(run, kind):
    """The error of a form, None where it takes the input."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try:
            run(kind)
        except Exception as error:
            return error


def test_every_fast_form_is_held_to_its_original():
    assert registered() == {*FORMS}


@pytest.mark.parametrize(('form', 'what'), CASES)
def test_what_the_original_refuses_is_refused(form, what):
    original, inputs = FORMS[form]
    scope = 'mmdet' if form in OF_MMDET else 'mmseg'
    if scope == 'mmdet':
        pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
        pytest.importorskip('mmdet').utils.register_all_modules(init_default_scope=True)
    init_default_scope(scope)
    theirs = answer(inputs[what], dict(type=original, name=original))
    assert theirs is not None, 'the original takes this input'
    ours = answer(inputs[what], dict(type=form, name=original, of=original))
    assert ours is not None, f'{original} answers {theirs!r}'
    assert str(ours).strip() or str(theirs).strip() == ''


def test_what_a_head_cannot_learn_by_is_refused_as_it_is_built():
    """MMSegmentation trains such a head: a softmax of one channel is 1."""
    init_default_scope('mmseg')
    for form in ('FastUPerHead', 'FastFCNHead', 'FastHead'):
        kind = dict(type=form, name=FORMS[form][0], of=FORMS[form][0])
        for options in (dict(num_classes=1), dict(num_classes=2, out_channels=1)):
            with pytest.raises(ValueError, match=r'has one output channel .* is always 0: set'):
                head(kind, **options)
        binary = dict(num_classes=2, out_channels=1, loss_decode=dict(CE, use_sigmoid=True))
        assert head(kind, **binary).out_channels == 1


@pytest.mark.parametrize(('weights', 'count'), [([1.0] * 4, 4), ([1.0], 1), ([], 0)])
def test_the_number_of_weights_is_refused_before_any_image(weights, count):
    init_default_scope('mmseg')
    asked = re.escape('num_classes = 3 classes') + f', got {count}'
    with pytest.raises(ValueError, match=asked):
        head(dict(type='FastFCNHead', name='FCNHead'), loss_decode=dict(CE, class_weight=weights))


def test_a_stride_is_refused_before_any_image():
    init_default_scope('mmseg')
    with pytest.raises(ValueError, match=r'stride must be at most .*crop_size = \(8, 8\), got \(9'):
        segmentor(dict(type='FastEncoderDecoder'), SLIDE | dict(stride=(9, 9)))


@pytest.mark.parametrize('shape', [(4, 8, 8), (8, 8)])
def test_images_of_other_channels_are_named(shape):
    """Of which MMSegmentation takes three channels, or rows."""
    init_default_scope('mmseg')
    with pytest.raises(ValueError, match='first image of the batch has 3 channels, number 1 has'):
        prepare(inputs=images((3, 8, 8), shape))(dict(type='FastSegDataPreProcessor'))


def test_sizes_of_a_batch_are_named_with_their_files():
    init_default_scope('mmseg')
    batch = dict(inputs=images((3, 8, 8), (3, 10, 9)), data_samples=labels())
    for name, each in zip('ab', batch['data_samples']):
        each.set_metainfo(dict(img_path=f'{name}.png'))
    built = MODELS.build(dict(type='FastSegDataPreProcessor', size=SIZE))
    with pytest.raises(ValueError, match=r'got 8 x 8 \(a\.png\) and 10 x 9 \(b\.png\): crop them'):
        built(batch, True)
