"""Logged values that reach the host one iteration later, so that it need not wait for the GPU.

MMEngine reads the losses of each iteration when its step has been launched. So the GPU is idle
while the host prepares the next step. Here the values of an iteration are read after the step of
the next one has been launched, and earlier only where something looks at them.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from mmengine.hooks import CheckpointHook, Hook, LoggerHook, RuntimeInfoHook
from mmengine.registry import HOOKS
from mmengine.runner import Runner


class HostCopy:
    """Numbers and tensors of one element on their way to the host.

    Args:
        values (Mapping): By name.
    """

    def __init__(self, values: Mapping[str, Any]):
        self.values = dict(values)
        devices = set()
        for name, value in self.values.items():
            if isinstance(value, torch.Tensor):
                self.values[name] = value.detach().to('cpu', non_blocking=value.is_cuda)
                devices |= {value.device} if value.is_cuda else set()
        self.events = [torch.cuda.current_stream(device).record_event() for device in devices]

    @property
    def is_late(self) -> bool:
        """Whether reading the values may wait for a GPU."""
        return bool(self.events)

    def read(self) -> dict[str, Any]:
        """The values, on the host."""
        for event in self.events:
            event.synchronize()
        return self.values


def is_looked_at(hook: Hook, runner: Runner, batch_idx: int) -> bool:
    """Whether the log or a checkpoint takes the values of this iteration, or training ends."""
    if hook.is_last_train_iter(runner) or hook.end_of_epoch(runner.train_dataloader, batch_idx):
        return True
    return any(
        (isinstance(other, LoggerHook) and hook.every_n_inner_iters(batch_idx, other.interval))
        # Before the hook removes older checkpoints, and in all processes.
        or (isinstance(other, CheckpointHook) and hook.every_n_train_iters(runner, other.interval))
        for other in runner.hooks
    )


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
        late = self.pending[-1].is_late and not is_looked_at(self, runner, batch_idx)
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
