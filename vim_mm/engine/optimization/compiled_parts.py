"""The parts of a model through ``torch.compile``, for training steps: what ``--compile`` adds.

The step changes by rounding, and random numbers are drawn by other kernels than in eager training:

- backbone, neck and heads are compiled, so that norms, activations, casts and resizing are fused;
- convolutions see their channels last, as cuDNN's kernels for 16 bits want them;
- between parts tensors stay in bfloat16 under ``--amp``, and so do gradients of resizing.

Validation and everything else run the parts as they are.
"""

import os
from collections.abc import Callable
from pathlib import Path
from types import MethodType

import torch
from mmengine.logging import print_log
from mmengine.optim import OptimWrapper
from torch import nn

from vim_mm.acceleration import parts_of
from vim_mm.engine.optimization.mixed_precision import BFloat16OptimWrapper
from vim_mm.engine.optimization.synchronized_norm import trace_synchronized_norms


class CompiledParts:
    """Compiles the parts of a model until :meth:`remove`; the first step takes one to two minutes.

    Args:
        model (nn.Module): One of MMEngine's kin, on its device, with its weights loaded.
        wrapper (OptimWrapper): Of its optimizer; the state of a resumed run is there already.
    """

    def __init__(self, model: nn.Module, wrapper: OptimWrapper):
        cache = _keep_what_is_compiled()
        model.to(memory_format=torch.channels_last)
        _keep_form(wrapper.optimizer)
        for state in wrapper.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() == 4:
                    state[name] = value.contiguous(memory_format=torch.channels_last)
        if isinstance(wrapper, BFloat16OptimWrapper):
            wrapper.keep_bfloat16()
        # Where images differ between processes in size, one process may compile what another runs
        # eagerly: past the compiler's limit of shapes, say. Their exchanges would not meet.
        fixed = getattr(model.data_preprocessor, 'size', None) is not None
        fixed = fixed and not hasattr(model, 'with_fixed_shapes')  # a detector's: objects differ
        self._undo = trace_synchronized_norms(model) if fixed else []
        names = [name for name, _ in model.named_children() if name != 'data_preprocessor']
        for part in parts_of(model, of_pictures=True):
            self._undo.append(_compile(part))
        print_log(
            f'Compiling {", ".join(names)} in the first step takes one to two minutes; what is '
            f'compiled is kept in {cache}.',
            logger='current',
        )

    def remove(self) -> None:
        """Give the parts their own forward passes back."""
        for undo in reversed(self._undo):  # a part may be a traced layer
            undo()
        self._undo.clear()


def _keep_what_is_compiled() -> str:
    """The folder for it; PyTorch's default lies among temporary files."""
    from torch._inductor.runtime.runtime_utils import default_cache_dir  # takes a second

    # PyTorch sets the variable to its default as soon as its compiler is imported.
    if os.environ.get('TORCHINDUCTOR_CACHE_DIR') in (None, default_cache_dir()):
        caches = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache')
        os.environ['TORCHINDUCTOR_CACHE_DIR'] = str(caches / 'vim_mm' / 'inductor')
    return os.environ['TORCHINDUCTOR_CACHE_DIR']


def _keep_form(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer step as it was made; a resumed state says how the other run stepped."""
    form = {
        name: optimizer.defaults[name]
        for name in ('foreach', 'fused')
        if name in optimizer.defaults
    }
    for group in optimizer.param_groups:
        group.update(form)
        for param in group['params'] if form.get('fused') else ():
            state = optimizer.state.get(param, {})
            if 'step' in state:  # which lies on the CPU otherwise
                state['step'] = torch.as_tensor(state['step'], dtype=torch.float32).to(param.device)


def _options() -> dict[str, bool] | None:
    """Of the compiler. In deterministic training kernels are not chosen by how fast they ran."""
    if not torch.are_deterministic_algorithms_enabled():
        return None
    from torch._inductor import list_options  # takes a second

    return {'deterministic': True} if 'deterministic' in list_options() else None


def _compile(part: nn.Module) -> Callable[[], None]:
    """Compile the training of a part, and return what undoes it."""
    plain, given = part.forward, vars(part).get('forward')
    # What somebody gave knows its module itself.
    own = getattr(plain, '__self__', None) is part
    call = plain.__func__ if own else plain
    # Sizes of a training are few; a dynamic one would make the kernels of all slower.
    compiled = torch.compile(call, dynamic=False, options=_options())

    def forward(part, *args, **kwargs):
        chosen = compiled if part.training and torch.is_grad_enabled() else call
        return chosen(part, *args, **kwargs) if own else chosen(*args, **kwargs)

    # A method, which a copy of the part has of itself.
    part.forward = MethodType(forward, part)

    def undo() -> None:
        if given is None:
            del part.forward
        else:
            part.forward = given

    return undo
