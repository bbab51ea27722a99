"""What stands around the scan in a block, in Triton: norm, convolution, gate, and the parameters.

Letters as in csrc/ops.cpp. Activations between the projections are [H, B, L]: a row for each
channel and item of the batch. Sums over tokens are made by one program each, or by block and added
up afterwards: there are no atomics.
"""

import triton
import triton.language as tl

from vim_mm.ops.triton.methods import sigmoid


@triton.jit
def add_rms_norm_kernel(
    residual, update, weight, normed, total, rstd, rows, C, eps,
    HAS_UPDATE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """normed = total / rms(total) weight of rows [C], total = residual + update."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_C)
    mask = (row < rows)[:, None] & (column < C)[None, :]
    place = row[:, None] * C + column[None, :]
    x = tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        x += tl.load(update + place, mask=mask, other=0.0).to(tl.float32)
        stored = x.to(total.dtype.element_ty)
        tl.store(total + place, stored, mask=mask)
        x = stored.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 1) / C + eps)
    tl.store(rstd + row, inverse, mask=row < rows)
    w = tl.load(weight + column, mask=column < C, other=0.0).to(tl.float32)
    x *= inverse[:, None] * w[None, :]
    tl.store(normed + place, x.to(normed.dtype.element_ty), mask=mask)


@triton.jit
def add_rms_norm_backward_kernel(
    grad_normed, grad_total, total, rstd, weight, grad_residual, grad_update, grad_weight,
    rows, C, HAS_TOTAL: tl.constexpr, HAS_UPDATE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Gradients; that of weight by program, [programs, C]."""
    column = tl.arange(0, BLOCK_C)
    w = tl.load(weight + column, mask=column < C, other=0.0).to(tl.float32)[None, :]
    sums = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    first = tl.program_id(0).to(tl.int64) * BLOCK_R
    for start in range(first, rows, tl.num_programs(0) * BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        mask = (row < rows)[:, None] & (column < C)[None, :]
        place = row[:, None] * C + column[None, :]
        inverse = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        unit = tl.load(total + place, mask=mask, other=0.0).to(tl.float32) * inverse
        g = tl.load(grad_normed + place, mask=mask, other=0.0).to(tl.float32)
        sums += g * unit
        g *= w
        g = (g - unit * (tl.sum(g * unit, 1) / C)[:, None]) * inverse
        if HAS_TOTAL:
            g += tl.load(grad_total + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_residual + place, g.to(grad_residual.dtype.element_ty), mask=mask)
        if HAS_UPDATE:
            tl.store(grad_update + place, g.to(grad_update.dtype.element_ty), mask=mask)
    by_program = grad_weight + tl.program_id(0) * C + column
    tl.store(by_program, tl.sum(sums, 0), mask=column < C)


@triton.jit
def _convolve(x, weight, bias, t, mask, L, sign, W: tl.constexpr):
    """bias + sum over w of weight[w] x[t - sign (W - 1 - w)], zeros outside of the sequence."""
    total = tl.zeros(mask.shape, tl.float32) + tl.load(bias)
    for w in tl.static_range(W):
        s = t - sign * (W - 1 - w)
        there = mask & (s >= 0) & (s < L)
        total += tl.load(weight + w) * tl.load(x + s, mask=there, other=0.0).to(tl.float32)
    return total


@triton.jit
def conv_kernel(
    x, weight, bias, u, H, B, L,
    W: tl.constexpr, SETS: tl.constexpr, BACKWARDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """u[p, h, b, l] = silu(conv(x[h, b])): of the second set, or if BACKWARDS of all, mirrored."""
    row = tl.program_id(0).to(tl.int64)
    h = row // B
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = t < L
    for p in tl.static_range(SETS):
        c = p * H + h
        sign = 1 - 2 * (p == 1 or BACKWARDS)
        out = _convolve(x + row * L, weight + c * W, bias + c, t, mask, L, sign, W)
        out *= sigmoid(out)
        tl.store(u + (p * H * B + row) * L + t, out.to(u.dtype.element_ty), mask=mask)


@triton.jit
def conv_backward_kernel(
    x, weight, bias, grad_u, grad_weight, grad_bias, H, B, L,
    W: tl.constexpr, BACKWARDS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turns grad_u into the gradient before SiLU, and sums those of weight and bias.

    One program has a channel of a set, and all its tokens. TAPS is W as a power of 2.
    """
    h = tl.program_id(0)
    p = tl.program_id(1)
    c = p * H + h
    tap = tl.arange(0, TAPS)
    sums = tl.zeros((TAPS, BLOCK), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    sign = 1 - 2 * p
    if BACKWARDS:
        sign = -1
    for b in range(0, B):
        source = x + (h.to(tl.int64) * B + b) * L
        target = grad_u + (c.to(tl.int64) * B + b) * L
        for start in range(0, L, BLOCK):
            t = start + tl.arange(0, BLOCK)
            mask = t < L
            out = _convolve(source, weight + c * W, bias + c, t, mask, L, sign, W)
            g = tl.load(target + t, mask=mask, other=0.0).to(tl.float32)
            share = sigmoid(out)
            g *= share * (1.0 + out * (1.0 - share))
            g = g.to(grad_u.dtype.element_ty)
            tl.store(target + t, g, mask=mask)
            g = g.to(tl.float32)
            total += g
            # Not t - sign (W - 1 - tap): of a constant minus a range Triton takes every element to
            # have the alignment of the first, and loads pairs from odd places where W is odd.
            s = t[None, :] + sign * (tap - (W - 1))[:, None]
            there = mask[None, :] & (s >= 0) & (s < L) & (tap < W)[:, None]
            sums += g[None, :] * tl.load(source + s, mask=there, other=0.0).to(tl.float32)
    tl.store(grad_weight + c * W + tap, tl.sum(sums, 1), mask=tap < W)
    tl.store(grad_bias + c, tl.sum(total, 0))


@triton.jit
def conv_input_backward_kernel(
    grad, weight, grad_x, H, B, L,
    W: tl.constexpr, SETS: tl.constexpr, BACKWARDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of x from that before SiLU, summed over sets."""
    row = tl.program_id(0).to(tl.int64)
    h = row // B
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = t < L
    total = tl.zeros((BLOCK,), tl.float32)
    for p in tl.static_range(SETS):
        source = grad + (p * H * B + row) * L
        for w in tl.static_range(W):
            sign = 1 - 2 * (p == 1 or BACKWARDS)
            s = t + sign * (W - 1 - w)
            there = mask & (s >= 0) & (s < L)
            value = tl.load(source + s, mask=there, other=0.0).to(tl.float32)
            total += tl.load(weight + (p * H + h) * W + w) * value
    tl.store(grad_x + row * L + t, total.to(grad_x.dtype.element_ty), mask=mask)


@triton.jit
def gate_kernel(
    y, z, out, total, count, scale,
    DIRECTIONS: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = silu(z) total, total = scale times the sum of y over directions, as it is stored."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    x = tl.load(y + i, mask=mask, other=0.0).to(tl.float32)
    if DIRECTIONS == 2:
        x += tl.load(y + count + i, mask=mask, other=0.0).to(tl.float32)
    stored = (x * scale).to(out.dtype.element_ty)
    if KEEP:
        tl.store(total + i, stored, mask=mask)
    gate = tl.load(z + i, mask=mask, other=0.0).to(tl.float32)
    x = stored.to(tl.float32) * (gate * sigmoid(gate))
    tl.store(out + i, x.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate_backward_kernel(
    grad_out, total, z, grad_y, grad_z, out, count, scale, BLOCK: tl.constexpr
):
    """Gradients of one direction's y and of z, and ``out`` again."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    g = tl.load(grad_out + i, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(total + i, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(z + i, mask=mask, other=0.0).to(tl.float32)
    share = sigmoid(gate)
    value = gate * share
    dtype = out.dtype.element_ty
    tl.store(out + i, (x * value).to(dtype), mask=mask)
    tl.store(grad_y + i, (g * value * scale).to(dtype), mask=mask)
    tl.store(grad_z + i, (g * x * share * (1.0 + gate * (1.0 - share))).to(dtype), mask=mask)
