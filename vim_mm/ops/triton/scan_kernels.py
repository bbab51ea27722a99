"""The selective scan in Triton: the kernels of its forward and its backward pass.

Letters as in csrc/ops.cpp: B batch, G groups, H channels of a group, L steps, N states.

A program has BLOCK_H channels of one group and one item of the batch, and walks along the sequence
in chunks of BLOCK_T steps. A chunk is a tile [BLOCK_H, BLOCK_T] whose steps are scanned in parallel
(``tl.associative_scan``), one state after the other; what a chunk hands to the next one goes
through global memory, where backward reads it again. Steps beyond the end have dt = 0, with which
every method is the identity. There are no atomics: sums over channels, chunks and the batch are
written by block, and added up afterwards.

A tile is in scan order. Of a group that is scanned from the end, segments of SEGMENT steps, which a
thread loads at once, are read from the last to the first, and each is turned over in registers:
that takes no instruction, and a scan from right to left many.

A tensor of time has L as its last, contiguous axis, and any strides before that.
"""

import triton
import triton.language as tl

from vim_mm.ops.triton.methods import discretize, sigmoid, softplus


@triton.jit
def _compose(a_1, x_1, a_2, x_2):
    """x -> a_1 x + x_1, and then x -> a_2 x + x_2."""
    return a_1 * a_2, a_2 * x_1 + x_2


