"""The batch of a recipe: by accumulated gradients it is the same on any number of processes."""

import json
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.hooks import Hook
from mmengine.registry import DATASETS
from torch.utils.data import Dataset

from tests.engine.processes import needs_forks, run_processes
from tests.engine.toy import ToyModel, make_runner
from vim_mm.engine.batches import randomness
from vim_mm.engine.batches.batch import Batch, check_pooled_norms, plan_batch
from vim_mm.engine.batches.randomness import NumberedSampler
from vim_mm.engine.watching.nonfinite import NonFiniteLossError

SAMPLES, TOTAL, STEPS = 20, 8, 5


def recipe(images: int, enable: bool = False) -> dict:
    return dict(base_batch_size=images, enable=enable)


class Pooled(torch.nn.Sequential):
    pool_scales = (1, 2)


@pytest.mark.parametrize(
    ('norm', 'size', 'processes', 'fits'),
    [
        (torch.nn.BatchNorm2d, 1, 1, False),
        (torch.nn.BatchNorm2d, 1, 4, False),
        (torch.nn.BatchNorm2d, 2, 1, True),
        (torch.nn.SyncBatchNorm, 1, 1, False),
        (torch.nn.SyncBatchNorm, 1, 4, True),
        (lambda n: torch.nn.GroupNorm(1, n), 1, 1, True),
    ],
)
def test_one_image_cannot_be_normalized_after_pooling(norm, size, processes, fits):
    batch = Batch(16, processes, size, 16)
    model = torch.nn.Sequential(Pooled(torch.nn.Conv2d(3, 4, 1), norm(4)))
    with nullcontext() if fits else pytest.raises(ValueError, match='--batch-per-gpu 2'):
        check_pooled_norms(model, batch)
    check_pooled_norms(torch.nn.Sequential(norm(4)), batch)  # of larger maps


@pytest.mark.parametrize(
    ('size', 'processes', 'scale', 'expected', 'line'),
    [
        (2, 1, recipe(16), (16, 2, 8), '16 images a step = 2 x 8 micro-batches'),
        (2, 8, recipe(16), (16, 2, 1), '8 processes x 2; the batch and the learning rate are'),
        (3, 4, recipe(16), (16, 2, 2), '4 processes x 2 x 2 micro-batches'),
        (32, 2, recipe(16), (16, 8, 1), '2 processes x 8; the batch'),
        (2, 1, recipe(16, enable=True), (2, 2, 1), 'rate is multiplied by 2 / 16'),
        (3, 2, None, (6, 3, 1), 'names no batch'),
    ],
)
def test_plan(size, processes, scale, expected, line):
    batch = plan_batch(size, processes, scale)
    assert (batch.total, batch.size, batch.counts) == expected
    assert line in str(batch)


@pytest.mark.parametrize(
    ('size', 'processes', 'message'),
    [(0, 1, 'must be positive, got 0'), (2, 3, '3 processes cannot share the 16 images')],
)
def test_no_plan(size, processes, message):
    with pytest.raises(ValueError, match=message):
        plan_batch(size, processes, recipe(16))


