"""The Triton backend: every method for real A, forward and backward, without a compiler.

Importing this package imports no Triton: that is left to the first call. :data:`MISSING` says why
it cannot be used. The operators are ``vim_mm::triton_scan_fwd`` and ``_bwd``, with the arguments of
the compiled ones (csrc/ops.cpp).
"""

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from vim_mm.ops.library import MAX_MIXED_GROUPS, register_scan_autograd
from vim_mm.ops.reference import DIFFERENTIABLE, SCHEMA, ScanInputs

OLDEST = (3, 3)  # the first with tl.gather and tuples of tensors


def _missing() -> str | None:
    if importlib.util.find_spec('triton') is None:
        return 'Triton is not installed'
    from importlib.metadata import PackageNotFoundError, version

    for distribution in ('triton', 'pytorch-triton', 'pytorch-triton-rocm'):
        try:
            found = version(distribution)
        except PackageNotFoundError:
            continue
        if tuple(int(part) for part in found.split('.')[:2]) < OLDEST:
            return f'Triton is {found}, older than {".".join(map(str, OLDEST))}'
    return None


# Why there is no Triton; None where there is.
MISSING: str | None = _missing()


def obstacle(device_type: str, dtype: torch.dtype, is_complex: bool = False) -> str | None:
    """Why there is no Triton scan for tensors of that device and dtype, or None.

    Without a GPU there is one under Triton's interpreter (TRITON_INTERPRET=1), which is for tests.
    """
    if MISSING is not None:
        return MISSING
    if is_complex:
        return 'the Triton scan takes no complex A'
    if dtype == torch.float64:
        return 'the Triton scan has no float64'
    if device_type == 'cpu' and os.environ.get('TRITON_INTERPRET') == '1':
        return None
    if device_type not in ('cuda', 'xpu'):
        return f'Triton has no code for {device_type}'
    return None


@torch.library.custom_op(
    'vim_mm::triton_scan_fwd',
    mutates_args=(),
    schema=f'({SCHEMA}) -> (Tensor, Tensor, Tensor)',
)
def triton_scan_fwd(*arguments) -> tuple[Tensor, Tensor, Tensor]:
    """out, last_state and what backward takes; :func:`vim_mm.ops.triton.scan.scan_forward`."""
    from vim_mm.ops.triton.scan import scan_forward

    inputs = ScanInputs(*arguments)
    with _on(inputs.u):
        return scan_forward(inputs)


@torch.library.custom_op(
    'vim_mm::triton_scan_bwd',
    mutates_args=(),
    schema=f'(Tensor? grad_out, Tensor? grad_last_state, Tensor edges, {SCHEMA}) '
    '-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)',
)
def triton_scan_bwd(grad_out, grad_last_state, edges, *arguments) -> tuple[Tensor, ...]:
    """Gradients of the tensors; :func:`vim_mm.ops.triton.scan.scan_backward`."""
    from vim_mm.ops.triton.scan import scan_backward

    inputs = ScanInputs(*arguments)
    with _on(inputs.u):
        return scan_backward(grad_out, grad_last_state, edges, inputs)


def _on(x: Tensor) -> Any:
    """Triton launches on the current device, not on that of its arguments."""
    return torch.cuda.device_of(x)


@triton_scan_fwd.register_fake
def _(*arguments):
    from vim_mm.ops.triton.scan import edges_shape, like_rows

    inputs = ScanInputs(*arguments)
    u, states = inputs.u, inputs.A.shape[-1]
    batch, groups, channels, _ = u.shape
    last_state = u.new_empty((batch, groups, states, channels), dtype=torch.float32)
    shape = edges_shape(u.shape, states, inputs.method)
    return like_rows(u), last_state.mT, u.new_empty(shape, dtype=torch.float32)


@triton_scan_bwd.register_fake
def _(grad_out, grad_last_state, edges, *arguments):
    from vim_mm.ops.triton.scan import like_rows

    inputs = ScanInputs(*arguments)
    u = inputs.u

    def empty(x: Tensor | None) -> Tensor:
        if x is None:
            return u.new_empty(0)
        if x is u or x is inputs.delta or x is inputs.z:
            return like_rows(u, x.dtype)
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    return tuple(map(empty, inputs.tensors()[: len(DIFFERENTIABLE)]))


register_scan_autograd(
    'triton_scan_fwd',
    'triton_scan_bwd',
    "the Triton scan has no second derivative; backend='reference' takes the PyTorch "
    'reference, which has',
)


def triton_scan(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """out and last_state of the grouped scan, differentiable.

    More groups of different directions than a launch takes are scanned by several.
    """
    groups = len(inputs.reverse)
    if groups <= MAX_MIXED_GROUPS or len(set(inputs.reverse)) == 1:
        out, last_state, _ = triton_scan_fwd(*inputs)
        return out, last_state
    parts = [
        triton_scan(inputs.of_groups(first, first + MAX_MIXED_GROUPS))
        for first in range(0, groups, MAX_MIXED_GROUPS)
    ]
    out, last_state = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    return out, last_state


# The fused block: vim_mm.ops.triton.block. Defined without torch.library.custom_op, whose checks
# take longer than a launch.
_library = torch.library.Library('vim_mm', 'FRAGMENT')
_library.define(
    'triton_add_rms_norm_fwd(Tensor residual, Tensor? update, Tensor weight, float eps, '
    'ScalarType dtype) -> (Tensor normed, Tensor sum, Tensor rstd)'
)
_library.define(
    'triton_add_rms_norm_bwd(Tensor grad_normed, Tensor? grad_sum, Tensor sum, Tensor rstd, '
    'Tensor weight, bool with_update) -> (Tensor, Tensor, Tensor)'
)
_library.define(
    'triton_mixer_fwd(Tensor x, Tensor? update, Tensor? norm, float eps, ScalarType dtype, '
    'Tensor?[] parameters, int method, int[] reverse, float scale, bool keep) '
    '-> (Tensor out, Tensor sum, Tensor[] kept)'
)
_library.define(
    'triton_mixer_bwd(Tensor grad_out, Tensor? grad_sum, Tensor x, Tensor? norm, Tensor[] kept, '
    'int[] sizes, int[] types, bool with_update, int method, int[] reverse, float scale) '
    '-> Tensor[]'
)


def _call(name: str) -> Any:
    def operator(x: Tensor, *arguments: Any) -> Any:
        from vim_mm.ops.triton import block

        with _on(x):
            return getattr(block, name)(x, *arguments)

    return operator


for _name in ('add_rms_norm_fwd', 'add_rms_norm_bwd', 'mixer_fwd', 'mixer_bwd'):
    _library.impl(f'triton_{_name}', _call(_name), 'CompositeExplicitAutograd')
