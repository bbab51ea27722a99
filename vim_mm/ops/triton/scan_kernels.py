"""The selective scan in Triton: its forward kernel, and what both passes share.

Letters as in csrc/ops.cpp: B batch, G groups, H channels of a group, L steps, N states.

A program has ROWS x CHANNELS channels of one group and one item of the batch, and walks along the
sequence in chunks of LANES x STEPS steps. A tile is [ROWS, LANES], one entry for each thread. What
varies in time is a tuple of STEPS tiles for each of CHANNELS channels: of each of its channels a
thread has a *segment* of STEPS neighbouring steps. It composes the steps of a segment one after the
other, ``tl.associative_scan`` composes the segments of a row, and a second walk through the segment
finds the states. So threads exchange values once for each segment and not for each step, and a scan
of the other direction takes tuples from their other end, which costs nothing.

The state at the end of a chunk goes through global memory, where backward reads it again. Steps
beyond the end have dt = 0, with which every method is the identity. There are no atomics: sums over
channels, chunks and the batch are written by block, and added up afterwards.

A tensor of time has L as its last, contiguous axis, and any strides before that. VECTOR steps can
be read at once: it divides L and all strides, which arguments give as multiples of it.
"""
# ruff: noqa: RUF005, as Triton takes no starred tuples

import triton
import triton.language as tl

from vim_mm.ops.triton.methods import discretize, sigmoid, softplus

# Numbers that no kernel is specialized for: what matters of strides is VECTOR.
NUMBERS = [
    'H', 'L', 'G', 'items', 'chunks', 'slots', 'reverse_bits',
    *(f'{x}_{axis}' for x in ('u', 'delta', 'z', 'out', 'grad_out') for axis in 'bgh'),
    *(f'{x}_{axis}' for x in 'BC' for axis in 'bgn'),
]  # fmt: skip


@triton.jit
def _compose(a_1, x_1, a_2, x_2):
    """x -> a_1 x + x_1, and then x -> a_2 x + x_2."""
    return a_1 * a_2, a_2 * x_1 + x_2


@triton.jit
def _compose_sequences(a_1, x_1, a_2, x_2):
    """Likewise, where a_2 = 0 begins a sequence, whatever was before: 0 times inf would be NaN."""
    begins = a_2 == 0.0
    return tl.where(begins, 0.0, a_1 * a_2), tl.where(begins, x_2, a_2 * x_1 + x_2)


@triton.jit
def _flip(values, REVERSE: tl.constexpr, STEPS: tl.constexpr):
    """From the order of memory to that of the scan, or back."""
    if REVERSE:
        flipped = ()
        for s in tl.static_range(STEPS):
            flipped = flipped + (values[STEPS - 1 - s],)
        return flipped
    else:
        return values


