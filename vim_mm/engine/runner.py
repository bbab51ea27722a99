"""Drives training and testing for the tools: MMEngine's runner, made to work without CUDA as well.

This module and :mod:`vim_mm.engine.processes` alone know what differs on a machine without a GPU:
the devices of DistributedDataParallel, and SyncBN; and the backend of the process group.
"""

import copy
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from mmengine.dist import broadcast, is_distributed, master_only
from mmengine.evaluator import Evaluator
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.model import BaseDataPreprocessor, is_model_wrapper, revert_sync_batchnorm
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import MODEL_WRAPPERS, RUNNERS
from mmengine.runner import BaseLoop, Runner
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from vim_mm.checkpoints.file import NotACheckpointError
from vim_mm.checkpoints.reading import naming_file
from vim_mm.checkpoints.state import require_training
from vim_mm.engine.batches.batch import AccumulationHook, Batch, check_pooled_norms, plan_batch
from vim_mm.engine.batches.randomness import NumberedSampler, SeedIterationHook
from vim_mm.engine.batches.samples import SampleError, build_dataloader, ignored_labels
from vim_mm.engine.checks.classes import ClassesHook
from vim_mm.engine.checks.learning import LearningHook
from vim_mm.engine.checks.unread import misspelled_keys
from vim_mm.engine.determinism import any_algorithms, sums_in_any_order
from vim_mm.engine.mmengine_patches import activate
from vim_mm.engine.optimization.schedule import fast_forward, reset_values, same_schedule
from vim_mm.engine.processes import (
    choose_allocator,
    init_process_group,
    threads_of_environment,
)
from vim_mm.engine.saving import beginning
from vim_mm.engine.saving.checkpoint_hook import durable
from vim_mm.engine.screen import opened
from vim_mm.engine.watching.late_values import LateRuntimeInfoHook
from vim_mm.engine.watching.missed_validation import MissedValidationHook
from vim_mm.engine.watching.nonfinite import NonFiniteLossError, NonFiniteLossHook
from vim_mm.engine.watching.provenance_hook import ProvenanceHook
from vim_mm.engine.watching.summary import SummaryHook
from vim_mm.errors import UserValueError
from vim_mm.whole_file import whole_file


class SameBuffersHook(Hook):
    """Validates all processes with the buffers that a checkpoint would hold: those of process 0.

    Without SyncBN each process has running statistics of its own. MMEngine's SyncBuffersHook takes
    their mean at each validation, so that a checkpoint would depend on when the last one was.
    """

    def before_val(self, runner: Runner) -> None:
        """Copy the buffers of process 0 to all."""
        for buffer in runner.model.buffers():
            broadcast(buffer)


# PyTorch's and MMSegmentation's errors of a batch.
_OF_SIZES = re.compile(
    r'stack expects each tensor to be equal size, but got.*|The image size in a batch should be.*'
)


@contextmanager
def _telling_sizes() -> Iterator[None]:
    """SampleError in place of the libraries' when a batch is made of images of several sizes."""
    try:
        yield
    except Exception as error:
        sizes = _OF_SIZES.search(str(error))
        if sizes is None:
            raise
        raise SampleError(
            'the images of a batch must have one size: crop them (RandomCrop) or resize them '
            f'(Resize with keep_ratio=False) in the pipeline of the data set ({sizes[0]})'
        ) from error


