"""What a run is, in some lines before it begins, and where its results are, when it has ended."""

import logging
import os
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext

import torch
from mmengine.hooks import Hook, IterTimerHook
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper
from torch import nn
from torch.utils.data import Dataset

from vim_mm.engine.batches.samples import classes_of, leaves
from vim_mm.engine.optimization.graphed_step import GraphedStepHook
from vim_mm.models.fused import path_of_layers, summarize_paths
from vim_mm.models.mamba import Mamba
from vim_mm.ops.backends import path_of
from vim_mm.processor import processor_name

_LAST = 'LOWEST'  # after the checks and the hooks that load weights
_CLASSES = 6  # that are named
_REPLAYED = 5  # iterations by graphs, by whose time the others are told


class SummaryHook(Hook):
    """Logs the model, its data, the path of its scans and the device; then the time to go.

    The tools register it in place of MMEngine's own account of a run, which is in the log file.
    """

    priority = _LAST

    def __init__(self):
        self._trains = False
        self._began: float | None = None
        self._graphs: GraphedStepHook | None = None
        # The first iteration by whose time the others are told, and when it began.
        self._steady: int | None = None
        self._since = 0.0

    def before_train(self, runner) -> None:
        """Say what is trained; of a finished run the runner has said all."""
        self._trains = runner.iter < runner.max_iters
        if not self._trains:
            return
        say = runner.logger.info
        for line in describe(runner, 'train', 'val'):
            say(_wrapped(line))
        say(f'Training started: {_length(runner)}.')
        self._graphs = next((h for h in runner.hooks if isinstance(h, GraphedStepHook)), None)
        self._began, self._steady = time.monotonic(), None

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        """Say how long the first iteration took, and how long all of them will take.

        Those that compile or are recorded say nothing of the others: with graphs the iterations are
        told by some that were replayed, in MMEngine's estimates from then on as well.
        """
        if self._began is not None:
            seconds, self._began = time.monotonic() - self._began, None
            first = f'First iteration after {seconds:.1f} s'
            if self._graphs is None:
                runner.logger.info(f'{first}; at its speed {_remaining(runner, seconds)}')
            else:
                runner.logger.info(f'{first}.')
        elif self._graphs is None:
            return
        elif self._steady is None:
            if self._graphs.step.replayed:
                self._steady, self._since = runner.iter + 1, time.monotonic()
                for timer in runner.hooks:
                    if isinstance(timer, IterTimerHook):
                        timer.time_sec_tot, timer.start_iter = 0, self._steady
        elif runner.iter + 1 - self._steady == _REPLAYED:
            seconds = (time.monotonic() - self._since) / _REPLAYED
            runner.logger.info(f'At the speed of its graphs {_remaining(runner, seconds)}')
            self._graphs = None

    def after_train(self, runner) -> None:
        """Say where the checkpoints are, if an iteration was trained."""
        if not self._trains:
            return
        for line in _checkpoints(runner):
            runner.logger.info(line)

    def before_test(self, runner) -> None:
        """Say what is tested."""
        for line in describe(runner, 'test'):
            runner.logger.info(_wrapped(line))
        runner.logger.info(f'Test started: {len(runner.test_dataloader)} batches.')


def describe(runner, *stages: str) -> Iterator[str]:
    """Lines on a run that is about to begin.

    Args:
        runner: Of MMEngine; its model is on its device.
        *stages (str): 'train', 'val' or 'test', of those whose data are told.
    """
    model = runner.model.module if is_model_wrapper(runner.model) else runner.model
    parts = [
        f'{name} {type(part).__name__}{_size_of(part)}'
        for name, part in model.named_children()
        if name != 'data_preprocessor'
    ]
    yield f'Model:      {type(model).__name__}: {", ".join(parts)}'
    whole = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = '' if trained == whole else f', {trained / 1e6:.2f} M of them trained'
    yield f'Parameters: {whole / 1e6:.2f} M{frozen}'
    datasets = {
        stage: loop.dataloader.dataset
        for stage in stages
        if (loop := getattr(runner, f'{stage}_loop')) is not None
    }
    sizes = [f'{stage} {len(dataset)}' for stage, dataset in datasets.items()]
    first = next(iter(datasets.values()), None)
    yield f'Data:       {", ".join(sizes)} images{_root_of(first)}'
    yield from _classes_of(first)
    wrapper = runner.optim_wrapper if stages[0] == 'train' else None
    yield from _scans(model, _autocast_dtype(model, wrapper))
    many = f', {runner.world_size} processes' if runner.world_size > 1 else ''
    yield f'Device:     {_device(model)}{many}'
    logs = [
        f', log in {os.path.relpath(handler.baseFilename, runner.work_dir)}'
        for handler in runner.logger.handlers
        if isinstance(handler, logging.FileHandler)
    ]
    yield f'Directory:  {runner.work_dir}{"".join(logs)}'


