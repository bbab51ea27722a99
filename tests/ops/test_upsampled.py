"""The cross entropy of upsampled logits: its checks, and its kernels by a process of their own."""

import re

import numpy as np
import pytest
import torch

from tests.own_process import run_pytest
from vim_mm.errors import UserError
from vim_mm.ops import triton
from vim_mm.ops.upsampled import upsampled_cross_entropy

KERNELS = 'tests/ops/upsampled_kernels.py'


@pytest.mark.slow
@pytest.mark.skipif(triton.MISSING is not None, reason=str(triton.MISSING))
@pytest.mark.skipif(torch.cuda.is_available(), reason='the kernels themselves are tested')
def test_kernels_by_the_interpreter():
    run_pytest(KERNELS, TRITON_INTERPRET='1')


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_kernels():
    run_pytest(KERNELS)


LOGITS = torch.zeros(2, 4, 3, 3)
LABELS = torch.zeros(2, 6, 6, dtype=torch.int64)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ((LOGITS[0], LABELS), 'logits must be (B, C, h, w)'),
        ((LOGITS.long(), LABELS), 'logits must be (B, C, h, w) of floating point'),
        ((LOGITS[:, :1], LABELS), 'at least 2 classes'),
        ((LOGITS, LABELS[0]), 'labels must be (B, H, W)'),
        ((LOGITS, LABELS[:1]), 'of the 2 images'),
        ((LOGITS, LABELS.float()), 'labels must be int64 or uint8, got torch.float32'),
        ((LOGITS, LABELS, 255, torch.ones(3)), 'one real weight for each of the 4 classes'),
        ((LOGITS, LABELS, 255, torch.ones(1, 4)), 'one real weight for each of the 4 classes'),
        ((LOGITS, LABELS, 255, torch.ones(4) * 1j), 'one real weight for each of the 4 classes'),
        ((LOGITS, LABELS, 255, torch.ones(4).requires_grad_()), 'class_weight gets no gradient'),
        ((LOGITS.numpy(), LABELS), 'logits: expected a tensor, got ndarray'),
        ((LOGITS.to_sparse(), LABELS), 'logits: expected a dense tensor'),
        ((LOGITS, None), 'labels: expected a tensor, got NoneType'),
        ((LOGITS, LABELS, 255, [1.0] * 4), 'class_weight: expected a tensor, got list'),
        ((LOGITS, LABELS, None), 'ignore_index must be an integer, got None'),
        ((LOGITS, LABELS, '255'), "ignore_index must be an integer, got '255'"),
        ((LOGITS, LABELS, 255.5), 'ignore_index must be an integer, got 255.5'),
        ((LOGITS, LABELS, 2**63), 'ignore_index must fit 64 bits'),
        ((LOGITS, LABELS, True), 'ignore_index must be an integer, got True'),
        ((LOGITS, LABELS, 255, None, 'no'), "align_corners must be a bool, got 'no'"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(UserError, match=re.escape(message)):
        upsampled_cross_entropy(*arguments)


def test_uint8_labels():
    logits, labels = torch.randn(2, 4, 3, 3), torch.randint(0, 4, (2, 6, 6))
    expected, found = (upsampled_cross_entropy(logits, x) for x in (labels, labels.byte()))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize(('ignored', 'corners'), [(2, None), (np.int64(2), False)])
def test_other_words_for_an_option(ignored, corners):
    """As PyTorch takes them."""
    logits, labels = torch.randn(2, 4, 3, 3), torch.randint(0, 4, (2, 6, 6))
    expected = upsampled_cross_entropy(logits, labels, 2, None, False)
    found = upsampled_cross_entropy(logits, labels, ignored, None, corners)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_no_images():
    logits, labels = torch.zeros(0, 4, 3, 3), torch.zeros(0, 6, 6, dtype=torch.int64)
    assert upsampled_cross_entropy(logits, labels).loss == 0
