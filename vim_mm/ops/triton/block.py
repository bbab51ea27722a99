"""The fused block by Triton kernels and PyTorch's products: what csrc/cuda/mixer does.

The operators have the arguments and results of the compiled ones (csrc/ops.cpp), but that what a
mixer saves is a tensor each. docs/block.md has the order of launches.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from vim_mm.ops.mixer_parameters import DTYPES, EACH, SINGLE, count_sets, sizes_of
from vim_mm.ops.reference import ScanInputs
from vim_mm.ops.triton import block_kernels as kernels
from vim_mm.ops.triton.launch import launch
from vim_mm.ops.triton.scan import edges_shape, scan_forward, scan_gradients

_BLOCK = 1024
# Programs of the norm's backward pass, each of which sums the gradient of the weight over its rows.
_NORM_PROGRAMS = 264


def _norm_tile(channels: int) -> dict:
    columns = triton.next_power_of_2(channels)
    return dict(BLOCK_R=max(1, 2048 // columns), BLOCK_C=columns)


def add_rms_norm_fwd(
    residual: Tensor, update: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """normed, the sum (empty without an update), and 1 / rms."""
    channels = residual.shape[-1]
    rows = residual.numel() // max(channels, 1)
    normed = torch.empty_like(residual, dtype=dtype)
    total = residual.new_empty(0) if update is None else torch.empty_like(residual)
    rstd = residual.new_empty(residual.shape[:-1], dtype=torch.float32)
    if rows:
        tile = _norm_tile(channels)
        launch(
            kernels.add_rms_norm_kernel, (-(-rows // tile['BLOCK_R']),),
            residual=residual, update=residual if update is None else update, weight=weight,
            normed=normed, total=total, rstd=rstd, rows=rows, C=channels, eps=eps,
            HAS_UPDATE=update is not None, **tile,
        )  # fmt: skip
    return normed, total, rstd


def add_rms_norm_bwd(
    grad_normed: Tensor,
    grad_sum: Tensor | None,
    total: Tensor,
    rstd: Tensor,
    weight: Tensor,
    with_update: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of residual, update (empty if not asked for) and weight."""
    channels = total.shape[-1]
    rows = total.numel() // max(channels, 1)
    tile = _norm_tile(channels)
    programs = max(1, min(_NORM_PROGRAMS, -(-rows // tile['BLOCK_R'])))
    grad = torch.empty_like(total)
    grad_update = torch.empty_like(grad_normed) if with_update else grad_normed.new_empty(0)
    by_program = total.new_empty((programs, channels), dtype=torch.float32)
    launch(
        kernels.add_rms_norm_backward_kernel, (programs,),
        grad_normed=grad_normed, grad_total=total if grad_sum is None else grad_sum, total=total,
        rstd=rstd, weight=weight, grad_residual=grad, grad_update=grad_update,
        grad_weight=by_program, rows=rows, C=channels,
        HAS_TOTAL=grad_sum is not None, HAS_UPDATE=with_update, **tile,
    )  # fmt: skip
    return grad, grad_update, by_program.sum(0).to(weight.dtype)


class _Shape(NamedTuple):
    """Letters as in csrc/ops.cpp."""

    B: int
    L: int
    C: int
    H: int
    N: int
    R: int
    W: int
    P: int  # sets of parameters
    K: int  # directions
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.R + 2 * self.N

    def narrow_shapes(self) -> list[tuple[int, ...]]:
        """Of the parameters that products take, in the dtype of activations."""
        return [
            (2 * self.H, self.C),
            (self.C, self.H),
            (self.P, self.rows, self.H),
            (self.P, self.H, self.R),
        ]

    def wide_shapes(self) -> list[tuple[int, ...]]:
        """Of those that kernels take, in float32: conv, its bias, the bias of dt_proj, D and A."""
        sets = (self.P, self.H)
        return [(*sets, self.W), sets, sets, sets, (self.K, self.H, self.N)]


def _views(memory: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Tensors of those shapes, which lie behind each other."""
    views, first = [], 0
    for shape in shapes:
        size = math.prod(shape)
        views.append(memory[first : first + size].view(shape))
        first += size
    return views


def _pack(parameters: Sequence[Tensor | None], s: _Shape, device: torch.device) -> list[Tensor]:
    """The parameters as products and kernels take them, in one piece of memory for each dtype."""
    narrow, wide = (
        torch.empty(sum(map(math.prod, shapes)), dtype=dtype, device=device)
        for shapes, dtype in ((s.narrow_shapes(), s.dtype), (s.wide_shapes(), torch.float32))
    )
    in_proj, out_proj, x_proj, dt_proj = _views(narrow, s.narrow_shapes())
    conv, conv_bias, dt_bias, D, A = _views(wide, s.wide_shapes())
    pairs = [(in_proj, parameters[0]), (out_proj, parameters[2])]
    for p in range(s.P):
        given = parameters[SINGLE + p * EACH :][:EACH]
        places = (conv[p].unsqueeze(1), conv_bias[p], x_proj[p], dt_proj[p], dt_bias[p], D[p])
        pairs += zip(places, given, strict=True)
    pairs += zip(A.unbind(0), parameters[-s.K :], strict=True)
    _copy(pairs)
    A.exp_().neg_()
    return [narrow, wide]


def _copy(pairs: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """Each second tensor to the first, zeros for None. PyTorch copies those that have the same pair
    of dtypes in one launch, and others in as many as there are."""
    by_types: dict[tuple, tuple[list[Tensor], list[Tensor]]] = {}
    for to, source in pairs:
        if source is None:
            to.zero_()
        else:
            lists = by_types.setdefault((to.dtype, source.dtype), ([], []))
            lists[0].append(to)
            lists[1].append(source)
    for lists in by_types.values():
        torch._foreach_copy_(*lists)


def shape_of(x: Tensor, sizes: Sequence[int], count: int, directions: int, dtype) -> _Shape:
    return _Shape(*x.shape, *sizes, count_sets(count, directions), directions, dtype)


def _convolve(s: _Shape, x: Tensor, conv: Tensor, bias: Tensor, backwards: bool) -> Tensor:
    u = x.new_empty((s.P, s.H, s.B, s.L))
    launch(
        kernels.conv_kernel, (s.H * s.B, -(-s.L // _BLOCK)),
        x=x, weight=conv, bias=bias, u=u, H=s.H, B=s.B, L=s.L,
        W=s.W, SETS=s.P, BACKWARDS=backwards, BLOCK=_BLOCK,
    )  # fmt: skip
    return u


def _groups(s: _Shape, rows: Tensor) -> Tensor:
    """(P, rows, B L) as (B, K, rows, L)."""
    return rows.view(*rows.shape[:2], s.B, s.L).permute(2, 0, 1, 3).expand(-1, s.K, -1, -1)


def _scan_inputs(
    s: _Shape,
    u: Tensor,
    dt_B_C: Tensor,
    packs: Sequence[Tensor],
    method: int,
    reverse: Sequence[int],
) -> ScanInputs:
    """Those of the scan of all directions, without a gate."""
    dt_proj = _views(packs[0], s.narrow_shapes())[3]
    _, _, dt_bias, D, A = _views(packs[1], s.wide_shapes())
    dt, B, C = dt_B_C.split((s.R, s.N, s.N), 1)
    delta = torch.bmm(dt_proj, dt)
    shared = (s.K, s.H)
    return ScanInputs(
        _groups(s, u.view(s.P, s.H, -1)), _groups(s, delta), A, _groups(s, B), _groups(s, C),
        D.expand(shared), None, dt_bias.expand(shared), None, None, True, method, reverse,
    )  # fmt: skip


def mixer_fwd(
    x: Tensor,
    update: Tensor | None,
    norm: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    parameters: Sequence[Tensor | None],
    method: int,
    reverse: Sequence[int],
    scale: float,
    keep: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The mixer of rms_norm(x + update), that sum, and what backward takes."""
    sizes = sizes_of(parameters)
    s = shape_of(x, sizes, len(parameters), len(reverse), dtype)
    packs = _pack(parameters, s, x.device)
    in_proj, out_proj, x_proj, _ = _views(packs[0], s.narrow_shapes())
    conv, conv_bias, *_ = _views(packs[1], s.wide_shapes())
    tokens = s.B * s.L
    normed, total, rstd = x, x.new_empty(0), None
    if norm is not None:
        normed, total, rstd = add_rms_norm_fwd(x, update, norm, eps, dtype)
    xz = torch.mm(in_proj, normed.view(tokens, s.C).t())
    if parameters[1] is not None:
        xz += parameters[1].to(dtype)[:, None]
    u = _convolve(s, xz, conv, conv_bias, bool(reverse[0]))
    dt_B_C = torch.bmm(x_proj, u.view(s.P, s.H, tokens))
    inputs = _scan_inputs(s, u, dt_B_C, packs, method, reverse)
    # Of both directions the outputs lie like u's: [K, H, B, L].
    y, _, edges = scan_forward(inputs)
    y = y.permute(1, 2, 0, 3).contiguous()
    gated = xz.new_empty((s.H, tokens))
    kept_sum = torch.empty_like(gated) if keep else gated
    count = gated.numel()
    if count:
        launch(
            kernels.gate_kernel, (-(-count // _BLOCK),),
            y=y, z=xz[s.H :], out=gated, total=kept_sum, count=count, scale=scale,
            DIRECTIONS=s.K, KEEP=keep, BLOCK=_BLOCK,
        )  # fmt: skip
    out = torch.mm(gated.t(), out_proj.t())
    if parameters[3] is not None:
        out += parameters[3].to(dtype)
    kept = []
    if keep:
        kept = [xz, dt_B_C, edges, kept_sum, *packs]
        kept += [] if norm is None else [normed, rstd]
    return out.view(s.B, s.L, s.C), total, kept


def mixer_bwd(
    grad_out: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    norm: Tensor | None,
    kept: Sequence[Tensor],
    sizes: Sequence[int],
    types: Sequence[int],
    with_update: bool,
    method: int,
    reverse: Sequence[int],
    scale: float,
) -> list[Tensor]:
    """Gradients of x, update, norm and all parameters; an empty tensor where there is none."""
    xz, dt_B_C, edges, kept_sum, *packs = kept[:6]
    normed, rstd = kept[6:] if norm is not None else (x, None)
    s = shape_of(x, sizes, len(types), len(reverse), grad_out.dtype)
    tokens, count = s.B * s.L, s.H * s.B * s.L
    in_proj, out_proj, x_proj, dt_proj = _views(packs[0], s.narrow_shapes())
    conv, conv_bias, _, _, A = _views(packs[1], s.wide_shapes())
    grad_rows = grad_out.view(tokens, s.C)
    none = grad_out.new_empty(0)
    grads: list[Tensor] = [none] * len(types)

    # The gate and out_proj.
    grad_gated = torch.mm(out_proj.t(), grad_rows.t())
    gated, grad_y, grad_xz = (torch.empty_like(t) for t in (kept_sum, kept_sum, xz))
    if count:
        launch(
            kernels.gate_backward_kernel, (-(-count // _BLOCK),),
            grad_out=grad_gated, total=kept_sum, z=xz[s.H :], grad_y=grad_y,
            grad_z=grad_xz[s.H :], out=gated, count=count, scale=scale, BLOCK=_BLOCK,
        )  # fmt: skip
    grads[2] = torch.mm(grad_rows.t(), gated.t())
    if types[3] >= 0:
        grads[3] = grad_rows.sum(0, dtype=torch.float32)

    # The scan, from what the convolution and the step sizes were.
    backwards = bool(reverse[0])
    u = _convolve(s, xz, conv, conv_bias, backwards)
    inputs = _scan_inputs(s, u, dt_B_C, packs, method, reverse)
    grad_scan = grad_y.view(1, s.H, s.B, s.L).permute(2, 0, 1, 3).expand(-1, s.K, -1, -1)
    found = scan_gradients(grad_scan, None, edges, inputs)
    grad_u, grad_delta, grad_B_C = (_sets(s, found[x]) for x in ('u', 'delta', 'matrices'))
    grad_dt_B_C = torch.empty_like(dt_B_C)
    grad_dt_B_C[:, s.R :].copy_(grad_B_C)
    torch.bmm(dt_proj.mT, grad_delta, out=grad_dt_B_C[:, : s.R])
    grad_D, grad_bias = (
        found[x] if s.P == s.K else found[x].sum(0, keepdim=True) for x in ('D', 'delta_bias')
    )

    # The projections and the convolution.
    dt = dt_B_C[:, : s.R]
    grad_dt_proj = torch.bmm(grad_delta, dt.mT)
    u_rows = u.view(s.P, s.H, tokens)
    grad_x_proj = torch.bmm(grad_dt_B_C, u_rows.mT)
    grad_u = torch.baddbmm(grad_u, x_proj.mT, grad_dt_B_C)
    grad_conv, grad_conv_bias = torch.empty_like(conv), torch.empty_like(conv_bias)
    shape = dict(H=s.H, B=s.B, L=s.L, W=s.W, BACKWARDS=backwards)
    launch(
        kernels.conv_backward_kernel, (s.H, s.P),
        x=xz, weight=conv, bias=conv_bias, grad_u=grad_u, grad_weight=grad_conv,
        grad_bias=grad_conv_bias, **shape, TAPS=triton.next_power_of_2(s.W), BLOCK=_BLOCK // 2,
    )  # fmt: skip
    launch(
        kernels.conv_input_backward_kernel, (s.H * s.B, -(-s.L // _BLOCK)),
        grad=grad_u, weight=conv, grad_x=grad_xz, **shape, SETS=s.P, BLOCK=_BLOCK,
    )  # fmt: skip

    # in_proj and the norm.
    grads[0] = torch.mm(grad_xz, normed.view(tokens, s.C))
    if types[1] >= 0:
        grads[1] = grad_xz.sum(1, dtype=torch.float32)
    grad_x = torch.mm(grad_xz.t(), in_proj).view(x.shape)
    grad_update = grad_norm = none
    if norm is not None:
        grad_x, grad_update, grad_norm = add_rms_norm_bwd(
            grad_x, grad_sum, x, rstd, norm, with_update
        )
    for p in range(s.P):
        first = SINGLE + p * EACH
        grads[first : first + EACH] = [
            grad_conv[p].unsqueeze(1), grad_conv_bias[p], grad_x_proj[p], grad_dt_proj[p],
            grad_bias[p], grad_D[p],
        ]  # fmt: skip
    grads[-s.K :] = (found['A'] * A).unbind(0)  # A is its own derivative by A_log
    # Each in memory of its own, and contiguous.
    own = [
        none
        if type < 0
        else torch.empty_like(g, dtype=DTYPES[type], memory_format=torch.contiguous_format)
        for g, type in zip(grads, types, strict=True)
    ]
    _copy((to, g) for to, g, type in zip(own, grads, types, strict=True) if type >= 0)
    return [grad_x, grad_update, grad_norm, *own]


def _sets(s: _Shape, grad: Tensor) -> Tensor:
    """(B, K, rows, L) as (P, rows, B L), summed over directions that share parameters."""
    grad = grad.permute(1, 2, 0, 3)
    if s.P < s.K:
        grad = grad.sum(0, keepdim=True, dtype=grad.dtype)  # else autocast makes it float32
    return grad.reshape(s.P, grad.shape[1], s.B * s.L)


def kept_shapes(
    s: _Shape, method: int, with_norm: bool
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Of what a mixer keeps: shape and dtype of each."""
    tokens = s.B * s.L
    sizes = [sum(map(math.prod, of)) for of in (s.narrow_shapes(), s.wide_shapes())]
    shapes = [
        ((2 * s.H, tokens), s.dtype),
        ((s.P, s.rows, tokens), s.dtype),
        (edges_shape((s.B, s.K, s.H, s.L), s.N, method), torch.float32),
        ((s.H, tokens), s.dtype),
        ((sizes[0],), s.dtype),
        ((sizes[1],), torch.float32),
    ]
    if with_norm:
        shapes += [((s.B, s.L, s.C), s.dtype), ((s.B, s.L), torch.float32)]
    return shapes
