"""Tests of the kernels on upsampled logits; tests/ops/test_upsampled.py runs them.

On a GPU, or on a CPU under Triton's interpreter (TRITON_INTERPRET=1).
"""

import itertools

import pytest
import torch
import torch.nn.functional as F

from vim_mm.ops import triton
from vim_mm.ops.triton import upsampled
from vim_mm.ops.upsampled import upsampled_cross_entropy

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
assert triton.obstacle(DEVICE, torch.float32) is None
IGNORED = 255
# (h, w) of the logits and (H, W) of the labels: whole scales, others, smaller labels, one pixel.
SIZES = [
    ((3, 4), (12, 16)), ((3, 4), (7, 11)), ((7, 11), (3, 4)), ((4, 4), (4, 4)),
    ((1, 1), (5, 3)), ((3, 3), (1, 1)), ((2, 19), (3, 40)),
]  # fmt: skip


@pytest.fixture(autouse=True)
def wide_tiles(monkeypatch, request):
    """The interpreter goes tile by tile: tiles of one pixel take it minutes."""
    if DEVICE == 'cpu' and 'number_of_classes' not in request.node.name:
        tiles = upsampled._tiles
        monkeypatch.setattr(upsampled, '_tiles', lambda *args, **_: (*tiles(*args)[:2], 16))


def make(classes, size, pixels, dtype=torch.float32, labels=torch.int64, images=1):
    logits = (3 * torch.randn(images, classes, *size, device=DEVICE)).to(dtype)
    target = torch.randint(0, min(classes, IGNORED), (images, *pixels), device=DEVICE)
    target[torch.rand(target.shape, device=DEVICE) < 0.2] = IGNORED
    return logits, target.to(labels)


def expected(logits, labels, weight=None, align_corners=False):
    """Sums and gradient by PyTorch in float64; the predictions in float32, as they are compared."""
    wide = logits.double().cpu().requires_grad_()
    labels, weight = labels.cpu(), None if weight is None else weight.cpu()
    large = F.interpolate(wide, labels.shape[1:], mode='bilinear', align_corners=align_corners)
    loss = F.cross_entropy(
        large, labels.long(), None if weight is None else weight.double(), ignore_index=IGNORED,
        reduction='sum',
    )  # fmt: skip
    (grad,) = torch.autograd.grad(loss, wide)
    large = F.interpolate(
        logits.float().cpu(), labels.shape[1:], mode='bilinear', align_corners=align_corners
    )
    counts = labels != IGNORED
    correct = ((large.max(1).indices == labels) & counts).sum()
    return loss.detach(), correct, counts, grad


def check(logits, labels, weight=None, align_corners=False):
    logits = logits.detach().requires_grad_()
    sums = upsampled_cross_entropy(logits, labels, IGNORED, weight, align_corners)
    (grad,) = torch.autograd.grad(sums.loss, logits)
    loss, correct, counts, expected_grad = expected(logits.detach(), labels, weight, align_corners)
    # Of a single pixel the loss may be nearly 0, and its last bits those of the logits.
    torch.testing.assert_close(sums.loss.double().cpu(), loss, rtol=1e-6, atol=2e-6)
    assert sums.correct == correct
    assert sums.counted == counts.sum()
    weights = counts.sum() if weight is None else weight.cpu()[labels.cpu()[counts].long()].sum()
    torch.testing.assert_close(sums.weight.cpu(), weights.float(), rtol=1e-6, atol=1e-6)
    assert grad.dtype == logits.dtype
    rounding = 1e-5 if grad.dtype == torch.float32 else torch.finfo(grad.dtype).eps
    error = (grad.double().cpu() - expected_grad).abs().max()
    assert error <= rounding * expected_grad.abs().max() + 1e-7


@pytest.mark.parametrize('align_corners', [False, True])
@pytest.mark.parametrize(('size', 'pixels'), SIZES)
def test_any_sizes(size, pixels, align_corners):
    logits, labels = make(7, size, pixels, images=2)
    check(logits, labels, align_corners=align_corners)


@pytest.mark.parametrize('classes', [2, 9, 33, 64, 150, 255, 600, 1000])
def test_any_number_of_classes(classes):
    logits, labels = make(classes, (2, 3), (5, 7))
    check(logits, labels, torch.rand(classes, device=DEVICE))


@pytest.mark.parametrize('labels', [torch.int64, torch.uint8])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('memory_format', [torch.contiguous_format, torch.channels_last])
def test_dtypes_and_memory_formats(dtype, labels, memory_format):
    logits, target = make(5, (3, 4), (9, 8), dtype, labels)
    check(logits.contiguous(memory_format=memory_format), target)


