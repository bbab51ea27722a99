"""FastDetector around its losses: predictions, heads that are not known, waits, graphs."""

import copy
import logging

import pytest
import torch
from mmengine.structures import InstanceData
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
from mmcv.ops import RoIAlign
from mmdet.models.detectors import MaskRCNN
from mmdet.models.roi_heads import StandardRoIHead
from mmdet.registry import MODELS
from mmdet.structures.mask import PolygonMasks

from tests.detection import fast as small
from vim_mm.detection import boxes, detector, masks, roi, rpn
from vim_mm.detection.sample import most_positive
from vim_mm.engine import BFloat16OptimWrapper


@MODELS.register_module(force=True)
class OwnRoIHead(StandardRoIHead):
    """With features of its own."""

    def _bbox_forward(self, x, rois):
        return super()._bbox_forward(x, rois)


@MODELS.register_module(force=True)
class OwnMaskRCNN(MaskRCNN):
    """With a loss of its own."""

    def loss(self, batch_inputs, batch_data_samples):
        return super().loss(batch_inputs, batch_data_samples)


each_kind = pytest.mark.parametrize(
    'kind',
    [
        pytest.param(kind, marks=() if kind == 'standard' else pytest.mark.slow)
        for kind in small.CONFIGS
    ],
)


@each_kind
def test_predictions_are_the_original_bit_for_bit(kind):
    fast, slow = (model.eval() for model in small.detectors(small.config(kind)))
    data = slow.data_preprocessor(small.batch(3, 3), False)
    with torch.no_grad():
        ours, theirs = (
            model.predict(data['inputs'], copy.deepcopy(data['data_samples']), rescale=False)
            for model in (fast, slow)
        )
    for own, expected in zip(ours, theirs, strict=True):
        own, expected = own.pred_instances, expected.pred_instances
        names = expected.keys()
        assert len(expected) and own.keys() == names
        assert all(torch.equal(own[name], expected[name]) for name in names)


def test_the_preprocessor_gives_the_original_bits():
    model = small.config('standard')
    own = {**model.data_preprocessor, 'type': 'FastDetDataPreprocessor'}
    for training in (True, False):
        given = small.batch(3, 2, sizes=((50, 90), (64, 70)))
        ours, theirs = (
            MODELS.build(cfg)(copy.deepcopy(given), training)
            for cfg in (own, model.data_preprocessor)
        )
        assert torch.equal(ours['inputs'], theirs['inputs'])
        for a, b in zip(ours['data_samples'], theirs['data_samples'], strict=True):
            assert a.metainfo == b.metainfo
            assert (a.gt_instances.masks.masks == b.gt_instances.masks.masks).all()


def _polygons(batch: dict) -> dict:
    for sample in batch['data_samples']:
        truth = sample.gt_instances
        corners = [[b[[0, 1, 2, 1, 2, 3, 0, 3]].numpy()] for b in truth.bboxes]
        truth.masks = PolygonMasks(corners, *small.SIZE)
    return batch


FALLBACKS = {
    'sampler': (
        dict(train_cfg__rpn__sampler__type='IoUBalancedNegSampler'),
        ('rpn_head', 'IoUBalancedNegSampler samples boxes'),
    ),
    'nms': (
        dict(train_cfg__rpn_proposal__nms=dict(type='soft_nms', iou_threshold=0.7)),
        ('rpn_head', 'its proposals are thinned out by'),
    ),
    'decoded boxes': (
        dict(
            rpn_head__reg_decoded_bbox=True, rpn_head__loss_bbox=dict(type='GIoULoss')
        ),
        ('rpn_head', 'reg_decoded_bbox is set'),
    ),
    'head': (
        dict(roi_head__type='OwnRoIHead'),
        ('roi_head', 'OwnRoIHead has a _bbox_forward of its own'),
    ),
    'loss': (
        dict(roi_head__bbox_head__loss_cls=dict(type='FocalLoss')),
        ('roi_head', 'its loss is FocalLoss, not a softmax cross entropy'),
    ),
    'weights of classes': (
        dict(roi_head__bbox_head__loss_cls__class_weight=[1.0] * (small.CLASSES + 1)),
        ('roi_head', 'CrossEntropyLoss has a class_weight'),
    ),
    'batch norm': (
        dict(roi_head__mask_head__norm_cfg=dict(type='BN')),
        ('roi_head', 'BatchNorm2d would count padded regions'),
    ),
    'polygons': ({}, ('roi_head', 'masks are PolygonMasks, which are cut out on the CPU')),
    'sizes of masks': (
        dict(data_preprocessor__pad_mask=False),
        ('roi_head', 'masks of a batch differ in size: set pad_mask=True'),
    ),
    'detector': (dict(type='OwnMaskRCNN'), ('rpn_head', 'OwnMaskRCNN has a loss of its own')),
}  # fmt: skip


