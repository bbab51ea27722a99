"""VimRunner in this process; runs of several processes are tested by way of the tools."""

import json
import os
import re
import subprocess
import sys
import time

import pytest
import torch
from mmengine.model import MMDistributedDataParallel
from mmengine.registry import RUNNERS
from mmengine.runner import Runner
from torch import distributed, nn

from tests.engine.processes import free_port, torchrun_environment
from tests.engine.toy import Mean, ToyModel, make_runner
from vim_mm.engine import VimRunner
from vim_mm.engine.determinism import sums_in_any_order
from vim_mm.engine.processes import (
    choose_allocator,
    init_process_group,
    threads_of_environment,
)
from vim_mm.engine.saving.written import last_checkpoint


def test_weights_that_do_not_fit_are_named_by_their_file(tmp_path, monkeypatch):
    make_runner(tmp_path / 'a').train()
    file = tmp_path / 'a/iter_2.pth'
    other = make_runner(tmp_path / 'b', ToyModel(ssm_cfg=dict(d_state=8)), load_from=str(file))
    words = re.escape(f'{file}: the checkpoint was made by another architecture')
    with pytest.raises(RuntimeError, match=words):
        other.train()

    def fail(*args, **kwargs):
        raise RuntimeError(f'{file}: it is of another size')

    monkeypatch.setattr(Runner, 'load_checkpoint', fail)  # which names it already
    with pytest.raises(RuntimeError) as raised:
        other.load_checkpoint(str(file))
    assert str(raised.value).count(str(file)) == 1


@pytest.fixture(params=['pytorch', 'slurm'])
def launcher(request, monkeypatch):
    """The environment of the only process of that launcher's job."""
    monkeypatch.setenv('MASTER_PORT', free_port())
    monkeypatch.setenv('MASTER_ADDR', '127.0.0.1')
    names = {
        'pytorch': ('RANK', 'LOCAL_RANK', 'WORLD_SIZE'),
        'slurm': ('SLURM_PROCID', 'SLURM_LOCALID', 'SLURM_NTASKS'),
    }
    for name in names['pytorch']:
        # So that monkeypatch removes what is set for slurm.
        monkeypatch.setenv(name, '')
    for name, value in zip(names[request.param], '001'):
        monkeypatch.setenv(name, value)
    yield request.param
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    ('given', 'gpu', 'expected'),
    [
        ({}, True, 'expandable_segments:True'),
        ({}, False, None),
        ({'PYTORCH_CUDA_ALLOC_CONF': 'backend:native'}, True, 'backend:native'),
        ({'PYTORCH_ALLOC_CONF': 'backend:native'}, True, None),
    ],
)
def test_segments_grow_unless_the_user_has_chosen(given, gpu, expected, monkeypatch):
    environment = {**os.environ}
    for name in ('PYTORCH_CUDA_ALLOC_CONF', 'PYTORCH_ALLOC_CONF'):
        environment.pop(name, None)
    environment.update(given)
    monkeypatch.setattr(os, 'environ', environment)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: gpu)
    choose_allocator()
    assert environment.get('PYTORCH_CUDA_ALLOC_CONF') == expected


class NormModel(ToyModel):
    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(self.head, nn.SyncBatchNorm(3))


@pytest.mark.skipif(torch.cuda.is_available(), reason='without CUDA things differ')
@pytest.mark.parametrize(
    'wrapper',
    [
        None,
        dict(find_unused_parameters=True),
        dict(type=MMDistributedDataParallel),
        dict(type='mmengine.MMDistributedDataParallel'),
    ],
)
def test_distributed_training_needs_no_cuda(launcher, wrapper, tmp_path):
    runner = make_runner(
        tmp_path,
        NormModel(),
        launcher=launcher,
        cfg=dict(model_wrapper_cfg=wrapper, sync_bn='torch'),
    )
    runner.train()
    assert distributed.get_backend() == 'gloo'
    assert isinstance(runner.model, nn.parallel.DistributedDataParallel)
    assert runner.model.find_unused_parameters == ('find_unused_parameters' in (wrapper or {}))
    assert not any(isinstance(m, nn.SyncBatchNorm) for m in runner.model.modules())
    assert runner.iter == 2


@pytest.mark.parametrize(
    ('value', 'threads'), [('3', 3), ('4,2', 4), ('', 1), (None, 1), ('0', 1), ('all', 1)]
)
def test_threads_of_every_level(value, threads, monkeypatch):
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    if value is not None:
        monkeypatch.setenv('OMP_NUM_THREADS', value)
    assert threads_of_environment() == threads