def test_strips_of_several_lengths(monkeypatch):
    for programs in (1, 2 * 4 * 9, 10**6):
        monkeypatch.setattr(upsampled, '_PROGRAMS', programs)
        logits, labels = make(3, (4, 17), (8, 33))
        check(logits, labels)


def test_equal_logits_count_for_the_first_class():
    logits, labels = make(6, (4, 5), (8, 10))
    check(logits.round().clamp(-1, 1), labels)
    check(torch.zeros_like(logits), labels)


def test_all_pixels_ignored():
    logits, labels = make(6, (4, 5), (8, 10))
    check(logits, torch.full_like(labels, IGNORED))


def test_large_logits():
    logits, labels = make(6, (4, 5), (8, 10))
    check(100 * logits, labels)


def test_a_class_may_be_ignored():
    logits, labels = make(6, (4, 5), (8, 10))
    labels[labels == IGNORED] = 2
    sums = upsampled_cross_entropy(logits, labels, 2)
    expected_sums = upsampled_cross_entropy(logits.double(), labels, 2)
    torch.testing.assert_close(sums.loss.double(), expected_sums.loss, rtol=1e-6, atol=0)
    assert sums.counted == expected_sums.counted == (labels != 2).sum()


def test_the_factor_of_the_gradient_and_no_gradient():
    logits, labels = make(6, (4, 5), (8, 10))
    assert not upsampled_cross_entropy(logits, labels).loss.requires_grad
    logits.requires_grad_()
    sums = upsampled_cross_entropy(logits, labels)
    (once,) = torch.autograd.grad(sums.loss, logits, retain_graph=True)
    (twice,) = torch.autograd.grad(2 * sums.loss, logits, retain_graph=True)
    assert torch.equal(2 * once, twice)
    (again,) = torch.autograd.grad(upsampled_cross_entropy(logits, labels).loss, logits)
    assert torch.equal(once, again)


def test_not_finite_logits_are_seen():
    for value in (float('nan'), float('inf')):
        logits, labels = make(6, (4, 5), (8, 10))
        logits[0, 3, 2, 2] = value
        labels[0] = 0
        assert not upsampled_cross_entropy(logits, labels).loss.isfinite()


@pytest.mark.skipif(DEVICE == 'cuda', reason='the assertion on a GPU ends its process')
@pytest.mark.parametrize('label', [6, 300, -1, 2**32])
def test_a_label_out_of_range(label):
    logits, labels = make(6, (4, 5), (8, 10))
    labels[0, 3, 4] = label
    with pytest.raises(RuntimeError, match='out of range'):
        upsampled_cross_entropy(logits, labels)


@pytest.mark.parametrize('align_corners', [False, True])
def test_labels(align_corners):
    for (size, pixels), classes in zip(SIZES, itertools.cycle((7, 2, 150)), strict=False):
        logits, _ = make(classes, size, pixels)
        labels = upsampled.upsampled_labels(logits, pixels, align_corners)
        large = F.interpolate(logits, pixels, mode='bilinear', align_corners=align_corners)
        two = large.topk(2, dim=1).values
        differ = labels != large.argmax(1)
        assert ((two[:, 0] - two[:, 1])[differ] < 1e-5).all()
        assert not (differ.sum() > 2)


def test_labels_of_equal_and_missing_logits():
    logits = torch.zeros(1, 5, 3, 3, device=DEVICE)
    assert (upsampled.upsampled_labels(logits, (6, 6), False) == 0).all()
    logits[:, 0] = -0.0
    assert (upsampled.upsampled_labels(logits, (6, 6), False) == 0).all()
    logits[:, 3] = float('nan')
    assert (upsampled.upsampled_labels(logits, (6, 6), False) == 3).all()


def test_labels_beside_infinite_logits():
    """A class that is masked by -inf is predicted nowhere; F.interpolate makes NaN at borders."""
    logits, _ = make(5, (3, 4), (12, 16))
    expected = upsampled.upsampled_labels(logits[:, 1:], (12, 16), False) + 1
    logits[:, 0] = float('-inf')
    assert torch.equal(upsampled.upsampled_labels(logits, (12, 16), False), expected)
    logits[:, 2] = float('inf')
    assert (upsampled.upsampled_labels(logits, (12, 16), False) == 2).all()
    logits[:, 1:, :, :2] = float('-inf')
    assert not (upsampled.upsampled_labels(logits, (12, 16), False)[..., 9:] != 2).any()