@DATASETS.register_module()
class NoisyPictures(Dataset):
    """Pictures by their index, with noise from every generator, as augmentation draws it."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = torch.rand(3, 8, 8) + float(np.random.rand())
        return (torch.full((3, 8, 8), float(index)) / SAMPLES + noise / 8,)


@pytest.mark.parametrize('kind', ['InfiniteSampler', 'DefaultSampler'])
@pytest.mark.parametrize('size', [1, 2])
def test_a_micro_batch_is_made_of_the_same_samples_on_any_number_of_processes(
    size, kind, monkeypatch
):
    """Of every number of a micro-batch in a step: indices and the numbers that seed them."""

    import mmengine.dataset.sampler as sampler_module

    def deal(processes: int) -> dict:
        dealt = {}
        counts = TOTAL // (processes * size)
        for rank in range(processes):
            for module in (randomness, sampler_module):
                monkeypatch.setattr(module, 'get_dist_info', partial(tuple, (rank, processes)))
            sampler = NumberedSampler(NoisyPictures(), dict(type=kind), 3, size, counts)
            sampler.set_epoch(2)
            drawn = [(int(i), i.number, i.epoch) for _, i in zip(range(2 * TOTAL), sampler)]
            for n in range(SAMPLES // TOTAL * counts):
                step, index = divmod(n, counts)
                key = step, index * processes + rank
                dealt[key] = drawn[n * size : (n + 1) * size]
        return dealt

    one = deal(1)
    assert len(one) == SAMPLES // TOTAL * TOTAL // size
    assert all(len(samples) == size for samples in one.values())
    assert deal(2) == deal(4) == one
    step = [number for (step, _), part in one.items() if step == 1 for _, number, _ in part]
    assert sorted(step) == [*range(TOTAL, 2 * TOTAL)], 'the samples that follow the first step'


class Recorder(Hook):
    """Keeps the pictures and learning rates of every iteration."""

    def __init__(self):
        self.pictures, self.rates = [], []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        batches = data_batch if runner.batch.counts > 1 else [data_batch]
        self.pictures.append([x.tolist() for (pictures,) in batches for x in pictures])
        self.rates.append(runner.optim_wrapper.param_groups[0]['lr'])


def train(
    work_dir,
    size,
    model=None,
    steps=STEPS,
    epochs=None,
    scale=False,
    total=TOTAL,
    sampler=None,
    **options,
):
    """A training with ``size`` pictures in a micro-batch; its runner and the record of it."""
    record = Recorder()
    sampler = dict(type=sampler or ('DefaultSampler' if epochs else 'InfiniteSampler'))
    length = dict(by_epoch=True, max_epochs=epochs) if epochs else dict(max_iters=steps)
    runner = make_runner(
        work_dir,
        model or ToyModel(drop_path_rate=0.2),
        train_dataloader=dict(
            dataset=dict(type='NoisyPictures'),
            sampler=sampler,
            batch_size=size,
            num_workers=0,
            collate_fn=dict(type='default_collate'),
        ),
        train_cfg=dict(by_epoch=False, val_interval=100) | length,
        auto_scale_lr=recipe(total, enable=scale),
        param_scheduler=dict(type='LinearLR', by_epoch=False, start_factor=0.1, end=4),
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=3)),
        custom_hooks=[record],
        randomness=dict(seed=1),
        **options,
    )
    runner.train()
    return runner, record


def weights(runner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in runner.model.parameters()]).cpu()


def same_pictures(steps_a: list, steps_b: list) -> bool:
    return [sorted(step) for step in steps_a] == [sorted(step) for step in steps_b]


@pytest.mark.parametrize('epochs', [None, pytest.param(2, marks=pytest.mark.slow)])
def test_accumulation_is_the_whole_batch(epochs, tmp_path, monkeypatch):
    """The same pictures and rates in each step, and the same weights but for rounding."""
    monkeypatch.setattr(torch.backends.cudnn, 'allow_tf32', False)  # a thousand times coarser
    start = ToyModel().state_dict()

    def model():
        made = ToyModel()  # without stochastic depth, whose draws are those of a micro-batch
        made.load_state_dict(start)
        return made

    whole, record = train(tmp_path / 'whole', TOTAL, model(), epochs=epochs)
    assert whole.batch.counts == 1
    for size in (4, 1):
        parts, other = train(tmp_path / str(size), size, model(), epochs=epochs)
        assert parts.batch == Batch(TOTAL, 1, size, recipe=TOTAL)
        assert parts.iter == whole.iter == (epochs * (SAMPLES // TOTAL) if epochs else STEPS)
        assert same_pictures(other.pictures, record.pictures)
        assert other.rates == record.rates
        torch.testing.assert_close(weights(parts), weights(whole), rtol=1e-4, atol=1e-5)
    assert len(set(record.rates)) > 2
    (log,) = Path(whole.log_dir).glob('*.log')
    assert f'Batch: {TOTAL} images a step = {TOTAL}; the batch and' in log.read_text()


def test_a_scaled_learning_rate(tmp_path):
    runner, record = train(tmp_path, 2, scale=True)
    assert runner.batch.counts == 1 and runner.batch.total == 2
    assert record.rates[-1] == pytest.approx(0.1 * 2 / TOTAL)
    assert {len(step) for step in record.pictures} == {2}


@pytest.mark.parametrize('sampler', ['InfiniteSampler', 'DefaultSampler'])
def test_resuming_within_and_with_another_batch_per_gpu(sampler, tmp_path):
    """Also in the third epoch, of two steps, and with the noise of each sample."""
    whole, record = train(tmp_path / 'whole', 2, sampler=sampler)
    for size in (2, 4):
        work_dir = tmp_path / f'resumed{size}'
        options = dict(load_from=str(tmp_path / 'whole' / 'iter_3.pth'), resume=True)
        resumed, added = train(work_dir, size, sampler=sampler, **options)
        assert len(added.pictures) == STEPS - 3
        assert same_pictures(added.pictures, record.pictures[3:])
        assert added.rates == record.rates[3:]
        if size == 2:
            assert torch.equal(weights(resumed), weights(whole))


def test_a_clipped_gradient_is_that_of_the_step(tmp_path):
    norms, start = [], ToyModel().state_dict()
    for size in (TOTAL, 2):
        optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.01), clip_grad=dict(max_norm=1e-3))
        model = ToyModel()
        model.load_state_dict(start)
        runner, _ = train(tmp_path / str(size), size, model, 1, optim_wrapper=optim_wrapper)
        norms.append(runner.message_hub.get_scalar('train/grad_norm').data[0].tolist())
    assert len(norms[0]) == len(norms[1]) == 1
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_amp_hooks_a_part_once(tmp_path):
    """The runner alone tells the wrapper how long a training is, in micro-batches."""
    optim_wrapper = dict(type='BFloat16OptimWrapper', optimizer=dict(type='SGD', lr=0.01))
    runner, _ = train(tmp_path, 2, ToyModel(), 3, optim_wrapper=optim_wrapper)
    assert len(runner.model.head._forward_hooks) == 1
    assert runner.optim_wrapper._max_counts == 3 * TOTAL // 2


@pytest.fixture
def loss_scaler(monkeypatch):
    """What AmpOptimWrapper needs: CUDA and float16, or here a scaler for the CPU and float32."""
    if not torch.cuda.is_available():
        from mmengine.optim.optimizer import amp_optimizer_wrapper as module

        monkeypatch.setattr(module, 'is_cuda_available', lambda: True)
        monkeypatch.setattr(module, 'GradScaler', partial(torch.amp.GradScaler, 'cpu'))
        monkeypatch.setattr('mmengine.runner.amp.autocast', lambda **_: nullcontext())
    return dict(init_scale=16.0, growth_interval=2)


def test_the_loss_scale_follows_steps(loss_scaler, tmp_path):
    """It doubles after every second step, and the weights are those of the whole batch."""
    trained, start = [], ToyModel().state_dict()
    for size in (TOTAL, 2):
        optim_wrapper = dict(
            type='AmpOptimWrapper',
            loss_scale=loss_scaler,
            optimizer=dict(type='SGD', lr=0.01),
            clip_grad=dict(max_norm=0.1),
        )
        model = ToyModel()
        model.load_state_dict(start)
        runner, _ = train(tmp_path / str(size), size, model, optim_wrapper=optim_wrapper)
        assert runner.optim_wrapper.loss_scaler.get_scale() == 16 * 2 ** (STEPS // 2)
        trained.append(weights(runner))
    rtol = 1e-2 if torch.cuda.is_available() else 1e-4
    torch.testing.assert_close(trained[1], trained[0], rtol=rtol, atol=1e-4)
    assert (trained[0] - weights_of(start)).abs().max() > 1e-3


def weights_of(state: dict) -> torch.Tensor:
    return torch.cat([value.flatten() for value in state.values()])


class FaultyModel(ToyModel):
    """Has a NaN in the second micro-batch of the second step."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, inputs, mode='tensor'):
        self.calls += 1
        if self.calls == 4:
            self.seen = inputs.clone()
        if hasattr(self, 'seen') and torch.equal(inputs, self.seen):
            inputs = inputs * torch.nan
        return super().forward(inputs, mode)


