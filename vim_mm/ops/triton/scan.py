"""Launches the kernels of the selective scan."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vim_mm.errors import UserValueError
from vim_mm.ops.discretization import IS_CAUSAL
from vim_mm.ops.library import MAX_MIXED_GROUPS
from vim_mm.ops.reference import DIFFERENTIABLE, ScanInputs, starts
from vim_mm.ops.triton.launch import launch
from vim_mm.ops.triton.scan_backward_kernels import scan_backward_kernel
from vim_mm.ops.triton.scan_kernels import scan_forward_kernel

# Tensors like u.
_TIMED = ('u', 'delta', 'z')


class Tile(NamedTuple):
    """How a pass is cut, see :mod:`.scan_kernels`: channels of a thread, then rows and lanes of a
    tile, steps of a segment, and warps."""

    channels: int
    rows: int
    lanes: int
    steps: int
    warps: int

    @property
    def block(self) -> int:
        """Channels of a program."""
        return self.channels * self.rows

    @property
    def chunk(self) -> int:
        """Steps of a chunk."""
        return self.lanes * self.steps

    def short(self, length: int) -> 'Tile':
        """This one for so many steps: fewer lanes, and more rows in a warp."""
        # By comparisons: torch.compile guards on them where sizes are dynamic.
        sizes = (16, 32, 64, 128, 256)
        chunk = next((s for s in sizes if s >= length and s < self.chunk), self.chunk)
        lanes = min(self.lanes, chunk // self.steps)
        return self._replace(lanes=lanes, rows=self.rows * self.lanes // lanes)


# A warp has a row. Backward sums over channels: its programs have several warps, so that fewer sums
# go to memory.
_FORWARD = Tile(channels=2, rows=1, lanes=32, steps=8, warps=1)
_BACKWARD = Tile(channels=2, rows=4, lanes=32, steps=4, warps=4)


def forward_tile(length: int) -> Tile:
    """Of the forward pass for so many steps.

    It decides how sums are split, so it depends on shapes alone. Its chunk is that of the backward
    pass or a multiple.
    """
    return _FORWARD.short(length)


def backward_tile(length: int) -> Tile:
    """Of the backward pass, likewise."""
    return _BACKWARD.short(length)


def _chunks(tile: Tile, length: int) -> int:
    """How many chunks a pass has. From whichever end, both passes cut at the same steps."""
    chunk = forward_tile(length).chunk
    return -(-length // chunk) * (chunk // tile.chunk)


def edges_shape(shape: Sequence[int], states: int, method: int) -> tuple[int, ...]:
    """(directions, chunks of backward, B, G, N, H): the states that forward keeps."""
    batch, groups, channels, length = shape
    directions = 1 if IS_CAUSAL[method] else 2
    return (directions, _chunks(backward_tile(length), length), batch, groups, states, channels)


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
        raise UserValueError(
            f'reverse: the Triton scan takes up to {MAX_MIXED_GROUPS} groups of different '
            f'directions, got {len(flags)}'
        )
    return 2, sum(1 << k for k, flag in enumerate(flags) if flag)


def _vector(length: int, tensors: Iterable[Tensor]) -> int:
    """Steps that can be read at once: up to 8, wherever rows begin."""
    offsets = [length]
    for x in tensors:
        if x.data_ptr() % 16:
            return 1
        offsets += x.stride()[:-1]
    return math.gcd(8, *offsets)


class _Launches(NamedTuple):
    """A scan's inputs as kernels take them, and what all launches of it share."""

    tensors: dict
    sizes: dict
    strides: dict
    constants: dict
    tile: Tile

    def launch(self, kernel, reverse: Sequence[int], **arguments) -> None:
        directions, bits = _directions(reverse)
        launch(
            kernel, (-(-self.sizes['H'] // self.tile.block) * self.sizes['items'],),
            **self.tensors, **self.sizes, **self.strides, **self.constants, **arguments,
            reverse_bits=bits, DIRECTIONS=directions, num_warps=self.tile.warps,
        )  # fmt: skip


def _launches(tile: Tile, outputs: dict, inputs: ScanInputs) -> _Launches:
    """``outputs``: like u in shape, by the prefix of their strides; all of ``out``'s are alike."""
    u, delta, A, B, C, D, z, delta_bias, initial_state, reset = inputs.tensors()
    batch, groups, channels, length = u.shape
    u, delta, z = (None if x is None else _rows(x) for x in (u, delta, z))
    B, C = (_rows(M) if M.dim() == 4 else M for M in (B, C))
    A, D, delta_bias = (None if x is None else x.contiguous() for x in (A, D, delta_bias))
    timed = {'u': u, 'delta': delta, 'z': u if z is None else z, **outputs}
    varying = [M for M in (B, C) if M.dim() == 4]
    vector = min(_vector(length, [*timed.values(), *varying]), tile.steps)
    strides = {}
    for name, x in timed.items():
        strides |= {f'{name}_{axis}': x.stride(i) // vector for i, axis in enumerate('bgh')}
    for name, M in (('B', B), ('C', C)):
        unit = vector if M.dim() == 4 else 1
        of = zip('bgn', _strides_of_matrix(M), strict=True)
        strides |= {f'{name}_{axis}': stride // unit for axis, stride in of}
    # Pointers that are not there are never read.
    tensors = dict(
        u=u, delta=delta, A=A, B=B, C=C, D=A if D is None else D, z=u if z is None else z,
        delta_bias=A if delta_bias is None else delta_bias,
        initial_state=A if initial_state is None else initial_state.mT.contiguous(),
        starts=A if reset is None else _both_starts(reset),
    )  # fmt: skip
    items = batch * groups
    sizes = dict(H=channels, L=length, G=groups, items=items, chunks=_chunks(tile, length))
    constants = dict(
        N=A.shape[-1], METHOD=inputs.method, SOFTPLUS=inputs.delta_softplus,
        HAS_D=D is not None, HAS_Z=z is not None, HAS_BIAS=delta_bias is not None,
        HAS_INITIAL=initial_state is not None, HAS_RESET=reset is not None,
        B_VARIES=B.dim() == 4, C_VARIES=C.dim() == 4,
        VECTOR=vector, CHANNELS=tile.channels, ROWS=tile.rows, LANES=tile.lanes, STEPS=tile.steps,
    )  # fmt: skip
    return _Launches(tensors, sizes, strides, constants, tile)


def _both_starts(reset: Tensor) -> Tensor:
    """Where sequences begin, for a scan from either end: (2, B, L), bytes."""
    return torch.stack([starts(reset, reverse) for reverse in (False, True)]).view(torch.uint8)


def scan_forward(inputs: ScanInputs) -> tuple[Tensor, Tensor, Tensor]:
    """out (B, G, H, L) in u's dtype, last_state (B, G, H, N) float32, and edges for backward.

    A is real; what varies in time is float32, float16 or bfloat16.
    """
    u, method, reverse = inputs.u, inputs.method, inputs.reverse
    batch, groups, channels, length = u.shape
    out = like_rows(u)
    states = inputs.A.shape[-1]
    last_state = u.new_empty((batch, groups, states, channels), dtype=torch.float32)
    edges = u.new_empty(edges_shape(u.shape, states, method), dtype=torch.float32)
    if out.numel() == 0:
        given = inputs.initial_state
        last_state = last_state.zero_() if given is None else last_state.copy_(given.mT)
        return out, last_state.mT, edges
    launches = _launches(forward_tile(length), {'out': out}, inputs)
    given = dict(
        out=out, last_state=last_state, slots=edges.shape[1], EDGE=backward_tile(length).chunk
    )
    if IS_CAUSAL[method]:
        launches.launch(
            scan_forward_kernel, reverse, **given, edges=edges, partial=last_state, PART=0
        )
    else:
        partial = like_rows(u, torch.float32)
        for part, (flags, kept) in enumerate(zip(_both_ways(reverse), edges, strict=True), 1):
            launches.launch(
                scan_forward_kernel, flags, **given, edges=kept, partial=partial, PART=part
            )
    return out, last_state.mT, edges


def _both_ways(reverse: Sequence[int]) -> tuple[list[int], list[int]]:
    """The directions asked for, and the others."""
    return [int(bool(flag)) for flag in reverse], [int(not flag) for flag in reverse]


def scan_backward(
    grad_out: Tensor | None, grad_last_state: Tensor | None, edges: Tensor, inputs: ScanInputs
) -> tuple[Tensor, ...]:
    """Gradients of all tensors but ``reset``, each in its dtype; empty where there is none.

    Sums over channels, steps and the batch are made in float32 and in a fixed order.
    """
    u, given = inputs.u, inputs.tensors()[: len(DIFFERENTIABLE)]
    if u.numel() == 0:
        *zeros, of_state = (u.new_empty(0) if x is None else torch.zeros_like(x) for x in given)
        if inputs.initial_state is not None and grad_last_state is not None:
            of_state.copy_(grad_last_state)
        return *zeros, of_state
    found = scan_gradients(grad_out, grad_last_state, edges, inputs)
    return tuple(
        u.new_empty(0) if x is None else found[name] if name in _TIMED else _own(found[name], x)
        for name, x in zip(DIFFERENTIABLE, given, strict=True)
    )


def scan_gradients(
    grad_out: Tensor | None, grad_last_state: Tensor | None, edges: Tensor, inputs: ScanInputs
) -> dict[str, Tensor]:
    """By name, those of u, delta and z in their dtypes, and float32 sums that share memory.

    ``matrices`` has the rows of B and then those of C, where they vary in time.
    """
    u, delta, A, B, C, _, z, *_ = inputs.tensors()
    method, reverse, like = inputs.method, inputs.reverse, like_rows(u)
    (batch, groups, channels, length), states = u.shape, A.shape[-1]
    grad_out = None if grad_out is None else _rows(grad_out)
    outputs = {'out': like, 'grad_out': u if grad_out is None else grad_out}
    launches = _launches(backward_tile(length), outputs, inputs)
    parts = 1 if IS_CAUSAL[method] else 2
    blocks, chunks = -(-channels // launches.tile.block), launches.sizes['chunks']
    # All in the layout of u.
    grads = [like, like_rows(u, delta.dtype)]
    grads.append(like if z is None else like_rows(u, z.dtype))
    wide = grads if parts == 1 else [like_rows(u, torch.float32) for _ in grads]
    # Sums over blocks of channels, and over steps: of A, D, the bias, and of constant B and C.
    varying = (B.dim() == 4) + (C.dim() == 4)
    kinds = 2 + states * (3 - varying)
    matrices, by_channel, adjoints = (
        torch.empty(shape, dtype=torch.float32, device=u.device)
        for shape in (
            (parts, batch, groups, blocks, states * varying, length),
            (parts, batch, groups, chunks, kinds, channels),
            (batch, groups, states, channels),
        )
    )
    if parts == 2:
        by_channel[1, :, :, :, states].zero_()  # that of D is the first part's
    last = None if grad_last_state is None else grad_last_state.mT.contiguous().float()
    for part in range(parts):
        written = wide if part < parts - 1 else grads
        launches.launch(
            scan_backward_kernel,
            _both_ways(reverse)[part],
            **_named('grad', written),
            **_named('other', wide),
            grad_out=outputs['grad_out'],
            grad_last=adjoints if last is None else last,
            edges=edges[part],
            matrices=matrices[part],
            channels=by_channel[part],
            adjoints=adjoints,
            HAS_OUT=grad_out is not None,
            HAS_LAST=last is not None and part == 0,
            PART=0 if parts == 1 else part + 1,
        )
    found = dict(zip(_TIMED, grads, strict=True))
    totals = by_channel.sum((0, 1, 3))  # (G, kinds, H)
    found |= {
        'A': totals[:, :states].mT,
        'D': totals[:, states],
        'delta_bias': totals[:, states + 1],
        'initial_state': adjoints.mT,
    }
    found['matrices'] = matrices.sum((0, 3))
    rest, rows = totals[:, states + 2 :], found['matrices']
    for name, M in (('B', B), ('C', C)):
        if M.dim() == 4:
            found[name], rows = rows[:, :, :states], rows[:, :, states:]
        else:
            found[name], rest = rest[:, :states].mT, rest[:, states:]
    return found


def _named(prefix: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """The kernel's gradients of u, delta and z."""
    return {f'{prefix}_{x}': t for x, t in zip(_TIMED, tensors, strict=True)}


def _own(grad: Tensor, like: Tensor) -> Tensor:
    """In the dtype of its tensor, contiguous, and sharing no memory with another gradient."""
    if grad.dtype == like.dtype and grad.is_contiguous() and grad._base is None:
        return grad
    return torch.empty(like.shape, dtype=like.dtype, device=like.device).copy_(grad)
