"""The functions that Mamba-1's users call, by the signatures of mamba_ssm, Vim and VMamba.

Nothing is registered under another package's name; a line of yours puts a function in its place,
see docs/other_libraries.md. All are ``zoh``, run on every device and in float64 too, and answer
wrong shapes, dtypes and devices as :func:`vim_mm.ops.selective_scan_fn` does.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vim_mm import ops
from vim_mm.errors import UserTypeError, UserValueError
from vim_mm.ops.discretization import check_device, check_tensor

__all__ = [
    'bimamba_inner_fn',
    'mamba_inner_fn',
    'mamba_inner_fn_no_out_proj',
    'selective_scan_cuda',
    'selective_scan_cuda_core',
    'selective_scan_cuda_oflex',
    'selective_scan_fn',
]


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
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`vim_mm.ops.selective_scan_fn` of ``zoh``; flags count by their truth, as mamba_ssm's.

    MambaVision passes None for one.
    """
    u, delta, B, C, z = _contiguous_in_time(u=u, delta=delta, B=B, C=C, z=z)
    return ops.selective_scan_fn(
        u, delta, A, B, C, D, z, delta_bias, bool(delta_softplus), bool(return_last_state)
    )


def _contiguous_in_time(**rows: Tensor | None) -> list[Any]:
    """Copied if need be, as by mamba_ssm: CUDA's fast kernels are for no other strides."""
    for name, x in rows.items():
        if x is not None:
            check_tensor(name, x)
    return [x if x is None or x.stride()[-1:] == (1,) else x.contiguous() for x in rows.values()]


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Tensor:
    """Convolution, projections, scan, gate and output projection of a Mamba layer.

    Args:
        xz: (B, 2D, L), the input of the convolution and the gate.
        conv1d_weight: (D, 1, W).
        conv1d_bias: (D,) or None.
        x_proj_weight: (R + 2N, D), or R and the N of what is not given of ``B`` and ``C``; 2N if
            ``A`` is complex.
        delta_proj_weight: (D, R).
        out_proj_weight: (E, D).
        out_proj_bias: (E,) or None.
        A, D, delta_bias, delta_softplus: As in :func:`vim_mm.ops.selective_scan_fn`.
        B, C: None, for a matrix of the input, or (D, N).
        B_proj_bias, C_proj_bias: (N,), added to the projected matrices, 2N if ``A`` is complex; as
            in mamba_ssm without effect on given ones.
        checkpoint_lvl: 0 or 1; without effect on results. Nothing is recomputed in backward.
        b_rms_weight, c_rms_weight, dt_rms_weight: (N,), (N,) and (D,), of an RMS norm of B, C and
            the step size before its bias, with ``b_c_dt_rms_eps``; likewise 2N. Given matrices have
            none.

    Returns:
        (B, L, E).

    Raises:
        TypeError: A tensor has a wrong type, layout or dtype: weights have that of ``xz``, under
            autocast any.
        ValueError: A tensor has a wrong shape or device, ``checkpoint_lvl`` is unknown, or a given
            matrix has a norm.
    """
    norms = (b_rms_weight, c_rms_weight, dt_rms_weight)
    y = _inner(
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, A, B, C, D, delta_bias,
        B_proj_bias, C_proj_bias, delta_softplus, checkpoint_lvl, norms, b_c_dt_rms_eps,
    )  # fmt: skip
    return _out(y, out_proj_weight, out_proj_bias)


def mamba_inner_fn_no_out_proj(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
) -> Tensor:
    """:func:`mamba_inner_fn` up to the gate, as Vim's layer calls it: (B, D, L)."""
    return _inner(
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, A, B, C, D, delta_bias,
        B_proj_bias, C_proj_bias, delta_softplus, checkpoint_lvl,
    )  # fmt: skip


def bimamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    A_b: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
) -> Tensor:
    """:func:`mamba_inner_fn` of Vim's first bidirectional layer: two scans that differ in A alone.

    ``A_b`` (D, N) is of the scan from the last step to the first. Both read what the one causal
    convolution gives.
    """
    check_tensor('A', A)
    _check_shape('A_b', A_b, f'{(*A.shape,)}, as A has it', lambda x: x.shape == A.shape)
    both = [
        _inner(
            xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, a, B, C, D,
            delta_bias, B_proj_bias, C_proj_bias, delta_softplus, checkpoint_lvl, reverse=reverse,
        )
        for a, reverse in ((A, False), (A_b, True))
    ]  # fmt: skip
    return _out(both[0] + both[1], out_proj_weight, out_proj_bias)