@RUNNERS.register_module()
class VimRunner(Runner):
    """MMEngine's Runner, with eleven differences.

    - A step of the optimizer has the batch of the recipe, ``auto_scale_lr['base_batch_size']``, on
      any number of processes, see :mod:`vim_mm.engine.batches.batch`.
    - To make one calls :func:`vim_mm.activate`: it reads checkpoints as data.
    - Distributed runs work without CUDA, see :mod:`vim_mm.engine.processes`. There, batch
      statistics are those of each process: SyncBN needs CUDA, and is replaced by BN.
    - Distributed validation sees the model that a checkpoint would hold, see
      :class:`SameBuffersHook`.
    - Resuming and testing insist that the checkpoint fits the whole model, and was trained with the
      config's discretization and other switches, see :class:`ProvenanceHook`. Only a training that
      starts from other weights (``load_from``) may lack or add some, as the head for other classes
      does; the backbone sees to its own.
    - Heads that have not the classes of the data set, and a training that cannot learn from its
      data, are errors before the first iteration, see :class:`ClassesHook`, :class:`LearningHook`.
    - A checkpoint file appears whole or not at all, whenever the process is killed, and those
      before it are removed later: :class:`DurableCheckpointHook` stands in for MMEngine's. One
      training at a time writes into a folder, see :mod:`vim_mm.engine.saving.lock`. A validation
      in which it was killed is made when it is resumed, see :class:`MissedValidationHook`.
    - The host does not wait for the GPU in each iteration: losses are read an iteration later, see
      :mod:`vim_mm.engine.watching.late_values`. Meanwhile batches are copied from pinned memory.
    - Segments of a GPU's memory grow, see :mod:`vim_mm.engine.processes`.
    - ``randomness=dict(deterministic=True)`` sets what cuBLAS needs for it in the environment, and
      lets metrics count, see :meth:`build_evaluator`.
    - ``launcher`` is 'none', 'pytorch' or 'slurm'; MMEngine's 'mpi' is not supported.

    They are hooks where MMEngine calls one. What is overridden below it asks no hook for: what it
    builds, in which environment, by what it loads, and what becomes of an error.
    """

    batch: Batch | None = None
    _accumulating: OptimWrapper | None = None
    _testing = False
    _scheduler_cfg = None
    _scheduler_states = None

    def __init__(self, *args, **kwargs):
        activate()
        super().__init__(*args, **kwargs)

    def build_logger(self, *args, **kwargs) -> MMLogger:
        """As in Runner; a tool's screen shows a part of it, see :mod:`vim_mm.engine.screen`."""
        logger = super().build_logger(*args, **kwargs)
        if (screen := opened()) is not None:
            screen.attach(logger)
        return logger

    def setup_env(self, env_cfg: dict) -> None:
        """Join the process group before MMEngine, which would ask for CUDA, gets to it."""
        choose_allocator()
        if self.distributed and not is_distributed():
            init_process_group(self.launcher, **env_cfg.get('dist_cfg', {}))
        super().setup_env(env_cfg)
        if torch.cuda.is_available():
            # The loader's workers need the cores; the same for every method and launcher.
            torch.set_num_threads(threads_of_environment())

    def build_evaluator(self, evaluator) -> Evaluator:
        """As in Runner, with metrics that a deterministic run does not refuse.

        MMSegmentation's IoU counts pixels by ``torch.histc``, for which PyTorch knows no
        deterministic form on a GPU. Whole numbers have the same sum in any order.
        """
        built = super().build_evaluator(evaluator)
        process = built.process

        def process_in_any_order(*args, **kwargs) -> None:
            with any_algorithms():
                process(*args, **kwargs)

        built.process = process_in_any_order
        return built

    @staticmethod
    def build_dataloader(dataloader, seed: int | None = None, diff_rank_seed: bool = False):
        """As in Runner, of a dataset whose samples are reproducible and checked."""
        return build_dataloader(Runner.build_dataloader, dataloader, seed, diff_rank_seed)

    def set_randomness(self, seed, diff_rank_seed: bool = False, deterministic: bool = False):
        """As in Runner; a deterministic run gets the workspaces that cuBLAS needs for one."""
        if deterministic:
            os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
        super().set_randomness(seed, diff_rank_seed, deterministic)

    def wrap_model(self, model_wrapper_cfg: dict | None, model: nn.Module) -> nn.Module:
        """Move the model to its device and wrap it for distributed training."""
        if self.deterministic and (kinds := sums_in_any_order(model)):
            self.logger.warning(
                'randomness.deterministic=True does not cover this model on a GPU: the gradients '
                f'of {", ".join(kinds)} of mmcv are sums in any order, and two runs differ in '
                'their last bits.'
            )
        if self.distributed and not torch.cuda.is_available():
            self.logger.info(
                'SyncBN needs CUDA: such layers, if any, become BN, and each process normalizes by '
                'its own part of the batch.'
            )
            self.cfg.pop('sync_bn', None)
            model = revert_sync_batchnorm(model)
            given = model_wrapper_cfg or {}
            kind = given.get('type', 'MMDistributedDataParallel')
            if issubclass(
                MODEL_WRAPPERS.get(kind) if isinstance(kind, str) else kind, DistributedDataParallel
            ):
                model_wrapper_cfg = {
                    'broadcast_buffers': False,
                    'find_unused_parameters': self.cfg.get('find_unused_parameters', False),
                    **given,
                    'device_ids': None,
                }
        for module in model.modules():
            if isinstance(module, BaseDataPreprocessor):
                # MMSegmentation's and MMPretrain's have no argument for it.
                module._non_blocking = True
        return super().wrap_model(model_wrapper_cfg, model)

    def register_default_hooks(self, hooks: dict | None = None) -> None:
        """As in Runner, with losses that the host does not wait for."""
        super().register_default_hooks({'runtime_info': LateRuntimeInfoHook(), **(hooks or {})})

    def register_hook(self, hook: Hook | dict, priority=None) -> None:
        """As in Runner; MMEngine's CheckpointHook is a DurableCheckpointHook."""
        super().register_hook(durable(hook), priority)

    def register_hooks(self, *args, **kwargs) -> None:
        """As in Runner, and those hooks that no run of ours goes without."""
        super().register_hooks(*args, **kwargs)
        self.register_hook(AccumulationHook())
        self.register_hook(ClassesHook())
        self.register_hook(LearningHook())
        self.register_hook(ProvenanceHook())
        self.register_hook(SeedIterationHook())
        self.register_hook(NonFiniteLossHook(late=True))
        self.register_hook(MissedValidationHook())
        if self.distributed:
            self.register_hook(SameBuffersHook())
        if opened() is not None:
            self.register_hook(SummaryHook())

    def build_train_loop(self, loop) -> BaseLoop:
        """As in Runner, for the batch of the recipe.

        Raises:
            ValueError: The processes cannot make this batch, or an epoch has less images.
        """
        if isinstance(loop, dict) and self.batch is None:
            self._make_batch()
        loop = super().build_train_loop(loop)
        loader = loop.dataloader
        if len(loader) == 0 and getattr(loader.sampler, 'by_epoch', False):
            raise UserValueError(
                f'an epoch has {len(loader.dataset)} images, less than the {self.batch.total} of '
                'a step'
            )
        return loop

    def _make_batch(self) -> None:
        loader = self._train_dataloader
        given = isinstance(loader, DataLoader)
        size = loader.batch_size if given else loader.get('batch_size', 1)
        self.batch = plan_batch(size, self.world_size, self.auto_scale_lr)
        self.logger.info(self.batch)
        check_pooled_norms(self.model, self.batch)
        if given:
            if (self.batch.size, self.batch.counts) != (size, 1):
                raise UserValueError(
                    'train_dataloader must be a config, not an object, so that its batches fit '
                    'the batch of the recipe'
                )
            return
        inner = self.model.module if is_model_wrapper(self.model) else self.model
        # A copy: the config that a checkpoint keeps does not depend on the number of processes.
        self._train_dataloader = {
            **loader,
            'batch_size': self.batch.size,
            'micro_batches': self.batch.counts,
            'ignored': ignored_labels(inner),
        }
        if self.batch.recipe is not None and not loader.get('batch_sampler'):
            # A step has the images of the recipe, also at the end of an epoch.
            self._train_dataloader['drop_last'] = True

    def build_optim_wrapper(self, optim_wrapper) -> OptimWrapper | OptimWrapperDict:
        """As in Runner, accumulating the gradients of the micro-batches.

        Raises:
            ValueError: The optimizer is to accumulate by itself, or there are several, or it is
                an object already.
        """
        for key, similar in misspelled_keys(optim_wrapper, self.model):
            self.logger.warning(
                f'optim_wrapper.paramwise_cfg.custom_keys.{key} has no effect: '
                f'it stands in no name of a parameter; did you mean {similar!r}?'
            )
        counts = 1 if self.batch is None else self.batch.counts
        if counts == 1:
            return super().build_optim_wrapper(optim_wrapper)
        if isinstance(optim_wrapper, OptimWrapper) and optim_wrapper is self._accumulating:
            return optim_wrapper
        if not isinstance(optim_wrapper, dict) or 'optimizer' not in optim_wrapper:
            raise UserValueError(
                'only an optim_wrapper of one optimizer, as a config, can accumulate'
            )
        if optim_wrapper.get('accumulative_counts', 1) != 1:
            raise UserValueError(
                'optim_wrapper.accumulative_counts follows from the batch of the recipe, '
                'auto_scale_lr.base_batch_size: remove one of them'
            )
        accumulating = {**optim_wrapper, 'accumulative_counts': counts}
        wrapper = self._accumulating = super().build_optim_wrapper(accumulating)
        begin = wrapper.initialize_count_status
        # The wrapper counts micro-batches, the loop counts steps.
        wrapper.initialize_count_status = lambda model, done, end: begin(
            model, done * counts, end * counts
        )
        return wrapper

    @property
    def insists_on_checkpoint(self) -> bool:
        """Whether a checkpoint must be of the same function, and fit the whole model."""
        return self._resume or self._testing

    def train(self) -> nn.Module:
        """As in Runner.

        Raises:
            FolderTakenError: Another training writes into the folder.
            NonFiniteLossError: Also where the step after such a loss raises another error.
            SampleError: The images of a batch have several sizes.
        """
        try:
            with beginning.locked(self), _telling_sizes():
                return super().train()
        except NonFiniteLossError:
            raise
        except Exception:
            self._settle_after_error()
            raise

    def _settle(self) -> None:
        """Read the losses that have not been read yet."""
        for hook in self.hooks:
            if isinstance(hook, LateRuntimeInfoHook | NonFiniteLossHook):
                hook.settle(self)

    def _settle_after_error(self) -> None:
        """Read them for the one that led to the error; raises nothing but NonFiniteLossError."""
        try:
            self._settle()
        except NonFiniteLossError:
            raise
        except Exception:
            pass  # of a broken device, say: the first error tells more

    def test(self) -> dict:
        """Test the model; its checkpoint must fit.

        Raises:
            SampleError: The images of a batch have several sizes.
        """
        self._testing = True
        with _telling_sizes():
            return super().test()

    def load_or_resume(self) -> None:
        """As in Runner; says which checkpoint it resumes, or that its folder has none.

        Raises:
            PointerError: ``last_checkpoint`` names none of the run.
        """
        if self._resume and self._load_from is None and not self._has_loaded:
            self._load_from = beginning.find_last(self)
            self._resume = self._load_from is not None
        super().load_or_resume()

    def load_checkpoint(
        self, filename: str, map_location='cpu', strict: bool | None = None, **kwargs
    ) -> dict:
        """As in Runner; ``strict`` None is True when resuming or testing."""
        if strict is None:
            strict = self.insists_on_checkpoint
        try:
            with naming_file(filename):
                checkpoint = super().load_checkpoint(filename, map_location, strict, **kwargs)
        except NotACheckpointError as error:
            if not self._resume or self._testing:
                raise
            raise type(error)(f'{error}{beginning.other_choices(self, filename)}') from error
        if self._resume and not self._testing:
            require_training(str(filename), checkpoint)
        self._scheduler_states = checkpoint.get('param_schedulers')
        return checkpoint

    def build_param_scheduler(self, scheduler) -> list | dict:
        """As in Runner, and keep the config, by which :meth:`resume` builds them again."""
        if self._scheduler_cfg is None:
            self._scheduler_cfg = copy.deepcopy(scheduler)
        return super().build_param_scheduler(scheduler)

    def resume(self, filename: str, *args, **kwargs) -> None:
        """As in Runner, but learning rates follow the config where it has another schedule.

        Those of every further iteration are then what they would be if the run had had this
        schedule from its start. MMEngine goes on with the checkpoint's: beyond its end, at rate 0.
        """
        asked = self._base_values()
        with naming_file(filename):
            super().resume(filename, *args, resume_param_scheduler=False, **kwargs)
        self._tell_other_values(asked)
        sampler, dataset = self.train_dataloader.sampler, self.train_dataloader.dataset
        if isinstance(sampler, NumberedSampler):
            # Now the checkpoint's; if the config gives none, the loader was built with another.
            sampler.reseed(self.seed)
            dataset.seed = self.seed
        if self.param_schedulers is not None and self._scheduler_states is not None:
            self._resume_param_schedulers(self._scheduler_states)
        done, end = self.iter, self.max_iters
        if done < end:
            self.logger.info(f'{filename} is continued at iteration {done + 1} of {end}.')
        else:
            self.logger.info(
                f'This run is finished: {filename} is of iteration {done}, and the config asks for '
                f'{end}. Give a larger train_cfg.max_iters, or max_epochs, to go on.'
            )

    def _base_values(self) -> list[dict]:
        """Of each group of the optimizer, what schedules start from; none before it is built."""
        wrapper = self.optim_wrapper
        if isinstance(wrapper, OptimWrapperDict):
            wrappers = [*wrapper.values()]
        else:
            wrappers = [wrapper] if isinstance(wrapper, OptimWrapper) else []
        return [
            dict(lr=group.get('initial_lr', group['lr']), weight_decay=group.get('weight_decay'))
            for each in wrappers
            for group in each.param_groups
        ]

    def _tell_other_values(self, asked: list[dict]) -> None:
        """Say where the optimizer has the checkpoint's :meth:`_base_values`, and not ``asked``."""
        pairs = [*zip(asked, self._base_values(), strict=False)]
        for name in ('lr', 'weight_decay'):
            other = next(((a[name], b[name]) for a, b in pairs if a[name] != b[name]), None)
            if other is not None:
                self.logger.warning(
                    f'The config has {name} {other[0]}, the checkpoint {other[1]}: a run that '
                    "is resumed goes on with the checkpoint's. To change it, start from its "
                    'weights, by load_from without --resume.'
                )

    def _resume_param_schedulers(self, states: list | dict) -> None:
        """Load the states of the schedulers, or go through another schedule to this iteration."""
        many = isinstance(self.param_schedulers, dict)
        schedulers = self.param_schedulers if many else {'': self.param_schedulers}
        states = states if many else {'': states}
        if all(same_schedule(schedulers[name], states.get(name, ())) for name in schedulers):
            for name in schedulers:
                for scheduler, state in zip(schedulers[name], states[name]):
                    scheduler.load_state_dict(state)
            return
        self.logger.info(
            'The schedule is not that of the checkpoint: from here on, learning rates are those of '
            'a run that had it from its start.'
        )
        for each in schedulers.values():
            reset_values(each)
        self.param_schedulers = self.build_param_scheduler(copy.deepcopy(self._scheduler_cfg))
        for each in self.param_schedulers.values() if many else [self.param_schedulers]:
            fast_forward(each, self.iter, self.epoch, max(len(self.train_dataloader), 1))

    @master_only
    def save_checkpoint(self, out_dir: str, filename: str, *args, **kwargs) -> None:
        """As in Runner, into a local directory, by way of a temporary file.

        Raises:
            OSError: It cannot be written, as on a full disk; earlier checkpoints are whole.
            NonFiniteLossError: The last step has spoilt the weights.
        """
        self._settle()
        path = Path(out_dir) / filename
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path, follow_links=False) as part:
                super().save_checkpoint(str(path.parent), part.name, *args, **kwargs)
        except OSError as error:
            raise OSError(f'{error}; {beginning.what_is_left(self)}.') from None
