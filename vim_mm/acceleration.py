"""Faster predictions of any model: mixed precision, CUDA graphs and torch.compile in one call."""

import gc
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from vim_mm.errors import UserRuntimeError

# Graphs that a part of a model keeps, those of the sizes that were seen last.
MAX_GRAPHS = 32


def accelerate(
    model: nn.Module, *, amp: bool = False, graph: bool = False, compile: bool = False
) -> nn.Module:
    """Make the predictions of a model faster, in place.

    What changes are the calls of its parts: of a model of MMEngine's kin the backbone, the neck and
    the heads, of a ``FastEncoderDecoder`` all that computes its logits, of any other ``nn.Module``
    the whole. Parameters, their names and all methods stay.

    Args:
        model (nn.Module): In evaluation mode, on its device. Its weights may be loaded later; it
            must not be moved later.
        amp (bool): Compute each part in bfloat16 autocast, as ``--amp`` trains it. Parts hand over
            float32.
        graph (bool): Record each part that takes whole pictures as a CUDA graph, one for each
            shape of its input, when the shape comes for the second time; from then on it is
            replayed. The last 32 shapes are kept. Calls that record gradients are made as before.
            The outputs are those of the calls, bit for bit.
        compile (bool): Pass the same parts through ``torch.compile``. Outputs differ by rounding.

    Returns:
        nn.Module: The model.

    Raises:
        RuntimeError: ``graph`` where there is no CUDA device, or, at a call, of a part that cannot
            be recorded: one that waits for the device.

    Example:
        >>> model = vim_mm.accelerate(vim_mm.vim_tiny().eval().cuda(), amp=True, graph=True)
        >>> with torch.no_grad():
        ...     maps = model(images)
    """
    if graph and not torch.cuda.is_available():
        raise UserRuntimeError('CUDA graphs need a CUDA device, and there is none')
    inner = getattr(model, 'module', model)  # of a wrapper for distributed runs
    if compile:  # as the kernels of convolutions want it
        inner.to(memory_format=torch.channels_last)
    pool = torch.cuda.graph_pool_handle() if graph else None
    for owner, name, of_pictures in _calls_of(inner):
        call = getattr(owner, name)
        if amp:
            inner.autocast_dtype = torch.bfloat16  # for accounts of the model
            call = _autocast(call, hand_over=name == 'forward')
        # Of labels the kernel; their logits are compiled below.
        if compile and of_pictures and name != 'input_labels':
            call = torch.compile(call)
        if graph and of_pictures:
            call = GraphedCall(call, type(owner).__name__, pool)
        setattr(owner, name, call)
    return model


def _calls_of(model: nn.Module) -> list[tuple[nn.Module, str, bool]]:
    """What predictions call: a module, the name of the method, and whether it takes images."""
    if predicts_in_chunks(model):
        return [(model, 'input_labels', True), (model, 'small_logits', True)]
    of_pictures = {*parts_of(model, of_pictures=True)}
    return [(part, 'forward', part in of_pictures) for part in parts_of(model)]


def predicts_in_chunks(model: nn.Module) -> bool:
    """Whether it is a ``FastEncoderDecoder`` that makes its predictions itself."""
    return getattr(model, 'predicts_in_chunks', lambda: False)()


def parts_of(model: nn.Module, of_pictures: bool = False) -> Iterator[nn.Module]:
    """What the losses and predictions of a model are computed by, one call after another.

    Args:
        model: One of MMEngine's kin, or any other, which is its only part.
        of_pictures: Only those whose shapes follow from the size of the pictures. A RoI head's
            follow from what is found in them.
    """
    if not hasattr(model, 'data_preprocessor'):
        yield model
        return
    for name, child in model.named_children():
        if name not in ('data_preprocessor', 'roi_head'):
            yield child
    if of_pictures:
        return
    # MMDetection never calls a RoI head, but what it is made of; a cascade holds that in lists.
    for part in getattr(model, 'roi_head', nn.Module()).children():
        yield from part if isinstance(part, nn.ModuleList) else (part,)


def hand_over_float32(outputs: Any) -> Any:
    """Outputs in any nesting, with float32 tensors in place of bfloat16 ones."""

    def convert(x: Any) -> Any:
        return x.float() if isinstance(x, Tensor) and x.dtype == torch.bfloat16 else x

    return tree_map(convert, outputs)


def _autocast(call: Callable, hand_over: bool) -> Callable:
    @wraps(call)
    def in_bfloat16(*args, **kwargs):
        tensors = (x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor))
        first = next(tensors, None)
        kind = nullcontext() if first is None else torch.autocast(first.device.type, torch.bfloat16)
        with kind:
            outputs = call(*args, **kwargs)
            return hand_over_float32(outputs) if hand_over else outputs

    return in_bfloat16


