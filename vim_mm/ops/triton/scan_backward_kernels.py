"""The backward pass of the selective scan in Triton; :mod:`.scan_kernels` has letters and order.

A program walks from the last chunk in scan order to the first. For each state it computes the
states anew, from those that forward kept between chunks, and scans their adjoints from right to
left: what that scan takes is turned over, scanned from left to right, and turned back; ``tile_of``
keeps that cheap. The state before a step is taken from its neighbour, and never from the state
after it, which would lose digits.
"""

import triton
import triton.language as tl

from vim_mm.ops.triton.methods import differentiate, sigmoid, softplus
from vim_mm.ops.triton.scan_kernels import (
    _column,
    _compose,
    _load,
    _matrix,
    _state_tile,
    _steps_of_chunk,
    _turn,
)


@triton.jit
def _add_pairs(p_1, q_1, p_2, q_2):
    return p_1 + p_2, q_1 + q_2


@triton.jit
def _store_row(pointer, x, mask, REVERSE: tl.constexpr, SEGMENT: tl.constexpr):
    """A row [1, BLOCK_T], by the first row of a tile: in its layout nothing has to be moved."""
    tl.store(pointer, _turn(tl.broadcast_to(x, pointer.shape), REVERSE, SEGMENT), mask=mask)


@triton.jit
def _store_sums(pointer, x, mask):
    """The sums of rows, [BLOCK_H], by the first step of a tile, likewise."""
    tl.store(pointer, tl.broadcast_to(tl.sum(x, 1, keep_dims=True), x.shape), mask=mask)