def _inner(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    A: Tensor,
    B: Tensor | None,
    C: Tensor | None,
    D: Tensor | None,
    delta_bias: Tensor | None,
    B_proj_bias: Tensor | None,
    C_proj_bias: Tensor | None,
    delta_softplus: bool,
    checkpoint_lvl: int,
    norms: tuple[Tensor | None, ...] = (None, None, None),
    eps: float = 1e-6,
    reverse: bool = False,
) -> Tensor:
    if checkpoint_lvl not in (0, 1):
        raise UserValueError(f'checkpoint_lvl must be 0 or 1, got {checkpoint_lvl}')
    given = (B is not None) + (C is not None)
    _check_layer(xz, conv1d_weight, x_proj_weight, delta_proj_weight, A, given)
    b_norm, c_norm, dt_norm = norms
    _check_like(
        xz, conv1d_weight=conv1d_weight, conv1d_bias=conv1d_bias, x_proj_weight=x_proj_weight,
        delta_proj_weight=delta_proj_weight,
    )  # fmt: skip
    channels, states = A.shape[0], A.shape[1] * (2 if A.is_complex() else 1)
    _check_vectors(channels, conv1d_bias=conv1d_bias, dt_rms_weight=dt_norm)
    _check_vectors(
        states, B_proj_bias=B_proj_bias, C_proj_bias=C_proj_bias, b_rms_weight=b_norm,
        c_rms_weight=c_norm,
    )  # fmt: skip
    for name, matrix, norm in (('b_rms_weight', B, b_norm), ('c_rms_weight', C, c_norm)):
        if matrix is not None and norm is not None:
            raise UserValueError(f'{name}: expected None, as {name[0].upper()} is given')
    (xz,) = _contiguous_in_time(xz=xz)
    x, z = xz.chunk(2, dim=1)
    u = ops.causal_conv1d(x, conv1d_weight.squeeze(1), conv1d_bias, activation='silu')
    batch, _, length = u.shape
    rank = delta_proj_weight.shape[1]
    # The matrix products of mamba_ssm, whose sums are therefore in the same order; delta has rows
    # of channels, contiguous in time.
    projected = F.linear(u.transpose(1, 2).flatten(0, 1), x_proj_weight)  # (B L, R + 2N)
    delta = F.linear(delta_proj_weight, projected[:, :rank])  # (D, B L)
    if dt_norm is not None:
        delta = F.rms_norm(delta.T, dt_norm.shape, dt_norm, eps).T
    delta = delta.unflatten(1, (batch, length)).transpose(0, 1)
    projected = projected.unflatten(0, (batch, length))
    if B is None:
        B = _matrix(projected[..., rank : rank + states], B_proj_bias, b_norm, eps, A)
    if C is None:
        C = _matrix(projected[..., -states:], C_proj_bias, c_norm, eps, A)
    u, delta, B, C, z = _contiguous_in_time(u=u, delta=delta, B=B, C=C, z=z)
    return ops.selective_scan_fn(
        u, delta, A, B, C, D, z, delta_bias, bool(delta_softplus), reverse=reverse
    )


def _check_layer(
    xz: Any, conv1d_weight: Any, x_proj_weight: Any, delta_proj_weight: Any, A: Any, given: int
) -> None:
    """What the slices of a layer would take as it is; ``given`` counts B and C that are."""
    _check_shape('A', A, '(D, N)', lambda x: x.dim() == 2)
    channels, states = A.shape[0], A.shape[1] * (2 if A.is_complex() else 1)
    _check_shape('xz', xz, f'(B, {2 * channels}, L)', lambda x: x.shape[1:-1] == (2 * channels,))
    _check_shape(
        'conv1d_weight',
        conv1d_weight,
        f'({channels}, 1, W)',
        lambda x: x.shape[:-1] == (channels, 1),
    )
    _check_shape(
        'delta_proj_weight', delta_proj_weight, f'({channels}, R)',
        lambda x: x.dim() == 2 and len(x) == channels,
    )  # fmt: skip
    rank = delta_proj_weight.shape[1]
    # A matrix that is given may have its rows nevertheless.
    rows = sorted({rank + states * (2 - given), rank + states * 2})
    _check_shape(
        'x_proj_weight', x_proj_weight, f'({" or ".join(map(str, rows))}, {channels})',
        lambda x: x.dim() == 2 and len(x) in rows and x.shape[1] == channels,
    )  # fmt: skip


def _check_shape(name: str, x: Any, expected: str, fits: Callable[[Tensor], bool]) -> None:
    check_tensor(name, x)
    if not fits(x):
        raise UserValueError(f'{name}: expected shape {expected}, got {(*x.shape,)}')