def test_the_runner_is_found_by_its_name():
    assert RUNNERS.get('VimRunner') is VimRunner


def test_unknown_launcher_is_refused():
    with pytest.raises(ValueError, match="'none', 'pytorch' or 'slurm', got 'mpi'"):
        init_process_group('mpi')


def test_amp_computes_in_bfloat16_and_keeps_float32(tmp_path):
    model = ToyModel()
    seen = []
    model.head.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    before = model.head.weight.clone()
    optim_wrapper = dict(type='BFloat16OptimWrapper', optimizer=dict(type='AdamW', lr=0.1))
    make_runner(tmp_path, model, optim_wrapper=optim_wrapper).train()
    assert seen[:2] == [torch.bfloat16] * 2
    after = model.head.weight  # where the runner has put it
    with torch.autocast(after.device.type, torch.bfloat16):
        handed_over = model.head(torch.ones(1, 8, 2, 2, device=after.device))
    assert handed_over.dtype == after.dtype == torch.float32
    assert not torch.equal(after.cpu(), before)


LOADING = """
import time
from torch.utils.data import DataLoader, _utils
from vim_mm.engine.processes import init_process_group

class Loop:
    def __init__(self):
        self.runner = self  # a cycle, as of MMEngine's runner and its loops
        self.loader = DataLoader(range(100), num_workers=2, persistent_workers=True)
        self.iterator = iter(self.loader)
        next(self.iterator)

_utils.MP_STATUS_CHECK_INTERVAL = 60.0  # seconds
init_process_group('pytorch')
loop = Loop()
del loop
print(time.time())
"""