@triton.jit
def _backward_rows(
    grad_out, grad_last, edges, u, delta, A, B, C, D, z, delta_bias,
    grad_u, grad_delta, grad_z, grad_B, grad_C, channels, adjoints,
    other_u, other_delta, other_z, b, g, h, block, blocks, H, L, G, items, chunks,
    grad_out_b, grad_out_g, grad_out_h, u_b, u_g, u_h, delta_b, delta_g, delta_h, z_b, z_g, z_h,
    B_b, B_g, B_n, C_b, C_g, C_n, out_b, out_g, out_h,
    N: tl.constexpr, METHOD: tl.constexpr, SOFTPLUS: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_OUT: tl.constexpr,
    HAS_LAST: tl.constexpr, B_VARIES: tl.constexpr, C_VARIES: tl.constexpr, PART: tl.constexpr,
    REVERSE: tl.constexpr, SEGMENT: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    mask_h = h < H
    channel = g * H + h
    bias = _column(delta_bias + channel, mask_h, HAS_BIAS)
    skip = _column(D + channel, mask_h, HAS_D)
    row = h.to(tl.int64)[:, None]
    u += b * u_b + g * u_g + row * u_h
    delta += b * delta_b + g * delta_g + row * delta_h
    z += b * z_b + g * z_g + row * z_h
    grad_out += b * grad_out_b + g * grad_out_g + row * grad_out_h
    item = b * G + g
    place = b * out_b + g * out_g + row * out_h
    B = _matrix(B, b, g, h, B_b, B_g, B_VARIES)
    C = _matrix(C, b, g, h, C_b, C_g, C_VARIES)
    grad_B += (item * blocks + block) * N * L
    grad_C += (item * blocks + block) * N * L
    A += channel * N
    grad_last += item * N * H
    edges += item * N * H
    adjoints += item * N * H
    slot = tl.cast(items, tl.int64) * N * H
    B_n, C_n = tl.cast(B_n, tl.int64), tl.cast(C_n, tl.int64)
    first_row = tl.arange(0, BLOCK_H) == 0
    j = tl.arange(0, BLOCK_T)[None, :]
    at_start = j == 0
    store_at_start = mask_h[:, None] & at_start
    start = h[:, None] + j
    # What a step of a tile takes: from the step before, from the other end, and there from the step
    # after.
    row = h[:, None] * 0
    before = tl.maximum(j - 1, 0) + row
    turned = BLOCK_T - 1 - j + row
    after_turned = tl.minimum(BLOCK_T - j, BLOCK_T - 1) + row
    # Of the sums by channel: A, then D and the bias, then B and C where they are constant.
    kinds = N + 2
    if not B_VARIES:
        kinds += N
    if not C_VARIES:
        kinds += N

    for back in range(0, chunks):
        i = chunks - 1 - back
        sums = channels + (item * chunks + i) * kinds * H + start
        t, t_scan = _steps_of_chunk(i, chunks, REVERSE, SEGMENT, BLOCK_T)
        mask = mask_h[:, None] & (t < L)[None, :]
        mask_row = first_row[:, None] & (t < L)[None, :]
        there = (t_scan < L)[None, :]
        t = t[None, :] + h[:, None] * 0

        raw = _load(delta + t, mask, REVERSE, SEGMENT) + bias
        dt = raw
        if SOFTPLUS:
            dt = softplus(dt)
        dt = tl.where(there, dt, 0.0)
        signal = _load(u + t, mask, REVERSE, SEGMENT)
        grad_y = tl.zeros_like(dt)
        if HAS_OUT:
            grad_y = _load(grad_out + t, mask, REVERSE, SEGMENT)
        if HAS_Z:
            gate = _load(z + t, mask, REVERSE, SEGMENT)
            open_share = sigmoid(gate)
            # That of z, but for the factor y.
            factor_z = grad_y * open_share * (1.0 + gate * (1.0 - open_share))
            grad_y *= gate * open_share
        grad_scan = grad_y
        if PART != 0:
            grad_scan = 0.5 * grad_y

        y = tl.zeros_like(dt)
        sum_u = tl.zeros_like(dt)
        sum_dt = tl.zeros_like(dt)
        for n in range(0, N):
            a = _column(A + n, mask_h, True)
            b_n = _state_tile(B + n * B_n, t, mask, mask_h, B_VARIES, REVERSE, SEGMENT)
            c_n = _state_tile(C + n * C_n, t, mask, mask_h, C_VARIES, REVERSE, SEGMENT)
            # State before the chunk, and adjoint of that after it.
            edge = tl.load(edges + (i - 1) * slot + n * H + h, mask=mask_h & (i > 0), other=0.0)
            given = mask_h & (back > 0)
            adjoint = tl.load(adjoints + n * H + h, mask=given, other=0.0)
            if HAS_LAST:
                adjoint += tl.load(grad_last + n * H + h, mask=mask_h & (back == 0), other=0.0)

            a_bar, beta, slope, beta_dt, beta_a = differentiate(dt, a, METHOD)
            drive = beta * signal
            entry = a_bar * tl.where(at_start, edge[:, None], 0.0)
            _, x = tl.associative_scan((a_bar, drive * b_n + entry), 1, _compose)
            x_before = tl.where(at_start, edge[:, None], tl.gather(x, before, 1))
            # Nothing precedes the first one, whose transition does not count.
            a_after = tl.gather(a_bar, after_turned, 1)
            entry = tl.where(at_start, adjoint[:, None], 0.0)
            entry += tl.gather(c_n * grad_scan, turned, 1)
            _, grad_x = tl.associative_scan((a_after, entry), 1, _compose)
            grad_x = tl.gather(grad_x, turned, 1)

            y += c_n * x
            by_b = grad_x * b_n
            sum_u += by_b * beta
            by_beta = by_b * signal
            by_z = grad_x * x_before * slope
            sum_dt += by_z * a + by_beta * beta_dt
            _store_sums(sums + n * H, by_z * dt + by_beta * beta_a, store_at_start)
            of_B = grad_x * drive
            of_C = grad_scan * x
            if B_VARIES and C_VARIES:
                of_B, of_C = tl.reduce((of_B, of_C), 0, _add_pairs, keep_dims=True)
                _store_row(grad_B + n * L + t, of_B, mask_row, REVERSE, SEGMENT)
                _store_row(grad_C + n * L + t, of_C, mask_row, REVERSE, SEGMENT)
            else:
                if B_VARIES:
                    of_B = tl.sum(of_B, 0, keep_dims=True)
                    _store_row(grad_B + n * L + t, of_B, mask_row, REVERSE, SEGMENT)
                else:
                    _store_sums(sums + (N + 2 + n) * H, of_B, store_at_start)
                if C_VARIES:
                    of_C = tl.sum(of_C, 0, keep_dims=True)
                    _store_row(grad_C + n * L + t, of_C, mask_row, REVERSE, SEGMENT)
                else:
                    _store_sums(sums + (kinds - N + n) * H, of_C, store_at_start)
            tl.store(adjoints + n * H + start, a_bar * grad_x, mask=store_at_start)

        if SOFTPLUS:
            sum_dt *= sigmoid(raw)
        sum_dt = tl.where(there, sum_dt, 0.0)
        _store_sums(sums + (N + 1) * H, sum_dt, store_at_start)
        if PART != 0:
            y *= 0.5
        if PART != 2:
            y += skip * signal
            sum_u += skip * grad_y
            _store_sums(sums + N * H, grad_y * signal, store_at_start)
        where = place + t
        if PART == 2:
            sum_u += _load(other_u + where, mask, REVERSE, SEGMENT)
            sum_dt += _load(other_delta + where, mask, REVERSE, SEGMENT)
        sum_u = _turn(sum_u, REVERSE, SEGMENT).to(grad_u.dtype.element_ty)
        tl.store(grad_u + where, sum_u, mask=mask)
        sum_dt = _turn(sum_dt, REVERSE, SEGMENT).to(grad_delta.dtype.element_ty)
        tl.store(grad_delta + where, sum_dt, mask=mask)
        if HAS_Z:
            y *= factor_z
            if PART == 2:
                y += _load(other_z + where, mask, REVERSE, SEGMENT)
            y = _turn(y, REVERSE, SEGMENT).to(grad_z.dtype.element_ty)
            tl.store(grad_z + where, y, mask=mask)
        # The chunk before begins with adjoints that other threads have written.
        tl.debug_barrier()


@triton.jit
def scan_backward_kernel(
    grad_out, grad_last, edges, u, delta, A, B, C, D, z, delta_bias,
    grad_u, grad_delta, grad_z, grad_B, grad_C, channels, adjoints,
    other_u, other_delta, other_z, H, L, G, items, chunks, reverse_bits,
    grad_out_b, grad_out_g, grad_out_h, u_b, u_g, u_h, delta_b, delta_g, delta_h, z_b, z_g, z_h,
    B_b, B_g, B_n, C_b, C_g, C_n, out_b, out_g, out_h,
    N: tl.constexpr, METHOD: tl.constexpr, SOFTPLUS: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_OUT: tl.constexpr,
    HAS_LAST: tl.constexpr, B_VARIES: tl.constexpr, C_VARIES: tl.constexpr, PART: tl.constexpr,
    DIRECTIONS: tl.constexpr, SEGMENT: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Gradients of what varies in time, and sums of the others.

    PART and DIRECTIONS as in forward; 1 keeps its gradients of u, delta and z in float32, and 2
    finds them in ``other_*`` and adds its own. Sums over the channels of a block are written to
    ``grad_B`` and ``grad_C`` [B, G, blocks, N, L], those over the steps of a chunk to ``channels``
    [B, G, chunks, kinds, H].
    """
    blocks = tl.cdiv(H, BLOCK_H)
    pid = tl.program_id(0)
    block = pid % blocks
    h = block * BLOCK_H + tl.arange(0, BLOCK_H)
    item = (pid // blocks).to(tl.int64)
    b = item // G
    g = item % G
    reverse = (reverse_bits >> g) & 1
    if DIRECTIONS == 0 or (DIRECTIONS == 2 and reverse == 0):
        _backward_rows(
            grad_out, grad_last, edges, u, delta, A, B, C, D, z, delta_bias,
            grad_u, grad_delta, grad_z, grad_B, grad_C, channels, adjoints,
            other_u, other_delta, other_z, b, g, h, block, blocks, H, L, G, items, chunks,
            grad_out_b, grad_out_g, grad_out_h,
            u_b, u_g, u_h, delta_b, delta_g, delta_h, z_b, z_g, z_h, B_b, B_g, B_n, C_b, C_g, C_n,
            out_b, out_g, out_h,
            N, METHOD, SOFTPLUS, HAS_D, HAS_Z, HAS_BIAS, HAS_OUT, HAS_LAST, B_VARIES, C_VARIES,
            PART, False, SEGMENT, BLOCK_H, BLOCK_T,
        )  # fmt: skip
    else:
        _backward_rows(
            grad_out, grad_last, edges, u, delta, A, B, C, D, z, delta_bias,
            grad_u, grad_delta, grad_z, grad_B, grad_C, channels, adjoints,
            other_u, other_delta, other_z, b, g, h, block, blocks, H, L, G, items, chunks,
            grad_out_b, grad_out_g, grad_out_h,
            u_b, u_g, u_h, delta_b, delta_g, delta_h, z_b, z_g, z_h, B_b, B_g, B_n, C_b, C_g, C_n,
            out_b, out_g, out_h,
            N, METHOD, SOFTPLUS, HAS_D, HAS_Z, HAS_BIAS, HAS_OUT, HAS_LAST, B_VARIES, C_VARIES,
            PART, True, SEGMENT, BLOCK_H, BLOCK_T,
        )  # fmt: skip