@pytest.mark.parametrize('name', FALLBACKS)
def test_what_is_not_known_takes_its_own_path(name, monkeypatch):
    said = []
    monkeypatch.setattr(detector, '_say_once', said.append)
    changes, (head, reason) = FALLBACKS[name]
    fast, slow = small.detectors(small.config('standard', **changes))
    given = small.batch(3, 2, sizes=((64, 96), (60, 90)))
    if name == 'polygons':
        given = _polygons(given)
    data = slow.data_preprocessor(given, True)
    losses = fast.loss(data['inputs'], copy.deepcopy(data['data_samples']))
    own = [line for line in said if line.startswith(head)]
    assert len(own) == 1 and reason in own[0], said
    if name != 'detector':
        assert len(said) == 1, 'the other head is fast'
    names = {'loss_rpn_cls', 'loss_rpn_bbox', 'loss_cls', 'loss_bbox', 'acc', 'loss_mask'}
    assert losses.keys() == names
    assert torch.isfinite(small.total(losses))
    small.total(losses).backward()
    assert all(param.grad is not None for param in fast.parameters())
    with pytest.raises(ValueError, match=f"{head} is trained by MMDetection's own methods"):
        fast.with_fixed_shapes(data)


def test_the_log_says_it_once(caplog):
    detector._say_once.cache_clear()
    fast, slow = small.detectors(small.config('standard', roi_head__type='OwnRoIHead'))
    data = slow.data_preprocessor(small.batch(3, 2), True)
    from mmengine.logging import MMLogger

    logger = MMLogger.get_current_instance()
    caplog.handler.setLevel(logging.INFO)
    logger.addHandler(caplog.handler)
    try:
        for _ in range(2):
            fast.loss(data['inputs'], copy.deepcopy(data['data_samples']))
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.text.count("roi_head is trained by MMDetection's own methods") == 1


def test_given_proposals_are_taken():
    """Fast R-CNN: there is no RPN."""
    cfg = small.config('standard')
    cfg.pop('rpn_head')
    fast = MODELS.build({**cfg, 'type': 'FastDetector', 'of': 'FastRCNN'})
    data = fast.data_preprocessor(small.batch(3, 2), True)
    for number, sample in enumerate(data['data_samples']):
        sample.proposals = InstanceData(bboxes=small._boxes(20 + number, small.SIZE))
    losses = fast.loss(data['inputs'], data['data_samples'])
    assert losses.keys() == {'loss_cls', 'loss_bbox', 'acc', 'loss_mask'}


def test_images_that_no_anchor_fits_into_are_an_error():
    fast, _ = small.detectors(
        small.config(
            'standard', train_cfg__rpn__allowed_border=0, rpn_head__anchor_generator__scales=[40]
        )
    )
    data = fast.data_preprocessor(small.batch(3, 2), True)
    with pytest.raises(ValueError, match=r'no anchor lies inside of an image of \(64, 96\) pixels'):
        fast.loss(data['inputs'], data['data_samples'])


def test_only_two_stage_detectors():
    small.config('standard')
    with pytest.raises(TypeError, match="'RetinaNet' must name a subclass of TwoStageDetector"):
        MODELS.build(dict(type='FastDetector', of='RetinaNet'))


