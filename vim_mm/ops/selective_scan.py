"""selective_scan_fn: the public op. Checks its arguments, chooses the backend, calls it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vim_mm.errors import UserTypeError, UserValueError
from vim_mm.ops import triton
from vim_mm.ops.backends import OPERATORS, chosen_backend
from vim_mm.ops.chunked import chunked_scan
from vim_mm.ops.counted import counted_scan, counting
from vim_mm.ops.discretization import (
    IS_CAUSAL,
    check_device,
    check_reset,
    check_tensor,
    method_id,
    method_name,
)
from vim_mm.ops.exported import exported_scan, exporting_to_onnx
from vim_mm.ops.library import call, refuse_forward_mode
from vim_mm.ops.reference import (
    DIFFERENTIABLE,
    TENSORS,
    ScanInputs,
    grouped_scan_ref,
    real_dtype,
    state_dtype,
)

MAX_STATES = 256
_REAL = (torch.float32, torch.float16, torch.bfloat16)
_ANY_FLOAT = (*_REAL, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)
_OPTIONAL = ('D', 'z', 'delta_bias', 'initial_state')


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    discretization_method: str = 'zoh',
    use_cuda_kernel: bool | None = None,
    reverse: bool = False,
    *,
    backend: str | None = None,
    initial_state: Tensor | None = None,
    reset: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Selective scan: x_t = A_bar_t x_{t-1} + beta_t B_t u_t, out_t = (C_t x_t + D u_t) silu(z_t).

    Letters: B batch, D channels, L steps, N states, G groups of channels. All tensors may have any
    strides and any L >= 0, B >= 0. Every tensor argument receives a gradient of its own dtype; the
    reference alone has a second derivative.

    Args:
        u, delta, z: (B, D, L), float32, float16 or bfloat16 in any mix, or all float64.
            ``delta`` is the step size before ``delta_bias`` and softplus, ``z`` the gate.
        A: (D, N), float or complex (conjugate pairs: the output is then twice the real part);
            1 <= N <= 256.
        B, C: (D, N), (B, N, L) or (B, G, N, L), dtypes as ``u``, or complex if A is; with complex
            A also interleaved reals (B, N, 2L) or (B, G, N, 2L). Channel d reads group
            d // (D / G).
        D, delta_bias: (D,), any float.
        delta_softplus: Apply softplus to ``delta + delta_bias``.
        return_last_state: Also return the state after the last step in scan order.
        discretization_method: 'zoh', 'foh', 'bilinear', 'poly', 'highorder', 'rk4' or 'zoh_exact',
            the control. 'poly' averages the scans in both directions; its last state is that of the
            direction asked for.
        use_cuda_kernel: True for the compiled CUDA kernel or an error, False for the PyTorch
            reference, None for what ``backend`` says.
        reverse: Scan from the last step to the first.
        backend: 'native' (the compiled kernel of the device), 'triton', 'torch' (PyTorch
            operators) or 'reference', or an error where it cannot be had. Where it and
            ``use_cuda_kernel`` are None, the environment variables VIM_MM_BACKEND (a name) and
            VIM_USE_CUDA_KERNEL (1 or 0) decide, and where those are empty the first of these
            names that can be had. Variables are read at each eager call and frozen into a compiled
            graph.
        initial_state: (B, D, N), the state before the first step in scan order, in the dtype of
            the state that is returned; None is 0. What ``return_last_state`` gave for one piece of
            a sequence continues it in the next. Not with 'poly', which scans from both ends.
        reset: (B, L), bool. True where a sequence begins: no state passes between steps t - 1 and
            t, in either direction, so that several sequences in one row are scanned as if each
            were alone, 'poly' and ``reverse`` included. It has no gradient. ``reset[:, 0]`` drops
            the initial state of a forward scan. With ``reverse`` the state after step 0 is returned
            whatever ``reset[:, 0]`` is: where it is true, continue with 0.

    Returns:
        out (B, D, L) in u's dtype; with ``return_last_state`` also the state (B, D, N), float32
        (float64 for float64 inputs), complex if A is.

    Raises:
        TypeError: An argument has a wrong type, layout or dtype.
        ValueError: An argument has a wrong shape, device or value, the method is unknown, or
            ``backend`` and ``use_cuda_kernel`` contradict each other.
        RuntimeError: The backend that was demanded is not available.

    Source: S6 of Gu & Dao, Mamba, arXiv 2312.00752; discretizations in vim_mm.ops.discretization.
    """
    check_bool('reverse', reverse)
    inputs = ScanInputs(
        u, delta, A, B, C, D, z, delta_bias, initial_state, reset, delta_softplus,
        method_id(discretization_method), [int(reverse)],
    )  # fmt: skip
    check_shapes(inputs, 'D')
    inputs = _deinterleave(inputs)
    grouped = _grouped(inputs, check_state_matrices(inputs))
    out, last_state = _scan(grouped, return_last_state, use_cuda_kernel, backend)
    out = out.flatten(1, 2)
    return (out, last_state.flatten(1, 2)) if return_last_state else out


