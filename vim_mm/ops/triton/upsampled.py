"""Kernels on logits that are upsampled bilinearly and never stand in memory at their large size.

A *cell* is the square between four neighboring small logits. Every pixel in it is a weighted sum of
the same four vectors of C classes. So a program takes a strip of cells of one row, loads the
vectors once, goes over the pixels, and keeps what it computes in registers: of the loss the sums,
of the gradient the columns of small logits at both sides of a cell. A second kernel adds up, for
each small logit, what the cells around it gave, in a fixed order: results are deterministic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vim_mm.ops.triton.launch import launch

# Stands for the logits of classes that do not exist: finite, or its differences would be NaN.
_NO_CLASS = tl.constexpr(-3e38)
# Programs that keep the largest GPUs busy; with fewer, strips get shorter.
_PROGRAMS = 8192
_SUMS = tl.constexpr(5)  # that a program leaves: loss, weight, hits, counted and impossible pixels
# Arguments whose factors nobody is to know: threads would take neighboring classes to load them in
# one instruction, and what _in_rows combines would lie in several threads.
_NUMBERS = ['classes', 'per_column', 'per_strip']


@triton.jit
def _source(pixel, scale, ALIGN: tl.constexpr):
    """Where a pixel lies among the small logits, as PyTorch has it."""
    if ALIGN:
        return pixel.to(tl.float32) * scale
    else:
        return tl.maximum((pixel.to(tl.float32) + 0.5) * scale - 0.5, 0.0)


@triton.jit
def _first(cell, size, pixels, scale, inverse, ALIGN: tl.constexpr):
    """The first of the pixels of a row or column that lies in this cell or behind it."""
    guess = cell * inverse if ALIGN else (cell + 0.5) * inverse - 0.5
    # At most one off: the largest number before it, then up by what the pixels themselves say.
    first = tl.minimum(tl.maximum(tl.ceil(guess) - 1, 0), pixels).to(tl.int32)
    first += (_source(first, scale, ALIGN) < cell).to(tl.int32)
    first += (_source(first, scale, ALIGN) < cell).to(tl.int32)
    first = tl.minimum(first, pixels)
    return tl.where(cell == 0, 0, tl.where(cell >= size, pixels, first))


@triton.jit
def _logits(row, column, classes, of_class):
    """Of one column of a row, channels last, in the shape of ``of_class``."""
    x = tl.load(row + column * classes + of_class, of_class < classes, other=_NO_CLASS)
    # Of 16 bits the constant would be infinite.
    return tl.where(of_class < classes, x.to(tl.float32), _NO_CLASS)


@triton.jit
def _column(rows, column, classes, of_class, BOUNDED: tl.constexpr = False):
    """The logits at one side of a cell: the upper, the lower ones."""
    upper = _logits(rows[0], column, classes, of_class)
    lower = _logits(rows[1], column, classes, of_class)
    if BOUNDED:  # infinite ones as large ones: what lies between is a number. NaN stays
        upper = tl.clamp(upper, -8e37, 8e37, propagate_nan=tl.PropagateNan.ALL)
        lower = tl.clamp(lower, -8e37, 8e37, propagate_nan=tl.PropagateNan.ALL)
    return upper, lower


@triton.jit
def _store_column(at, classes, column, of_class):
    """Write what a column of small logits gets from this row of cells: its upper, its lower end."""
    upper, lower = column
    tl.store(at + of_class, upper, of_class < classes)
    tl.store(at + classes + of_class, lower, of_class < classes)


@triton.jit
def _order(x):
    """Integers in the order of float32 numbers, NaN above all. Its own inverse.

    A GPU compares integers across a warp in one instruction, floating-point numbers in ten.
    """
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _in_rows(x, wide: tl.constexpr):
    """Classes (P, n * wide) as (P, n, wide): those that a thread has are combined first."""
    return tl.reshape(x, (x.shape[0], x.shape[1] // wide, wide))


@triton.jit
def _total(one, two, SECOND: tl.constexpr):
    """The sum over the classes of both tiles: (P, 1)."""
    if SECOND:
        one = tl.sum(_in_rows(one, SECOND), 1) + two
    return tl.sum(one, 1, keep_dims=True)


@triton.jit
def _largest(one_x, two_x, one, two, classes, SECOND: tl.constexpr):
    """The largest logit of both tiles, and the first class that has it: (P, 1) each."""
    one_x = _order(one_x)
    largest = one_x
    if SECOND:
        two_x = _order(two_x)
        largest = tl.maximum(tl.max(_in_rows(one_x, SECOND), 1), two_x)
    largest = tl.max(largest, 1, keep_dims=True)
    first = tl.where(one_x == largest, one, classes)
    if SECOND:
        first = tl.min(_in_rows(first, SECOND), 1)
        first = tl.minimum(first, tl.where(two_x == largest, two, classes))
    return _order(largest).to(tl.float32, bitcast=True), tl.min(first, 1, keep_dims=True)


@triton.jit
def _slopes(left, right):
    """From the four corners of a cell to the coefficients of :func:`_along`."""
    upper, lower = left
    upper_right, lower_right = right
    down, across = lower - upper, upper_right - upper
    return upper, down, across, lower_right - lower - across


@triton.jit
def _along(slopes, y):
    """Of a row of pixels the logit at the left side of the cell, and what it gains to the right."""
    upper, down, across, both = slopes
    # Without -0, which is no smaller than +0 although its bits are.
    return upper + y * down + 0.0, across + y * both


@triton.jit
def _add_pixels(sides, q, x):
    """Add the gradient of pixels in a row to what its left and its right side get."""
    left, right = sides
    across = q * x
    return (
        left + tl.sum(q - across, 0, keep_dims=True),
        right + tl.sum(across, 0, keep_dims=True),
    )


@triton.jit
def _add_row(columns, sides, y):
    """Add the gradient of a row to the two columns of small logits at the sides of a cell."""
    upper, lower = columns[0]
    upper_right, lower_right = columns[1]
    left, right = sides
    return (
        (upper + (1 - y) * left, lower + y * left),
        (upper_right + (1 - y) * right, lower_right + y * right),
    )


@triton.jit(do_not_specialize=_NUMBERS)
def cross_entropy_kernel(
    logits, labels, class_weight, parts, columns,
    height, width, rows, cols, classes, per_column, per_strip, strips,
    scale_y, scale_x, inverse_y, inverse_x, ignore_index,
    ALIGN: tl.constexpr, WEIGHTED: tl.constexpr, GRAD: tl.constexpr, CELLS: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """A strip of CELLS cells: its sums, and the gradient of the small logits around it.

    Classes are in two tiles, of FIRST and SECOND, so that few do not exist.
    """
    program = tl.program_id(0)
    strip = program % strips
    i = (program // strips) % height
    image = (program // strips // height).to(tl.int64)
    both_rows = (
        logits + (image * height + i) * width * classes,
        logits + (image * height + tl.minimum(i + 1, height - 1)) * width * classes,
    )
    labels += image * rows * cols
    columns += program.to(tl.int64) * per_strip

    pixel = tl.arange(0, PIXELS)[:, None]
    nothing = tl.arange(0, 1)[:, None]  # makes a tensor of a loop's number
    one = tl.arange(0, FIRST)[None, :]
    zero = tl.zeros((1, FIRST), tl.float32)
    one_left = (zero, zero)
    one_right = (zero, zero)
    two = one
    j = strip * CELLS
    one_l = _column(both_rows, j, classes, one)
    if SECOND:
        two = FIRST + tl.arange(0, SECOND)[None, :]
        second_zero = tl.zeros((1, SECOND), tl.float32)
        two_left = (second_zero, second_zero)
        two_right = (second_zero, second_zero)
        two_l = _column(both_rows, j, classes, two)
    top = _first(i, height, rows, scale_y, inverse_y, ALIGN)
    bottom = _first(i + 1, height, rows, scale_y, inverse_y, ALIGN)
    left = _first(j, width, cols, scale_x, inverse_x, ALIGN)

    loss = tl.zeros((PIXELS, 1), tl.float32)
    weights = tl.zeros((PIXELS, 1), tl.float32)
    hits = tl.zeros((PIXELS, 1), tl.int32)
    counted = tl.zeros((PIXELS, 1), tl.int32)
    impossible = tl.zeros((PIXELS, 1), tl.int32)
    for j in range(strip * CELLS, tl.minimum(strip * CELLS + CELLS, width)):
        right = _first(j + 1, width, cols, scale_x, inverse_x, ALIGN)
        beside = tl.minimum(j + 1, width - 1)
        one_r = _column(both_rows, beside, classes, one)
        one_slopes = _slopes(one_l, one_r)
        if SECOND:
            two_r = _column(both_rows, beside, classes, two)
            two_slopes = _slopes(two_l, two_r)
        for row in range(top, bottom):
            y = _source(row + nothing, scale_y, ALIGN) - i
            one_at, one_slope = _along(one_slopes, y)
            one_sides = (zero, zero)
            if SECOND:
                two_at, two_slope = _along(two_slopes, y)
                two_sides = (second_zero, second_zero)
            for start in range(left, right, PIXELS):
                column = start + pixel
                inside = column < right
                x = _source(column, scale_x, ALIGN) - j
                label = tl.load(labels + row * cols + column, inside, other=0).to(tl.int64)
                counts = inside & (label != ignore_index)
                known = counts & (label >= 0) & (label < classes)
                label = tl.where(known, label, classes).to(tl.int32)
                one_x = one_at + x * one_slope
                two_x = two_at + x * two_slope if SECOND else one_x
                largest, prediction = _largest(one_x, two_x, one, two, classes, SECOND)
                left_of_it = _column(both_rows, j, classes, label)
                slopes = _slopes(left_of_it, _column(both_rows, beside, classes, label))
                at_label, slope = _along(slopes, y)
                at_label += x * slope
                one_x = tl.exp(one_x - largest)
                two_x = tl.exp(two_x - largest)
                total = _total(one_x, two_x, SECOND)
                if WEIGHTED:
                    weight = tl.load(class_weight + label, known, other=0.0)
                else:
                    weight = known.to(tl.float32)
                # Not a product with the weight alone: an ignored pixel's loss may be infinite.
                loss += tl.where(known, (largest - at_label + tl.log(total)) * weight, 0.0)
                weights += weight
                counted += counts.to(tl.int32)
                impossible += (counts & (label == classes)).to(tl.int32)
                hits += (known & (prediction == label)).to(tl.int32)
                if GRAD:
                    factor = weight / total
                    q = one_x * factor - tl.where(one == label, weight, 0.0)
                    one_sides = _add_pixels(one_sides, q, x)
                    if SECOND:
                        q = two_x * factor - tl.where(two == label, weight, 0.0)
                        two_sides = _add_pixels(two_sides, q, x)
            if GRAD:
                one_left, one_right = _add_row((one_left, one_right), one_sides, y)
                if SECOND:
                    two_left, two_right = _add_row((two_left, two_right), two_sides, y)
        if GRAD:
            at = columns + (j - strip * CELLS) * per_column
            _store_column(at, classes, one_left, one)
            one_left = one_right
            one_right = (zero, zero)
            if SECOND:
                _store_column(at, classes, two_left, two)
                two_left = two_right
                two_right = (second_zero, second_zero)
        one_l = one_r
        if SECOND:
            two_l = two_r
        left = right
    if GRAD:
        at = columns + (tl.minimum(strip * CELLS + CELLS, width) - strip * CELLS) * per_column
        _store_column(at, classes, one_left, one)
        if SECOND:
            _store_column(at, classes, two_left, two)
    parts += program * _SUMS
    tl.store(parts, tl.sum(loss))
    tl.store(parts + 1, tl.sum(weights))
    tl.store(parts + 2, tl.sum(hits).to(tl.float32))
    tl.store(parts + 3, tl.sum(counted).to(tl.float32))
    tl.store(parts + 4, tl.sum(impossible).to(tl.float32))


@triton.jit(do_not_specialize=_NUMBERS)
def labels_kernel(
    logits, labels,
    height, width, rows, cols, classes, strips, scale_y, scale_x, inverse_y, inverse_x,
    ALIGN: tl.constexpr, CELLS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    PIXELS: tl.constexpr,
):  # fmt: skip
    """Of each pixel in a strip of CELLS cells the first class of the largest logit."""
    program = tl.program_id(0)
    strip = program % strips
    i = (program // strips) % height
    image = (program // strips // height).to(tl.int64)
    both_rows = (
        logits + (image * height + i) * width * classes,
        logits + (image * height + tl.minimum(i + 1, height - 1)) * width * classes,
    )
    labels += image * rows * cols
    pixel = tl.arange(0, PIXELS)[:, None]
    nothing = tl.arange(0, 1)[:, None]  # makes a tensor of a loop's number
    one = tl.arange(0, FIRST)[None, :]
    two = one
    j = strip * CELLS
    one_l = _column(both_rows, j, classes, one, True)
    if SECOND:
        two = FIRST + tl.arange(0, SECOND)[None, :]
        two_l = _column(both_rows, j, classes, two, True)
    top = _first(i, height, rows, scale_y, inverse_y, ALIGN)
    bottom = _first(i + 1, height, rows, scale_y, inverse_y, ALIGN)
    left = _first(j, width, cols, scale_x, inverse_x, ALIGN)
    for j in range(strip * CELLS, tl.minimum(strip * CELLS + CELLS, width)):
        right = _first(j + 1, width, cols, scale_x, inverse_x, ALIGN)
        beside = tl.minimum(j + 1, width - 1)
        one_r = _column(both_rows, beside, classes, one, True)
        one_slopes = _slopes(one_l, one_r)
        if SECOND:
            two_r = _column(both_rows, beside, classes, two, True)
            two_slopes = _slopes(two_l, two_r)
        for row in range(top, bottom):
            y = _source(row + nothing, scale_y, ALIGN) - i
            one_at, one_slope = _along(one_slopes, y)
            if SECOND:
                two_at, two_slope = _along(two_slopes, y)
            for start in range(left, right, PIXELS):
                column = start + pixel
                x = _source(column, scale_x, ALIGN) - j
                one_x = one_at + x * one_slope
                two_x = two_at + x * two_slope if SECOND else one_x
                _, label = _largest(one_x, two_x, one, two, classes, SECOND)
                label = label.to(labels.dtype.element_ty)
                tl.store(labels + row * cols + column, label, column < right)
        one_l = one_r
        if SECOND:
            two_l = two_r
        left = right


@triton.jit
def gradient_kernel(
    columns, factor, out, height, width, classes, strips, chunks,
    CELLS: tl.constexpr, COLUMNS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """What the (up to) four cells around each small logit gave, times a factor."""
    program = tl.program_id(0)
    chunk = program % chunks
    i = (program // chunks) % height
    image = (program // chunks // height).to(tl.int64)
    j = chunk * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    of_class = tl.arange(0, CLASSES)[None, :]
    exists = (j < width) & (of_class < classes)
    per_row = strips * (CELLS + 1) * 2 * classes
    row = columns + (image * height + i) * per_row + of_class
    strip, k = j // CELLS, j % CELLS
    own = (strip * (CELLS + 1) + k) * 2 * classes
    # A column between strips is the last of the one before, too; behind the last lies another one.
    last = own - 2 * classes
    is_last = exists & (k == 0) & (strip > 0)
    behind = own + 2 * classes
    is_behind = exists & (j == width - 1)
    total = tl.zeros((COLUMNS, CLASSES), tl.float32)
    for end in tl.static_range(3):
        # The upper ends in this row of cells, the lower ones in the row above it; below the last
        # row of small logits is the same row again.
        at = row if end == 0 else row - per_row + classes if end == 1 else row + classes
        there = (end == 0) | ((end == 1) & (i > 0)) | ((end == 2) & (i == height - 1))
        total += tl.load(at + own, exists & there, other=0.0)
        total += tl.load(at + last, is_last & there, other=0.0)
        total += tl.load(at + behind, is_behind & there, other=0.0)
    total *= tl.load(factor)
    out += (image * height + i) * width * classes
    tl.store(out + j * classes + of_class, total.to(out.dtype.element_ty), exists)


def _scales(size: int, pixels: int, align_corners: bool) -> tuple[float, float]:
    """Small logits per pixel, and a number of pixels per small logit, along one dimension."""
    if not align_corners:
        return size / pixels, pixels / size
    scale = (size - 1) / (pixels - 1) if pixels > 1 else 0.0
    # Without a scale all pixels lie in the first cell, and the others begin behind them.
    return scale, 1 / scale if scale else float(pixels)


def _tiles(classes: int, row: int, least: int = 1) -> tuple[int, int, int]:
    """Widths of both tiles of classes, the second may be 0, and pixels of a tile.

    A cell has ``row`` pixels in a row. ``least`` pixels hide what a comparison takes.
    """
    whole = triton.next_power_of_2(classes)
    half = whole // 2
    rest = max(32, triton.next_power_of_2(classes - half)) if classes > half else 0
    first, second = (half, rest) if half >= 32 and rest < half else (whole, 0)
    # One pixel is fastest where its classes fill a warp (H100: 0.92 ms of 19 classes, 1.04 with 2).
    return first, second, min(8 if whole <= 16 else least, triton.next_power_of_2(row))


def _cells(images: int, height: int, width: int) -> int:
    """Length of a strip."""
    cells = 8
    while cells > 1 and images * height * triton.cdiv(width, cells) < _PROGRAMS:
        cells //= 2
    return cells


def columns_shape(shape: torch.Size) -> tuple[int, ...]:
    """Of what :func:`cross_entropy_forward` keeps of logits (B, C, h, w)."""
    images, classes, height, width = shape
    cells = _cells(images, height, width)
    return images, height, triton.cdiv(width, cells), cells + 1, 2, classes


def cross_entropy_forward(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    class_weight: Tensor | None,
    align_corners: bool,
    with_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Sums over the pixels, and what the gradient is made of.

    Args:
        logits: (B, C, h, w), float32, bfloat16 or float16, C at most 1024.
        labels: (B, H, W), of integers.
        ignore_index: Label of pixels that do not count.
        class_weight: (C,) float32, or None for ones.
        align_corners: As in ``F.interpolate``.
        with_grad: Whether the second result is filled; else it is empty.

    Returns:
        tuple[Tensor, Tensor]: (5,) float64: loss, weight, hits, pixels that count, and pixels whose
        label is impossible; and float32 of :func:`columns_shape`.
    """
    images, classes, height, width = logits.shape
    rows, cols = labels.shape[1:]
    logits = logits.permute(0, 2, 3, 1).contiguous()
    labels = labels.contiguous()
    shape = columns_shape((images, classes, height, width))
    _, _, strips, ends, _, _ = shape
    programs = images * height * strips
    parts = logits.new_empty((programs, 5), dtype=torch.float32)
    columns = logits.new_empty(shape if with_grad else 0, dtype=torch.float32)
    scale_y, inverse_y = _scales(height, rows, align_corners)
    scale_x, inverse_x = _scales(width, cols, align_corners)
    first, second, pixels = _tiles(classes, triton.cdiv(cols, width))
    launch(
        cross_entropy_kernel, (programs,), num_warps=1 if classes <= 512 else 2,
        logits=logits, labels=labels,
        class_weight=parts if class_weight is None else class_weight.float().contiguous(),
        parts=parts, columns=columns, height=height, width=width, rows=rows, cols=cols,
        classes=classes, per_column=2 * classes, per_strip=2 * classes * ends, strips=strips,
        scale_y=scale_y, scale_x=scale_x, inverse_y=inverse_y, inverse_x=inverse_x,
        ignore_index=ignore_index, ALIGN=align_corners, WEIGHTED=class_weight is not None,
        GRAD=with_grad, CELLS=ends - 1, FIRST=first, SECOND=second, PIXELS=pixels,
    )  # fmt: skip
    return parts.sum(0, dtype=torch.float64), columns