def _check_vectors(size: int, **vectors: Any) -> None:
    for name, x in vectors.items():
        if x is not None:
            _check_shape(name, x, f'({size},)', lambda x: x.shape == (size,))


def _check_like(xz: Tensor, **weights: Any) -> None:
    """Device and dtype; autocast converts."""
    if not xz.is_floating_point():
        raise UserTypeError(f'xz: expected a floating point dtype, got {xz.dtype}')
    for name, x in weights.items():
        if x is None:
            continue
        check_tensor(name, x)
        check_device(name, x, 'xz', xz)
        if x.dtype != xz.dtype and not torch.is_autocast_enabled(xz.device.type):
            raise UserTypeError(f'{name}: expected {xz.dtype}, as xz has it, got {x.dtype}')


def _out(y: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    channels = y.shape[1]
    _check_shape(
        'out_proj_weight', weight, f'(E, {channels})', lambda x: x.shape[1:] == (channels,)
    )
    _check_vectors(len(weight), out_proj_bias=bias)
    _check_like(y, out_proj_weight=weight, out_proj_bias=bias)  # y is as xz
    return F.linear(y.transpose(1, 2), weight, bias)


def _matrix(
    projected: Tensor, bias: Tensor | None, norm: Tensor | None, eps: float, A: Tensor
) -> Tensor:
    """(B, L, N), or (B, L, 2N) for a complex A, to the scan's (B, N, L)."""
    if bias is not None:
        projected = projected + bias.to(projected.dtype)
    if norm is not None:
        projected = F.rms_norm(projected, norm.shape, norm, eps)
    if A.is_complex():
        pairs = projected.to(A.real.dtype).unflatten(-1, (-1, 2)).contiguous()
        projected = torch.view_as_complex(pairs)
    return projected.transpose(1, 2)


def _forward(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
) -> tuple[Tensor, Tensor]:
    """The ungated output, and the states of one chunk as mamba_ssm saves them: (B, D, 1, 2N).

    Odd entries are the state after the last step, even ones the product of all A_bar.
    """
    out, state = selective_scan_fn(
        u, delta, A, B, C, D, None, delta_bias, delta_softplus, return_last_state=True
    )
    dtype = state.real.dtype
    dt = delta if delta_bias is None else delta + delta_bias.to(dtype)[:, None]
    if delta_softplus:
        dt = F.softplus(dt.to(dtype))
    decay = torch.exp(dt.sum(-1, keepdim=True, dtype=dtype) * A)
    return out, torch.stack([decay.to(state.dtype), state], dim=-1).flatten(2).unsqueeze(2)


def _gradients(
    arguments: list[Any], delta_softplus: bool, grad: Tensor, shares: bool = False
) -> list[Tensor | None]:
    """Of u, delta, A, B, C, D, z and delta_bias; the forward pass is run again.

    ``shares`` says whether neighbouring channels may share delta.
    """
    # Under inference_mode as well, whose tensors take part in no backward pass: copies of them do.
    with torch.inference_mode(False), torch.enable_grad():
        grad = grad.clone() if grad.is_inference() else grad
        inputs = [x.clone() if isinstance(x, Tensor) and x.is_inference() else x for x in arguments]
        inputs = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
        for x in inputs:
            if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
                x.requires_grad_()  # the scan names the others
        u, delta, A, B, C, D, z, delta_bias = inputs
        if shares:
            delta, delta_bias = _for_each_channel(u, delta, delta_bias)
        u, delta, B, C = _widened(grad.dtype, u, delta, B, C)
        out = selective_scan_fn(u, delta, A, B, C, D, z, delta_bias, delta_softplus)
        given = [x for x in inputs if x is not None]
        found = iter(torch.autograd.grad(out, given, grad.to(out.dtype)))
    return [x if x is None else next(found) for x in inputs]


def _fwd(u, delta, A, B, C, D, z, delta_bias, delta_softplus):
    """mamba_ssm's: out, states (B, D, 1, 2N), and with a gate the gated output."""
    with torch.no_grad():
        out, states = _forward(u, delta, A, B, C, D, delta_bias, delta_softplus)
        if z is None:
            return [out, states]
        _check_like_u('z', z, u)
        return [out, states, _gate(out, z)]


def _check_like_u(name: str, x: Any, u: Tensor) -> None:
    """What :func:`vim_mm.ops.selective_scan_fn` does not see, or sees after it was used."""
    check_tensor('u', u)
    check_tensor(name, x)
    check_device(name, x, 'u', u)
    if x.shape != u.shape:
        raise UserValueError(f'{name}: expected shape (B, D, L) = {(*u.shape,)}, got {(*x.shape,)}')
    if not x.is_floating_point():
        raise UserTypeError(f'{name}: expected a floating point dtype, got {x.dtype}')


def _gate(out: Tensor, z: Tensor) -> Tensor:
    gate = F.silu(z.to(torch.promote_types(out.dtype, torch.float32)))
    return torch.mul(out, gate, out=torch.empty_like(out))  # rounded once, in one pass


def _bwd(u, delta, A, B, C, D, z, delta_bias, dout, x, out, dz, delta_softplus, recompute_out_z):
    """mamba_ssm's: gradients of u, delta, A, B, C, D, delta_bias, then of z, then the gated output.

    ``dz`` may be memory for the gradient of z. ``x``, the states of the forward pass, is not read.
    """
    recompute_out_z = recompute_out_z and z is not None
    _check_like_u('dout', dout, u)
    if dz is not None:
        _check_like_u('dz', dz, u)
    if recompute_out_z:
        _check_like_u('out', out, u)
    found = _gradients([u, delta, A, B, C, D, z, delta_bias], delta_softplus, dout)
    results = [*found[:6], found[7]]
    if z is not None:
        results.append(found[6] if dz is None else dz.copy_(found[6]))
    if recompute_out_z:
        with torch.no_grad():
            results.append(_gate(out, z))
    return results


def _core_fwd(u, delta, A, B, C, D, delta_bias, delta_softplus, nrows):
    """VMamba's: out in u's dtype, and states. ``nrows`` is a hint for its kernel alone."""
    with torch.no_grad():
        return [*_forward(u, delta, A, B, C, D, delta_bias, delta_softplus)]


def _oflex_fwd(u, delta, A, B, C, D, delta_bias, delta_softplus, nrows, out_float):
    """VMamba's: as core, out in float32 if ``out_float``; neighbouring channels may share delta.

    delta is then (B, D / n, L) and its bias (D / n,).
    """
    with torch.no_grad():
        delta, delta_bias = _for_each_channel(u, delta, delta_bias)
        if out_float:
            u, delta, B, C = _widened(torch.float32, u, delta, B, C)
        return [*_forward(u, delta, A, B, C, D, delta_bias, delta_softplus)]


def _widened(
    dtype: torch.dtype, u: Tensor, delta: Tensor, B: Tensor, C: Tensor
) -> tuple[Tensor, ...]:
    """All of them, if u is narrower than ``dtype``: CUDA's fast kernels want one dtype."""
    given = (u, delta, B, C)
    for name, x in zip(('u', 'delta', 'B', 'C'), given):
        check_tensor(name, x)
    if torch.promote_types(u.dtype, dtype) == u.dtype:
        return given
    # A dtype that is none of theirs stays, and the scan names it.
    return tuple(
        x.to(torch.promote_types(x.dtype, dtype)) if x.is_floating_point() else x for x in given
    )


def _for_each_channel(
    u: Tensor, delta: Tensor, delta_bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    for name, x in (('u', u), ('delta', delta)):
        check_tensor(name, x)
    if u.dim() != 3 or delta.dim() != 3 or u.shape[1] == delta.shape[1]:
        return delta, delta_bias
    channels, shared = u.shape[1], delta.shape[1]
    if shared == 0 or channels % shared:
        raise UserValueError(
            f'delta: expected a number of channels that divides D = {channels}, got {shared}'
        )
    sharing = channels // shared
    if delta_bias is not None:
        expected = f'({shared},), as delta has it'
        _check_shape('delta_bias', delta_bias, expected, lambda x: x.shape == (shared,))
        delta_bias = delta_bias.repeat_interleave(sharing)
    return delta.repeat_interleave(sharing, dim=1), delta_bias


def _core_bwd(u, delta, A, B, C, D, delta_bias, dout, x, delta_softplus, nrows, *, shares=False):
    """VMamba's: gradients of u, delta, A, B, C, D and delta_bias."""
    _check_like_u('dout', dout, u)
    found = _gradients([u, delta, A, B, C, D, None, delta_bias], delta_softplus, dout, shares)
    return [*found[:6], found[7]]


selective_scan_cuda = SimpleNamespace(fwd=_fwd, bwd=_bwd)
selective_scan_cuda_core = SimpleNamespace(fwd=_core_fwd, bwd=_core_bwd)
selective_scan_cuda_oflex = SimpleNamespace(fwd=_oflex_fwd, bwd=partial(_core_bwd, shares=True))
