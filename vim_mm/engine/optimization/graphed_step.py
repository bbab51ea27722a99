"""Training by CUDA graphs: forward pass, losses and backward pass of a step, replayed in one call.

The host launches the hundreds of kernels of a step one by one, and a fast GPU waits for it. A graph
holds them all. What it computes are the same kernels on the same numbers, random ones included; so
the results are those of a training without it.

Outside of the graph stay the preparation of the batch, which is copied to where the graph reads it,
the exchange of gradients between processes, their clipping, the optimizer, its learning rates, the
loss scaler's decisions and all hooks.
"""

import atexit
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NoReturn

import numpy as np
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.model import BaseModel, is_model_wrapper
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from torch import Tensor, nn

from vim_mm.acceleration import call_aside, record
from vim_mm.engine.optimization.compiled_parts import CompiledParts
from vim_mm.engine.optimization.flat_data_parallel import FlatDataParallel, forward_backward
from vim_mm.engine.optimization.mixed_precision import BFloat16OptimWrapper
from vim_mm.errors import UserError

# Graphs that a training keeps. They share the memory of activations, not that of gradients.
MAX_GRAPHS = 4
# Optimizers with a fused form, whose hundred small launches are otherwise outside of the graph.
_FUSED = ('AdamW', 'Adam', 'SGD', torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
_WRAPPERS = (OptimWrapper, AmpOptimWrapper, BFloat16OptimWrapper)


class GraphError(UserError, ValueError):
    """A training cannot be done by CUDA graphs."""


def train_by_graph(cfg: Config, compile: bool = False) -> None:
    """Give the config of a training the :class:`GraphedStepHook`, unless it has it.

    With ``compile`` the hook compiles the parts of the model, and the optimizer takes its fused
    form if it has one. Several processes will exchange gradients by :class:`FlatDataParallel`,
    unless the config names another wrapper of the model, which is then refused.
    """
    hooks = cfg.get('custom_hooks') or []
    if all(hook['type'] not in ('GraphedStepHook', GraphedStepHook) for hook in hooks):
        hooks = [*hooks, dict(type='GraphedStepHook')]
    if compile:
        for hook in hooks:
            if hook['type'] in ('GraphedStepHook', GraphedStepHook):
                hook['compile'] = True
        # Several optimizers have a name each; the hook refuses them.
        optimizer = cfg.optim_wrapper.get('optimizer', {})
        if optimizer.get('type') in _FUSED and not {'fused', 'foreach'} & {*optimizer}:
            optimizer.fused = True
    cfg.custom_hooks = hooks
    if cfg.get('model_wrapper_cfg') is None:
        cfg.model_wrapper_cfg = dict(type='FlatDataParallel')


def obstacle(runner: Runner) -> str | None:
    """Why a training cannot be done by graphs, None if nothing is known to be in the way."""
    if not isinstance(runner, Runner):
        return f'{type(runner).__name__} shards the model, whose exchanges a graph does not hold'
    model, wrapper = _inner(runner.model), runner.optim_wrapper
    if model is not runner.model and runner.cfg.get('find_unused_parameters'):
        return 'every parameter must take part in the loss: remove find_unused_parameters'
    kind = type(model).__name__
    if is_model_wrapper(model):
        return (
            f'{kind} exchanges gradients by hooks that a graph does not hold: several processes '
            "take model_wrapper_cfg=dict(type='FlatDataParallel')"
        )
    if hasattr(model, 'roi_head') or hasattr(model, 'bbox_head'):
        if not hasattr(model, 'why_shapes_vary'):
            return (
                f'{kind} is a detector, whose shapes depend on the boxes of each batch: two-stage '
                "detectors take model.type='FastDetector'"
            )
        reason = model.why_shapes_vary()
        if reason is not None:
            return f'{kind} is a detector, whose shapes depend on the boxes of each batch: {reason}'
    if runner.cfg.get('compile'):
        return 'the config compiles the step: remove compile'
    if type(model).train_step is not BaseModel.train_step:
        return f'{kind} has a train_step of its own'
    if type(wrapper) not in _WRAPPERS:
        return f'a step of {type(wrapper).__name__} is not known here'
    return None if _is_on_gpu(model) else 'it needs a CUDA device'


def _inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, FlatDataParallel) else model


def _is_on_gpu(model: nn.Module) -> bool:
    return next(model.parameters()).is_cuda


