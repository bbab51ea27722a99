"""Fast heads against MMSegmentation's own: one loss, one accuracy, one gradient."""

import warnings

import pytest
import torch
from mmengine.registry import init_default_scope
from mmengine.structures import PixelData

from tests.registered.fresh import run_fresh
from vim_mm.ops import upsampled as loss_module
from vim_mm.ops.upsampled import upsampled_cross_entropy

pytest.importorskip('mmseg')
from mmseg.registry import MODELS
from mmseg.structures import SegDataSample

CLASSES = 7
CE = dict(type='CrossEntropyLoss', loss_weight=0.7)
BINARY = dict(CE, use_sigmoid=True)
WEIGHTS = [0.5, 1.0, 2.0, 0.0, 1.5, 3.0, 0.25]


@pytest.fixture(autouse=True)
def scope():
    init_default_scope('mmseg')


def fcn(head_type, **options):
    cfg = dict(in_channels=6, in_index=0, channels=8, num_convs=1, concat_input=False)
    cfg |= dict(num_classes=CLASSES, norm_cfg=dict(type='BN'), dropout_ratio=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # avg_non_ignore is False
        return MODELS.build(dict(type=head_type, **cfg | options))


def samples(size, ignored=0.2, batch=3, ignore_index=255, classes=CLASSES):
    labels = torch.randint(0, classes, (batch, 1, *size))
    labels[torch.rand(labels.shape) < ignored] = ignore_index
    return [SegDataSample(gt_sem_seg=PixelData(data=label)) for label in labels]


def losses_and_gradient(head, logits, data_samples):
    logits = logits.detach().requires_grad_()
    results = head.loss_by_feat(logits, data_samples)
    total = sum(value.sum() for name, value in results.items() if 'loss' in name)
    return results, torch.autograd.grad(total, logits)[0]


def check_agreement(ours, theirs, logits, data_samples):
    expected, expected_grad = losses_and_gradient(theirs, logits, data_samples)
    results, grad = losses_and_gradient(ours, logits, data_samples)
    assert [*results] == [*expected]
    for name in expected:
        assert results[name].shape == expected[name].shape
        assert results[name].dtype == expected[name].dtype
        torch.testing.assert_close(results[name], expected[name], rtol=1e-6, atol=1e-12)
    assert torch.equal(results['acc_seg'], expected['acc_seg'])
    scale = expected_grad.abs().max()
    torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=float(1e-6 * scale))


LOSSES = {
    'plain': CE,
    'class weights': dict(CE, class_weight=WEIGHTS),
    'avg_non_ignore': dict(CE, avg_non_ignore=True),
    'sum': dict(CE, reduction='sum'),
    'several': [
        CE,
        dict(CE, class_weight=WEIGHTS, loss_name='loss_weighted'),
        dict(CE, avg_non_ignore=True, loss_weight=0.2),
        dict(CE, loss_name='watched'),
    ],
}


@pytest.fixture(params=['one chunk', 'chunks'])
def chunks(request, monkeypatch):
    if request.param == 'chunks':
        monkeypatch.setattr(loss_module, 'CHUNK_BYTES', 2 * CLASSES * 40 * 52 * 4)


@pytest.mark.usefixtures('chunks')
@pytest.mark.parametrize('align_corners', [False, True])
@pytest.mark.parametrize('loss', LOSSES)
def test_agrees_with_mmseg(loss, align_corners):
    options = dict(loss_decode=LOSSES[loss], align_corners=align_corners)
    ours, theirs = (fcn(name, **options) for name in ('FastFCNHead', 'FCNHead'))
    check_agreement(ours, theirs, torch.randn(3, CLASSES, 10, 13), samples((40, 52)))


@pytest.mark.parametrize('align_corners', [False, True])
@pytest.mark.parametrize('size', [(10, 13), (64, 208), (37, 29), (5, 6), (1, 1), (11, 5)])
def test_any_ratio_of_sizes(size, align_corners):
    options = dict(align_corners=align_corners)
    ours, theirs = (fcn(name, **options) for name in ('FastFCNHead', 'FCNHead'))
    check_agreement(ours, theirs, 3 * torch.randn(3, CLASSES, 10, 13), samples(size))