def test_a_loss_that_is_not_finite_is_traced_to_its_micro_batch(tmp_path):
    with pytest.raises(NonFiniteLossError, match=r'iteration 2 is nan.*output of backbone'):
        train(tmp_path, TOTAL // 2, FaultyModel())


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(accumulative_counts=2), 'accumulative_counts follows from the batch'),
        (None, 'only an optim_wrapper of one optimizer'),
    ],
)
def test_what_cannot_accumulate(options, message, tmp_path):
    optimizer = dict(type='AdamW', lr=0.1)
    several = dict(constructor='x', head=dict(optimizer=optimizer))
    optim_wrapper = several if options is None else dict(optimizer=optimizer, **options)
    with pytest.raises(ValueError, match=message):
        train(tmp_path, 2, optim_wrapper=optim_wrapper)


def test_an_epoch_without_a_step(tmp_path):
    with pytest.raises(ValueError, match='20 images, less than the 32 of a step'):
        train(tmp_path, 2, epochs=1, total=32)


def test_a_finished_loader_cannot_change_its_batch(tmp_path):
    with pytest.raises(ValueError, match='must be a config'):
        make_runner(tmp_path, auto_scale_lr=recipe(8)).train()


def _worker(rank: int, processes: int, work_dir: Path) -> None:
    runner, record = train(work_dir, 2, launcher='pytorch' if processes > 1 else 'none')
    assert runner.batch.counts == TOTAL // 2 // processes
    torch.save(weights(runner), work_dir / f'weights{rank}.pth')
    (work_dir / f'pictures{rank}.json').write_text(json.dumps(record.pictures))


@pytest.mark.slow
@needs_forks
def test_one_two_and_four_processes_train_the_same(tmp_path):
    """Stochastic depth and augmentation included: micro-batches have numbers, not processes."""
    pictures, trained = {}, {}
    for processes in (1, 2, 4):
        work_dir = tmp_path / str(processes)
        run_processes(_worker, processes, processes, work_dir)
        ranks = range(processes)
        parts = [json.loads((work_dir / f'pictures{rank}.json').read_text()) for rank in ranks]
        pictures[processes] = [[*chain(*step)] for step in zip(*parts)]
        trained[processes] = torch.load(work_dir / 'weights0.pth')
    assert len(pictures[1]) == STEPS and {len(step) for step in pictures[1]} == {TOTAL}
    assert same_pictures(pictures[2], pictures[1]) and same_pictures(pictures[4], pictures[1])
    for processes in (2, 4):
        torch.testing.assert_close(trained[processes], trained[1], rtol=1e-4, atol=1e-5)