def tensors_of(batch: Any, path: str = '') -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch, each with its place in it.

    Raises:
        GraphError: The batch holds something else, other than the metainfo of its samples.
    """
    if isinstance(batch, Tensor):
        yield path, batch
    elif isinstance(batch, Mapping):
        for name, item in batch.items():
            yield from tensors_of(item, f'{path}.{name}')
    elif isinstance(batch, BaseDataElement):
        # A sample keeps its names in a set, whose order may be another in each batch.
        for name in sorted(batch.keys()):
            yield from tensors_of(batch.get(name), f'{path}.{name}')
    elif isinstance(batch, list | tuple):
        for i, item in enumerate(batch):
            yield from tensors_of(item, f'{path}[{i}]')
    elif batch is not None:
        raise GraphError(
            f'--graph: a batch must hold tensors only, got {type(batch).__name__} as {path}'
        )


class _RefusedMetainfo:
    """In place of a value of the metainfo of a sample, which a graph would take from one batch.

    That a name is there, and that its value is not None, can be asked.
    """

    def __init__(self, name: str):
        vars(self)['name'] = name

    def refuse(self, *args: Any) -> NoReturn:
        """Whatever is asked of the value."""
        raise GraphError(
            f"--graph: the model reads '{vars(self)['name']}' of its samples, which a CUDA graph "
            'would repeat in every step'
        )

    def __deepcopy__(self, memo: dict) -> '_RefusedMetainfo':
        """Itself, as samples copy their metainfo with every conversion."""
        return self

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __index__ = refuse
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __hash__ = __str__ = __repr__ = refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __neg__ = refuse


def clone_batch(batch: Any) -> Any:
    """A batch with tensors of its own, and with metainfo that refuses to be read."""
    if isinstance(batch, Tensor):
        return batch.clone()
    if isinstance(batch, BaseDataElement):
        own = type(batch)()
        own.set_data(clone_batch(dict(batch.items())))
        for name in batch.metainfo_keys():
            own.set_field(_RefusedMetainfo(name), name, field_type='metainfo')
        return own
    if isinstance(batch, Mapping):
        return {name: clone_batch(item) for name, item in batch.items()}
    if hasattr(batch, '_fields'):  # a named tuple
        return type(batch)(*map(clone_batch, batch))
    return None if batch is None else type(batch)(map(clone_batch, batch))


@dataclass
class _Recorded:
    """A graph, and the tensors that it reads and writes.

    Attributes:
        inputs (dict): Of the batch, by their place in it.
        losses (dict): What is logged, by name.
        grads (dict): By number of the parameter; those that get no gradient are missing.
    """

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    losses: dict[str, Tensor]
    grads: dict[int, Tensor]


class GraphedStep:
    """The ``train_step`` of a model by graphs.

    Batches of a shape are launched as always when the shape comes for the first time, recorded when
    it comes for the second time, and replayed from then on; nothing is recorded under a profiler.
    There are graphs for the first ``MAX_GRAPHS`` shapes; all others are launched. If parameters are
    moved, frozen or replaced, all is recorded anew. Several processes take a step by graphs only if
    each of them can, because NCCL demands it of exchanges inside of a graph, such as SyncBN's.

    ``torch.cuda.make_graphed_callables`` makes two graphs of a module, forward and backward, for
    one shape, of tensors alone: samples, losses that are logged and a change of shape it cannot
    take, nor a module with hooks.

    Args:
        model (BaseModel | FlatDataParallel): On its GPU, with the ``train_step`` of ``BaseModel``.
        compiled (bool): Whether its first step of a shape compiles it, which the log will say.

    Attributes:
        recorded (dict): Graphs by the shapes of the batch and the factor of the loss, None where
            they have come once.
        replayed (int): Batches that a graph computed.
        launched (int): Batches whose kernels the host launched.
    """

    def __init__(self, model: BaseModel | FlatDataParallel, compiled: bool = False):
        self.model, self.compiled = _inner(model), compiled
        self.exchange, self.agree = (lambda params: None), bool
        if model is not self.model:
            self.exchange, self.agree = model.average_gradients, model.all_agree
        self.params: list[nn.Parameter] = []
        self.state: tuple = ()
        self.recorded: dict[tuple, _Recorded | None] = {}
        self.pool: tuple | None = None
        self.replayed = self.launched = 0
        self.is_full_said = False

    def __call__(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        """As in ``BaseModel.train_step``: one batch, and the optimizer's step if it is due.

        Raises:
            GraphError: The model does what a graph cannot hold.
        """
        self._forget_if_changed()  # first, because preprocessors may wait for the last step
        with optim_wrapper.optim_context(self.model):
            batch = self.model.data_preprocessor(data, True)
        if hasattr(self.model, 'with_fixed_shapes'):
            try:
                batch = self.model.with_fixed_shapes(batch)
            except ValueError as error:
                raise GraphError(f'--graph: {error}') from error
        losses = self._losses(batch, optim_wrapper)
        if optim_wrapper.should_update():
            self.exchange(self.params)
            optim_wrapper.step()
            # The next replay overwrites the gradients that the parameters have from a graph.
            optim_wrapper.zero_grad(set_to_none=True)
        return losses

    def _losses(self, batch: Any, wrapper: OptimWrapper) -> dict[str, Tensor]:
        given = dict(tensors_of(batch))
        for path, x in given.items():
            if x.device != self.params[0].device:
                raise GraphError(
                    f'--graph: the preprocessor leaves {path} on {x.device}, which a CUDA graph '
                    'would repeat in every step'
                )
        # Not all strides: that of a dimension of size 1 is any number, another in each batch.
        shapes = tuple(
            (path, x.shape, None if x.is_contiguous() else x.stride(), x.dtype, x.device)
            for path, x in given.items()
        )
        key = shapes, float(wrapper.scale_loss(torch.ones(())))
        is_new, has_room = key not in self.recorded, len(self.recorded) < MAX_GRAPHS
        if is_new and has_room:
            self.recorded[key] = None
        recorded = self.recorded.get(key)
        # A profiler such as RecordHook's looks for the operators of a step as it is launched.
        recordable = not is_new and not torch.autograd._profiler_enabled()
        if not self.agree(recorded is not None or recordable):
            if is_new and not has_room and not self.is_full_said:
                self.is_full_said = True
                _log(f'Batches come in more than {MAX_GRAPHS} shapes: the others make no graphs.')
            launch = self._launch_first if is_new and has_room else self._launch
            return launch(batch, wrapper)
        if recorded is None:
            recorded = self.recorded[key] = self._record(batch, wrapper)
        return self._replay(recorded, given, wrapper)

    def _forget_if_changed(self) -> None:
        """Drop the graphs that would read other memory than the model's, or train another part."""
        # In each step, so modules are walked once; parameters() and buffers() walk them each.
        modules = [*self.model.modules()]
        own = (p for module in modules for p in module._parameters.values() if p is not None)
        params = [*dict.fromkeys(own)]  # once where modules share one
        state = (
            *((id(p), p.data_ptr(), p.requires_grad) for p in params),
            *(b.data_ptr() for m in modules for b in m._buffers.values() if b is not None),
            *(module.training for module in modules),
        )
        if state != self.state:
            self.recorded.clear()
            # The memory of graphs that are gone cannot be shared any more.
            self.pool = torch.cuda.graph_pool_handle()
            self.params, self.state = params, state

    def _launch(self, batch: Any, wrapper: OptimWrapper) -> dict[str, Tensor]:
        self.launched += 1
        return call_aside(lambda: self._backward(batch, wrapper))

    def _launch_first(self, batch: Any, wrapper: OptimWrapper) -> dict[str, Tensor]:
        before = _host_generators()
        begin = perf_counter()
        losses = self._launch(batch, wrapper)
        if self.compiled:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            _log(f'The first step of this shape, with compilation: {perf_counter() - begin:.0f} s.')
        if _host_generators() != before:
            raise GraphError(
                f'--graph: {type(self.model).__name__} draws random numbers on the host, which a '
                'CUDA graph would repeat in every step'
            )
        return losses

    def _backward(self, batch: Any, wrapper: OptimWrapper) -> dict[str, Tensor]:
        values = forward_backward(self.model, batch, wrapper)
        return {name: value.detach() for name, value in values.items()}

    def _record(self, batch: Any, wrapper: OptimWrapper) -> _Recorded:
        own = clone_batch(batch)
        inputs = dict(tensors_of(own))  # before a model puts others in their place

        def function() -> tuple[dict[str, Tensor], dict[int, Tensor]]:
            # Nothing but its results may be left: what autograd and the wrapper keep is put back.
            kept, count = [p.grad for p in self.params], wrapper._inner_count
            for param in self.params:
                param.grad = None
            losses = self._backward(own, wrapper)
            grads = {i: p.grad for i, p in enumerate(self.params) if p.grad is not None}
            for param, grad in zip(self.params, kept, strict=True):
                param.grad = grad
            wrapper._inner_count = count
            return losses, grads

        try:
            graph, (losses, grads) = record(function, self.pool)
        except (torch.OutOfMemoryError, GraphError):
            raise
        except Exception as error:
            # The end of a capture that has failed raises once more, and says less.
            first = error.__context__ or error
            line = (str(first).splitlines() or [''])[0]
            raise GraphError(
                f'--graph: the step of {type(self.model).__name__} cannot be recorded as a CUDA '
                f'graph: {type(first).__name__}: {line}'
            ) from error
        sizes = ' x '.join(map(str, next(iter(inputs.values())).shape))
        _log(f'A CUDA graph trains on batches of {sizes} from here on.')
        return _Recorded(graph, inputs, losses, grads)

    def _replay(
        self, recorded: _Recorded, given: dict[str, Tensor], wrapper: OptimWrapper
    ) -> dict[str, Tensor]:
        self.replayed += 1
        for path, own in recorded.inputs.items():
            own.copy_(given[path])
        recorded.graph.replay()
        wrapper._inner_count += 1  # as MMEngine demands of who replaces its backward()
        self._hand_over(recorded.grads, is_last=wrapper.should_update())
        # The next replay comes before all of them are read.
        return {name: value.clone() for name, value in recorded.losses.items()}

    def _hand_over(self, grads: dict[int, Tensor], is_last: bool) -> None:
        """Add gradients of a replay to those of the parameters.

        Args:
            grads: By number of the parameter.
            is_last: Whether the optimizer takes them before the next replay overwrites them.
        """
        new = [(self.params[i], grad) for i, grad in grads.items()]
        first = [(param, grad) for param, grad in new if param.grad is None]
        more = [(param.grad, grad) for param, grad in new if param.grad is not None]
        if more:
            # One launch for many, as the optimizers do it; PyTorch has no public name for it.
            torch._foreach_add_([total for total, _ in more], [grad for _, grad in more])
        if first and not is_last:
            params, given = zip(*first, strict=True)
            copies = [torch.empty_like(grad) for grad in given]
            torch._foreach_copy_(copies, [*given])
            first = [*zip(params, copies, strict=True)]
        for param, grad in first:
            param.grad = grad