@pytest.mark.parametrize('ignored', [0.0, 1.0])
@pytest.mark.parametrize('loss', ['plain', 'avg_non_ignore'])
def test_no_pixel_ignored_or_all(loss, ignored):
    ours, theirs = (fcn(name, loss_decode=LOSSES[loss]) for name in ('FastFCNHead', 'FCNHead'))
    check_agreement(ours, theirs, torch.randn(3, CLASSES, 10, 13), samples((40, 52), ignored))


def test_another_ignore_index():
    """One that is a class: its pixels do not count."""
    ours, theirs = (fcn(name, ignore_index=2) for name in ('FastFCNHead', 'FCNHead'))
    data_samples = samples((40, 52), ignored=0.0)
    check_agreement(ours, theirs, torch.randn(3, CLASSES, 10, 13), data_samples)


def test_class_weights_with_avg_non_ignore():
    """MMSegmentation 1.2 fails here; ignored pixels are in its average without the flag neither."""
    weighted = dict(CE, class_weight=WEIGHTS)
    ours = fcn('FastFCNHead', loss_decode=dict(weighted, avg_non_ignore=True))
    theirs = fcn('FCNHead', loss_decode=weighted)
    check_agreement(ours, theirs, torch.randn(3, CLASSES, 10, 13), samples((40, 52)))


def test_large_logits():
    """Probabilities that are zero in float32."""
    ours, theirs = (fcn(name) for name in ('FastFCNHead', 'FCNHead'))
    check_agreement(ours, theirs, 300 * torch.randn(3, CLASSES, 10, 13), samples((40, 52)))


def test_impossible_label_is_an_error():
    head = fcn('FastFCNHead')
    data_samples = samples((8, 8))
    data_samples[0].gt_sem_seg.data[0, 3, 4] = CLASSES
    with pytest.raises((IndexError, RuntimeError), match='out of'):
        head.loss_by_feat(torch.randn(3, CLASSES, 4, 4), data_samples)


def test_gradient_by_finite_differences():
    logits = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 4, (2, 9, 7))
    weight = torch.tensor([0.3, 1.0, 2.0])
    for align_corners in (False, True):
        assert torch.autograd.gradcheck(
            lambda x: upsampled_cross_entropy(x, labels, 3, weight, align_corners).loss,  # noqa: B023
            logits,
        )


def test_twice_differentiated_is_an_error():
    logits = torch.randn(1, 3, 4, 4, requires_grad=True)
    labels = torch.zeros(1, 8, 8, dtype=torch.long)
    loss = upsampled_cross_entropy(logits.square(), labels).loss
    with pytest.raises(RuntimeError, match='no second derivative'):
        torch.autograd.grad(loss, logits, create_graph=True)


@pytest.mark.slow
def test_one_graph_under_compile(monkeypatch):
    monkeypatch.setattr(loss_module, 'CHUNK_BYTES', 1)
    logits = torch.randn(3, CLASSES, 8, 9, requires_grad=True)
    labels = torch.randint(0, CLASSES, (3, 32, 36))
    weight = torch.tensor(WEIGHTS)

    def function(x):
        return upsampled_cross_entropy(x, labels, 2, weight).loss

    compiled = torch.compile(function, fullgraph=True, backend='aot_eager')
    loss, expected = compiled(logits), function(logits)
    torch.testing.assert_close(loss, expected)
    (grad,), (expected_grad,) = (torch.autograd.grad(x, logits) for x in (loss, expected))
    torch.testing.assert_close(grad, expected_grad)


def test_autocast_is_nearer_to_float32_than_mmseg():
    """The loss is float32's of the rounded logits, where MMSegmentation enlarges in bfloat16."""
    ours, theirs = (fcn(name) for name in ('FastFCNHead', 'FCNHead'))
    logits = torch.randn(3, CLASSES, 10, 13).bfloat16()
    data_samples = samples((40, 52))
    expected, expected_grad = losses_and_gradient(theirs, logits.float(), data_samples)
    with torch.autocast('cpu', torch.bfloat16):
        results, grad = losses_and_gradient(ours, logits, data_samples)
        rough, _ = losses_and_gradient(theirs, logits, data_samples)
    assert results['loss_ce'].dtype == torch.float32
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(results['loss_ce'], expected['loss_ce'], rtol=1e-6, atol=0)
    torch.testing.assert_close(rough['loss_ce'].float(), expected['loss_ce'], rtol=5e-3, atol=0)
    scale = expected_grad.abs().max()
    torch.testing.assert_close(grad.float(), expected_grad, rtol=2**-8, atol=float(1e-6 * scale))