def _flatten(args: tuple, kwargs: dict) -> tuple[list, str]:
    """What a call is given, its tensors in a list, and how they lie in it."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):  # most are: it takes no time
        return [args[0]], ''
    leaves, structure = tree_flatten((args, kwargs))
    return leaves, str(structure)


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Where the graphs of a GPU are recorded: on one stream, or they would share no memory.

    PyTorch's own belongs to the GPU of the first graph, and would record nothing of another one.
    """
    return torch.cuda.Stream(device)


def call_aside(function: Callable[[], Any]) -> Any:
    """Call a function on the stream of :func:`record`; the current stream waits for it.

    A backward pass before the one that is recorded belongs there: what autograd keeps of it for the
    gradient of a parameter is bound to its stream, and a graph may not wait for another one.
    """
    current = torch.cuda.current_stream()
    stream = _capture_stream(torch.cuda.current_device())
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        result = function()
    current.wait_stream(stream)
    return result


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect nothing meanwhile: what is deleted may wait for the GPU, which ends a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def record(
    function: Callable[[], Any], pool: tuple | None = None
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of a call, and what the call returned: tensors that each replay fills anew.

    It is made on the current device, which must be that of the tensors.

    Args:
        function: Must have been called before, such that libraries are ready.
        pool: Memory that graphs share, by ``torch.cuda.graph_pool_handle()``. A replay may then
            overwrite the outputs of any other graph of the pool that was recorded later.
    """
    graph = torch.cuda.CUDAGraph()
    stream = _capture_stream(torch.cuda.current_device())
    # A graph must cast weights itself: what autocast of the caller keeps is freed when that ends.
    torch.clear_autocast_cache()
    # Other threads, such as those that load data, may go on allocating and waiting.
    with (
        _no_garbage_collection(),
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode='thread_local'),
    ):
        outputs = function()
    torch.clear_autocast_cache()  # of what lies in the memory of the graph
    return graph, outputs


class GraphedCall:
    """A function of tensors on a GPU, recorded for each signature that comes again, and replayed.

    Args:
        function (Callable): Takes tensors in nested lists, tuples and dicts, and returns such.
        name (str): For messages.
        pool: See :func:`record`.

    Attributes:
        graphs (OrderedDict): By signature the graph with its inputs and outputs, None of those that
            have come once; the last one used is last.
    """

    def __init__(self, function: Callable, name: str, pool: tuple | None = None):
        self.function, self.name, self.pool = function, name, pool
        self.graphs: OrderedDict[tuple, tuple | None] = OrderedDict()

    def __call__(self, *args, **kwargs):
        leaves, structure = _flatten(args, kwargs)
        if torch.is_grad_enabled() or not self._can_be_recorded(leaves):
            return self.function(*args, **kwargs)
        # The GPU idles until the replay: what comes before it adds to the latency.
        key = (
            structure,
            *[(x.shape, x.stride(), x.dtype, x.device) for x in leaves],
            torch.is_autocast_enabled() and torch.get_autocast_dtype('cuda'),  # both of CUDA
            torch.is_inference_mode_enabled(),
        )
        if key not in self.graphs:
            self.graphs[key] = None
            while len(self.graphs) > MAX_GRAPHS:
                self.graphs.popitem(last=False)
            return self.function(*args, **kwargs)
        if self.graphs[key] is None:
            self.graphs[key] = self._record(args, kwargs)
        graph, inputs, outputs = self.graphs[key]
        for own, given in zip(inputs, leaves, strict=True):
            own.copy_(given)
        graph.replay()
        self.graphs.move_to_end(key)
        # The caller may keep what it gets, such as the logits of the windows of a picture.
        return tree_map(torch.clone, outputs)

    def _can_be_recorded(self, leaves: list) -> bool:
        on_gpu = [isinstance(x, Tensor) and x.is_cuda for x in leaves]
        if not any(on_gpu):
            return False
        if not all(on_gpu):
            warnings.warn(f'{self.name} takes more than tensors, and makes no graph', stacklevel=3)
            return False
        return not torch.cuda.is_current_stream_capturing()  # by the caller, who gets all of it

    def _record(self, args: tuple, kwargs: dict) -> tuple:
        args, kwargs = tree_map(torch.clone, (args, kwargs))
        inputs = tree_flatten((args, kwargs))[0]
        try:
            with torch.cuda.device_of(inputs[0]):
                graph, outputs = record(lambda: self.function(*args, **kwargs), self.pool)
        except RuntimeError as error:
            raise UserRuntimeError(
                f'{self.name} cannot be recorded as a CUDA graph: {str(error).splitlines()[0]}'
            ) from error
        return graph, inputs, outputs