@triton.jit
def _split(x, V: tl.constexpr):
    """[ROWS, LANES V] as V tiles. Every round halves them by the lowest bit left of the step."""
    tiles = (x,)
    for level in tl.static_range(3):
        if 2**level < V:
            even, odd = (), ()
            for k in tl.static_range(2**level):
                tile = tiles[k]
                e, o = tl.split(tl.reshape(tile, (tile.shape[0], tile.shape[1] // 2, 2)))
                even, odd = even + (e,), odd + (o,)
            tiles = even + odd
    return tiles


@triton.jit
def _join(tiles, V: tl.constexpr):
    """V tiles as [ROWS, LANES V]: what ``_split`` takes apart."""
    for level in tl.static_range(3):
        if 2**level < V:
            pairs = ()
            for k in tl.static_range(V // 2 ** (level + 1)):
                pair = tl.join(tiles[k], tiles[k + V // 2 ** (level + 1)])
                pairs = pairs + (tl.reshape(pair, (pair.shape[0], pair.shape[1] * 2)),)
            tiles = pairs
    return tiles[0]


@triton.jit
def _places(
    chunk, m, L, REVERSE: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, V: tl.constexpr
):
    """Of the m-th vectors of all segments, [1, LANES V]: their steps, and whether there are."""
    j = tl.arange(0, LANES * V)[None, :]
    segment = j // V
    if REVERSE:
        segment = LANES - 1 - segment
    first = (chunk * LANES + segment) * STEPS + m * V
    # Of a vector there is all or nothing.
    return first + j % V, first < L


@triton.jit
def _load(
    pointer, chunk, mask_h, L,
    REVERSE: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """A chunk of rows that begin at ``pointer`` [ROWS, 1]: a tuple of tiles in scan order."""
    most: tl.constexpr = 128 // pointer.dtype.element_ty.primitive_bitwidth
    V: tl.constexpr = most if most < VECTOR else VECTOR
    values = ()
    for m in tl.static_range(STEPS // V):
        t, there = _places(chunk, m, L, REVERSE, LANES, STEPS, V)
        place = tl.broadcast_to(pointer + t, (mask_h.shape[0], LANES * V))
        x = tl.load(place, mask=mask_h & there, other=0.0)
        values = values + _split(x.to(tl.float32), V)
    return _flip(values, REVERSE, STEPS)


@triton.jit
def _store(
    pointer, values, chunk, mask_h, L,
    REVERSE: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Writes what ``_load`` reads."""
    most: tl.constexpr = 128 // pointer.dtype.element_ty.primitive_bitwidth
    V: tl.constexpr = most if most < VECTOR else VECTOR
    values = _flip(values, REVERSE, STEPS)
    for m in tl.static_range(STEPS // V):
        t, there = _places(chunk, m, L, REVERSE, LANES, STEPS, V)
        x = _join(values[m * V : (m + 1) * V], V)
        place = tl.broadcast_to(pointer + t, x.shape)
        tl.store(place, x.to(pointer.dtype.element_ty), mask=mask_h & there)


@triton.jit
def _segments(i, chunks, REVERSE: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr):
    """Of the i-th chunk in scan order: its number in memory, and where segments begin there."""
    segment = tl.arange(0, LANES)[None, :]
    if REVERSE:
        chunk = chunks - 1 - i
        segment = LANES - 1 - segment
    else:
        chunk = i + 0
    return chunk, (chunk * LANES + segment) * STEPS


@triton.jit
def _step(t, s, REVERSE: tl.constexpr, STEPS: tl.constexpr):
    """The s-th step in scan order of segments that begin at ``t`` in the order of memory."""
    if REVERSE:
        return t + (STEPS - 1 - s)
    else:
        return t + s


@triton.jit
def _step_sizes(
    raw, bias, t, L, SOFTPLUS: tl.constexpr, REVERSE: tl.constexpr, STEPS: tl.constexpr
):
    """dt of a segment, 0 beyond the end."""
    dt = ()
    for s in tl.static_range(STEPS):
        x = raw[s] + bias
        if SOFTPLUS:
            x = softplus(x)
        dt = dt + (tl.where(_step(t, s, REVERSE, STEPS) < L, x, 0.0),)
    return dt


@triton.jit
def _column(pointer, mask_h, HAS: tl.constexpr):
    """[ROWS, 1] of a parameter, 0 where there is none."""
    if HAS:
        return tl.load(pointer, mask=mask_h, other=0.0).to(tl.float32)
    else:
        return mask_h.to(tl.float32) * 0.0


@triton.jit
def _row(x, b, g, h, x_b, x_g, x_h, VECTOR: tl.constexpr):
    """Where rows [ROWS, 1] of a tensor of time begin."""
    return x + (b * x_b + g * x_g + h.to(tl.int64) * x_h) * VECTOR


@triton.jit
def _load_row(
    x, b, g, h, x_b, x_g, x_h, chunk, H, L,
    REVERSE: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """A chunk of channels ``h``: a tuple of tiles."""
    row = _row(x, b, g, h, x_b, x_g, x_h, VECTOR)
    return _load(row, chunk, h < H, L, REVERSE, LANES, STEPS, VECTOR)


@triton.jit
def _load_inputs(
    u, delta, delta_bias, b, g, h, u_b, u_g, u_h, delta_b, delta_g, delta_h, chunk, t, H, L,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr,
    REVERSE: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """dt and u of a chunk of channels ``h``: a tuple of tiles each."""
    bias = _column(delta_bias + g * H + h, h < H, HAS_BIAS)
    raw = _load_row(
        delta, b, g, h, delta_b, delta_g, delta_h, chunk, H, L, REVERSE, LANES, STEPS, VECTOR
    )
    dt = _step_sizes(raw, bias, t, L, SOFTPLUS, REVERSE, STEPS)
    signal = _load_row(u, b, g, h, u_b, u_g, u_h, chunk, H, L, REVERSE, LANES, STEPS, VECTOR)
    return dt, signal


@triton.jit
def _varying(
    M, b, g, n, M_b, M_g, M_n, chunk, mask_h, L,
    REVERSE: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """B or C of one state, for all channels: a tuple of tiles."""
    row = M + (b * M_b + g * M_g + tl.cast(n, tl.int64) * M_n) * VECTOR
    return _load(row, chunk, mask_h, L, REVERSE, LANES, STEPS, VECTOR)


@triton.jit
def _constant(M, g, h, n, M_b, M_g, M_n, mask_h, STEPS: tl.constexpr):
    """B or C of one state that has no time: a column [ROWS, 1] for each step."""
    M += g * M_g + h.to(tl.int64) * M_b + tl.cast(n, tl.int64) * M_n
    return (tl.load(M, mask=mask_h, other=0.0).to(tl.float32),) * STEPS


@triton.jit
def _load_starts(
    starts, b, mask_h, chunk, L, G, items, HAS_RESET: tl.constexpr,
    REVERSE: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Where sequences begin in a chunk, for all channels: a tuple of tiles of 0 and 1.

    ``starts`` is [2, B, L], for scans from either end.
    """
    if HAS_RESET:
        place = b
        if REVERSE:
            place += items // G
        row = starts + place * (L // VECTOR) * VECTOR
        return _load(row, chunk, mask_h, L, REVERSE, LANES, STEPS, VECTOR)
    else:
        return (tl.zeros((mask_h.shape[0], LANES), tl.float32),) * STEPS


@triton.jit
def _within(x, start, HAS_RESET: tl.constexpr):
    """What a step takes from the other side of its beginning: 0 where a sequence begins there."""
    if HAS_RESET:
        return tl.where(start > 0.0, 0.0, x)
    else:
        return x


@triton.jit
def _state_before(i, edge, initial_state, mask_h, HAS_INITIAL: tl.constexpr):
    """That before the i-th chunk: what is at ``edge``, and before the first the initial one."""
    if HAS_INITIAL:
        return tl.load(tl.where(i > 0, edge, initial_state), mask=mask_h, other=0.0)
    else:
        return tl.load(edge, mask=mask_h & (i > 0), other=0.0)


@triton.jit
def _store_at(pointer, x, mask_h, lane, own):
    """What thread ``own`` of a row has. Pointers of the others go on from its: with neighbours in
    time side by side, as everywhere, nothing has to be moved."""
    tl.store(pointer + (lane - own), x, mask=mask_h & (lane == own))


@triton.jit
def _scan_lanes(a, x, before, at_start, lane_before, HAS_RESET: tl.constexpr):
    """The state before each segment. ``before`` is that before the first, whose x comes from it:
    a product of a, which can be infinite where the state is 0, does not multiply it here."""
    if HAS_RESET:
        _, after = tl.associative_scan((a, x), 1, _compose_sequences)
    else:
        _, after = tl.associative_scan((a, x), 1, _compose)
    return tl.where(at_start, before, tl.gather(after, lane_before, 1))


@triton.jit
def _forward_rows(
    u, delta, A, B, C, D, z, delta_bias, initial_state, starts, out, last_state, edges, partial,
    b, g, block, H, L, G, items, chunks, slots,
    u_b, u_g, u_h, delta_b, delta_g, delta_h, z_b, z_g, z_h, B_b, B_g, B_n, C_b, C_g, C_n,
    out_b, out_g, out_h,
    N: tl.constexpr, METHOD: tl.constexpr, SOFTPLUS: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_RESET: tl.constexpr,
    B_VARIES: tl.constexpr, C_VARIES: tl.constexpr, PART: tl.constexpr, REVERSE: tl.constexpr,
    EDGE: tl.constexpr, VECTOR: tl.constexpr,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    item = b * G + g
    slot = tl.cast(items, tl.int64) * N * H
    initial_state += item * N * H
    last_state += item * N * H
    edges += item * N * H
    lane = tl.arange(0, LANES)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    at_start = lane == 0
    lane_before = tl.maximum(lane - 1, 0)
    first_h = (block * ROWS + tl.arange(0, ROWS)[:, None]) * CHANNELS

    for i in range(0, chunks):
        chunk, t = _segments(i, chunks, REVERSE, LANES, STEPS)
        # The slot of the state after each segment, which is kept where it is one's last.
        edge = i * (LANES * STEPS // EDGE) + lane // (EDGE // STEPS)
        dt, signal = (), ()
        for k in tl.static_range(CHANNELS):
            of_dt, of_u = _load_inputs(
                u, delta, delta_bias, b, g, first_h + k,
                u_b, u_g, u_h, delta_b, delta_g, delta_h, chunk, t, H, L,
                SOFTPLUS, HAS_BIAS, REVERSE, LANES, STEPS, VECTOR,
            )  # fmt: skip
            dt, signal = dt + of_dt, signal + of_u
        y = (tl.zeros((ROWS, LANES), tl.float32),) * (CHANNELS * STEPS)
        begins = _load_starts(
            starts, b, first_h < H, chunk, L, G, items, HAS_RESET, REVERSE, LANES, STEPS, VECTOR
        )
        parted = begins[0]
        for s in tl.static_range(1, STEPS):
            parted += begins[s]

        for n in range(0, N):
            if B_VARIES:
                b_n = _varying(
                    B, b, g, n, B_b, B_g, B_n, chunk, first_h < H, L, REVERSE, LANES, STEPS, VECTOR
                )
            if C_VARIES:
                c_n = _varying(
                    C, b, g, n, C_b, C_g, C_n, chunk, first_h < H, L, REVERSE, LANES, STEPS, VECTOR
                )
            sums, ends = (), ()
            for k in tl.static_range(CHANNELS):
                h = first_h + k
                mask_h = h < H
                if not B_VARIES:
                    b_n = _constant(B, g, h, n, B_b, B_g, B_n, mask_h, STEPS)
                if not C_VARIES:
                    c_n = _constant(C, g, h, n, C_b, C_g, C_n, mask_h, STEPS)
                a = _column(A + (g * H + h) * N + n, mask_h, True)
                before = _state_before(
                    i, edges + (i * (LANES * STEPS // EDGE) - 1) * slot + n * H + h,
                    initial_state + (n * H + h), mask_h, HAS_INITIAL,
                )  # fmt: skip
                x = tl.where(at_start, before, 0.0)
                a_bars, drives = (), ()
                for s in tl.static_range(STEPS):
                    a_bar, beta = discretize(dt[k * STEPS + s], a, METHOD)
                    drive = beta * signal[k * STEPS + s] * b_n[s]
                    x = a_bar * _within(x, begins[s], HAS_RESET) + drive
                    if s == 0:
                        total = a_bar
                    else:
                        total = total * a_bar
                    a_bars, drives = a_bars + (a_bar,), drives + (drive,)
                total = _within(total, parted, HAS_RESET)
                x = _scan_lanes(total, x, before, at_start, lane_before, HAS_RESET)
                for s in tl.static_range(STEPS):
                    x = a_bars[s] * _within(x, begins[s], HAS_RESET) + drives[s]
                    sums = sums + (y[k * STEPS + s] + c_n[s] * x,)
                ends = ends + (x,)
            y = sums
            for k in tl.static_range(CHANNELS):
                h = first_h + k
                place = edges + edge * slot + (n * H + h)
                if PART != 2:
                    place = tl.where(edge == slots - 1, last_state + (n * H + h), place)
                own = lane // (EDGE // STEPS) * (EDGE // STEPS) + (EDGE // STEPS - 1)
                _store_at(place, ends[k], h < H, lane, own)

        for k in tl.static_range(CHANNELS):
            h = first_h + k
            mask_h = h < H
            place = _row(tl.cast(0, tl.int64), b, g, h, out_b, out_g, out_h, VECTOR)
            if PART == 1:
                _store(
                    partial + place, y[k * STEPS : (k + 1) * STEPS], chunk, mask_h, L,
                    REVERSE, LANES, STEPS, VECTOR,
                )  # fmt: skip
            else:
                skip = _column(D + g * H + h, mask_h, HAS_D)
                if PART == 2:
                    other = _load(partial + place, chunk, mask_h, L, REVERSE, LANES, STEPS, VECTOR)
                if HAS_Z:
                    gate = _load_row(
                        z, b, g, h, z_b, z_g, z_h, chunk, H, L, REVERSE, LANES, STEPS, VECTOR
                    )
                result = ()
                for s in tl.static_range(STEPS):
                    x = y[k * STEPS + s]
                    if PART == 2:
                        x = 0.5 * (x + other[s])
                    if HAS_D:
                        x += skip * signal[k * STEPS + s]
                    if HAS_Z:
                        x *= gate[s] * sigmoid(gate[s])
                    result = result + (x,)
                _store(out + place, result, chunk, mask_h, L, REVERSE, LANES, STEPS, VECTOR)
        # The next chunk begins with states that other threads have written.
        tl.debug_barrier()


@triton.jit(do_not_specialize=NUMBERS)
def scan_forward_kernel(
    u, delta, A, B, C, D, z, delta_bias, initial_state, starts, out, last_state, edges, partial,
    H, L, G, items, chunks, slots, reverse_bits,
    u_b, u_g, u_h, delta_b, delta_g, delta_h, z_b, z_g, z_h, B_b, B_g, B_n, C_b, C_g, C_n,
    out_b, out_g, out_h,
    N: tl.constexpr, METHOD: tl.constexpr, SOFTPLUS: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_RESET: tl.constexpr,
    B_VARIES: tl.constexpr, C_VARIES: tl.constexpr, PART: tl.constexpr, DIRECTIONS: tl.constexpr,
    EDGE: tl.constexpr, VECTOR: tl.constexpr,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """out and last_state of a group's channels.

    PART is 0 for a causal scan. One that averages both directions is two launches: 1, in the
    direction asked for, keeps y in ``partial``; 2, the other way round, adds its own. DIRECTIONS
    is 0 or 1 if no group or every group is scanned from the end, else 2, and each has its bit.
    States are kept every EDGE steps, ``slots`` times. ``initial_state`` [B, G, N, H] and ``starts``
    are there if HAS_INITIAL and HAS_RESET.
    """
    blocks = tl.cdiv(H, ROWS * CHANNELS)
    pid = tl.program_id(0)
    block = pid % blocks
    item = (pid // blocks).to(tl.int64)
    b = item // G
    g = item % G
    reverse = (reverse_bits >> g) & 1
    if DIRECTIONS == 0 or (DIRECTIONS == 2 and reverse == 0):
        _forward_rows(
            u, delta, A, B, C, D, z, delta_bias, initial_state, starts,
            out, last_state, edges, partial, b, g, block, H, L, G, items, chunks, slots,
            u_b, u_g, u_h, delta_b, delta_g, delta_h, z_b, z_g, z_h, B_b, B_g, B_n, C_b, C_g, C_n,
            out_b, out_g, out_h,
            N, METHOD, SOFTPLUS, HAS_D, HAS_Z, HAS_BIAS, HAS_INITIAL, HAS_RESET,
            B_VARIES, C_VARIES, PART, False, EDGE, VECTOR, CHANNELS, ROWS, LANES, STEPS,
        )  # fmt: skip
    else:
        _forward_rows(
            u, delta, A, B, C, D, z, delta_bias, initial_state, starts,
            out, last_state, edges, partial, b, g, block, H, L, G, items, chunks, slots,
            u_b, u_g, u_h, delta_b, delta_g, delta_h, z_b, z_g, z_h, B_b, B_g, B_n, C_b, C_g, C_n,
            out_b, out_g, out_h,
            N, METHOD, SOFTPLUS, HAS_D, HAS_Z, HAS_BIAS, HAS_INITIAL, HAS_RESET,
            B_VARIES, C_VARIES, PART, True, EDGE, VECTOR, CHANNELS, ROWS, LANES, STEPS,
        )  # fmt: skip
