"""Launches the kernels of the selective scan. Arguments as the compiled operators take them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from vim_mm.ops.discretization import IS_CAUSAL
from vim_mm.ops.triton.scan_backward_kernels import scan_backward_kernel
from vim_mm.ops.triton.scan_kernels import scan_forward_kernel

# Directions of so many groups fit into an integer.
MAX_MIXED_GROUPS = 31


class Tile(NamedTuple):
    """How a scan is cut: channels and steps of a chunk, steps of a thread, and warps."""

    channels: int
    steps: int
    segment: int
    warps: int


# A warp has a row, and a thread four steps of it. The backward pass turns rows over by tl.gather,
# for which compiled code takes as many exchanges between threads as the square of a thread's steps:
# 16. A row of several warps it gives to each of them as a whole, and takes 1024 for 1024 steps.
# Of five such tiles two warps were the fastest on an H200 in every backward pass that was measured.
_WARPS, _SEGMENT, _ROW = 2, 4, 128


def tile_of(length: int) -> Tile:
    """The tile of both passes for so many steps.

    It decides how sums are split, so it depends on shapes alone.
    """
    # By comparisons: torch.compile guards on them where sizes are dynamic.
    steps = next(s for s in (4, 8, 16, 32, 64, _ROW) if s >= length or s == _ROW)
    return Tile(_WARPS, steps, _SEGMENT, _WARPS)


def chunks_of(length: int) -> int:
    """How many chunks the sequence has, in both passes."""
    return -(-length // tile_of(length).steps)


def edges_shape(shape: Sequence[int], states: int, method: int) -> tuple[int, ...]:
    """(directions, chunks, B, G, N, H): the states that chunks hand on."""
    batch, groups, channels, length = shape
    directions = 1 if IS_CAUSAL[method] else 2
    return (directions, chunks_of(length), batch, groups, states, channels)


def _rows(x: Tensor) -> Tensor:
    """With neighbouring steps side by side."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def like_rows(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of that shape and, if its steps are side by side, of its strides."""
    out = torch.empty_like(x, dtype=dtype)
    return (
        out if out.stride(-1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
    )


def _strides_of_matrix(M: Tensor) -> tuple[int, int, int]:
    """Of B or C: (batch or, if constant, channel; group; state)."""
    if M.dim() == 4:
        return M.stride(0), M.stride(1), M.stride(2)
    return M.stride(1), M.stride(0), M.stride(2)


def _directions(reverse: Sequence[int]) -> tuple[int, int]:
    """What the kernels call DIRECTIONS, and the bits of the groups."""
    flags = [bool(flag) for flag in reverse]
    if all(flags) or not any(flags):
        return int(any(flags)), 0
    if len(flags) > MAX_MIXED_GROUPS:
        raise ValueError(
            f'reverse: the Triton scan takes up to {MAX_MIXED_GROUPS} groups of different '
            f'directions, got {len(flags)}'
        )
    return 2, sum(1 << k for k, flag in enumerate(flags) if flag)


class _Inputs(NamedTuple):
    """A scan's inputs as kernels take them, and what all launches of it share."""

    tensors: dict
    sizes: dict
    strides: dict
    constants: dict
    tile: Tile

    def launch(self, kernel, reverse: Sequence[int], **arguments) -> None:
        directions, bits = _directions(reverse)
        H, items = self.sizes['H'], self.sizes['items']
        grid = (triton.cdiv(H, self.tile.channels) * items,)
        kernel[grid](
            **self.tensors, **self.sizes, **self.strides, **self.constants, **arguments,
            reverse_bits=bits, DIRECTIONS=directions, num_warps=self.tile.warps,
        )  # fmt: skip


def _inputs(like, u, delta, A, B, C, D, z, delta_bias, softplus, method) -> _Inputs:
    batch, groups, channels, length = u.shape
    tile = tile_of(length)
    u, delta, z = (None if x is None else _rows(x) for x in (u, delta, z))
    B, C = (_rows(M) if M.dim() == 4 else M for M in (B, C))
    A, D, delta_bias = (None if x is None else x.contiguous() for x in (A, D, delta_bias))
    strides = {}
    for name, x in (('u', u), ('delta', delta), ('z', u if z is None else z)):
        strides |= {f'{name}_{axis}': x.stride(i) for i, axis in enumerate('bgh')}
    strides |= {f'out_{axis}': like.stride(i) for i, axis in enumerate('bgh')}
    for name, M in (('B', B), ('C', C)):
        b, g, n = _strides_of_matrix(M)
        strides |= {f'{name}_b': b, f'{name}_g': g, f'{name}_n': n}
    # Pointers that are not there are never read.
    tensors = dict(
        u=u, delta=delta, A=A, B=B, C=C, D=A if D is None else D, z=u if z is None else z,
        delta_bias=A if delta_bias is None else delta_bias,
    )  # fmt: skip
    items = batch * groups
    sizes = dict(H=channels, L=length, G=groups, items=items, chunks=-(-length // tile.steps))
    constants = dict(
        N=A.shape[-1], METHOD=method, SOFTPLUS=softplus, HAS_D=D is not None, HAS_Z=z is not None,
        HAS_BIAS=delta_bias is not None, B_VARIES=B.dim() == 4, C_VARIES=C.dim() == 4,
        SEGMENT=min(tile.segment, tile.steps), BLOCK_H=tile.channels, BLOCK_T=tile.steps,
    )  # fmt: skip
    return _Inputs(tensors, sizes, strides, constants, tile)


def scan_forward(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    method: int,
    reverse: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """out (B, G, H, L) in u's dtype, last_state (B, G, H, N) float32, and edges for backward.

    Shapes as csrc/ops.cpp has them, A real; what varies in time is float32, float16 or bfloat16.
    """
    batch, groups, channels, _ = u.shape
    out = like_rows(u)
    states = A.shape[-1]
    last_state = u.new_zeros((batch, groups, states, channels), dtype=torch.float32)
    edges = u.new_empty(edges_shape(u.shape, states, method), dtype=torch.float32)
    if out.numel() == 0:
        return out, last_state.mT, edges
    inputs = _inputs(out, u, delta, A, B, C, D, z, delta_bias, delta_softplus, method)
    given = dict(out=out, last_state=last_state)
    if IS_CAUSAL[method]:
        inputs.launch(
            scan_forward_kernel, reverse, **given, edges=edges, partial=last_state, PART=0
        )
    else:
        partial = like_rows(u, torch.float32)
        for part, (flags, kept) in enumerate(zip(_both_ways(reverse), edges, strict=True), 1):
            inputs.launch(
                scan_forward_kernel, flags, **given, edges=kept, partial=partial, PART=part
            )
    return out, last_state.mT, edges


def _both_ways(reverse: Sequence[int]) -> tuple[list[int], list[int]]:
    """The directions asked for, and the others."""
    return [int(bool(flag)) for flag in reverse], [int(not flag) for flag in reverse]


def scan_backward(
    grad_out: Tensor | None,
    grad_last_state: Tensor | None,
    edges: Tensor,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    method: int,
    reverse: Sequence[int],
) -> tuple[Tensor, ...]:
    """Gradients of the tensors from u to delta_bias, each in its dtype; empty where there is none.

    Sums over channels, steps and the batch are made in float32 and in a fixed order.
    """
    given = (u, delta, A, B, C, D, z, delta_bias)
    if u.numel() == 0:
        return tuple(u.new_empty(0) if x is None else torch.zeros_like(x) for x in given)
    like = like_rows(u)
    inputs = _inputs(like, *given, delta_softplus, method)
    (batch, groups, channels, length), states = u.shape, A.shape[-1]
    causal = IS_CAUSAL[method]
    parts, tile, device = 1 if causal else 2, inputs.tile, u.device
    blocks, chunks = triton.cdiv(channels, tile.channels), inputs.sizes['chunks']
    varies = [M.dim() == 4 for M in (B, C)]

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    # All in the layout of u.
    grads = [like, like_rows(u, delta.dtype)]
    grads.append(grads[0] if z is None else like_rows(u, z.dtype))
    wide = grads if causal else [like_rows(u, torch.float32) for _ in grads]
    # Sums over blocks of channels, and over steps: of A, D, the bias, and of constant B and C.
    sums = [floats(parts, batch, groups, blocks, states, length) if v else None for v in varies]
    kinds = 2 + states * (1 + varies.count(False))
    by_channel = floats(parts, batch, groups, chunks, kinds, channels)
    if not causal:
        by_channel[1, :, :, :, states].zero_()  # that of D is the first part's
    adjoints = floats(batch, groups, states, channels)
    grad_out = None if grad_out is None else _rows(grad_out)
    strides = u.stride() if grad_out is None else grad_out.stride()
    last = None if grad_last_state is None else grad_last_state.mT.contiguous().float()
    for part in range(parts):
        final = causal or part == 1
        written = grads if final else wide
        inputs.launch(
            scan_backward_kernel,
            _both_ways(reverse)[part],
            grad_out=u if grad_out is None else grad_out,
            grad_last=adjoints if last is None else last,
            edges=edges[part],
            **dict(zip(('grad_u', 'grad_delta', 'grad_z'), written, strict=True)),
            **dict(zip(('other_u', 'other_delta', 'other_z'), wide, strict=True)),
            grad_B=adjoints if sums[0] is None else sums[0][part],
            grad_C=adjoints if sums[1] is None else sums[1][part],
            channels=by_channel[part],
            adjoints=adjoints,
            **{f'grad_out_{axis}': strides[i] for i, axis in enumerate('bgh')},
            HAS_OUT=grad_out is not None,
            HAS_LAST=last is not None and part == 0,
            PART=0 if causal else part + 1,
        )
    totals = by_channel.sum((0, 1, 3))  # (G, kinds, H)
    grad_A, rest = totals[:, :states].mT, totals[:, states + 2 :]
    found = {'A': grad_A, 'D': totals[:, states], 'delta_bias': totals[:, states + 1]}
    for name, partial in zip('BC', sums, strict=True):
        if partial is None:
            found[name], rest = rest[:, :states].mT, rest[:, states:]
        else:
            found[name] = partial.sum((0, 3))
    timed = {'u': grads[0], 'delta': grads[1], 'z': grads[2]}
    names = ('u', 'delta', 'A', 'B', 'C', 'D', 'z', 'delta_bias')
    return tuple(
        u.new_empty(0) if x is None else timed[name] if name in timed else _own(found[name], x)
        for name, x in zip(names, given, strict=True)
    )


def _own(grad: Tensor, like: Tensor) -> Tensor:
    """In the dtype of its tensor, contiguous, and sharing no memory with another gradient."""
    if grad.dtype == like.dtype and grad.is_contiguous() and grad._base is None:
        return grad
    return torch.empty(like.shape, dtype=like.dtype, device=like.device).copy_(grad)
