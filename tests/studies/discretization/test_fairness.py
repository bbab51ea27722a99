"""What the protocol promises of a comparison: runs of one seed differ in the method alone."""

import math
from dataclasses import replace
from multiprocessing import Pipe

import numpy as np
import pytest
import torch
from timm.layers import DropPath
from torch import nn

from studies.discretization import pool, run, tasks, training
from studies.discretization.models.arms import ARMS
from studies.discretization.pool import Plan
from studies.discretization.results import Job
from studies.discretization.tasks import TASKS, Data, Split, load_splits
from studies.discretization.training import Settings, Step, autocast_of, train
from vim_mm.datasets.garments import GARMENTS
from vim_mm.datasets.scenes import SCENE_CLASSES

CPU = torch.device('cpu')


@pytest.mark.parametrize('arm', [*ARMS])
def test_an_arm_trains_with_its_method(arm, tiny_tasks, make_data):
    net = training.build(arm, tiny_tasks['fashion'], 0, Settings())
    assert {mixer.discretization_method for mixer in net.mixers()} == {ARMS[arm].method}
    images = tasks.normalize(make_data('fashion').test_images[:2])
    zoh = training.build('zoh', tiny_tasks['fashion'], 0, Settings())
    outputs = [each.eval()(images) for each in (net, zoh)]
    assert torch.equal(*outputs) == (arm == 'zoh')
    assert {getattr(mixer, 'rule', '') for mixer in net.mixers()} == {ARMS[arm].rule}


@pytest.fixture
def seen(monkeypatch):
    """What each run of ``train`` takes: steps, states of the generator, settings, and its test."""
    found = []

    class Noting:
        def __init__(self, net, data, settings, graph):
            self.loss_sum = torch.zeros(())
            self.autocast = autocast_of(CPU)
            self.taken = {'rates': [], 'plan': [], 'drawn': [], 'tests': []}
            self.taken['paths'] = [m.drop_prob for m in net.modules() if isinstance(m, DropPath)]
            found.append(self.taken)

        def __call__(self, plan, lr):
            self.taken['plan'].append(plan.clone())
            self.taken['rates'].append(lr)
            self.taken['drawn'].append(torch.rand(()).item())

    def tested(task, net, images, labels, autocast):
        found[-1]['tests'].append((images, labels))
        return 50.0

    monkeypatch.setattr(training, 'Step', Noting)
    monkeypatch.setattr(training, 'test', tested)
    return found


@pytest.mark.slowest
def test_runs_of_a_seed_take_the_same(seen, make_data):
    """Batches, augmentation, learning rates and the draws of drop path, in every arm."""
    data = make_data('fashion')
    for arm in ARMS:
        train(arm, 3, data, Settings(), 7)
    train('zoh', 4, data, Settings(), 7)
    *same, other = seen
    for taken in same:
        assert torch.equal(torch.stack(taken['plan']), data.plan(3, 7))
        assert taken['rates'] == same[0]['rates'] and taken['drawn'] == same[0]['drawn']
        assert taken['paths'] == same[0]['paths'] and max(taken['paths']) == pytest.approx(0.1)
    assert other['drawn'] != same[0]['drawn']


def test_a_run_is_tested_on_the_test_data(seen, make_data):
    data = make_data('fashion')
    result = train('foh', 0, data, Settings(), 10)
    for images, labels in seen[0]['tests']:
        assert images is data.test_images and labels is data.test_labels
    assert [step for step, *_ in result['curve']] == [2, 4, 6, 8, 10]
    assert result['metric'] == 50.0 and result['settings']['drop_path'] == 0.1


@pytest.mark.parametrize('dt_range', [(1e-3, 0.1), (1e-4, 1e-2)])
def test_dt_starts_in_the_range_of_the_settings(dt_range, tiny_tasks):
    task = replace(tiny_tasks['fashion'], size=replace(tiny_tasks['fashion'].size, channels=64))
    net = training.build('zoh', task, 0, Settings(dt_range=dt_range))
    biases = [bias for mixer in net.mixers() for bias in mixer._each('dt_proj', 'bias')]
    steps = nn.functional.softplus(torch.cat([bias.detach() for bias in biases]))
    low, high = dt_range
    assert low * 0.99 < steps.min() < 2 * low and high / 2 < steps.max() < 1.01 * high


