"""The scans that are made of PyTorch's operators, as one operator each while somebody counts.

torch's counter and MMEngine's look at operators, and of elementwise ones they count nothing. When
nobody counts, these scans stay what they are, which compilers and exports take apart.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch, flop_counter

from vim_mm.ops.chunked import chunked_scan
from vim_mm.ops.library import keep_inputs
from vim_mm.ops.reference import SCHEMA, ScanInputs, grouped_scan_ref

# In torch 2.4 the counter is a mode, later it has one.
_COUNTER = getattr(flop_counter, '_FlopCounterMode', flop_counter.FlopCounterMode)
_library = torch.library.Library('vim_mm', 'FRAGMENT')


_traces: list[object] = []  # those that count and are under way


@contextmanager
def counting_trace() -> Iterator[None]:
    """Inside of it a trace counts operators, as MMEngine's analysis does."""
    _traces.append(object())
    try:
        yield
    finally:
        _traces.pop()


def counting() -> bool:
    """Whether a counter looks at the operators that are called. A trace that exports is none."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return False  # transformed scans: the operators have no rules for it
    if _traces:
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and any(
        isinstance(mode, _COUNTER) for mode in _python_dispatch._get_current_dispatch_mode_stack()
    )


def counted_scan(backend: str, inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """out and last_state of 'torch' or 'reference', by an operator; without second derivative."""
    out, last_state, _ = getattr(torch.ops.vim_mm, f'{backend}_scan_fwd')(*inputs)
    return out, last_state


def _define(backend: str, scan: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Operators with the arguments of the compiled ones (csrc/ops.cpp).

    That of the backward pass computes nothing: autograd, which goes through the scan itself, does
    not work inside of an operator.
    """
    forward_name, backward_name = f'{backend}_scan_fwd', f'{backend}_scan_bwd'

    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        out, last_state = scan(ScanInputs(*arguments))
        return out, last_state, out.new_empty(0)

    def derive(ctx: Any, grad_out: Any, grad_last_state: Any, _: Any) -> tuple:
        if torch.is_grad_enabled():
            raise RuntimeError('while operations are counted, a scan has no second derivative')
        edges, *tensors = ctx.saved_tensors
        grads, rest = (grad_out, grad_last_state), (None,) * len(ctx.options)
        if all(grad is None for grad in grads):
            return (*(None for _ in tensors), *rest)
        getattr(torch.ops.vim_mm, backward_name)(*grads, edges, *tensors, *ctx.options)
        *given, reset = tensors
        leaves = [None if x is None else x.detach().requires_grad_() for x in given]
        with torch.enable_grad():
            results = scan(ScanInputs(*leaves, reset, *ctx.options))
        outputs, given = zip(*((x, grad) for x, grad in zip(results, grads) if grad is not None))
        present = [x for x in leaves if x is not None]
        found = iter(torch.autograd.grad(outputs, present, given, materialize_grads=True))
        return (*(None if x is None else next(found) for x in leaves), None, *rest)

    _library.define(f'{forward_name}({SCHEMA}) -> (Tensor, Tensor, Tensor)')
    _library.define(
        f'{backward_name}(Tensor? grad_out, Tensor? grad_last_state, Tensor edges, {SCHEMA}) -> ()'
    )
    _library.impl(forward_name, forward, 'CompositeExplicitAutograd')
    _library.impl(backward_name, lambda *_: None, 'CompositeExplicitAutograd')
    torch.library.register_autograd(f'vim_mm::{forward_name}', derive, setup_context=keep_inputs)


_define('torch', chunked_scan)
_define('reference', grouped_scan_ref)