UPER = dict(
    in_channels=[6, 6, 6, 6],
    in_index=[0, 1, 2, 3],
    pool_scales=(1, 2, 3, 6),
    channels=8,
    num_classes=CLASSES,
    dropout_ratio=0.0,
    norm_cfg=dict(type='BN'),
)
SEGFORMER = {key: value for key, value in UPER.items() if key != 'pool_scales'}
HEADS = {
    'FastUPerHead': (dict(type='FastUPerHead', **UPER), dict(type='UPerHead', **UPER)),
    'FastHead': (
        dict(type='FastHead', of='SegformerHead', **SEGFORMER),
        dict(type='SegformerHead', **SEGFORMER),
    ),
    'concatenated': (
        dict(type='FastFCNHead', input_transform='resize_concat', **SEGFORMER),
        dict(type='FCNHead', input_transform='resize_concat', **SEGFORMER),
    ),
}


@pytest.mark.parametrize('name', HEADS)
def test_whole_heads_agree(name):
    """Forward in the same bits; gradients of parameters and features."""
    ours, theirs = (MODELS.build(cfg) for cfg in HEADS[name])
    assert isinstance(ours, type(theirs))
    ours.load_state_dict(theirs.state_dict(), strict=True)
    features = [torch.randn(2, 6, 32 // 2**i, 24 // 2**i, requires_grad=True) for i in range(4)]
    data_samples = samples((128, 96), batch=2)
    results = {}
    for head in (ours, theirs):
        losses = head.loss(features, data_samples, None)
        tensors = [*features, *head.parameters()]
        grads = torch.autograd.grad(losses['loss_ce'], tensors, allow_unused=True)
        results[head] = losses, head.eval()(features), grads
        head.train()
    (losses, out, grads), (expected, expected_out, expected_grads) = results.values()
    torch.testing.assert_close(losses['loss_ce'], expected['loss_ce'], rtol=1e-6, atol=0)
    assert torch.equal(losses['acc_seg'], expected['acc_seg'])
    assert torch.equal(out, expected_out)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert (grad is None) == (expected_grad is None)
        if grad is not None:
            tolerance = 1e-5 * float(expected_grad.abs().max()) + 1e-9
            torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize(
    ('options', 'reason'),
    [
        (dict(loss_decode=[CE, dict(type='DiceLoss')]), 'DiceLoss is no plain CrossEntropyLoss'),
        (dict(sampler=dict(type='OHEMPixelSampler')), 'OHEMPixelSampler samples pixels'),
        (dict(loss_decode=dict(CE, reduction='none')), "has reduction 'none'"),
        (dict(loss_decode=BINARY), 'CrossEntropyLoss is binary'),
        (dict(loss_decode=[]), 'it has no loss'),
        (
            dict(num_classes=2, out_channels=1, threshold=0.3, loss_decode=BINARY),
            'it has one output channel',
        ),
        # MMSegmentation's plain cross entropy takes no None.
        (dict(ignore_index=None, loss_decode=BINARY), 'its ignore_index is None'),
    ],
)
def test_what_it_cannot_do_is_mmsegs_and_said_once(options, reason, monkeypatch):
    from vim_mm.segmentation import heads

    said = []
    monkeypatch.setattr(heads, 'print_log', lambda message, **_: said.append(message))
    heads._say_once.cache_clear()
    ours, theirs = (fcn(name, **options) for name in ('FastFCNHead', 'FCNHead'))
    logits = torch.randn(3, ours.out_channels, 10, 13)
    ignored = 0.0 if ours.ignore_index is None else 0.2
    data_samples = samples((40, 52), ignored, classes=ours.num_classes)
    for _ in range(2):
        results = ours.loss_by_feat(logits, data_samples)
    expected = theirs.loss_by_feat(logits, data_samples)
    for name in expected:
        assert torch.equal(results[name], expected[name])
    assert len(said) == 1
    assert reason in said[0]


def test_no_head():
    with pytest.raises(TypeError, match="'VisionMamba' must name a subclass of BaseDecodeHead"):
        MODELS.build(dict(type='FastHead', of='VisionMamba'))


def test_importing_vim_mm_imports_no_mmseg(tmp_path):
    program = 'import sys, vim_mm; print([n for n in sys.modules if n.startswith("mmseg")])'
    assert run_fresh(program, tmp_path).strip() == '[]'
