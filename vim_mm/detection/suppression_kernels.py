"""Triton's kernels of :mod:`vim_mm.detection.suppression`.

The first notes for each pair of boxes of a set whether the earlier one removes the later one: a bit
in words of 32. The second goes through a set from its first box to its last, 32 boxes at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BITS = tl.constexpr(32)  # of a word


def suppress_by_kernels(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """See :func:`vim_mm.detection.suppression.suppress`."""
    sets, number = valid.shape
    words = triton.cdiv(number, BITS.value)
    # The second kernel reads whole blocks of rows; those past the last box remove nothing.
    removes = torch.empty(sets, words * BITS.value, words, dtype=torch.int32, device=boxes.device)
    kept = torch.empty(sets, number, dtype=torch.bool, device=boxes.device)
    boxes, valid = boxes.contiguous(), valid.contiguous()
    with torch.cuda.device_of(boxes):
        overlap_kernel[sets, words, words](boxes, valid, removes, number, words, threshold)
        sweep_kernel[(sets,)](
            removes, valid, kept, number, words, WORDS=triton.next_power_of_2(words)
        )
    return kept


@triton.jit
def overlap_kernel(boxes, valid, removes, number, words, threshold):
    """``removes`` (S, 32 words, words): of row i, the bits of the later boxes that i removes."""
    index, row_block, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if block < row_block:  # only earlier boxes, which nobody asks for
        return
    bit = tl.arange(0, BITS)
    rows, columns = row_block * BITS + bit, block * BITS + bit
    start = index.to(tl.int64) * number
    left, top, right, bottom = _load_boxes(boxes, start + rows, rows < number)
    left2, top2, right2, bottom2 = _load_boxes(boxes, start + columns, columns < number)
    width = tl.minimum(right[:, None], right2[None]) - tl.maximum(left[:, None], left2[None])
    height = tl.minimum(bottom[:, None], bottom2[None]) - tl.maximum(top[:, None], top2[None])
    common = tl.maximum(width, 0) * tl.maximum(height, 0)
    whole = (right - left) * (bottom - top)
    whole2 = (right2 - left2) * (bottom2 - top2)
    # Boxes without area have nothing in common: 0 > 0.
    much = common > threshold * (whole[:, None] + whole2[None] - common)
    real = tl.load(valid + start + rows, mask=rows < number, other=0) != 0
    much = much & real[:, None] & (columns[None] > rows[:, None])
    word = tl.sum(tl.where(much, 1 << bit[None], 0), 1)
    place = index.to(tl.int64) * words * BITS + rows
    tl.store(removes + place * words + block, word)


@triton.jit
def _load_boxes(boxes, place, there):
    left = tl.load(boxes + place * 4, mask=there, other=0)
    top = tl.load(boxes + place * 4 + 1, mask=there, other=0)
    right = tl.load(boxes + place * 4 + 2, mask=there, other=0)
    bottom = tl.load(boxes + place * 4 + 3, mask=there, other=0)
    return left, top, right, bottom


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def sweep_kernel(removes, valid, kept, number, words, WORDS: tl.constexpr):
    """``kept`` (S, number): boxes that no box before them removes that is kept itself."""
    index = tl.program_id(0)
    lane, bit = tl.arange(0, WORDS), tl.arange(0, BITS)
    removes += index.to(tl.int64) * words * BITS * words
    start = index.to(tl.int64) * number
    gone = tl.zeros((WORDS,), tl.int32)  # a bit a box
    for block in range(words):
        first = removes + block * BITS * words
        here = tl.sum(tl.where(lane == block, gone, 0))
        for i in tl.static_range(BITS):
            # Within the block, one box after the other.
            later = tl.load(first + i * words + block)
            here = tl.where(((here >> i) & 1) == 0, here | later, here)
        stays = ((here >> bit) & 1) == 0
        place = block * BITS + bit
        real = tl.load(valid + start + place, mask=place < number, other=0) != 0
        tl.store(kept + start + place, stays & real, mask=place < number)
        others = stays[:, None] & (lane > block)[None] & (lane < words)[None]
        rows = tl.load(first + bit[:, None] * words + lane[None], mask=others, other=0)
        gone = gone | tl.reduce(rows, 0, _either)