def test_batches_of_other_numbers_of_objects_share_shapes():
    """Each other shape would be a CUDA graph of its own."""
    fast, slow = small.detectors(small.config('standard'))

    def truth(*objects):
        given = slow.data_preprocessor(small.batch(*objects), True)
        return fast.with_fixed_shapes(given)['data_samples']

    usual, few, many = (
        [tuple(x.shape) for x in truth(*objects)] for objects in ((5, 3), (0, 1), (7, 9))
    )
    assert few == many == usual
    more = truth(17, 3)
    assert more.boxes.shape[1] == len(more.masks) == 32


class _NoWaits(TorchDispatchMode):
    """Nothing is copied between devices, and no tensor is made of numbers of Python."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        assert name != 'aten.lift_fresh.default'
        result = function(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()]
        outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.dim()]
        assert len({x.device for x in (*inputs, *outputs)}) <= 1, name
        return result


@each_kind
def test_losses_wait_for_nothing(kind, monkeypatch):
    """On tensors of a GPU without values: to ask for one, or for a count, is an error."""
    fast, slow = small.detectors(small.config(kind))
    data = fast.with_fixed_shapes(slow.data_preprocessor(small.batch(5, 3), True))

    def on_gpu(x):
        return torch.empty(x.shape, dtype=x.dtype, device='cuda')

    def align(x, rois, size, *args):
        size = size if isinstance(size, tuple) else (size, size)
        return (x.sum() + rois.sum()).expand(len(rois), x.shape[1], *size)

    def anchors(head, level, size, like):
        number = 3 * size[0] * size[1]
        return like.new_empty(number, 4), like.new_empty(number, 2)

    # What is compiled, and what is copied once.
    monkeypatch.setattr(rpn, 'suppress', lambda given, valid, threshold: torch.ones_like(valid))
    monkeypatch.setattr(masks, 'roi_align', align)
    monkeypatch.setattr(RoIAlign, 'forward', lambda self, x, r: align(x, r, self.output_size))
    monkeypatch.setattr(rpn, '_anchors', anchors)
    monkeypatch.setattr(
        boxes, 'constant', lambda v, dtype, device: torch.empty(len(v), dtype=dtype, device=device)
    )
    monkeypatch.setattr(roi, '_most_masks', lambda sampler, regions: most_positive(sampler))
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in fast.modules():
            for name, param in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(on_gpu(param)))
        truth = type(data['data_samples'])(*map(on_gpu, data['data_samples']))
        images = on_gpu(data['inputs'])
        with _NoWaits():
            losses = fast.loss(images, truth)
    assert small.total(losses).device.type == 'cuda'


@pytest.mark.parametrize('kind', small.CONFIGS)
def test_parts_may_hand_over_bfloat16(kind):
    """As compiled ones do."""
    fast, slow = small.detectors(small.config(kind))
    wide, narrow = (
        BFloat16OptimWrapper(optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        for model in (slow, fast)
    )
    wide.initialize_count_status(slow, 0, 1)
    narrow.initialize_count_status(fast, 0, 1)
    narrow.keep_bfloat16()
    ours = fast.train_step(small.batch(4, 0), narrow)
    theirs = slow.train_step(small.batch(4, 0), wide)
    assert ours.keys() == theirs.keys()
    assert {value.dtype for value in ours.values()} == {torch.float32}
    torch.testing.assert_close(ours['loss'], theirs['loss'], rtol=0.3, atol=0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('kind', small.CONFIGS)
def test_a_step_on_a_gpu_waits_for_nothing(kind):
    model = small.config(kind)
    model.data_preprocessor.update(type='FastDetDataPreprocessor', non_blocking=True)
    fast = MODELS.build({**model, 'type': 'FastDetector', 'of': model.type}).cuda().train()
    batches = [small.batch(5, 3, seed=seed) for seed in range(3)]
    for batch in batches:
        batch['inputs'] = [image.pin_memory() for image in batch['inputs']]
    for number, batch in enumerate(batches):
        torch.cuda.set_sync_debug_mode('error' if number == 2 else 'default')
        try:
            data = fast.data_preprocessor(batch, True)
            small.total(fast.loss(data['inputs'], data['data_samples'])).backward()
        finally:
            torch.cuda.set_sync_debug_mode('default')