def _wrapped(line: str) -> str:
    """In lines of the screen's width."""
    return textwrap.fill(
        line, 120, subsequent_indent=' ' * 12, break_long_words=False, break_on_hyphens=False
    )


def _size_of(part: nn.Module) -> str:
    if hasattr(part, 'embed_dims') and isinstance(getattr(part, 'layers', None), nn.ModuleList):
        return f' ({len(part.layers)} layers of {part.embed_dims} channels)'
    return ''


def _root_of(dataset: Dataset | None) -> str:
    for inner, _ in leaves(dataset, '') if dataset is not None else ():
        return f' of {type(inner).__name__} in {getattr(inner, "data_root", "") or "no data_root"}'
    return ''


def _classes_of(dataset: Dataset | None) -> Iterator[str]:
    """How many classes there are, and how the labels of files are numbered."""
    classes = classes_of(dataset)
    if not classes:
        return
    names = [*map(str, classes)]
    shown = ', '.join(names[:_CLASSES] + ['...'] * (len(names) > _CLASSES))
    yield f'Classes:    {len(names)} ({shown})'
    reduced = [getattr(inner, 'reduce_zero_label', None) for inner, _ in leaves(dataset, '')]
    if any(each is False for each in reduced):  # MMSegmentation's alone have it
        yield f'Labels:     reduce_zero_label=False: 0 in the files is {names[0]}'
    if any(reduced):
        yield (
            f'Labels:     reduce_zero_label=True: 0 in the files is ignored, 1 is {names[0]}'
            + (f', {len(names)} is {names[-1]}' if len(names) > 1 else '')
        )


def _autocast_dtype(model: nn.Module, wrapper: object) -> torch.dtype | None:
    """What a model is cast to in a training by this wrapper, or in a test by ``accelerate``."""
    if wrapper is None:  # a model for test-time augmentation has the accelerated one in itself
        found = (vars(module).get('autocast_dtype') for module in model.modules())
        return next((dtype for dtype in found if dtype is not None), None)
    device = next(model.parameters()).device.type
    # Of several optimizers each opens its own, in the model's train_step().
    with wrapper.optim_context(model) if isinstance(wrapper, OptimWrapper) else nullcontext():
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _scans(model: nn.Module, dtype: torch.dtype | None) -> Iterator[str]:
    """The methods of the mixers, which path computes their scans, and why not a faster one."""
    mixers = [module for module in model.modules() if isinstance(module, Mamba)]
    if not mixers:
        return
    device = next(model.parameters()).device
    methods = ', '.join(dict.fromkeys(m.discretization_method for m in mixers))
    paths = {
        path_of(device, dtype or m.parameters_dtype(), m.use_cuda_kernel, backend=m.backend)
        for m in mixers
    }
    told = '; '.join(f'{path.name} scan ({path.reason})' for path in sorted(paths))
    yield f'Method:     {methods}, {told}'
    if device.type != 'cuda':  # elsewhere no layer has a fused path
        return
    for path in summarize_paths(path_of_layers(model, dtype=dtype)):
        if path.reason is not None:
            yield f'Layers:     {path}'


def _device(model: nn.Module) -> str:
    device = next(model.parameters()).device
    if device.type == 'cuda':
        name = torch.cuda.get_device_name(device)
    else:
        threads = torch.get_num_threads()
        name = f'{processor_name() or "CPU"}, {threads} thread{"s" * (threads > 1)}'
    return f'{device} ({name})'


def _remaining(runner, seconds: float) -> str:
    """By MMEngine's estimate, which a validation is no part of, or by seconds of an iteration."""
    left = runner.max_iters - runner.iter - 1
    eta = runner.message_hub.runtime_info.get('eta', seconds * left)
    return f'the training takes {_duration(eta)} more, and validations besides.'


def _length(runner) -> str:
    begun = f' from iteration {runner.iter + 1}' if runner.iter else ''
    epochs = f' in {runner.max_epochs} epochs' if runner.max_epochs > 1 else ''
    return f'{runner.max_iters} iterations{epochs}{begun}'


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f'{hours}:{minutes:02}:{seconds:02}'


def _checkpoints(runner) -> Iterator[str]:
    info: Mapping = runner.message_hub.runtime_info
    best = {key: path for key, path in info.items() if key.startswith('best_ckpt')}
    for key, path in best.items():
        metric = key.removeprefix('best_ckpt').lstrip('_')
        score = info.get(key.replace('best_ckpt', 'best_score'))
        told = f' ({metric + " " if metric else ""}{score:.4g})' if score is not None else ''
        yield f'Best checkpoint: {path}{told}'
    if 'last_ckpt' in info:
        yield f'Last checkpoint: {info["last_ckpt"]}'
    if not best:
        yield (
            'No best checkpoint is kept: default_hooks.checkpoint.save_best names a metric, such '
            'as mIoU, coco/bbox_mAP or accuracy/top1.'
        )
