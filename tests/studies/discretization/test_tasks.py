"""Data, augmentation and metrics of the study's tasks."""

from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch

from studies.discretization import tasks
from studies.discretization.arms import ARMS, make_net
from studies.discretization.tasks import by_token, loss_of, mean_iou, normalize


@pytest.mark.parametrize('name', ['fashion', 'scenes'])
def test_plan_follows_from_the_seed(make_data, name):
    data = make_data(name)
    plan = data.plan(5, 12)
    assert torch.equal(plan, data.plan(5, 12))
    assert not torch.equal(plan, data.plan(6, 12))
    first_epoch = plan[:10, :, 0].flatten()
    assert sorted(first_epoch.tolist()) == [*range(40)]  # each picture once


@pytest.mark.parametrize('name', ['fashion', 'scenes'])
def test_take_flips_and_shifts(make_data, name):
    """Against NumPy's flip and roll of one picture after the other."""
    data = make_data(name)
    shift, side = data.task.shift, data.task.size.image
    step = data.plan(1, 1)[0]
    images, labels = data.take(step)
    for image, label, (index, flip, down, right) in zip(images, labels, step.tolist()):
        padded = data.images[index].numpy()
        truth = padded[down : down + side, right : right + side]
        truth_label = data.labels[index].numpy()
        if flip:
            truth = truth[:, ::-1]
            truth_label = truth_label[:, ::-1] if data.task.dense else truth_label
        torch.testing.assert_close(image[None], normalize(torch.from_numpy(truth.copy())[None]))
        np.testing.assert_array_equal(label.numpy(), truth_label)
    assert step[:, 1].unique().tolist() == [0, 1] and (step[:, 2:] <= 2 * shift).all()


def test_half_of_the_images_lose_a_rectangle(tiny_tasks, make_data):
    data = make_data('fashion')
    plain = data.take(data.plan(1, 10)[0])[0]
    plan = data.plan(1, 10)
    data.task = replace(data.task, erase=(4, 14))
    erasing = data.plan(1, 10)
    assert torch.equal(erasing[..., :4], plan), 'the other numbers of a seed stay'
    images = data.take(erasing[0])[0]
    for image, before, row in zip(images, plain, erasing[0, :, 4:].tolist()):
        top, bottom, left, end = row
        assert 0 <= top <= bottom <= 28 and 0 <= left <= end <= 28
        before = before.clone()
        before[:, top:bottom, left:end] = 0
        assert torch.equal(image, before)
    sides = (erasing[..., 5] - erasing[..., 4]).flatten()
    assert {*sides.tolist()} <= {0, *range(4, 15)}
    assert 0.2 < (sides > 0).float().mean() < 0.8


def test_other_resolutions_are_of_test_images_with_dt_divided(make_data, monkeypatch):
    """What is tested, and with which divisor of dt; the pictures by OpenCV's own enlargement."""
    data = make_data('scenes')
    net = make_net(ARMS['zoh'], data.task.size, True, 0, (1e-3, 0.1), 0.0)
    seen = {}

    def note(task, net, images, labels, autocast):
        (divisor,) = {mixer.dt_divisor for mixer in net.mixers()}
        seen[images.shape[-1], divisor] = images, labels
        return float(len(seen))

    monkeypatch.setattr(tasks, 'test', note)
    found = tasks.test_resolutions(data.task, net, data, None)
    assert [*found] == ['1', '1.5', '1.5/dt', '2', '2/dt']
    # In this order: each metric is that of its divisor.
    assert [*seen] == [(32, 1.0), (48, 1.0), (48, 1.5), (64, 1.0), (64, 2.0)]
    assert [*found.values()] == [1.0, 2.0, 3.0, 4.0, 5.0]
    for (size, _), (images, labels) in seen.items():
        assert len(images) == len(labels) == len(data.test_images)
        for image, before in zip(images.numpy(), data.test_images.numpy()):
            truth = cv2.resize(before.astype(np.float32), (size, size))
            assert np.abs(image - truth).max() <= 0.51
        for label, before in zip(labels.numpy(), data.test_labels.numpy()):
            truth = cv2.resize(before, (size, size), interpolation=cv2.INTER_NEAREST_EXACT)
            np.testing.assert_array_equal(label, truth)


def test_tokens_have_their_pixels(tiny_tasks):
    """Row-major tokens, row-major pixels inside: as the backbone orders patches."""
    labels = torch.arange(64).view(1, 8, 8)
    tokens = by_token(labels, 4)
    assert tokens.shape == (1, 4, 16)
    assert tokens[0, 1].tolist() == labels[0, :4, 4:].flatten().tolist()
    assert tokens[0, 2].tolist() == labels[0, 4:, :4].flatten().tolist()
    task = tiny_tasks['scenes']
    truth = torch.randint(task.classes, (2, 32, 32))
    certain = torch.nn.functional.one_hot(by_token(truth, 4), task.classes).flatten(2) * 50.0
    assert loss_of(task, certain, truth).item() < 1e-3


def test_mean_iou():
    confusion = torch.tensor([[3.0, 1, 0], [2, 4, 0], [0, 0, 0]])
    assert mean_iou(confusion) == pytest.approx(100 * (3 / 6 + 4 / 7) / 2)
