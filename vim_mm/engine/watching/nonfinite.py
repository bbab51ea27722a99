"""Stops a training whose loss is NaN or infinite, and says where the first such value arose."""

import math
import re
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from mmengine.dist import all_gather_object, all_reduce
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper, revert_sync_batchnorm
from mmengine.optim import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from mmengine.registry import HOOKS
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from vim_mm.engine.batches.batch import MicroBatches, micro_batch_number
from vim_mm.engine.batches.randomness import seed_iteration
from vim_mm.engine.watching.late_values import HostCopy, is_looked_at
from vim_mm.errors import UserError


class NonFiniteLossError(UserError, RuntimeError):
    """The loss of an iteration is NaN or infinite."""


def _tensors(value) -> Iterator[torch.Tensor]:
    """The floating-point tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _is_finite(value) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in _tensors(value))


def _trained(wrapper: OptimWrapper | OptimWrapperDict) -> list[nn.Parameter]:
    """What a step changes. To walk through the modules instead takes thirty times as long."""
    wrappers = wrapper.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper]
    groups = (group for each in wrappers for group in each.optimizer.param_groups)
    return [param for group in groups for param in group['params'] if param.requires_grad]


class _Found(Exception):
    """Ends a replay at the first module at fault."""


def first_fault(model: nn.Module, step, whole: bool = False) -> str | None:
    """Name the first module that makes a value that is not finite of values that are.

    Args:
        model (nn.Module): Its parameters are looked at first.
        step (Callable): Runs the model forward.
        whole (bool): Run the step to its end in any case: other processes take part in it.

    Returns:
        str | None: What is at fault, None where all outputs of all modules are finite.
    """
    faults = []

    def found(fault: str) -> None:
        faults.append(fault)
        if not whole:
            raise _Found

    def check(name: str, module: nn.Module):
        def hook(_, args: tuple, kwargs: dict, outputs) -> None:
            if not faults and not _is_finite(outputs):
                given = 'finite' if _is_finite((args, kwargs)) else 'already not finite'
                kind = type(module).__name__
                found(f'the output of {name} ({kind}), whose input is {given}')

        return hook

    # Modules inside of one end before it, so the first to be found is the innermost.
    handles = [
        module.register_forward_hook(check(name, module), with_kwargs=True)
        for name, module in ((_plain_name(n), m) for n, m in model.named_modules())
        if name  # the output of the whole model is the loss
    ]
    try:
        for name, param in model.named_parameters():
            if not _is_finite(param):
                found(
                    f'the weights {_plain_name(name)} before the step, so it was the gradient of '
                    'the step before'
                )
                break
        step()
    except _Found:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return faults[0] if faults else None


def _plain_name(name: str) -> str:
    """The name of a module or parameter without what FSDP puts around it."""
    return re.sub(r'(^|\.)_fsdp_wrapped_module(?=\.|$)', '', name).removeprefix('.')


@dataclass
class _Step:
    """What is known of a step until its loss is."""

    iteration: int
    batch: Any
    params: list[nn.Parameter]
    weights: list[torch.Tensor] | None
    loss: HostCopy


@HOOKS.register_module()
class NonFiniteLossHook(Hook):
    """Ends a training whose loss is NaN or infinite.

    By then the optimizer has spoilt the weights, so a copy of those before the step is kept, and
    the iteration is repeated from it with the same batch and the same random numbers, this time
    with hooks on every module. What it costs is one copy of the weights in each step, and their
    size in memory, twice if ``late``.

    Under FSDP the processes tell each other in every iteration whether their losses are finite,
    because they can only replay one together.

    MMDetection's CheckInvalidLossHook asserts that every 50th loss is finite: by then the weights
    are spoilt, nobody knows by what, and a loss scaler's skipped step ends the training.

    Steps that a loss scaler skips do not count (AmpOptimWrapper), unless its scale is at 1 or
    below: then it is not the scale that is too large.

    Args:
        late (bool): Look at the loss of a GPU one iteration later, which does not make the host
            wait, unless the log or a checkpoint takes it. Whoever runs the training calls
            :meth:`settle` before a further checkpoint is saved and when the training breaks off,
            as VimRunner does. Nothing is late under FSDP or with a loss scaler.
    """

    # Before a checkpoint is saved.
    priority = 'HIGH'

    def __init__(self, late: bool = False):
        self.late = late
        self.params: list[nn.Parameter] = []
        self.weights: list[torch.Tensor] | None = None
        self.spare: list[list[torch.Tensor]] = []  # copies that no step needs any more
        self.pending: deque[_Step] = deque()

    def before_train_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        """Copy the weights, unless a loss scaler protects them."""
        if isinstance(runner.optim_wrapper, AmpOptimWrapper):
            return
        self.params = _trained(runner.optim_wrapper)
        self.weights = self.spare.pop() if self.spare else None
        with torch.no_grad():
            if self.weights is None or len(self.weights) != len(self.params):  # or a layer froze
                self.weights = [param.clone() for param in self.params]
            else:
                # One launch for all. PyTorch has no public name for it; copy_ is a launch for each.
                torch._foreach_copy_(self.weights, self.params)

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        """Look at the losses that are due.

        Raises:
            NonFiniteLossError: One is NaN or infinite.
        """
        if not outputs or 'loss' not in outputs:
            self._free(self.weights)
            return
        loss = HostCopy({'loss': outputs['loss']})
        self.pending.append(_Step(runner.iter, data_batch, self.params, self.weights, loss))
        late = self.late and loss.is_late and not is_looked_at(self, runner, batch_idx)
        sharded = isinstance(runner.model, FullyShardedDataParallel)
        waits = sharded or isinstance(runner.optim_wrapper, AmpOptimWrapper)
        self.settle(runner, keep=1 if late and not waits else 0)

    def after_train(self, runner) -> None:
        """Look at all losses."""
        self.settle(runner)

    def before_val(self, runner) -> None:
        """Look at all losses."""
        self.settle(runner)

    def settle(self, runner, keep: int = 0) -> None:
        """Look at the losses of all steps but the last ``keep``.

        Raises:
            NonFiniteLossError: One is NaN or infinite.
        """
        while len(self.pending) > keep:
            self._look(runner, self.pending.popleft())

    def _look(self, runner, step: _Step) -> None:
        loss = float(step.loss.read()['loss'])
        sharded = isinstance(runner.model, FullyShardedDataParallel)
        fails = not (math.isfinite(loss) or self._is_skipped(runner.optim_wrapper))
        if not (_in_any_process(fails) if sharded else fails):
            self._free(step.weights)
            return
        fault = self._replay(runner, step, sharded)
        if sharded:
            loss, fault = _agree_on_fault(loss, fault)
        fault = fault or 'made by the loss itself or by backward: all modules give finite ones'
        raise NonFiniteLossError(
            f'The loss of iteration {step.iteration + 1} is {loss}. The first value that is not '
            f'finite is {fault}.'
        )

    def _free(self, weights: list[torch.Tensor] | None) -> None:
        if weights is not None:
            self.spare.append(weights)

    @staticmethod
    def _is_skipped(optim_wrapper) -> bool:
        scaler = getattr(optim_wrapper, 'loss_scaler', None)
        return scaler is not None and scaler.is_enabled() and scaler.get_scale() > 1

    def _replay(self, runner, step: _Step, sharded: bool) -> str | None:
        # Copies of later steps first: they hold what was frozen in this one.
        later = [(each.params, each.weights) for each in reversed(self.pending)]
        copies = [(self.params, self.weights), *later, (step.params, step.weights)]
        with torch.no_grad():
            for params, weights in copies:
                for param, before in zip(params, weights or ()):
                    param.copy_(before)
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        if not sharded:
            model = revert_sync_batchnorm(model)  # the other processes do not take part
        batches = step.batch if isinstance(step.batch, MicroBatches) else (step.batch,)

        wrapper = runner.optim_wrapper
        # Of several wrappers none knows the dtype of the whole model.
        several = isinstance(wrapper, OptimWrapperDict)
        context = (lambda _: nullcontext()) if several else wrapper.optim_context

        def forward() -> None:
            for index, batch in enumerate(batches):
                seed_iteration(runner.seed, step.iteration, micro_batch_number(index))
                with torch.no_grad(), context(model):
                    data = model.data_preprocessor(batch, True)
                    if sharded:  # by the wrapper, which gathers the weights
                        runner.model(**data, mode='loss')
                    else:
                        model._run_forward(data, mode='loss')

        return first_fault(runner.model if sharded else model, forward, whole=sharded)


def _in_any_process(flag: bool) -> bool:
    flags = torch.tensor([float(flag)])
    all_reduce(flags, op='max')
    return bool(flags.item())


def _agree_on_fault(loss: float, fault: str | None) -> tuple[float, str | None]:
    """Of the first process with a fault, or with a loss that is not finite."""
    told = all_gather_object((loss, fault))
    told.sort(key=lambda each: (each[1] is None, math.isfinite(each[0])))
    return told[0]
