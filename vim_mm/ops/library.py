"""The native operators as torch sees them: loads `vim_mm._C` once, gives fake kernels and autograd.

Shapes and letters of the operators stand with their schemas in csrc/ops.cpp.
"""

import functools
import importlib.util
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from vim_mm.errors import UserValueError
from vim_mm.ops.discretization import IS_CAUSAL
from vim_mm.ops.reference import DIFFERENTIABLE, ScanInputs, state_dtype

CHUNK = 64  # kChunk of csrc/cuda/common/scan_arguments.h

# Why `vim_mm._C` is missing, for the messages of those who need it; None when it is loaded.
MISSING: str | None = None
if importlib.util.find_spec('vim_mm._C') is None:
    MISSING = 'vim_mm._C is not built (see docs/install.md)'
else:
    try:
        importlib.import_module('vim_mm._C')
    except ImportError as error:
        MISSING = f'vim_mm._C is built but does not load: {error}'


def has_kernel(device_type: str) -> bool:
    """Whether the compiled scan exists for tensors of a device type such as 'cpu' or 'cuda'."""
    if MISSING is not None:
        return False
    return _is_registered(device_type)


@functools.cache  # to ask takes longer than to launch a kernel, and a mixer asks at every call
def _is_registered(device_type: str) -> bool:
    key = {'cpu': 'CPU', 'cuda': 'CUDA'}.get(device_type)
    if key is None:
        return False
    if key == 'CPU':
        cpu_capability()  # else its error would come from the middle of a model
    try:
        torch.library.get_kernel('vim_mm::selective_scan_fwd', key)
    except RuntimeError:  # how it says that there is none
        return False
    return True


def cpu_capability() -> str:
    """The instruction set of the CPU kernels: that of VIM_MM_CPU_CAPABILITY, or the best there is.

    Raises:
        ValueError: The variable names none, or one that this processor does not have.
    """
    try:
        return torch.ops.vim_mm.cpu_capability()
    except RuntimeError as error:
        raise UserValueError(str(error)) from None


def built_architectures() -> list[str]:
    """GPU architectures of the compiled library as TORCH_CUDA_ARCH_LIST names them."""
    if MISSING is not None or not hasattr(torch.ops.vim_mm, 'build_info'):
        return []
    text = torch.ops.vim_mm.build_info().partition('cuda=')[2]
    return [name for name in text.split(';') if name]