def _grouped(inputs: ScanInputs, groups: int) -> ScanInputs:
    """The inputs of ``selective_scan_fn``, their channels split into groups."""

    def split(x: Any, dim: int) -> Any:
        if x is None:
            return None
        if groups == 1:  # the same view; a third of unflatten's time on the CPU
            return x.unsqueeze(dim)
        return x.unflatten(dim, (groups, x.shape[dim] // groups))

    def split_matrix(M: Tensor) -> Tensor:
        if M.dim() == 2:
            return split(M, 0)
        M = M if M.dim() == 4 else M.unsqueeze(1)
        return M if groups == 1 else M.expand(-1, groups, -1, -1)

    return ScanInputs(
        u=split(inputs.u, 1),
        delta=split(inputs.delta, 1),
        A=split(inputs.A, 0),
        B=split_matrix(inputs.B),
        C=split_matrix(inputs.C),
        D=split(inputs.D, 0),
        z=split(inputs.z, 1),
        delta_bias=split(inputs.delta_bias, 0),
        initial_state=split(inputs.initial_state, 1),
        reset=inputs.reset,
        delta_softplus=inputs.delta_softplus,
        method=inputs.method,
        reverse=[*inputs.reverse] * groups,
    )


def selective_scan_grouped_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    discretization_method: str = 'zoh',
    use_cuda_kernel: bool | None = None,
    reverse: Sequence[bool] = (False, True),
    *,
    backend: str | None = None,
    initial_state: Tensor | None = None,
    reset: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Selective scans of K groups, each in its own direction, in one call of the native op.

    Equals :func:`selective_scan_fn` on each group. A tensor that groups share is passed with
    stride 0 (``x.unsqueeze(1).expand(-1, K, -1, -1)``): nothing is copied, and its gradient is the
    sum over the groups.

    Args:
        u, delta, z: (B, K, D, L).
        A: (K, D, N).
        B, C: (B, K, N, L) or (K, D, N); complex if A is.
        D, delta_bias: (K, D).
        reverse: K bools, True for a group that is scanned from the last step to the first.
        initial_state: (B, K, D, N).
        reset: (B, L), one for all groups.
        delta_softplus, return_last_state, discretization_method, use_cuda_kernel, backend: As in
            :func:`selective_scan_fn`, and so are the dtypes and the errors.

    Returns:
        out (B, K, D, L); with ``return_last_state`` also the state (B, K, D, N).
    """
    inputs = ScanInputs(
        u, delta, A, B, C, D, z, delta_bias, initial_state, reset, delta_softplus,
        method_id(discretization_method), reverse,
    )  # fmt: skip
    groups, channels = check_shapes(inputs, 'K, D')
    if groups < 1:
        raise UserValueError('u: expected at least one group, got none')
    batch, length, states = u.shape[0], u.shape[3], A.shape[2]
    for name, M in (('B', B), ('C', C)):
        _check_state_dtype(name, M, u, A)
        if M.dim() == 3:
            _check_shape(name, M, (groups, channels, states), '(K, D, N)')
        else:
            _check_shape(name, M, (batch, groups, states, length), '(B, K, N, L)')
    if len(reverse) != groups:
        raise UserValueError(f'reverse: expected {groups} flags, one per group, got {len(reverse)}')
    for flag in reverse:
        check_bool('reverse', flag)
    options: tuple[Any, ...] = (delta_softplus, inputs.method, [*map(int, reverse)])
    inputs = ScanInputs(*inputs.tensors(), *options)
    out, last_state = _scan(inputs, return_last_state, use_cuda_kernel, backend)
    return (out, last_state) if return_last_state else out


def _scan(
    inputs: ScanInputs,
    return_last_state: bool,
    use_cuda_kernel: bool | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """Both public forms, once their shapes are checked and are those of the grouped one."""
    check_bool('delta_softplus', inputs.delta_softplus)
    check_bool('return_last_state', return_last_state)
    if exporting_to_onnx():  # what the graph may hold is no choice of backend
        for name in ('initial_state', 'reset'):
            if getattr(inputs, name) is not None:
                raise UserValueError(f'{name}: a scan that is exported to ONNX takes none')
        return chunked_scan(inputs, exported_scan)
    u, A = inputs.u, inputs.A
    name = chosen_backend(backend, use_cuda_kernel, u.device.type, u.dtype, A.is_complex())
    if name in OPERATORS:
        refuse_forward_mode(*inputs.tensors())
    if name == 'native':
        out, last_state, _ = call(torch.ops.vim_mm.selective_scan_fwd, *inputs)
        return out, last_state
    if name == 'triton':
        return triton.triton_scan(inputs)
    if counting():
        return counted_scan(name, inputs)
    return chunked_scan(inputs) if name == 'torch' else grouped_scan_ref(inputs)


def check_shapes(inputs: ScanInputs, letters: str) -> tuple[int, ...]:
    """Check all but the shapes of B and C; the sizes that ``letters``, 'D' or 'K, D', stand for."""
    _check_tensors(inputs)
    u, A = inputs.u, inputs.A
    rank = len(letters.split(','))
    sequence, per_channel = f'(B, {letters}, L)', f'({letters},)' if rank == 1 else f'({letters})'
    _check_rank('u', u, rank + 2, sequence)
    _check_rank('A', A, rank + 1, f'({letters}, N)')
    channels = tuple(u.shape[1:-1])
    _check_shape('delta', inputs.delta, tuple(u.shape), sequence)
    _check_shape('A', A, (*channels, A.shape[-1]), f'({letters}, N)')
    _check_shape('z', inputs.z, tuple(u.shape), sequence)
    _check_shape('D', inputs.D, channels, per_channel)
    _check_shape('delta_bias', inputs.delta_bias, channels, per_channel)
    if not 1 <= A.shape[-1] <= MAX_STATES:
        raise UserValueError(f'A: expected 1 to {MAX_STATES} states N, got {A.shape[-1]}')
    if inputs.reset is not None:
        check_reset(inputs.reset, (u.shape[0], u.shape[-1]), 'u', u)
    if inputs.initial_state is not None:
        shape = (u.shape[0], *channels, A.shape[-1])
        _check_shape('initial_state', inputs.initial_state, shape, f'(B, {letters}, N)')
        if not IS_CAUSAL[inputs.method]:
            raise UserValueError(
                f'initial_state: {method_name(inputs.method)!r} scans from both ends, whose states '
                'cannot both be given, and takes none'
            )
    return channels


def _check_tensors(inputs: ScanInputs) -> None:
    """Types, dtypes and device but of ``reset``; the dtypes of B and C depend on more than that."""
    pairs = zip(DIFFERENTIABLE, inputs.tensors())
    tensors: dict[str, Any] = {
        name: x for name, x in pairs if x is not None or name not in _OPTIONAL
    }
    for name, x in tensors.items():
        check_tensor(name, x)
    u = tensors['u']
    if u.dtype not in _ANY_FLOAT:
        raise UserTypeError(f'u: expected float32, float16, bfloat16 or float64, got {u.dtype}')
    for name, x in tensors.items():
        check_device(name, x, 'u', u)
        if name in ('delta', 'z'):
            _check_real_dtype(name, x, u)
        elif name in ('D', 'delta_bias') and x.dtype not in _ANY_FLOAT:
            raise UserTypeError(
                f'{name}: expected a floating point dtype of 16 bits or more, got {x.dtype}'
            )
        elif name == 'A' and x.dtype not in (*_ANY_FLOAT, *_COMPLEX):
            raise UserTypeError(
                f'A: expected a floating point dtype of 16 bits or more, complex64 or complex128, '
                f'got {x.dtype}'
            )
        elif name == 'initial_state' and x.dtype != state_dtype(u, tensors['A']):
            raise UserTypeError(
                f'initial_state: expected {state_dtype(u, tensors["A"])}, the dtype of the state, '
                f'got {x.dtype}'
            )


def _check_real_dtype(name: str, x: Tensor, u: Tensor) -> None:
    if u.dtype == torch.float64 and x.dtype != torch.float64:
        raise UserTypeError(f'{name}: expected float64, as u is, got {x.dtype}')
    if u.dtype != torch.float64 and x.dtype not in _REAL:
        raise UserTypeError(f'{name}: expected float32, float16 or bfloat16, got {x.dtype}')


def _check_state_dtype(name: str, M: Tensor, u: Tensor, A: Tensor) -> None:
    if not A.is_complex():
        if M.is_complex():
            raise UserTypeError(f'{name}: expected a real dtype, as A is real, got {M.dtype}')
        return _check_real_dtype(name, M, u)
    expected = torch.complex128 if u.dtype == torch.float64 else torch.complex64
    if M.dtype != expected:
        raise UserTypeError(f'{name}: expected {expected}, as A is complex, got {M.dtype}')


def _check_rank(name: str, x: Tensor, rank: int, letters: str) -> None:
    if x.dim() != rank:
        raise UserValueError(
            f'{name}: expected {rank} dimensions {letters}, got shape {(*x.shape,)}'
        )


def _check_shape(name: str, x: Tensor | None, shape: tuple[int, ...], letters: str) -> None:
    if x is not None and tuple(x.shape) != shape:
        raise UserValueError(f'{name}: expected shape {letters} = {shape}, got {(*x.shape,)}')


def check_bool(name: str, value: bool) -> None:
    """TypeError if the argument is no bool: a text is true, whatever it says."""
    if not isinstance(value, bool):
        raise UserTypeError(f'{name}: expected a bool, got {value!r}')


def _deinterleave(inputs: ScanInputs) -> ScanInputs:
    """Real B and C with complex A hold (re, im) pairs along their last axis."""
    u, A = inputs.u, inputs.A
    if not A.is_complex():
        return inputs

    def complex_matrix(name: str, M: Tensor) -> Tensor:
        if M.is_complex() or M.dim() not in (3, 4):
            return M
        _check_real_dtype(name, M, u)
        if M.shape[-1] != 2 * u.shape[-1]:
            raise UserValueError(
                f'{name}: expected 2 L = {2 * u.shape[-1]} interleaved steps with complex A, '
                f'got shape {(*M.shape,)}'
            )
        pairs = M.to(real_dtype(u))
        return torch.view_as_complex(pairs.unflatten(-1, (-1, 2)).contiguous())

    tensors = zip(TENSORS, inputs.tensors())
    changed: list[Any] = [
        complex_matrix(name, x) if name in ('B', 'C') else x for name, x in tensors
    ]
    return ScanInputs(*changed, *inputs.options())


def check_state_matrices(inputs: ScanInputs) -> int:
    """Dtype and shape of B and C in selective_scan_fn; returns the number of groups G."""
    u, A, B, C = inputs.u, inputs.A, inputs.B, inputs.C
    batch, channels, length = u.shape
    states = A.shape[1]
    groups = 1
    for name, M in (('B', B), ('C', C)):
        _check_state_dtype(name, M, u, A)
        if M.dim() == 2:
            _check_shape(name, M, (channels, states), '(D, N)')
        elif M.dim() == 3:
            _check_shape(name, M, (batch, states, length), '(B, N, L)')
        elif M.dim() == 4:
            _check_shape(name, M, (batch, M.shape[1], states, length), '(B, G, N, L)')
            if M.shape[1] == 0 or channels % M.shape[1]:
                raise UserValueError(
                    f'{name}: expected a number of groups G that divides D = {channels}, '
                    f'got {M.shape[1]}'
                )
            if 1 not in (groups, M.shape[1]) and groups != M.shape[1]:
                raise UserValueError(
                    f'C: expected as many groups as B, {groups}, or one, got {M.shape[1]}'
                )
            groups = max(groups, M.shape[1])
        else:
            raise UserValueError(
                f'{name}: expected shape (D, N), (B, N, L) or (B, G, N, L), got {(*M.shape,)}'
            )
    return groups