def test_the_settings_of_a_label_train_its_runs(monkeypatch, tmp_path):
    """And those of the protocol: the second range of recall, and the grid."""
    assert run.SETTINGS[''] == Settings() == Settings(lr=2e-3, dt_range=(1e-3, 0.1))
    assert run.SETTINGS['dt0.01'] == Settings(dt_range=(1e-4, 1e-2))
    assert run.SETTINGS['lr0.004_dt1'] == Settings(lr=4e-3, dt_range=(1e-2, 1.0))
    used = []

    def note(arm, seed, data, settings, steps, deadline):
        used.append((arm, seed, settings, steps))
        return {'metric': 1.0, 'seconds': 1.0, 'task': data}

    monkeypatch.setattr(pool, 'train', note)
    monkeypatch.setattr(pool, 'load_splits', lambda *_: None)
    monkeypatch.setattr(pool, 'Data', lambda task, *_: task.name)
    monkeypatch.setattr(torch, 'set_num_threads', lambda count: None)
    desk, worker = Pipe()
    for job in (Job('recall', 'foh', 5, 'dt0.01'), Job('recall', 'zoh', 6), None):
        desk.send(job)
    plan = Plan(TASKS, tmp_path, tmp_path, tmp_path, run.SETTINGS, None, 'cpu', math.inf, {}, {})
    pool._work(worker, plan, 0)
    assert used == [
        ('foh', 5, run.SETTINGS['dt0.01'], 4000),
        ('zoh', 6, Settings(), 4000),
    ]


def test_a_step_is_that_of_the_protocol(make_data):
    """AdamW with these betas; no decay of vectors; gradients clipped to a norm of 1."""
    data = make_data('fashion')
    net = training.build('zoh', data.task, 0, Settings())
    step = Step(net, data, Settings(), graph=False)
    decayed, others = step.optimizer.param_groups
    assert (decayed['weight_decay'], others['weight_decay']) == (0.05, 0.0)
    assert decayed['betas'] == others['betas'] == (0.9, 0.999)
    assert all(param.ndim > 1 for param in decayed['params'])
    names = {id(param): name for name, param in net.named_parameters()}
    kept = {names[id(p)] for p in others['params'] if p.ndim > 1}
    assert {name.rpartition('.')[2] for name in kept} == {'A_log', 'A_b_log', 'pos_embed'}
    # A loss a thousand times as large gives the same gradients, as they are clipped.
    norms = []
    for scale in (1.0, 1000.0):
        net.head.weight.data.mul_(scale)
        step.eager()
        grads = [p.grad.norm() for p in net.parameters() if p.grad is not None]
        norms.append(torch.stack(grads).norm().item())
    assert max(norms) <= 1.0001 and norms[1] == pytest.approx(1.0, abs=1e-3)


class Garments:
    """Fashion-MNIST whose splits are told apart by their grey levels, labels in order."""

    LEVELS = {'train': 200, 'test': 100}

    def __init__(self, count=60):
        self.asked, self.count = [], count

    def __call__(self, source, split):
        self.asked.append(split)
        images = np.full((self.count, 28, 28), self.LEVELS[split], np.uint8)
        images[:, 0, 0] = np.arange(self.count) % 251  # tells which it is
        return images, np.arange(self.count, dtype=np.uint8) % len(GARMENTS)