def runs_on(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Whether code for one of the architectures runs on a GPU of that compute capability.

    Machine code runs on the same major version from its minor version on; with +PTX it is compiled
    for every later one at the first call. A suffix a or f ties code to its own version.
    """
    for name in architectures:
        match = re.fullmatch(r'(\d+)\.(\d+)([af]?)(\+PTX)?', name)
        if match is None:
            continue
        built = (int(match[1]), int(match[2]))
        if match[3]:
            if built == capability:
                return True
        elif (built[0] == capability[0] and built <= capability) or (
            match[4] and built <= capability
        ):
            return True
    return False


@functools.cache
def why_not_on_card() -> str | None:
    """Why the compiled kernels do not run on the GPU of this machine, None where they do.

    The first GPU stands for all; without one, and where it is unknown what was compiled, nothing
    speaks against them.
    """
    if not torch.cuda.is_available() or not (architectures := built_architectures()):
        return None
    capability = torch.cuda.get_device_capability(0)
    if runs_on(capability, architectures):
        return None
    needed = '.'.join(map(str, capability))
    return f'vim_mm._C is compiled for {" ".join(architectures)}, and the GPU needs {needed}'


def call(operator: Callable[..., Any], *arguments: Any) -> Any:
    """What an operator returns; where memory is full the error is torch's own.

    A compiled operator gets its memory through torch's C interface, which passes on that an
    allocation failed, not why. Compiled graphs call operators without this function.

    Raises:
        torch.OutOfMemoryError: The GPU has too little memory.
    """
    if torch.compiler.is_compiling():
        return operator(*arguments)
    try:
        return operator(*arguments)
    except RuntimeError as error:
        if not any(name in str(error) for name in _ALLOCATIONS):
            raise
        device = next(x for x in arguments if isinstance(x, Tensor)).device
        message = _full_memory(device)
        if message is None:
            raise
        # Its name since torch 2.5 is torch.OutOfMemoryError.
        raise torch.cuda.OutOfMemoryError(message) from error


_ALLOCATIONS = ('aoti_torch_empty_strided', 'aten::empty_like')


def _full_memory(device: torch.device) -> str | None:
    """How full a GPU's memory is and what to do; None without a GPU that works."""
    try:
        free, total = torch.cuda.mem_get_info(device)
    except (RuntimeError, ValueError):  # after an illegal access, say, and on a CPU
        return None
    return (
        f'CUDA out of memory in an operator of vim_mm: {device} has {free / 2**30:.2f} GiB free of '
        f'{total / 2**30:.2f}. Take smaller batches or images, with_cp=True of the backbone, or '
        'against gaps between tensors PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.'
    )


def _forward_fake(*arguments) -> tuple[Tensor, Tensor, Tensor]:
    inputs = ScanInputs(*arguments)
    u, states = inputs.u, inputs.A.shape[-1]
    last_state = u.new_empty((*u.shape[:3], states), dtype=state_dtype(u, inputs.A))
    # The CPU kernel needs nothing of its forward.
    on_cuda = u.device.type == 'cuda'
    edges = edges_shape(u.shape, states, inputs.method) if on_cuda else (0,)
    return torch.empty_like(u), last_state, last_state.new_empty(edges)


def edges_shape(shape: Sequence[int], states: int, method: int) -> tuple[int, ...]:
    """(directions, B, G, H, chunks, N), given (B, G, H, L): of what CUDA's backward takes."""
    directions = 1 if IS_CAUSAL[method] else 2
    return (directions, *shape[:3], -(-shape[3] // CHUNK), states)


def _backward_fake(grad_out, grad_last_state, edges, *arguments) -> tuple[Tensor, ...]:
    inputs = ScanInputs(*arguments)
    if inputs.initial_state is not None and inputs.u.device.type == 'cuda':
        # Its gradient is contiguous there, whatever its strides.
        inputs = inputs._replace(initial_state=inputs.initial_state.contiguous())
    given = inputs.tensors()[: len(DIFFERENTIABLE)]
    return tuple(inputs.u.new_empty(0) if x is None else torch.empty_like(x) for x in given)


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Keep tensors with a forward-mode derivative from operators that would drop it unnoticed.

    Raises:
        NotImplementedError: One has a tangent, of ``torch.func.jvp`` for example.
    """
    if forward_ad._current_level < 0:  # PyTorch has no public name for it
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(
            'this operator has no forward-mode derivative (jvp); '
            "the scan's backend='reference' has, for zoh and rk4"
        )


def without_autocast(x: Tensor) -> AbstractContextManager:
    """For operators that autocast would change: products, which it rounds, and ``torch.cat`` and
    ``stack``, which refuse float16 under its bfloat16 and the other way round."""
    # The meta device has none.
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


# Directions of so many groups fit into an integer, which a launch of Triton's scan takes.
MAX_MIXED_GROUPS = 31


def register_scan_autograd(forward: str, backward: str, no_second_derivative: str) -> None:
    """Derivatives of a scan by an operator for its backward pass, which has none itself.

    Args:
        forward: Name in ``torch.ops.vim_mm``: from the inputs of a scan to out, last_state and
            edges.
        backward: Likewise: of the gradients of out and last_state, edges, and what ``forward``
            takes, to the gradients of the tensors.
        no_second_derivative: Message of the RuntimeError.
    """
    operator = getattr(torch.ops.vim_mm, backward)

    def derive(
        ctx: Any, grad_out: Tensor | None, grad_last_state: Tensor | None, _: Tensor | None
    ) -> tuple:
        edges, *tensors = ctx.saved_tensors
        given = tensors[: len(DIFFERENTIABLE)]
        rest = (None,) * (len(tensors) - len(given) + len(ctx.options))
        if grad_out is None and grad_last_state is None:
            return (*(None for _ in given), *rest)
        grads = call(operator, grad_out, grad_last_state, edges, *tensors, *ctx.options)
        return (*(None if x is None else g for x, g in zip(given, grads, strict=True)), *rest)

    def refuse(ctx: Any, *grads: Tensor | None) -> tuple:
        raise RuntimeError(no_second_derivative)

    torch.library.register_autograd(f'vim_mm::{forward}', derive, setup_context=keep_inputs)
    torch.library.register_autograd(f'vim_mm::{backward}', refuse)


def keep_inputs(ctx: Any, inputs: tuple, output: tuple) -> None:
    """``setup_context`` of a scan's operator, as :func:`torch.library.register_autograd` has it."""
    inputs = ScanInputs(*inputs)
    edges, ctx.options = output[2], inputs.options()
    ctx.mark_non_differentiable(edges)
    ctx.save_for_backward(edges, *inputs.tensors())
    # An output that nobody used costs no tensor of zeros.
    ctx.set_materialize_grads(False)


if MISSING is None:
    torch.library.register_fake('vim_mm::selective_scan_fwd')(_forward_fake)
    torch.library.register_fake('vim_mm::selective_scan_bwd')(_backward_fake)
    register_scan_autograd(
        'selective_scan_fwd',
        'selective_scan_bwd',
        'the compiled selective scan has no second derivative; '
        'use_cuda_kernel=False takes the PyTorch reference, which has',
    )
