"""Whether a training can learn: what does not fit in its losses, its loop and its schedules.

Where it cannot be meant it is an error, before the first iteration; where it can, one line of the
log.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec

from mmengine.evaluator import Evaluator
from mmengine.hooks import CheckpointHook, EarlyStoppingHook, Hook
from mmengine.optim import OptimWrapperDict
from mmengine.optim.scheduler.param_scheduler import INF
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner
from torch import nn

from vim_mm.checkpoints.provenance import inner_model
from vim_mm.engine.batches.samples import (
    IGNORED_LABEL,
    CheckedDataset,
    ignored_labels,
    leaves,
)
from vim_mm.engine.checks.first_samples import look_at_samples, lost_objects, one_class
from vim_mm.errors import UserRuntimeError, UserValueError, did_you_mean
from vim_mm.segmentation.guards import check_losses

# The samplers of MMEngine and MMDetection that never end.
_ENDLESS = {'InfiniteSampler', 'MultiSourceSampler', 'GroupMultiSourceSampler'}
# Validations beyond which an interval counts the wrong unit.
_MOST_VALIDATIONS = 1000


def check_training(runner: Runner) -> None:
    """Look at the parts of a training that is about to begin, and log what is doubtful.

    Raises:
        ValueError: A loss is always 0, no parameter learns, an epoch never ends, a schedule never
            moves, or something waits for a metric that there is not.
    """
    check_heads(runner.model)
    _check_end_of_epochs(runner)
    _check_monitors(runner)
    lines = (_rates, _schedules, _intervals)
    for line in (line for look in lines for line in look(runner)):
        runner.logger.warning(line)


def check_heads(model: nn.Module) -> None:
    """Look whether each head of a segmentor or a classifier has a loss to learn by.

    Raises:
        ValueError: The softmax of one class, weights for another number of classes, or no loss at
            all.
        TypeError: The weights are no numbers.
    """
    model = inner_model(model)
    given = (getattr(module, 'loss_weight', None) for module in model.modules())
    weights = [weight for weight in given if isinstance(weight, int | float)]
    if weights and not any(weights):
        raise UserValueError('loss_weight is 0 in every loss of the model: nothing is learnt')
    for name, module in model.named_modules():
        check_losses(module, f'model.{name}')
        classes = getattr(module, 'num_classes', None)
        # MMDetection's heads, and those that classify masks, have a class more, of nothing.
        for key, more in (('loss_cls', 1), ('loss_module', 0)):
            loss = _softmax(getattr(module, key, None))
            weights = getattr(loss, 'class_weight', None)
            if isinstance(classes, int) and isinstance(weights, list | tuple):
                _check_count(f'model.{name}.{key}.class_weight', weights, classes, more)
        if _softmax(getattr(module, 'loss_module', None)) is not None and classes == 1:
            raise UserValueError(
                f'model.{name}.num_classes is 1, whose softmax is always 1 and whose loss is '
                'always 0: a classifier needs 2 classes or more'
            )


def _softmax(loss: nn.Module | None) -> nn.Module | None:
    """The cross entropy of a softmax that a loss is or has; None of another one."""
    loss = getattr(loss, 'ce', loss)  # of MMPretrain's smooth labels
    softmax = type(loss).__name__ == 'CrossEntropyLoss' and not loss.use_sigmoid
    return loss if softmax and not getattr(loss, 'use_mask', False) else None


def _check_count(name: str, weights: Sequence, classes: int, more: int) -> None:
    if len(weights) != classes + more:
        nothing = ' and one for no object' if more else ''
        raise UserValueError(
            f'{name} must have a weight for each of the num_classes = {classes} classes{nothing}, '
            f'got {len(weights)}'
        )


def check_ignored(model: nn.Module, evaluator: Evaluator, name: str) -> str | None:
    """Compare the label that the heads of a segmentor ignore with the metric's.

    Args:
        model (nn.Module): Nothing is said of others than segmentors.
        evaluator (Evaluator): Its ``IoUMetric``s are looked at.
        name (str): What the config calls it.

    Returns:
        str | None: What is doubtful.

    Raises:
        ValueError: The metric counts a class that no head learns.
    """
    model = inner_model(model)
    classes = getattr(getattr(model, 'decode_head', None), 'num_classes', None)
    metrics = [m for m in evaluator.metrics if 'IoUMetric' in _names(m) and not m.format_only]
    if not isinstance(classes, int) or not metrics:
        return None
    ignored = ignored_labels(model)
    for metric in metrics:
        differ = f'{name}.ignore_index is {metric.ignore_index}, but the heads ignore {ignored}'
        for label in ignored:
            if label != metric.ignore_index and 0 <= label < classes:
                raise UserValueError(
                    f'{differ} (model.decode_head.ignore_index): the metric would count the class '
                    f'{label}, which is not learnt'
                )
        if ignored and metric.ignore_index not in ignored:
            return f'{differ}: training and validation leave out other pixels.'
    return None


def check_installed(evaluator: Evaluator, name: str) -> None:
    """RuntimeError if a metric of ``name``, as the config calls it, would fail without a package.

    MMDetection's other metrics of detectors say so when they are built.
    """
    needed = ('FasterCocoMetric' in _names(m) and not m.format_only for m in evaluator.metrics)
    if any(needed) and find_spec('faster_coco_eval') is None:
        raise UserRuntimeError(
            f'{name}: FasterCocoMetric needs faster-coco-eval, which is not installed: '
            'pip install faster-coco-eval'
        )


def _names(instance: object) -> set[str]:
    return {kind.__name__ for kind in type(instance).__mro__}


def _endless(loader) -> str | None:
    """The type of the sampler that the config names if it never ends."""
    sampler = loader.sampler
    if hasattr(loader.batch_sampler, 'sampler'):  # one of the config's has the sampler itself
        sampler = loader.batch_sampler.sampler
    sampler = getattr(sampler, 'sampler', sampler)  # inside of ours
    return type(sampler).__name__ if _ENDLESS & _names(sampler) else None


def _check_end_of_epochs(runner: Runner) -> None:
    loop = runner.train_loop
    endless = _endless(loop.dataloader)
    if isinstance(loop, EpochBasedTrainLoop) and endless is not None:
        raise UserValueError(
            f'train_dataloader.sampler is {endless}, which never ends, and train_cfg.type is '
            f'{type(loop).__name__}: set train_dataloader.sampler.type=DefaultSampler, or '
            'train_cfg.type=IterBasedTrainLoop with max_iters'
        )


def _rates(runner: Runner) -> Iterator[str]:
    """What is doubtful of the learning rates; ValueError if no parameter has gradients."""
    wrapper = runner.optim_wrapper
    wrappers = wrapper.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper]
    groups = [
        group
        for each in wrappers
        for group in each.param_groups
        if any(param.requires_grad for param in group['params'])
    ]
    if not groups:
        raise UserValueError(
            'no parameter of the model that the optimizer has takes gradients (requires_grad): '
            'everything is frozen'
        )
    if all(group.get('initial_lr', group['lr']) == 0 for group in groups):
        yield (
            'the learning rate of every parameter is 0 (optim_wrapper.optimizer.lr, or lr_mult of '
            'paramwise_cfg): nothing is learnt.'
        )


def check_metric(name: str, key: str, evaluator: Evaluator) -> None:
    """ValueError if ``key``, which the config gives as ``name``, is known to be no metric."""
    metrics = evaluator.metrics if type(evaluator) is Evaluator else []
    prefixes = [f'{m.prefix}/' for m in metrics if getattr(m, 'prefix', None)]
    if not metrics or len(prefixes) < len(metrics) or key.startswith(tuple(prefixes)):
        return
    raise UserValueError(
        f'{name}={key!r} is no metric of val_evaluator: names of these begin with '
        f'{" or ".join(sorted({*prefixes}))}'
    )


def check_found(name: str, key: str, metrics: Mapping) -> None:
    """ValueError if a validation has not given the metric that the config gives as ``name``."""
    if key not in metrics:
        raise UserValueError(
            f'{name}={key!r} is no metric of this validation, which has {", ".join(metrics)}'
            f'{did_you_mean(key, metrics)}'
        )


def _monitors(runner: Runner) -> Iterator[tuple[str, str]]:
    """The metrics that hooks and schedules wait for, by their names in the config."""
    for hook in runner.hooks:
        if isinstance(hook, EarlyStoppingHook):
            yield 'EarlyStoppingHook.monitor', hook.monitor
    for name, scheduler in _all_schedulers(runner):
        if getattr(scheduler, 'need_val_args', False):
            yield f'{name}.monitor', scheduler.monitor


def _check_monitors(runner: Runner) -> None:
    for name, key in _monitors(runner):
        if runner.val_loop is None:
            raise UserValueError(
                f'{name}={key!r} needs a validation: val_dataloader, val_cfg and val_evaluator'
            )
        check_metric(name, key, runner.val_loop.evaluator)


def _all_schedulers(runner: Runner) -> Iterator[tuple[str, object]]:
    schedulers = runner.param_schedulers or []
    if not isinstance(schedulers, dict):
        schedulers = {'': schedulers}
    for key, several in schedulers.items():
        name = f'param_scheduler.{key}' if key else 'param_scheduler'
        for i, scheduler in enumerate(several):
            yield f'{name}.{i} ({type(scheduler).__name__})', scheduler


def _schedules(runner: Runner) -> Iterator[str]:
    """What is doubtful of the schedules; ValueError if one counts epochs that never are."""
    loop = runner.train_loop
    for name, scheduler in _all_schedulers(runner):
        by_epoch = getattr(scheduler, 'by_epoch', False)
        waits = getattr(scheduler, 'need_val_args', False)  # for validations
        if isinstance(loop, IterBasedTrainLoop) and by_epoch and not waits:
            raise UserValueError(
                f'{name} counts epochs (by_epoch=True), and train_cfg.type is '
                f'{type(loop).__name__}, which has none: it would never change '
                f'{scheduler.param_name}; set by_epoch=False and count iterations'
            )
        if isinstance(loop, IterBasedTrainLoop) and not waits:
            later = any(other.begin >= _reach(scheduler)[1] for _, other in _all_schedulers(runner))
            if not later and _decays_at_once(scheduler, loop.max_iters):
                yield (
                    f'{name} has decayed {scheduler.param_name} in the first twentieth of the '
                    f'{loop.max_iters} iterations: if it counts epochs, multiply by the '
                    f'{len(loop.dataloader)} iterations of one.'
                )
        if not isinstance(loop, EpochBasedTrainLoop):
            continue
        first, last = _reach(scheduler)
        epochs, unit = loop.max_epochs, 'epochs' if by_epoch else 'iterations'
        end = epochs if by_epoch else loop.max_iters
        if first >= end:
            yield (
                f'{name} first changes {scheduler.param_name} after {first} {unit}, and the '
                f'training has {end}: look at by_epoch={by_epoch}.'
            )
        elif by_epoch and 10 * end < last < INF:
            yield (
                f'{name} ends after {last} epochs (by_epoch=True), and the training has {end}: if '
                'it counts iterations, set by_epoch=False.'
            )
        elif not by_epoch and last <= epochs < end and not _converted(runner, name):
            yield (
                f'{name} is at its end after {last} of {end} iterations (by_epoch=False), and the '
                f'training has {epochs} epochs: if it counts epochs, set by_epoch=True.'
            )


def _converted(runner: Runner, name: str) -> bool:
    """Whether the config of a scheduler counts epochs, of which MMEngine made iterations."""
    schedulers = runner.cfg.get('param_scheduler')
    for key in name.partition(' ')[0].split('.')[1:]:
        if isinstance(schedulers, list | tuple):
            schedulers = schedulers[int(key)]
        elif key in (schedulers or ()):
            schedulers = schedulers[key]
    return bool((schedulers or {}).get('convert_to_iter_based'))


def _reach(scheduler) -> tuple[int, int]:
    """The first step at which a scheduler changes something, and the last one."""
    begin, end = scheduler.begin, scheduler.end
    if milestones := getattr(scheduler, 'milestones', None):
        return min(milestones), max(milestones)
    if step := getattr(scheduler, 'step_size', None):
        return begin + step, end
    length = getattr(scheduler, 'T_max', None)
    return begin, end if length is None else min(end, begin + length)


def _decays_at_once(scheduler, iterations: int) -> bool:
    """Whether a schedule by iterations is over in the first twentieth of them; no warm-up is."""
    early, (_, last) = iterations / 20, _reach(scheduler)
    gamma, step = getattr(scheduler, 'gamma', 1), getattr(scheduler, 'step_size', None)
    if gamma != 1 and not hasattr(scheduler, 'milestones'):
        return gamma ** (early // (step or 1)) <= 0.02
    warms_up = hasattr(scheduler, 'factor') or 'Warmup' in type(scheduler).__name__
    rises = getattr(scheduler, 'end_factor', 0) >= getattr(scheduler, 'start_factor', 1)
    return last <= early and gamma <= 1 and not warms_up and not rises


def _intervals(runner: Runner) -> Iterator[str]:
    """What is doubtful of the intervals of validations and checkpoints."""
    loop = runner.train_loop
    if not isinstance(loop, EpochBasedTrainLoop | IterBasedTrainLoop):
        return
    by_epoch = isinstance(loop, EpochBasedTrainLoop)
    kind, interval = type(loop).__name__, loop.val_interval
    end = loop.max_epochs if by_epoch else loop.max_iters
    if runner.val_loop is not None and loop.val_begin > end:
        yield f'train_cfg.val_begin={loop.val_begin} lies behind the end of the training, {end}.'
    if runner.val_loop is not None and by_epoch and loop.max_epochs < interval < INF:
        yield (
            f'train_cfg.val_interval={interval} counts epochs in {kind}, and the training has '
            f'{loop.max_epochs}: it is validated at its end alone.'
        )
    if runner.val_loop is not None and not by_epoch:
        often = interval == 1 < min(loop.max_iters, len(loop.dataloader))
        if often or loop.max_iters / interval > _MOST_VALIDATIONS:
            yield (
                f'train_cfg.val_interval={interval} counts iterations in {kind}, of which an epoch '
                f'has {len(loop.dataloader)} and the training {loop.max_iters}.'
            )
    if getattr(runner.log_processor, 'by_epoch', by_epoch) != by_epoch:
        yield f'log_processor.by_epoch should be {by_epoch} with {kind}: the log counts otherwise.'
    for hook in runner.hooks:
        if not isinstance(hook, CheckpointHook) or hook.interval <= 0:
            continue
        if hook.by_epoch and not by_epoch:
            yield (
                f'default_hooks.checkpoint counts epochs (by_epoch=True), of which {kind} has '
                'none: a checkpoint is saved at the end alone; set by_epoch=False.'
            )
        elif by_epoch and not hook.by_epoch and hook.interval > loop.max_iters:
            yield (
                f'default_hooks.checkpoint.interval={hook.interval} counts iterations '
                f'(by_epoch=False), and the training has {loop.max_iters}.'
            )


def needed_truth(model: nn.Module) -> tuple[str, ...]:
    """Of what a data sample must have one for a model to learn from it; empty if unknown."""
    model = inner_model(model)
    names = _names(model)
    if 'EncoderDecoder' in names:
        return ('gt_depth_map' if 'DepthEstimator' in names else 'gt_sem_seg',)
    if 'BaseDetector' in names:
        return 'gt_instances', 'gt_sem_seg', 'gt_panoptic_seg'
    if any(name.endswith('Classifier') for name in names):
        return 'gt_label', 'gt_score'
    return ()


def _compared_truth(evaluator: Evaluator) -> tuple[str, ...]:
    """As :func:`needed_truth`, for the metrics that read it from the samples."""
    for metric in evaluator.metrics:
        names = _names(metric)
        if 'IoUMetric' in names and not metric.format_only:
            return ('gt_sem_seg',)
        if names & {'Accuracy', 'SingleLabelMetric', 'MultiLabelMetric'}:
            return 'gt_label', 'gt_score'
    return ()


def _ignored_by(evaluator: Evaluator) -> list[int]:
    """The labels that the metrics of a segmentor leave out; the usual one of other evaluators."""
    found = {m.ignore_index for m in evaluator.metrics if 'IoUMetric' in _names(m)}
    return sorted(found) or [IGNORED_LABEL]


def _demand(dataset, truth: tuple[str, ...], ignored: list[int] | None = None) -> None:
    if isinstance(dataset, CheckedDataset):
        dataset.truth = truth
        dataset.ignored = dataset.ignored if ignored is None else ignored


def _reduced(dataset) -> set[bool]:
    return {bool(getattr(inner, 'reduce_zero_label', False)) for inner, _ in leaves(dataset, '')}


def _other_numbers(runner: Runner) -> str | None:
    """What to say where training and validation number the classes differently."""
    train, val = (
        _reduced(loop.dataloader.dataset) for loop in (runner.train_loop, runner.val_loop)
    )
    if train & val:
        return None
    return (
        f'reduce_zero_label is {train.pop()} in train_dataloader.dataset and {val.pop()} in '
        'val_dataloader.dataset: the labels of one are those of the other plus 1.'
    )


@HOOKS.register_module()
class LearningHook(Hook):
    """Looks whether a training can learn from its data, before its first iteration."""

    priority = 'VERY_HIGH'

    def before_train(self, runner: Runner) -> None:
        """Look at the training and its data, and at those of validation, which comes later."""
        check_training(runner)
        dataset, name = runner.train_loop.dataloader.dataset, 'train_dataloader.dataset'
        _demand(dataset, needed_truth(runner.model))
        findings = look_at_samples(dataset, name)
        lines = [*findings.lines, *lost_objects(dataset, name)]
        doubt = one_class(findings, dataset, name, ignored_labels(inner_model(runner.model)))
        if doubt is not None and findings.complete:
            raise UserValueError(doubt)
        lines.append(None if doubt is None else f'{doubt}.')
        lines.append(None if runner.val_loop is None else _other_numbers(runner))
        for line in filter(None, lines):
            runner.logger.warning(line)
        if runner.val_loop is not None:
            self._before_metrics(runner, 'val')

    def after_val_epoch(self, runner: Runner, metrics: dict | None = None) -> None:
        """Look whether a validation gives what hooks and schedules wait for."""
        if runner._train_loop is None or isinstance(runner._train_loop, dict):
            return  # this is no training
        for name, key in _monitors(runner):
            check_found(name, key, metrics or {})

    def before_test(self, runner: Runner) -> None:
        """Look at the data of testing."""
        self._before_metrics(runner, 'test')

    def _before_metrics(self, runner: Runner, phase: str) -> None:
        loop = getattr(runner, f'{phase}_loop')
        check_installed(loop.evaluator, f'{phase}_evaluator')
        name = f'{phase}_dataloader.dataset'
        if endless := _endless(loop.dataloader):
            raise UserValueError(
                f'{phase}_dataloader.sampler is {endless}, which never ends: set its type to '
                'DefaultSampler'
            )
        dataset = loop.dataloader.dataset
        ignored = _ignored_by(loop.evaluator)
        _demand(dataset, _compared_truth(loop.evaluator), ignored)
        findings = look_at_samples(dataset, name, phase != 'test', ignored)
        doubts = [check_ignored(runner.model, loop.evaluator, f'{phase}_evaluator')]
        if findings.complete or {*ignored} & {*findings.labels}:
            doubts.append(one_class(findings, dataset, name, ignored))
        for line in [*findings.lines, *filter(None, doubts)]:
            runner.logger.warning(line)
