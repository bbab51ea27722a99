"""The backward pass of the selective scan in Triton; :mod:`.scan_kernels` has letters and tiles.

A program walks from the last chunk in scan order to the first. For each state it computes the
states of a chunk anew, from that before it, which forward kept. Adjoints take the same way from
right to left: the steps of a segment from the last to the first, and segments turned over across
threads. ``adjoint`` is what a step hands to the one before it, ``A_bar`` times that of its state.
The state before a step is never computed from that after it, which would lose digits.
"""
# ruff: noqa: RUF005, as Triton takes no starred tuples

import triton
import triton.language as tl

from vim_mm.ops.triton.methods import differentiate, sigmoid
from vim_mm.ops.triton.scan_kernels import (
    NUMBERS,
    _column,
    _compose,
    _compose_sequences,
    _constant,
    _join,
    _load,
    _load_inputs,
    _load_row,
    _load_starts,
    _row,
    _scan_lanes,
    _segments,
    _split,
    _state_before,
    _step,
    _store,
    _store_at,
    _varying,
    _within,
)


@triton.jit
def _add_pairs(p_1, q_1, p_2, q_2):
    return p_1 + p_2, q_1 + q_2


@triton.jit
def _sum_rows(p, q, ROWS: tl.constexpr, STEPS: tl.constexpr):
    """Tiles summed over the rows of a program, four steps at a time."""
    if ROWS == 1:
        return p, q
    else:
        sums_p, sums_q = (), ()
        for m in tl.static_range(STEPS // 4):
            x, y = _join(p[4 * m : 4 * m + 4], 4), _join(q[4 * m : 4 * m + 4], 4)
            sum_x, sum_y = tl.reduce((x, y), 0, _add_pairs, keep_dims=True)
            sums_p = sums_p + _split(tl.broadcast_to(sum_x, x.shape), 4)
            sums_q = sums_q + _split(tl.broadcast_to(sum_y, x.shape), 4)
        return sums_p, sums_q


@triton.jit
def _add(p, q, STEPS: tl.constexpr):
    sums = ()
    for s in tl.static_range(STEPS):
        sums = sums + (p[s] + q[s],)
    return sums


@triton.jit
def _sum(values, STEPS: tl.constexpr):
    """Of a segment."""
    total = values[0]
    for s in tl.static_range(1, STEPS):
        total += values[s]
    return total


@triton.jit
def _store_sums(pointer, x, mask_h, lane):
    """The sums of rows [ROWS, LANES]."""
    total = tl.broadcast_to(tl.sum(x, 1, keep_dims=True), x.shape)
    _store_at(pointer, total, mask_h, lane, 0)


@triton.jit
def _load_grad_out(
    grad_out, b, g, h, grad_out_b, grad_out_g, grad_out_h, chunk, H, L,
    HAS_OUT: tl.constexpr, REVERSE: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """A chunk of channels ``h``: a tuple of tiles, of zeros if there is none."""
    if HAS_OUT:
        return _load_row(
            grad_out, b, g, h, grad_out_b, grad_out_g, grad_out_h, chunk, H, L,
            REVERSE, LANES, STEPS, VECTOR,
        )  # fmt: skip
    else:
        return (tl.zeros((ROWS, LANES), tl.float32),) * STEPS


@triton.jit
def _scan_lanes_back(a, h, after, at_end, lane_turned, lane_next, HAS_RESET: tl.constexpr):
    """What enters each segment from the right. ``after`` enters the last, whose h comes from it."""
    a, h = tl.gather(a, lane_turned, 1), tl.gather(h, lane_turned, 1)
    if HAS_RESET:
        _, h = tl.associative_scan((a, h), 1, _compose_sequences)
    else:
        _, h = tl.associative_scan((a, h), 1, _compose)
    return tl.where(at_end, after, tl.gather(h, lane_next, 1))


@triton.jit
def _backward_rows(
    grad_out, grad_last, edges, u, delta, A, B, C, D, z, delta_bias, initial_state, starts,
    grad_u, grad_delta, grad_z, matrices, channels, adjoints,
    other_u, other_delta, other_z, b, g, block, blocks, H, L, G, items, chunks,
    grad_out_b, grad_out_g, grad_out_h, u_b, u_g, u_h, delta_b, delta_g, delta_h, z_b, z_g, z_h,
    B_b, B_g, B_n, C_b, C_g, C_n, out_b, out_g, out_h,
    N: tl.constexpr, METHOD: tl.constexpr, SOFTPLUS: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_RESET: tl.constexpr, HAS_OUT: tl.constexpr,
    HAS_LAST: tl.constexpr, B_VARIES: tl.constexpr, C_VARIES: tl.constexpr, PART: tl.constexpr,
    REVERSE: tl.constexpr, VECTOR: tl.constexpr,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    item = b * G + g
    slot = tl.cast(items, tl.int64) * N * H
    initial_state += item * N * H
    grad_last += item * N * H
    edges += item * N * H
    adjoints += item * N * H
    # Of the sums by channel: A, then D and the bias, then B and C where they are constant.
    kinds = N + 2
    if not B_VARIES:
        kinds += N
    if not C_VARIES:
        kinds += N
    lane = tl.arange(0, LANES)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    HALF: tl.constexpr = 1.0 if PART == 0 else 0.5
    at_start = lane == 0
    at_end = lane == LANES - 1
    lane_before = tl.maximum(lane - 1, 0)
    lane_turned = LANES - 1 - lane
    lane_next = tl.maximum(LANES - 2 - lane, 0)
    row = tl.arange(0, ROWS)[:, None]
    first_row = row == 0
    first_h = (block * ROWS + row) * CHANNELS
    # Of the sums over channels, B and C, where they vary.
    varying: tl.constexpr = B_VARIES + C_VARIES
    first_matrix = (item * blocks + block) * (varying * N) + row * 0

    for back in range(0, chunks):
        i = chunks - 1 - back
        sums = channels + (item * chunks + i) * kinds * H
        chunk, t = _segments(i, chunks, REVERSE, LANES, STEPS)
        dt, signal, grad_y = (), (), ()
        for k in tl.static_range(CHANNELS):
            h = first_h + k
            of_dt, of_u = _load_inputs(
                u, delta, delta_bias, b, g, h,
                u_b, u_g, u_h, delta_b, delta_g, delta_h, chunk, t, H, L,
                SOFTPLUS, HAS_BIAS, REVERSE, LANES, STEPS, VECTOR,
            )  # fmt: skip
            dt, signal = dt + of_dt, signal + of_u
            given = _load_grad_out(
                grad_out, b, g, h, grad_out_b, grad_out_g, grad_out_h, chunk, H, L,
                HAS_OUT, REVERSE, ROWS, LANES, STEPS, VECTOR,
            )  # fmt: skip
            if HAS_Z:
                gate = _load_row(
                    z, b, g, h, z_b, z_g, z_h, chunk, H, L, REVERSE, LANES, STEPS, VECTOR
                )
            for s in tl.static_range(STEPS):
                x = given[s]
                if HAS_Z:
                    x *= gate[s] * sigmoid(gate[s])
                grad_y = grad_y + (x,)

        begins = _load_starts(
            starts, b, first_h < H, chunk, L, G, items, HAS_RESET, REVERSE, LANES, STEPS, VECTOR
        )
        parted = begins[0]
        for s in tl.static_range(1, STEPS):
            parted += begins[s]
        zero = tl.zeros((ROWS, LANES), tl.float32)
        y = (zero,) * (CHANNELS * STEPS)
        sum_u = (zero,) * (CHANNELS * STEPS)
        sum_dt = (zero,) * (CHANNELS * STEPS)
        for n in range(0, N):
            if B_VARIES:
                b_n = _varying(
                    B, b, g, n, B_b, B_g, B_n, chunk, first_h < H, L, REVERSE, LANES, STEPS, VECTOR
                )
            if C_VARIES:
                c_n = _varying(
                    C, b, g, n, C_b, C_g, C_n, chunk, first_h < H, L, REVERSE, LANES, STEPS, VECTOR
                )
            sums_y, sums_u, sums_dt, ends, sums_a = (), (), (), (), ()
            for k in tl.static_range(CHANNELS):
                h = first_h + k
                mask_h = h < H
                if not B_VARIES:
                    b_n = _constant(B, g, h, n, B_b, B_g, B_n, mask_h, STEPS)
                if not C_VARIES:
                    c_n = _constant(C, g, h, n, C_b, C_g, C_n, mask_h, STEPS)
                a = _column(A + (g * H + h) * N + n, mask_h, True)
                # State before the chunk, and what the chunk after it hands back.
                before = _state_before(
                    i, edges + (i - 1) * slot + (n * H + h), initial_state + (n * H + h),
                    mask_h, HAS_INITIAL,
                )  # fmt: skip
                after = tl.load(adjoints + (n * H + h), mask=mask_h & (back > 0), other=0.0)
                if HAS_LAST:
                    after += tl.load(grad_last + (n * H + h), mask=mask_h & (back == 0), other=0.0)
                # Walk 1: what a segment does to the state before it and to the adjoint after it.
                x, adjoint = tl.where(at_start, before, 0.0), tl.where(at_end, after, 0.0)
                steps = ()
                for s in tl.static_range(STEPS):
                    step = differentiate(dt[k * STEPS + s], a, METHOD)
                    steps = steps + (step,)
                    drive = step[1] * signal[k * STEPS + s] * b_n[s]
                    x = step[0] * _within(x, begins[s], HAS_RESET) + drive
                    if s == 0:
                        total = step[0]
                    else:
                        total = total * step[0]
                total = _within(total, parted, HAS_RESET)
                for s in tl.static_range(STEPS - 1, -1, -1):
                    entry = c_n[s] * (grad_y[k * STEPS + s] * HALF)
                    adjoint = _within(steps[s][0] * (adjoint + entry), begins[s], HAS_RESET)
                x = _scan_lanes(total, x, before, at_start, lane_before, HAS_RESET)
                adjoint = _scan_lanes_back(
                    total, adjoint, after, at_end, lane_turned, lane_next, HAS_RESET
                )
                # Walk 2: the states.
                states = (x,)
                for s in tl.static_range(STEPS):
                    drive = steps[s][1] * signal[k * STEPS + s] * b_n[s]
                    x = steps[s][0] * _within(x, begins[s], HAS_RESET) + drive
                    states = states + (x,)
                # Walk 3: the adjoints, and all gradients.
                of_y, of_u, of_dt, of_B, of_C = (), (), (), (), ()
                of_a = zero
                for s in tl.static_range(STEPS - 1, -1, -1):
                    a_bar, beta, slope, beta_dt, beta_a = steps[s]
                    share = grad_y[k * STEPS + s] * HALF
                    grad_x = c_n[s] * share + adjoint
                    adjoint = _within(a_bar * grad_x, begins[s], HAS_RESET)
                    by_b = grad_x * b_n[s]
                    by_beta = by_b * signal[k * STEPS + s]
                    by_z = grad_x * slope * _within(states[s], begins[s], HAS_RESET)
                    of_y = (y[k * STEPS + s] + c_n[s] * states[s + 1],) + of_y
                    of_u = (sum_u[k * STEPS + s] + by_b * beta,) + of_u
                    of_dt = (sum_dt[k * STEPS + s] + (by_z * a + by_beta * beta_dt),) + of_dt
                    of_a += by_z * dt[k * STEPS + s] + by_beta * beta_a
                    of_B = (grad_x * (beta * signal[k * STEPS + s]),) + of_B
                    of_C = (share * states[s + 1],) + of_C
                sums_y, sums_u, sums_dt = sums_y + of_y, sums_u + of_u, sums_dt + of_dt
                ends, sums_a = ends + (adjoint,), sums_a + (of_a,)
                if not B_VARIES:
                    _store_sums(sums + (N + 2 + n) * H + h, _sum(of_B, STEPS), mask_h, lane)
                if not C_VARIES:
                    _store_sums(sums + (kinds - N + n) * H + h, _sum(of_C, STEPS), mask_h, lane)
                if k == 0:
                    sums_B, sums_C = of_B, of_C
                else:
                    sums_B, sums_C = _add(sums_B, of_B, STEPS), _add(sums_C, of_C, STEPS)
            y, sum_u, sum_dt = sums_y, sums_u, sums_dt
            for k in tl.static_range(CHANNELS):
                h = first_h + k
                _store_sums(sums + n * H + h, sums_a[k], h < H, lane)
                _store_at(adjoints + (n * H + h), ends[k], h < H, lane, 0)
            if B_VARIES or C_VARIES:
                sums_B, sums_C = _sum_rows(sums_B, sums_C, ROWS, STEPS)
                place = matrices + (first_matrix + n) * (L // VECTOR) * VECTOR
                if B_VARIES:
                    _store(place, sums_B, chunk, first_row, L, REVERSE, LANES, STEPS, VECTOR)
                if C_VARIES:
                    place += (varying - 1) * N * (L // VECTOR) * VECTOR
                    _store(place, sums_C, chunk, first_row, L, REVERSE, LANES, STEPS, VECTOR)

        for k in tl.static_range(CHANNELS):
            h = first_h + k
            mask_h = h < H
            bias = _column(delta_bias + g * H + h, mask_h, HAS_BIAS)
            skip = _column(D + g * H + h, mask_h, HAS_D)
            place = _row(tl.cast(0, tl.int64), b, g, h, out_b, out_g, out_h, VECTOR)
            # What is not kept in registers meanwhile.
            if SOFTPLUS:
                raw = _load_row(
                    delta, b, g, h, delta_b, delta_g, delta_h, chunk, H, L,
                    REVERSE, LANES, STEPS, VECTOR,
                )  # fmt: skip
            if HAS_Z:
                gate = _load_row(
                    z, b, g, h, z_b, z_g, z_h, chunk, H, L, REVERSE, LANES, STEPS, VECTOR
                )
                given = _load_grad_out(
                    grad_out, b, g, h, grad_out_b, grad_out_g, grad_out_h, chunk, H, L,
                    HAS_OUT, REVERSE, ROWS, LANES, STEPS, VECTOR,
                )  # fmt: skip
            if PART == 2:
                part_u = _load(other_u + place, chunk, mask_h, L, REVERSE, LANES, STEPS, VECTOR)
                part_delta = _load(
                    other_delta + place, chunk, mask_h, L, REVERSE, LANES, STEPS, VECTOR
                )
                if HAS_Z:
                    part_z = _load(other_z + place, chunk, mask_h, L, REVERSE, LANES, STEPS, VECTOR)
            of_u, of_dt, of_z = (), (), ()
            bias_sum, skip_sum = zero, zero
            for s in tl.static_range(STEPS):
                grad = sum_dt[k * STEPS + s]
                if SOFTPLUS:
                    grad *= sigmoid(raw[s] + bias)
                # Beyond the end dt is no function of anything.
                grad = tl.where(_step(t, s, REVERSE, STEPS) < L, grad, 0.0)
                bias_sum += grad
                if PART == 2:
                    grad += part_delta[s]
                of_dt = of_dt + (grad,)
                grad = sum_u[k * STEPS + s]
                if PART != 2:
                    if HAS_D:
                        grad += skip * grad_y[k * STEPS + s]
                    skip_sum += grad_y[k * STEPS + s] * signal[k * STEPS + s]
                else:
                    grad += part_u[s]
                of_u = of_u + (grad,)
                if HAS_Z:
                    grad = y[k * STEPS + s] * HALF
                    if HAS_D and PART != 2:
                        grad += skip * signal[k * STEPS + s]
                    share = sigmoid(gate[s])
                    grad *= given[s] * share * (1.0 + gate[s] * (1.0 - share))
                    if PART == 2:
                        grad += part_z[s]
                    of_z = of_z + (grad,)
            _store(grad_u + place, of_u, chunk, mask_h, L, REVERSE, LANES, STEPS, VECTOR)
            _store(grad_delta + place, of_dt, chunk, mask_h, L, REVERSE, LANES, STEPS, VECTOR)
            if HAS_Z:
                _store(grad_z + place, of_z, chunk, mask_h, L, REVERSE, LANES, STEPS, VECTOR)
            _store_sums(sums + (N + 1) * H + h, bias_sum, mask_h, lane)
            if PART != 2:
                _store_sums(sums + N * H + h, skip_sum, mask_h, lane)
        # The chunk before begins with adjoints that other threads have written.
        tl.debug_barrier()


@triton.jit(do_not_specialize=NUMBERS)
def scan_backward_kernel(
    grad_out, grad_last, edges, u, delta, A, B, C, D, z, delta_bias, initial_state, starts,
    grad_u, grad_delta, grad_z, matrices, channels, adjoints,
    other_u, other_delta, other_z, H, L, G, items, chunks, reverse_bits,
    grad_out_b, grad_out_g, grad_out_h, u_b, u_g, u_h, delta_b, delta_g, delta_h, z_b, z_g, z_h,
    B_b, B_g, B_n, C_b, C_g, C_n, out_b, out_g, out_h,
    N: tl.constexpr, METHOD: tl.constexpr, SOFTPLUS: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_RESET: tl.constexpr, HAS_OUT: tl.constexpr,
    HAS_LAST: tl.constexpr, B_VARIES: tl.constexpr, C_VARIES: tl.constexpr, PART: tl.constexpr,
    DIRECTIONS: tl.constexpr, VECTOR: tl.constexpr,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Gradients of what varies in time, and sums of the others.

    PART and DIRECTIONS as in forward; 1 keeps its gradients of u, delta and z in float32, and 2
    finds them in ``other_*`` and adds its own. Sums over the channels of a program are written to
    ``matrices`` [B, G, blocks, N or 2 N, L], those over the steps of a chunk to ``channels``
    [B, G, chunks, kinds, H]. ``adjoints`` ends as the gradient of the initial state.
    """
    blocks = tl.cdiv(H, ROWS * CHANNELS)
    pid = tl.program_id(0)
    block = pid % blocks
    item = (pid // blocks).to(tl.int64)
    b = item // G
    g = item % G
    reverse = (reverse_bits >> g) & 1
    if DIRECTIONS == 0 or (DIRECTIONS == 2 and reverse == 0):
        _backward_rows(
            grad_out, grad_last, edges, u, delta, A, B, C, D, z, delta_bias, initial_state,
            starts, grad_u, grad_delta, grad_z, matrices, channels, adjoints,
            other_u, other_delta, other_z, b, g, block, blocks, H, L, G, items, chunks,
            grad_out_b, grad_out_g, grad_out_h,
            u_b, u_g, u_h, delta_b, delta_g, delta_h, z_b, z_g, z_h, B_b, B_g, B_n, C_b, C_g, C_n,
            out_b, out_g, out_h,
            N, METHOD, SOFTPLUS, HAS_D, HAS_Z, HAS_BIAS, HAS_INITIAL, HAS_RESET, HAS_OUT, HAS_LAST,
            B_VARIES, C_VARIES, PART, False, VECTOR, CHANNELS, ROWS, LANES, STEPS,
        )  # fmt: skip
    else:
        _backward_rows(
            grad_out, grad_last, edges, u, delta, A, B, C, D, z, delta_bias, initial_state,
            starts, grad_u, grad_delta, grad_z, matrices, channels, adjoints,
            other_u, other_delta, other_z, b, g, block, blocks, H, L, G, items, chunks,
            grad_out_b, grad_out_g, grad_out_h,
            u_b, u_g, u_h, delta_b, delta_g, delta_h, z_b, z_g, z_h, B_b, B_g, B_n, C_b, C_g, C_n,
            out_b, out_g, out_h,
            N, METHOD, SOFTPLUS, HAS_D, HAS_Z, HAS_BIAS, HAS_INITIAL, HAS_RESET, HAS_OUT, HAS_LAST,
            B_VARIES, C_VARIES, PART, True, VECTOR, CHANNELS, ROWS, LANES, STEPS,
        )  # fmt: skip
