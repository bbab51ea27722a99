"""Logged values that reach the host one iteration later, so that it need not wait for the GPU.

MMEngine reads the losses of each iteration when its step has been launched. So the GPU is idle
while the host prepares the next step. Here the values of an iteration are read after the step of
the next one has been launched, and earlier only where something looks at them.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from mmengine.hooks import LoggerHook, RuntimeInfoHook
from mmengine.registry import HOOKS
from mmengine.runner import Runner


class HostCopy:
    """Numbers and tensors of one element on their way to the host.

    Args:
        values (Mapping): By name.
    """

    def __init__(self, values: Mapping[str, Any]):
        self.values = dict(values)
        self.event = None
        for name, value in self.values.items():
            if not isinstance(value, torch.Tensor):
                continue
            self.values[name] = value.detach().to('cpu', non_blocking=True)
            if value.is_cuda:
                self.event = self.event or torch.cuda.Event()
        if self.event is not None:
            self.event.record()

    @property
    def is_late(self) -> bool:
        """Whether reading the values may wait for a GPU."""
        return self.event is not None

    def read(self) -> dict[str, Any]:
        """The values, on the host."""
        if self.event is not None:
            self.event.synchronize()
        return self.values


@HOOKS.register_module()
class LateRuntimeInfoHook(RuntimeInfoHook):
    """MMEngine's hook, which gives a GPU's losses to the message hub one iteration later.

    In an iteration whose losses are logged, in the last one, and for validation and checkpoints the
    hub has all values. What the log and the checkpoints hold is the same.
    """

    def __init__(self) -> None:
        self.pending: deque[HostCopy] = deque()

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: dict | None = None,
    ) -> None:
        """Begin to copy these values, and hand on those that are due."""
        if outputs is None:
            return
        self.pending.append(HostCopy(outputs))
        late = self.pending[-1].is_late and not self._is_logged(runner, batch_idx)
        self.settle(runner, keep=1 if late else 0)

    def settle(self, runner: Runner, keep: int = 0) -> None:
        """Hand all values on but those of the last ``keep`` iterations."""
        while len(self.pending) > keep:
            for name, value in self.pending.popleft().read().items():
                runner.message_hub.update_scalar(f'train/{name}', value)

    def before_val(self, runner: Runner) -> None:
        """Hand all values on."""
        self.settle(runner)
        super().before_val(runner)

    def after_train(self, runner: Runner) -> None:
        """Hand all values on."""
        self.settle(runner)
        super().after_train(runner)

    def _is_logged(self, runner: Runner, batch_idx: int) -> bool:
        if self.is_last_train_iter(runner) or self.end_of_epoch(runner.train_dataloader, batch_idx):
            return True
        loggers = (hook for hook in runner.hooks if isinstance(hook, LoggerHook))
        return any(self.every_n_inner_iters(batch_idx, hook.interval) for hook in loggers)