@pytest.mark.slow  # imports everything anew
def test_the_workers_of_loaders_end_at_once():
    """PyTorch's destructor would wait for each of them: five seconds, and here a minute."""
    environment = torchrun_environment(0, 1, free_port())
    done = subprocess.run(
        [sys.executable, '-c', LOADING],
        env={**os.environ, **environment, 'PYTHONPATH': os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert time.time() - float(done.stdout) < 30


class Determinism(Mean):
    """Notes how PyTorch is set while it counts."""

    seen: list[bool] = []

    def process(self, data_batch, data_samples) -> None:
        self.seen.append(torch.are_deterministic_algorithms_enabled())
        super().process(data_batch, data_samples)


def test_metrics_of_a_deterministic_run_may_count_in_any_order(tmp_path):
    Determinism.seen.clear()
    try:
        make_runner(
            tmp_path,
            randomness=dict(seed=0, deterministic=True),
            val_evaluator=[Determinism()],
        ).train()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert Determinism.seen and not any(Determinism.seen)


class Rois(ToyModel):
    """Has what a detector has, under mmcv's name."""

    def __init__(self):
        super().__init__()
        kind = type('RoIAlign', (nn.Identity,), dict(__module__='mmcv.ops.roi_align'))
        self.extractor = nn.ModuleList([kind(), kind()])


@pytest.mark.parametrize('deterministic', [False, True])
def test_a_deterministic_detector_says_what_is_not(deterministic, tmp_path):
    try:
        make_runner(tmp_path, Rois(), randomness=dict(seed=0, deterministic=deterministic))
    finally:
        torch.use_deterministic_algorithms(False)
    (log,) = tmp_path.rglob('*.log')
    assert log.read_text().count('the gradients of RoIAlign of mmcv') == deterministic


def test_the_operators_of_mmcv_are_found():
    ops = pytest.importorskip('mmcv.ops', reason='needs mmcv with compiled operators')
    assert sums_in_any_order(nn.Sequential(ops.RoIAlign(7), ops.DeformConv2d(4, 4, 3))) == [
        'DeformConv2d',
        'RoIAlign',
    ]


@pytest.mark.parametrize(
    ('options', 'expected'),
    [
        (dict(lr=0.1, weight_decay=0.01), None),
        (dict(lr=0.5, weight_decay=0.01), 'The config has lr 0.5, the checkpoint 0.1:'),
        (dict(lr=0.1, weight_decay=0.2), 'has weight_decay 0.2, the checkpoint 0.01:'),
    ],
)
def test_a_resumed_run_says_that_the_checkpoint_has_other_values(options, expected, tmp_path):
    make_runner(tmp_path / 'first').train()
    runner = make_runner(
        tmp_path / 'second',
        load_from=str(tmp_path / 'first' / 'iter_1.pth'),
        resume=True,
        optim_wrapper=dict(optimizer=dict(type='AdamW', **options)),
    )
    runner.train()
    group = runner.optim_wrapper.param_groups[0]
    assert (group['initial_lr'], group['weight_decay']) == (0.1, 0.01)
    (log,) = (tmp_path / 'second').rglob('*.log')
    assert log.read_text().count("goes on with the checkpoint's") == (expected is not None)
    assert expected is None or expected in log.read_text()


class Killed(Mean):
    """A metric whose process is killed in the validation with this number, from 1."""

    def __init__(self, validation: int):
        super().__init__()
        self.left = validation

    def process(self, data_batch, data_samples) -> None:
        self.left -= not self.results
        if self.left == 0:
            raise KeyboardInterrupt
        super().process(data_batch, data_samples)


def validated(work_dir) -> list[int]:
    """The steps whose metrics are in the logs, over all starts of a training."""
    logs = sorted(work_dir.glob('*/vis_data/scalars.json'))
    records = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    return [record['step'] for record in records if 'mean' in record]


@pytest.mark.parametrize(('by_epoch', 'killed'), [(False, 3), (False, 2), (True, 3)])
def test_a_validation_that_was_killed_is_made_when_resumed(by_epoch, killed, tmp_path):
    end = dict(max_epochs=3) if by_epoch else dict(max_iters=3)
    options = dict(
        train_cfg=dict(by_epoch=by_epoch, val_interval=1, **end),
        default_hooks=dict(
            checkpoint=dict(type='CheckpointHook', by_epoch=by_epoch, interval=1),
            logger=dict(type='LoggerHook', log_metric_by_epoch=by_epoch),
        ),
    )
    with pytest.raises(KeyboardInterrupt):
        make_runner(tmp_path, val_evaluator=[Killed(killed)], **options).train()
    assert validated(tmp_path) == [1, 2, 3][: killed - 1]
    for _ in range(2):  # the second start finds nothing to do
        last = str(last_checkpoint(tmp_path))
        make_runner(tmp_path, load_from=last, resume=True, **options).train()
        assert validated(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize(
    'options',
    [
        dict(val_interval=2),
        dict(val_interval=1, val_begin=4),
        dict(val_interval=1, dynamic_intervals=[(3, 2)]),
    ],
)
def test_only_a_validation_that_is_due_is_made_up(options, tmp_path):
    """Step 3 of 5 has a checkpoint and no validation, and needs none."""

    def train(end, **more):
        train_cfg = dict(by_epoch=False, max_iters=end) | options
        hooks = dict(
            checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=1),
            logger=dict(type='LoggerHook', log_metric_by_epoch=False),
        )
        make_runner(tmp_path, train_cfg=train_cfg, default_hooks=hooks, **more).train()

    train(3)
    before = validated(tmp_path)
    (tmp_path / 'last_validation').write_text('0\n')
    train(5, load_from=str(tmp_path / 'iter_3.pth'), resume=True)
    assert validated(tmp_path)[len(before) :] == [4, 5]


def test_a_validation_by_itself_is_none_of_the_training(tmp_path):
    runner = make_runner(tmp_path)
    runner.train()
    (tmp_path / 'last_validation').write_text('0\n')
    runner.val()
    assert (tmp_path / 'last_validation').read_text() == '0\n'


def test_an_empty_note_of_validations_is_named(tmp_path):
    make_runner(tmp_path).train()
    (tmp_path / 'last_validation').write_text('')
    make_runner(tmp_path, load_from=str(tmp_path / 'iter_2.pth'), resume=True).train()
    logs = ''.join(log.read_text() for log in tmp_path.glob('*/*.log'))
    assert f'{tmp_path / "last_validation"} holds no number' in logs


def test_a_training_from_its_start_forgets_the_validations_before(tmp_path):
    """In the folder of another one, whose last validation was of the same step."""
    make_runner(tmp_path).train()
    with pytest.raises(KeyboardInterrupt):
        make_runner(tmp_path, val_evaluator=[Killed(1)]).train()
    make_runner(tmp_path, load_from=str(tmp_path / 'iter_2.pth'), resume=True).train()
    assert len(validated(tmp_path)) == 2
