"""A hook for benchmarks/several_gpus.py, which configs find by ``custom_imports``."""

from mmengine.dist import all_reduce
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner


@HOOKS.register_module()
class MeanLossHook(Hook):
    """What is logged of an iteration is the mean over processes; MMEngine logs the first one's.

    With equal shares, and losses that are means over pictures, it is that of the whole batch, as
    a single process logs it.
    """

    priority = 'HIGHEST'  # before the hooks that read the losses

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: dict | None = None,
        outputs: dict | None = None,
    ) -> None:
        for name, value in (outputs or {}).items():
            mean = value.detach().clone().float()
            all_reduce(mean, 'mean')
            outputs[name] = mean
