"""A training that is resumed under another schedule has that schedule's learning rates."""

from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook

from tests.engine.toy import make_runner
from vim_mm.config import config_path

SHIPPED = ['ade20k_paper_160k', 'ade20k_released_60k', 'coco_paper_380k', 'coco_released_184k']


class Rates(Hook):
    """Keeps the learning rates of all groups in each iteration."""

    def __init__(self):
        self.seen = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.seen.append(tuple(group['lr'] for group in runner.optim_wrapper.param_groups))


def shrunk(name: str) -> list[dict]:
    """The schedulers of a shipped config, over a dozen iterations instead of 60k and more."""
    schedulers = Config.fromfile(config_path(f'_base_/schedules/{name}.py')).param_scheduler
    for scheduler in schedulers:
        if 'end' in scheduler:
            scheduler.end = 3
        if 'milestones' in scheduler:
            scheduler.milestones = [5, 8]
    return schedulers


def train(work_dir, max_iters, schedulers, by_epoch=False, **options):
    """Learning rates of a training; two iterations are an epoch."""
    rates = Rates()
    length = dict(max_epochs=max_iters // 2) if by_epoch else dict(max_iters=max_iters)
    runner = make_runner(
        work_dir,
        train_cfg=dict(by_epoch=by_epoch, val_interval=1000, **length),
        param_scheduler=schedulers,
        custom_hooks=[rates],
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', by_epoch=by_epoch, interval=1)),
        optim_wrapper=dict(
            constructor='LayerDecayOptimWrapperConstructor',
            paramwise_cfg=dict(layer_decay_rate=0.9),
            optimizer=dict(type='AdamW', lr=1e-3),
        ),
        **options,
    )
    runner.train()
    return rates.seen, runner


def log_of(runner) -> str:
    (log,) = Path(runner.log_dir).glob('*.log')
    return log.read_text()


def epochs(**scheduler) -> dict:
    return dict(by_epoch=True, **scheduler)


@pytest.mark.slow
@pytest.mark.parametrize('name', SHIPPED)
def test_shipped_schedules_follow_a_longer_training(name, tmp_path):
    whole, _ = train(tmp_path / 'whole', 12, shrunk(name))
    first, _ = train(tmp_path / 'run', 6, shrunk(name))
    last = str(tmp_path / 'run' / 'iter_6.pth')
    added, _ = train(tmp_path / 'on', 12, shrunk(name), load_from=last, resume=True)
    assert len(whole) == 12 and len(added) == 6
    assert added == whole[6:]
    assert min(added[:-1])[0] > 0
    if 'released_184k' not in name:  # whose steps know no end
        assert first != whole[:6]


@pytest.mark.parametrize(
    'schedulers',
    [
        [epochs(type='LinearLR', end=2), epochs(type='CosineAnnealingLR', T_max=6, begin=2)],
        pytest.param([epochs(type='PolyLR', power=0.9)], marks=pytest.mark.slow),
        pytest.param(
            [epochs(type='PolyLR', power=0.9, convert_to_iter_based=True)], marks=pytest.mark.slow
        ),
        [
            dict(type='LinearLR', by_epoch=False, end=3, start_factor=0.1),
            epochs(type='MultiStepLR', milestones=[2, 4]),
        ],
        pytest.param(
            [epochs(type='StepLR', step_size=2), epochs(type='ExponentialLR', gamma=0.9, end=5)],
            marks=pytest.mark.slow,
        ),
    ],
    ids=['cosine', 'poly', 'converted', 'mixed', 'step'],
)
def test_schedules_by_epochs_do(schedulers, tmp_path):
    whole, _ = train(tmp_path / 'whole', 12, schedulers, by_epoch=True)
    train(tmp_path / 'run', 6, schedulers, by_epoch=True)
    last = str(tmp_path / 'run' / 'epoch_3.pth')
    added, _ = train(tmp_path / 'on', 12, schedulers, by_epoch=True, load_from=last, resume=True)
    assert added == whole[6:]


def test_an_unchanged_schedule_is_loaded_and_says_nothing(tmp_path):
    schedulers = shrunk('ade20k_paper_160k')
    whole, _ = train(tmp_path, 6, schedulers)
    last = str(tmp_path / 'iter_4.pth')
    added, runner = train(tmp_path / 'on', 6, schedulers, load_from=last, resume=True)
    assert added == whole[4:]
    assert 'not that of the checkpoint' not in log_of(runner)


def test_a_finished_run_says_so(tmp_path):
    schedulers = shrunk('ade20k_paper_160k')
    train(tmp_path, 4, schedulers)
    options = dict(load_from=str(tmp_path / 'iter_4.pth'), resume=True)
    added, runner = train(tmp_path / 'on', 4, schedulers, **options)
    assert added == []
    assert log_of(runner).count('This run is finished') == 1


def test_results_of_past_validations_cannot_be_replayed(tmp_path):
    plateau = epochs(type='ReduceOnPlateauLR', monitor='mean', rule='greater')
    train(tmp_path, 4, [plateau], by_epoch=True)
    options = dict(load_from=str(tmp_path / 'epoch_2.pth'), resume=True, by_epoch=True)
    with pytest.raises(ValueError, match='ReduceOnPlateauLR cannot be resumed under another'):
        train(tmp_path / 'on', 6, [{**plateau, 'patience': 3}], **options)


def test_deits_schedule_is_timms_one_epoch_late(tmp_path):
    """Two iterations are an epoch; timm's own scheduler is stepped after each, as DeiT does."""
    from timm.scheduler import CosineLRScheduler

    numbers = dict(epochs=10, warmup_epochs=3, warmup_lr=1e-6, eta_min=1e-5)
    ours = dict(type='DeiTCosineLR', by_epoch=False, iters_per_epoch=2, **numbers)
    rates, _ = train(tmp_path, 30, [ours])
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=1e-3)
    theirs = CosineLRScheduler(
        optimizer, t_initial=10, lr_min=1e-5, warmup_t=3, warmup_lr_init=1e-6, cycle_limit=1
    )
    expected = []
    for epoch in range(14):  # beyond the last, where timm stays at the least rate
        expected += 2 * [optimizer.param_groups[0]['lr']]
        theirs.step(epoch)
    # Heads have the full rate, which is the greatest of the groups'.
    assert [max(rate) for rate in rates[:28]] == pytest.approx(expected, rel=1e-12)