class Here:
    """A pool of processes that is this process."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def map(self, function, items):
        return map(function, items)


@pytest.mark.parametrize('name', ['fashion', 'scenes'])
def test_a_split_is_of_its_own_garments(name, monkeypatch, tmp_path):
    """Training data of the training images alone, test data of the others."""
    garments = Garments()
    monkeypatch.setattr(tasks, 'load_garments', garments)
    monkeypatch.setattr(tasks, 'ProcessPoolExecutor', Here)
    task = replace(TASKS[name], counts=(12, 8))
    train_split, test_split = load_splits(task, tmp_path, tmp_path)
    assert garments.asked == ['train', 'test']
    assert (len(train_split.images), len(test_split.images)) == (12, 8)
    if name == 'fashion':
        levels = [np.unique(s.images[:, 1:]).tolist() for s in (train_split, test_split)]
        assert levels == [[200], [100]]
        return
    # Garments are shaded by 0.75 to 1.25 times; where no garment lies is ground.
    for split, level in ((train_split, 200), (test_split, 100)):
        garment = np.median(split.images[split.labels > 0])
        assert abs(garment - level) < 0.3 * level
    assert not np.array_equal(train_split.labels[:8], test_split.labels)
    again = load_splits(task, tmp_path, tmp_path)
    assert garments.asked == ['train', 'test'], 'kept scenes are read'
    assert again[0].digest() == train_split.digest() != test_split.digest()


def test_settings_are_chosen_without_test_images(monkeypatch, tmp_path):
    """By training images, and not by those of the training itself; scenes are of these as well."""
    garments = Garments(count=240)
    monkeypatch.setattr(tasks, 'load_garments', garments)
    monkeypatch.setattr(tasks, 'HELD_OUT', 40)
    task = replace(TASKS['select-fashion'], counts=(200, 40))
    train_split, test_split = load_splits(task, tmp_path, tmp_path)
    assert {*garments.asked} == {'train'}
    marks = [{*split.images[:, 0, 0].tolist()} for split in (train_split, test_split)]
    assert [len(each) for each in marks] == [200, 40] and not marks[0] & marks[1]
    seen = []
    monkeypatch.setattr(tasks, 'ProcessPoolExecutor', Here)
    monkeypatch.setattr(
        tasks, 'Garments', lambda images, labels: seen.append({*images[:, 0, 0].tolist()})
    )
    scene = np.zeros((4, 128, 128), np.uint8)
    monkeypatch.setattr(tasks, '_scene_arrays', lambda *_, **__: (scene, scene))
    load_splits(replace(TASKS['select-scenes'], counts=(4, 4)), tmp_path, tmp_path)
    assert seen == marks and {*garments.asked} == {'train'}
    assert TASKS['select-scenes'].planned_seeds('zoh') == range(100, 102)


def test_tasks_of_scenes_have_the_same_scenes(monkeypatch, tmp_path):
    garments = Garments()
    monkeypatch.setattr(tasks, 'load_garments', garments)
    monkeypatch.setattr(tasks, 'ProcessPoolExecutor', Here)
    splits = [
        load_splits(replace(TASKS[name], counts=(12, 8)), tmp_path, tmp_path)
        for name in ('scenes', 'spacing')
    ]
    assert garments.asked == ['train', 'test']  # the second time they are read
    assert [s.digest() for s in splits[0]] == [s.digest() for s in splits[1]]


def test_labels_of_a_scene_lie_on_its_garments():
    """And its splits are drawn from generators of their own."""
    bright = tasks.Garments(np.full((60, 28, 28), 255, np.uint8), np.arange(60) % len(GARMENTS))
    images, labels = tasks._scene_arrays(range(20), 'train', bright, 128)
    assert labels.max() < len(SCENE_CLASSES) and labels.min() == 0
    inside, outside = images[labels > 0].mean(), images[labels == 0].mean()
    assert inside > outside + 50
    for flipped in (labels[:, ::-1], labels[:, :, ::-1]):
        assert images[flipped > 0].mean() < inside - 20
    other, _ = tasks._scene_arrays(range(20), 'test', bright, 128)
    assert not np.array_equal(images, other)


class Known(nn.Module):
    """Predicts what it was told; wrongly in training."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, images):
        return self.outputs[: len(images)] if not self.training else -self.outputs[: len(images)]


def test_the_accuracy_is_over_images(tiny_tasks):
    """Six of class 0, two of class 1, one of them wrong: 7 of 8, and not the mean over classes."""
    task = replace(tiny_tasks['fashion'], test_batch=8)
    labels = torch.tensor([0] * 6 + [1, 1], dtype=torch.uint8)
    outputs = nn.functional.one_hot(torch.tensor([0] * 6 + [1, 0]), task.classes).float()
    images = torch.zeros(8, 28, 28, dtype=torch.uint8)
    net = Known(outputs).train()
    assert tasks.test(task, net, images, labels, autocast_of(CPU)) == 87.5
    assert net.training, 'training goes on'


def test_the_miou_is_over_pixels_of_all_scenes(tiny_tasks):
    """Two scenes; the one's left half is class 1, of which a quarter is predicted as ground."""
    task = replace(tiny_tasks['scenes'], test_batch=1)
    side, patch = task.size.image, task.size.patch
    labels = torch.zeros(2, side, side, dtype=torch.uint8)
    labels[0, :, : side // 2] = 1
    predicted = labels.clone()
    predicted[0, : side // 4, : side // 2] = 0
    tokens = tasks.by_token(predicted.long(), patch)
    outputs = nn.functional.one_hot(tokens, task.classes).float().flatten(2)
    images = torch.zeros(2, side, side, dtype=torch.uint8)

    class Each(Known):
        def forward(self, images):
            first, self.outputs = self.outputs[:1], self.outputs[1:]
            return first

    found = tasks.test(task, Each(outputs).train(), images, labels, autocast_of(CPU))
    # Of each scene's 4 quarters 6 are ground and well predicted, 1/2 is taken for ground.
    ground, ones = 6 / 6.5, 1.5 / 2
    assert found == pytest.approx(100 * (ground + ones) / 2)


def test_data_are_named_by_their_content(make_data):
    data = make_data('fashion')
    split = Split(np.zeros((3, 28, 28), np.uint8), np.zeros(3, np.uint8))
    assert Data(data.task, [split, split], CPU).digest != data.digest
