"""Training by MMEngine's strategies, such as FSDP, in place of :class:`VimRunner`.

A config asks for it with ``runner_type = 'FlexibleRunner'`` and a ``strategy``;
``configs/_base_/fsdp.py`` is one that shards a model layer by layer. Three things that
:class:`VimRunner` does MMEngine's runner does not: a checkpoint may be left half written when the
process is killed, validation has each process' own buffers, and the host waits for the losses.
"""

from mmengine._strategy import BaseStrategy
from mmengine.config import Config
from mmengine.dist import get_world_size
from mmengine.hooks import Hook
from mmengine.registry import FUNCTIONS, RUNNERS
from mmengine.runner import FlexibleRunner, Runner
from torch import nn

from vim_mm.engine.batches.batch import plan_batch
from vim_mm.engine.batches.samples import build_dataloader
from vim_mm.engine.mmengine_patches import activate
from vim_mm.engine.processes import choose_allocator, init_process_group
from vim_mm.engine.runner import VimRunner
from vim_mm.engine.saving.checkpoint_hook import durable
from vim_mm.engine.screen import opened
from vim_mm.engine.watching.summary import SummaryHook
from vim_mm.errors import UserValueError
from vim_mm.models.block import Block


@FUNCTIONS.register_module()
def wrap_vim_blocks(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """FSDP's ``auto_wrap_policy``: each layer of a backbone is a unit, all else another."""
    return recurse or isinstance(module, Block)


@RUNNERS.register_module()
class CheckedFlexibleRunner(FlexibleRunner):
    """MMEngine's FlexibleRunner, on the same samples; :func:`build_runner` gives it our hooks."""

    def build_strategy(self, *args, **kwargs) -> BaseStrategy:
        """As in FlexibleRunner; a tool's screen shows a part of its logger's records."""
        strategy = super().build_strategy(*args, **kwargs)
        if (screen := opened()) is not None:
            screen.attach(strategy.logger)
        return strategy

    def register_hooks(self, *args, **kwargs) -> None:
        """As in FlexibleRunner, and what a tool's screen tells of the run."""
        super().register_hooks(*args, **kwargs)
        if opened() is not None:
            self.register_hook(SummaryHook())

    def register_hook(self, hook: Hook | dict, priority=None) -> None:
        """As in FlexibleRunner; a checkpoint is removed when what replaces it is written."""
        super().register_hook(durable(hook), priority)

    @staticmethod
    def build_dataloader(dataloader, seed: int | None = None, diff_rank_seed: bool = False):
        """As in FlexibleRunner, of a dataset whose samples are reproducible and checked."""
        return build_dataloader(FlexibleRunner.build_dataloader, dataloader, seed, diff_rank_seed)


def build_runner(cfg: Config) -> Runner | FlexibleRunner:
    """The runner that a config asks for.

    Args:
        cfg (Config): As the tools read it. Without ``runner_type`` it gets a :class:`VimRunner`;
            with 'FlexibleRunner', MMEngine's runner for its ``strategy``.

    Raises:
        ValueError: The config asks FSDP to clip gradients: MMEngine would take the norm of the
            part of a gradient that each process has, and clip differently in each. Or it asks a
            strategy to resume: MMEngine would go on without weights that the checkpoint lacks. Or
            the batch of the recipe needs accumulated gradients.
    """
    activate()
    if cfg.get('runner_type') is None:
        return VimRunner.from_cfg(cfg)
    sharded = 'FSDP' in cfg.get('strategy', {}).get('type', '')
    if sharded and cfg.optim_wrapper.get('clip_grad') is not None:
        raise UserValueError(
            'MMEngine clips gradients by the norm of a shard under FSDP: set '
            'optim_wrapper.clip_grad=None'
        )
    if cfg.get('resume'):
        raise UserValueError(
            "MMEngine's strategies resume from checkpoints that lack weights without a word: "
            'start from the weights of one by load_from'
        )
    choose_allocator()
    # Before MMEngine, which would ask for CUDA.
    if cfg.launcher != 'none':
        init_process_group(cfg.launcher, **cfg.env_cfg.get('dist_cfg', {}))
    size = cfg.train_dataloader.batch_size
    batch = plan_batch(size, get_world_size(), cfg.get('auto_scale_lr'))
    if batch.counts > 1:
        raise UserValueError(
            f"MMEngine's strategies do not accumulate gradients here, and {batch.processes} x "
            f'{batch.size} images are less than the {batch.total} of the recipe: take more '
            'processes, a larger --batch-per-gpu, or --scale-lr'
        )
    cfg.train_dataloader.batch_size = batch.size
    if cfg.runner_type == 'FlexibleRunner':
        cfg.runner_type = 'CheckedFlexibleRunner'
    ours = (
        'ClassesHook',
        'LearningHook',
        'ProvenanceHook',
        'SeedIterationHook',
        'NonFiniteLossHook',
    )
    own = [dict(type=hook) for hook in ours]
    cfg.custom_hooks = [*(cfg.get('custom_hooks') or []), *own]
    runner = RUNNERS.build(cfg)
    runner.logger.info(batch)
    return runner