def cross_entropy_backward(
    columns: Tensor, factor: Tensor, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """Gradient of the logits, channels last.

    Args:
        columns: By :func:`cross_entropy_forward`.
        factor: Of the gradient, of one element.
        shape: (B, C, h, w) of the logits.
        dtype: Of the logits.
    """
    images, classes, height, width = shape
    strips, ends = columns.shape[2:4]
    out = columns.new_empty((images, height, width, classes), dtype=dtype)
    tile = triton.next_power_of_2(classes)
    wide = max(1, 1024 // tile)
    chunks = triton.cdiv(width, wide)
    launch(
        gradient_kernel, (images * height * chunks,), columns=columns, factor=factor.float(),
        out=out, height=height, width=width, classes=classes, strips=strips, chunks=chunks,
        CELLS=ends - 1, COLUMNS=wide, CLASSES=tile,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)


def upsampled_labels(logits: Tensor, size: tuple[int, int], align_corners: bool) -> Tensor:
    """As :func:`vim_mm.ops.upsampled.upsampled_labels`, of at most 1024 classes."""
    images, classes, height, width = logits.shape
    logits = logits.permute(0, 2, 3, 1).contiguous()
    labels = torch.empty((images, *size), dtype=torch.int64, device=logits.device)
    cells = _cells(images, height, width)
    strips = triton.cdiv(width, cells)
    scale_y, inverse_y = _scales(height, size[0], align_corners)
    scale_x, inverse_x = _scales(width, size[1], align_corners)
    first, second, pixels = _tiles(classes, triton.cdiv(size[1], width), least=4)
    launch(
        labels_kernel, (images * height * strips,), num_warps=1 if classes <= 512 else 2,
        logits=logits, labels=labels, height=height, width=width, rows=size[0], cols=size[1],
        classes=classes, strips=strips, scale_y=scale_y, scale_x=scale_x, inverse_y=inverse_y,
        inverse_x=inverse_x, ALIGN=align_corners, CELLS=cells, FIRST=first, SECOND=second,
        PIXELS=pixels,
    )  # fmt: skip
    return labels