def _host_generators() -> tuple:
    """The states of the generators of Python, NumPy and PyTorch on the host."""
    _, keys, *rest = np.random.get_state()
    return random.getstate(), keys.tobytes(), rest, torch.get_rng_state().numpy().tobytes()


def _log(message: str) -> None:
    print_log(message, logger='current')


@HOOKS.register_module()
class GraphedStepHook(Hook):
    """Trains by CUDA graphs, see :class:`GraphedStep`. Works with MMEngine's own Runner as well.

    Args:
        compile (bool): Compile the parts of the model, see
            :mod:`vim_mm.engine.optimization.compiled_parts`.

    Attributes:
        step (GraphedStep, optional): While a training runs, and after it.
    """

    # The loop over micro-batches of AccumulationHook comes later, and so around the step.
    priority = 'ABOVE_NORMAL'

    def __init__(self, compile: bool = False) -> None:
        self.compile = compile
        self.step: GraphedStep | None = None
        self._parts: CompiledParts | None = None

    def before_train(self, runner: Runner) -> None:
        """Put the graphs in place of the model's own step; the weights are loaded by now.

        Raises:
            GraphError: This training cannot be done by graphs.
        """
        reason = obstacle(runner)
        if reason is not None:
            raise GraphError(f'--graph: {reason}')
        if self.compile:
            self._parts = CompiledParts(_inner(runner.model), runner.optim_wrapper)
        self.step = runner.model.train_step = GraphedStep(runner.model, self.compile)
        # After an error, too: a group of processes is not left while graphs hold operations of it.
        atexit.register(self.step.recorded.clear)

    def after_train(self, runner: Runner) -> None:
        """Say what ran."""
        replayed, launched = self.step.replayed, self.step.launched
        _log(f'CUDA graphs computed {replayed} of {replayed + launched} batches.')

    def after_run(self, runner: Runner) -> None:
        """Give the model its own step back; other hooks have taken off by now what is around it."""
        if self._parts is not None:
            self._parts.remove()
        if self.step is not None and 'train_step' in vars(runner.model):
            del runner.model.train_step
            self.step.recorded.clear()
            atexit.unregister(self.step.recorded.clear)
