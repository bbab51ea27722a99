"""A training whose loss is not finite ends, and names the iteration and the module at fault."""

from types import SimpleNamespace

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper, OptimWrapperDict
from torch import nn
from torch.optim import SGD

from tests.engine.toy import ToyModel, make_runner
from vim_mm.engine.watching.late_values import HostCopy
from vim_mm.engine.watching.nonfinite import NonFiniteLossError, NonFiniteLossHook

LENGTH = dict(train_cfg=dict(by_epoch=False, max_iters=4, val_interval=1000))


class Spoil(torch.autograd.Function):
    """The identity, which makes the first entry of its output or its gradient NaN."""

    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        return (
            x.index_fill(0, torch.tensor(0, device=x.device), torch.nan)
            if where == 'forward'
            else x.clone()
        )

    @staticmethod
    def backward(ctx, grad):
        if ctx.where == 'backward':
            grad = grad.index_fill(0, torch.tensor(0, device=grad.device), torch.nan)
        return grad, None


class Faulty(nn.Module):
    """Does ``what`` in the call of that number, and when it is repeated: the draw tells."""

    def __init__(self, where: str, iteration: int):
        super().__init__()
        self.where = where
        self.iteration = iteration
        self.calls = 0
        self.draw = None

    def forward(self, x):
        draw = torch.rand(())
        if self.calls == self.iteration:
            self.draw = draw
        self.calls += 1
        return Spoil.apply(x, self.where) if torch.equal(draw, self.draw or draw + 1) else x


class FaultyModel(ToyModel):
    def __init__(self, where: str, iteration: int = 2):
        super().__init__()
        self.head = nn.Sequential(self.head, Faulty(where, iteration), nn.ReLU())


@pytest.fixture(params=['at once', 'late'])
def when(request, monkeypatch):
    """Losses are read in their iteration, or in the next one, as those of a GPU are."""
    monkeypatch.setattr(HostCopy, 'is_late', request.param == 'late')
    return request.param


def test_the_first_module_at_fault_is_named(tmp_path, when):
    runner = make_runner(tmp_path, FaultyModel('forward'), **LENGTH)
    with pytest.raises(NonFiniteLossError) as caught:
        runner.train()
    assert 'iteration 3 is nan' in str(caught.value)
    assert 'the output of head.1 (Faulty), whose input is finite' in str(caught.value)
    assert {path.name for path in tmp_path.glob('*.pth')} == {'iter_1.pth', 'iter_2.pth'}


@pytest.mark.parametrize('interval', [1, 1000])
def test_weights_spoilt_by_a_gradient_are_named(tmp_path, when, interval):
    hooks = hooks_of(interval=interval)
    runner = make_runner(tmp_path, FaultyModel('backward', 1), default_hooks=hooks, **LENGTH)
    with pytest.raises(NonFiniteLossError) as caught:
        runner.train()
    assert 'iteration 3 is nan' in str(caught.value)
    assert 'weights' in str(caught.value) and 'the gradient of the step before' in str(caught.value)


def hooks_of(**checkpoint):
    return dict(checkpoint=dict(type='CheckpointHook', by_epoch=False, **checkpoint))


def test_a_checkpoint_before_the_fault_is_kept(tmp_path, when):
    hooks = hooks_of(interval=1, max_keep_ckpts=1)
    with pytest.raises(NonFiniteLossError):
        make_runner(tmp_path, FaultyModel('forward'), default_hooks=hooks, **LENGTH).train()
    assert [path.name for path in tmp_path.glob('*.pth')] == ['iter_2.pth']


def test_an_error_that_follows_from_the_fault_does_not_hide_it(tmp_path, when):
    class Picky(FaultyModel):
        def forward(self, inputs, mode='tensor'):
            if not all(torch.isfinite(p).all() for p in self.parameters()):
                raise ValueError('as a matcher says')
            return super().forward(inputs, mode)

    runner = make_runner(
        tmp_path, Picky('forward', 1), default_hooks=hooks_of(interval=1000), **LENGTH
    )
    with pytest.raises(NonFiniteLossError, match='iteration 2 is nan'):
        runner.train()


def test_a_training_that_is_stopped_looks_at_its_last_loss(tmp_path, when):
    class Stop(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            runner.train_loop.stop_training = runner.iter == 2

    options = dict(default_hooks=hooks_of(interval=1000), custom_hooks=[Stop()])
    with pytest.raises(NonFiniteLossError):
        make_runner(tmp_path, FaultyModel('forward'), **options, **LENGTH).train()


def test_layers_that_are_thawed_meanwhile(tmp_path, when):
    class Thaw(Hook):
        priority = 'VERY_HIGH'

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            runner.model.backbone.requires_grad_(runner.iter > 2)

    options = dict(default_hooks=hooks_of(interval=1000), custom_hooks=[Thaw()])
    with pytest.raises(NonFiniteLossError, match=r'the output of head.1 .*input is finite'):
        make_runner(tmp_path, FaultyModel('forward'), **options, **LENGTH).train()


def test_steps_without_a_loss(tmp_path, when):
    class Adversarial(FaultyModel):
        def train_step(self, data, optim_wrapper):
            log = super().train_step(data, optim_wrapper)
            return {'other': log['loss']} if self.head[1].calls % 2 == 0 else log

    options = dict(default_hooks=hooks_of(interval=1000))
    with pytest.raises(NonFiniteLossError, match=r'the output of head.1 .*input is finite'):
        make_runner(tmp_path, Adversarial('forward'), **options, **LENGTH).train()


def test_several_optimizers(tmp_path, when):
    model = FaultyModel('forward')
    parts = {name: OptimWrapper(SGD(getattr(model, name).parameters(), lr=0.1))
             for name in ('backbone', 'head')}  # fmt: skip

    def train_step(data, optim_wrapper):
        loss = model(data[0].to(model.head[0].weight.device), 'loss')['loss']
        loss.backward()
        for part in optim_wrapper.values():
            part.step()
        return {'loss': loss}

    model.train_step = train_step
    options = dict(
        optim_wrapper=OptimWrapperDict(**parts),
        param_scheduler=None,
        default_hooks=hooks_of(interval=1000),
    )
    with pytest.raises(NonFiniteLossError, match=r'the output of head.1 .*input is finite'):
        make_runner(tmp_path, model, **options, **LENGTH).train()


def test_a_loss_that_is_at_fault_itself_is_told_from_modules(tmp_path, when):
    class Infinite(ToyModel):
        def forward(self, inputs, mode='tensor'):
            out = super().forward(inputs, mode)
            return {'loss': out['loss'] / 0} if mode == 'loss' else out

    with pytest.raises(NonFiniteLossError, match=r'iteration 1 is inf.*made by the loss itself'):
        make_runner(tmp_path, Infinite(), **LENGTH).train()


@pytest.mark.parametrize(('scale', 'skipped'), [(65536.0, True), (1.0, False), (None, False)])
def test_steps_that_a_loss_scaler_skips_do_not_count(scale, skipped):
    wrapper = SimpleNamespace()
    if scale is not None:
        wrapper.loss_scaler = torch.amp.GradScaler('cpu', init_scale=scale)
        wrapper.loss_scaler.scale(torch.ones(()))
    assert NonFiniteLossHook._is_skipped(wrapper) == skipped
