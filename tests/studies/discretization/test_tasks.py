"""Data, augmentation and metrics of the study's tasks."""

from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch

from studies.discretization import tasks
from studies.discretization.models.arms import ARMS, make_net
from studies.discretization.models.stiffness import quantiles, stiffness, stiffness_rows
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


def test_spacings_compare_the_same_patches(make_data, monkeypatch):
    """A net that reads the class off its patch has the same score at every distance."""
    data = make_data('spacing')
    task = data.task

    class Reads(torch.nn.Module):
        def __init__(self, spacing):
            super().__init__()
            self.spacing, self.factors = spacing, []

        def use_study_mixers(self, **attributes):
            self.factors.append(attributes.get('dt_divisor', 1))

        def mixers(self):
            return []

        def forward(self, images):
            seen.append((self.spacing, images.shape[3], self.factors[-1:]))
            patches = images.unfold(2, 4, 4).unfold(3, 4, self.spacing)[:, 0]  # (B, h, w, 4, 4)
            grey = ((patches * tasks.STD + tasks.MEAN) * 255).flatten(1, 2).flatten(2)
            # Wrong where the patch begins beyond column 15.
            right = torch.arange(patches.shape[2]) * self.spacing < 16
            classes = torch.where(right.repeat(patches.shape[1])[:, None], grey / 20, 0).round()
            classes = classes.long().clamp(0, task.classes - 1)
            return torch.nn.functional.one_hot(classes, task.classes).float().flatten(2)

    seen = []
    monkeypatch.setattr(tasks, 'at_spacing', lambda net, spacing: Reads(spacing))
    found = tasks.test_spacings(task, Reads(4), data, torch.autocast('cpu', enabled=False))
    assert len({*found.values()}) == 1 and 40 < found['4'] < 60
    told = {(spacing, width, *factor) for spacing, width, factor in seen}
    assert told == {(8, 28), (8, 28, 0.5), (4, 32), (2, 34), (2, 34, 2.0)}


def test_columns_of_patches_are_chosen(make_data):
    """Of training's own columns: the score is that of every second column of labels."""
    data = make_data('spacing')
    task, labels = data.task, data.test_labels
    predicted = labels.clone()
    predicted[:, :, 4:8] = (predicted[:, :, 4:8] + 1) % task.classes  # the second column of patches
    outputs = torch.nn.functional.one_hot(by_token(predicted.long(), 4), task.classes)

    class Told(torch.nn.Module):
        def forward(self, images):
            first, rest = self.left[: len(images)], self.left[len(images) :]
            self.left = rest
            return first

    scores = []
    for columns in (range(0, 8, 2), range(8)):
        net = Told()
        net.left = outputs.float().flatten(2)
        scores.append(
            tasks.test(
                task, net, data.test_images, labels, torch.autocast('cpu', enabled=False), columns
            )
        )
    assert scores[0] == 100 and scores[1] < 95


def test_stiffness_counts_each_token_channel_and_state(tiny_tasks):
    """Against |z| of the mixers' own step sizes, one by one."""
    task = tiny_tasks['scenes']
    net = make_net(ARMS['bilinear'], task.size, True, 0, (1e-3, 0.1), 0.0)
    images = torch.randn(2, 1, 32, 32)
    found = stiffness(net, images)
    assert len(found['shares']) == 2 and len(found['log10_edges']) == len(found['shares'][0]) + 1
    given, inputs = [], []
    for mixer in net.mixers():
        mixer.register_forward_pre_hook(lambda m, x: inputs.append((m, x[0].detach())))
    net(images)
    for mixer, x in inputs:
        a = mixer.scan_arguments(x)
        dt = torch.nn.functional.softplus(a['delta'] + a['delta_bias'][..., None])
        given.append((dt[..., None] * a['A'][:, :, None].abs()).detach().numpy().ravel())
    for shares, z in zip(found['shares'], given, strict=True):
        counts, _ = np.histogram(np.log10(z), found['log10_edges'])
        np.testing.assert_allclose(shares, counts / len(z), atol=2e-4)
        low, median, high = quantiles(shares)
        assert low < median < high
        assert median == pytest.approx(np.median(z), rel=0.25)
    assert net.mixers()[0].observe is None
    rows = stiffness_rows({'bilinear': {0: {'stiffness': found}}, 'zoh': {0: {}}})
    assert [row['method'] for row in rows] == ['bilinear']
    share = 100 * np.mean(np.concatenate(given) > 0.1)
    assert float(rows[0]['above 0.1'].split()[0]) == pytest.approx(share, abs=0.1)