@triton.jit
def _turn(x, REVERSE: tl.constexpr, SEGMENT: tl.constexpr):
    """From the order of memory to that of the scan, or back."""
    if REVERSE:
        segments = tl.reshape(x, (x.shape[0], x.shape[1] // SEGMENT, SEGMENT))
        return tl.reshape(tl.flip(segments, 2), x.shape)
    else:
        return x


@triton.jit
def _load(pointer, mask, REVERSE: tl.constexpr, SEGMENT: tl.constexpr):
    x = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    return _turn(x, REVERSE, SEGMENT)


@triton.jit
def _steps_of_chunk(i, chunks, REVERSE: tl.constexpr, SEGMENT: tl.constexpr, BLOCK_T: tl.constexpr):
    """(t in the order of memory, t in that of the scan) of the i-th chunk in scan order."""
    j = tl.arange(0, BLOCK_T)
    if REVERSE:
        first = (chunks - 1 - i) * BLOCK_T
        segment = BLOCK_T // SEGMENT - 1 - j // SEGMENT
        return first + segment * SEGMENT + j % SEGMENT, first + BLOCK_T - 1 - j
    else:
        return i * BLOCK_T + j, i * BLOCK_T + j


@triton.jit
def _column(pointer, mask_h, HAS: tl.constexpr):
    """[BLOCK_H, 1] of a parameter, 0 where there is none."""
    if HAS:
        return tl.load(pointer, mask=mask_h, other=0.0).to(tl.float32)[:, None]
    else:
        return mask_h.to(tl.float32)[:, None] * 0.0


@triton.jit
def _matrix(M, b, g, h, M_b, M_g, VARIES: tl.constexpr):
    """Where the first state of B or C lies: of all channels, or, if constant, of each."""
    if VARIES:
        return M + b * M_b + g * M_g
    else:
        return M + g * M_g + h[:, None] * M_b


@triton.jit
def _state_tile(
    M, t, mask, mask_h, VARIES: tl.constexpr, REVERSE: tl.constexpr, SEGMENT: tl.constexpr
):
    """Of one state, [BLOCK_H, BLOCK_T], or [BLOCK_H, 1] where it is constant."""
    if VARIES:
        return _load(M + t, mask, REVERSE, SEGMENT)
    else:
        return tl.load(M, mask=mask_h[:, None], other=0.0).to(tl.float32)


@triton.jit
def _forward_rows(
    u, delta, A, B, C, D, z, delta_bias, out, last_state, edges, partial,
    b, g, h, H, L, G, items, chunks,
    u_b, u_g, u_h, delta_b, delta_g, delta_h, z_b, z_g, z_h, B_b, B_g, B_n, C_b, C_g, C_n,
    out_b, out_g, out_h,
    N: tl.constexpr, METHOD: tl.constexpr, SOFTPLUS: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr,
    B_VARIES: tl.constexpr, C_VARIES: tl.constexpr, PART: tl.constexpr, REVERSE: tl.constexpr,
    SEGMENT: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    mask_h = h < H
    channel = g * H + h
    bias = _column(delta_bias + channel, mask_h, HAS_BIAS)
    skip = _column(D + channel, mask_h, HAS_D)
    row = h.to(tl.int64)[:, None]
    u += b * u_b + g * u_g + row * u_h
    delta += b * delta_b + g * delta_g + row * delta_h
    z += b * z_b + g * z_g + row * z_h
    item = b * G + g
    place = b * out_b + g * out_g + row * out_h
    B = _matrix(B, b, g, h, B_b, B_g, B_VARIES)
    C = _matrix(C, b, g, h, C_b, C_g, C_VARIES)
    A += channel * N
    last_state += item * N * H
    edges += item * N * H
    slot = tl.cast(items, tl.int64) * N * H
    B_n, C_n = tl.cast(B_n, tl.int64), tl.cast(C_n, tl.int64)
    j = tl.arange(0, BLOCK_T)[None, :]
    at_start = j == 0
    # The state of the last step is stored by that step's pointer: contiguous, as all others are.
    at_end = mask_h[:, None] & (j == BLOCK_T - 1)
    end = h[:, None] + (j - (BLOCK_T - 1))

    for i in range(0, chunks):
        t, t_scan = _steps_of_chunk(i, chunks, REVERSE, SEGMENT, BLOCK_T)
        mask = mask_h[:, None] & (t < L)[None, :]
        t = t[None, :] + h[:, None] * 0
        dt = _load(delta + t, mask, REVERSE, SEGMENT) + bias
        if SOFTPLUS:
            dt = softplus(dt)
        dt = tl.where((t_scan < L)[None, :], dt, 0.0)
        signal = _load(u + t, mask, REVERSE, SEGMENT)
        y = tl.zeros_like(dt)
        for n in range(0, N):
            a = _column(A + n, mask_h, True)
            b_n = _state_tile(B + n * B_n, t, mask, mask_h, B_VARIES, REVERSE, SEGMENT)
            c_n = _state_tile(C + n * C_n, t, mask, mask_h, C_VARIES, REVERSE, SEGMENT)
            before = tl.load(edges + (i - 1) * slot + n * H + h, mask=mask_h & (i > 0), other=0.0)
            a_bar, beta = discretize(dt, a, METHOD)
            drive = beta * signal * b_n
            drive += a_bar * tl.where(at_start, before[:, None], 0.0)
            _, x = tl.associative_scan((a_bar, drive), 1, _compose)
            y += c_n * x
            after = edges + i * slot
            if PART != 2:
                after = tl.where(i < chunks - 1, after, last_state)
            tl.store(after + n * H + end, x, mask=at_end)
        if PART == 1:
            tl.store(partial + place + t, _turn(y, REVERSE, SEGMENT), mask=mask)
        else:
            if PART == 2:
                y = 0.5 * (y + _load(partial + place + t, mask, REVERSE, SEGMENT))
            y += skip * signal
            if HAS_Z:
                gate = _load(z + t, mask, REVERSE, SEGMENT)
                y *= gate * sigmoid(gate)
            y = _turn(y, REVERSE, SEGMENT).to(out.dtype.element_ty)
            tl.store(out + place + t, y, mask=mask)
        # The next chunk begins with states that other threads have written.
        tl.debug_barrier()


@triton.jit
def scan_forward_kernel(
    u, delta, A, B, C, D, z, delta_bias, out, last_state, edges, partial,
    H, L, G, items, chunks, reverse_bits,
    u_b, u_g, u_h, delta_b, delta_g, delta_h, z_b, z_g, z_h, B_b, B_g, B_n, C_b, C_g, C_n,
    out_b, out_g, out_h,
    N: tl.constexpr, METHOD: tl.constexpr, SOFTPLUS: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr,
    B_VARIES: tl.constexpr, C_VARIES: tl.constexpr, PART: tl.constexpr, DIRECTIONS: tl.constexpr,
    SEGMENT: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """out and last_state of a group's channels.

    PART is 0 for a causal scan. One that averages both directions is two launches: 1, in the
    direction asked for, keeps y in ``partial``; 2, the other way round, adds its own. DIRECTIONS
    is 0 or 1 if no group or every group is scanned from the end, else 2, and each has its bit.
    """
    blocks = tl.cdiv(H, BLOCK_H)
    pid = tl.program_id(0)
    h = pid % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    item = (pid // blocks).to(tl.int64)
    b = item // G
    g = item % G
    reverse = (reverse_bits >> g) & 1
    if DIRECTIONS == 0 or (DIRECTIONS == 2 and reverse == 0):
        _forward_rows(
            u, delta, A, B, C, D, z, delta_bias, out, last_state, edges, partial,
            b, g, h, H, L, G, items, chunks,
            u_b, u_g, u_h, delta_b, delta_g, delta_h, z_b, z_g, z_h, B_b, B_g, B_n, C_b, C_g, C_n,
            out_b, out_g, out_h,
            N, METHOD, SOFTPLUS, HAS_D, HAS_Z, HAS_BIAS, B_VARIES, C_VARIES,
            PART, False, SEGMENT, BLOCK_T,
        )  # fmt: skip
    else:
        _forward_rows(
            u, delta, A, B, C, D, z, delta_bias, out, last_state, edges, partial,
            b, g, h, H, L, G, items, chunks,
            u_b, u_g, u_h, delta_b, delta_g, delta_h, z_b, z_g, z_h, B_b, B_g, B_n, C_b, C_g, C_n,
            out_b, out_g, out_h,
            N, METHOD, SOFTPLUS, HAS_D, HAS_Z, HAS_BIAS, B_VARIES, C_VARIES,
            PART, True, SEGMENT, BLOCK_T,
        )  # fmt: skip
