"""The pictures of the task of recall: nothing near a region tells its class."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot

from studies.discretization.cues import CLASSES, PATCH, PATTERNS, SIDE, UNLABELED, draw_cues
from studies.discretization.tasks import TASKS, Data, by_token, load_splits, loss_of
from studies.discretization.training import Settings, train


@pytest.fixture(scope='module')
def drawn():
    return draw_cues('train', 4000)


def tokens_of(mask):
    """Numbers along the row-major scan of the tokens that have a pixel of the mask (H, W)."""
    grid = mask.reshape(SIDE // PATCH, PATCH, SIDE // PATCH, PATCH).any((1, 3))
    return np.flatnonzero(grid)


def find_cue(image, rows):
    """The best match of a pattern in rows of pixels: its score, class, and place."""
    grey = image.astype(float) - 128
    found = []
    patterns = np.tile(PATTERNS, (1, 2, 2))
    for top in range(rows.start, rows.stop - 7, PATCH):
        for left in range(0, SIDE - 7, PATCH):
            window = grey[top : top + 8, left : left + 8]
            scores = np.tensordot(patterns, window, 2) / 64
            found.append((scores.max(), int(scores.argmax()), top, left))
    return max(found)


@pytest.mark.slowest
def test_the_cue_tells_the_class_and_lies_far_away(drawn):
    images, labels = drawn
    assert images.shape == labels.shape == (4000, SIDE, SIDE)
    distances, right = [], 0
    for image, label in zip(images[:300], labels[:300]):
        region = label != UNLABELED
        assert region.sum() == 1024 and len(np.unique(label[region])) == 1
        _, found, top, left = find_cue(image, slice(0, 16))
        cue = np.zeros_like(region)
        cue[top : top + 8, left : left + 8] = True
        distances.append(np.abs(tokens_of(region)[:, None] - tokens_of(cue)).min())
        right += found == label[region][0]
    assert right >= 297  # of 300: noise hides few
    assert min(distances) >= 129


def test_classes_are_even(drawn):
    _, labels = drawn
    classes = labels.reshape(len(labels), -1).min(1)
    counts = np.bincount(classes, minlength=CLASSES)
    assert len(counts) == CLASSES and counts.min() > 200  # 267 each, standard deviation 16


def test_the_region_itself_tells_nothing(drawn):
    """A region's mean grey level is the same for every class, and so is each of its pixels'."""
    images, labels = drawn
    classes = labels.reshape(len(labels), -1).min(1)
    pixels = images[labels != UNLABELED].reshape(len(images), 1024).astype(float)
    spread = np.std([pixels[classes == c].mean(0) for c in range(CLASSES)], axis=0)
    assert spread.max() < 3  # 24 / sqrt(267) = 1.5 by noise alone, over 15 classes


def test_splits_differ_and_repeat():
    task = replace(TASKS['recall'], counts=(40, 20))
    one, again = (load_splits(task, None, None) for _ in range(2))
    assert [split.digest() for split in one] == [split.digest() for split in again]
    assert one[0].digest() != one[1].digest()
    assert not np.array_equal(one[0].images[: len(one[1].images)], one[1].images)


@pytest.mark.slowest
def test_a_run_is_not_flipped_and_not_tested_at_other_sizes():
    task = replace(TASKS['recall'], counts=(40, 20), steps=3, batch=4, test_batch=10)
    data = Data(task, load_splits(task, None, None), torch.device('cpu'))
    assert not data.plan(0, 3)[..., 1:].any()
    result = train('zoh', 0, data, Settings(), 3)
    assert 'resolutions' not in result and 0 <= result['metric'] <= 100


def test_pixels_without_a_label_do_not_count():
    task = TASKS['recall']
    _, labels = draw_cues('test', 4)
    labels = torch.from_numpy(labels)
    tokens = by_token(labels, PATCH).long()
    right = one_hot(tokens.clamp(max=CLASSES - 1), CLASSES).flatten(2) * 50.0
    assert loss_of(task, right, labels.long()).item() < 1e-3
    elsewhere = right.clone()
    elsewhere[(tokens == UNLABELED).all(-1)] = 7.0  # whatever is said there
    assert loss_of(task, elsewhere, labels.long()) == loss_of(task, right, labels.long())
