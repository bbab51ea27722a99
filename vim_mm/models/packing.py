"""Sequences of different lengths in common rows: where each stands, and how it gets there and back.

Nothing is between them: ``reset`` separates them in the recurrences. Rows are filled up at their
ends to one length, by a sequence of zeros that nobody reads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vim_mm.models.arguments import check_counts

# Rows have a multiple of so many steps: of 16 bits that many are what CUDA kernels load at once.
ALIGNMENT = 8


class Packing:
    """Where sequences of these lengths stand in ``rows`` rows.

    Rows are filled longest first, each sequence into the row that is shortest until then, so that
    rows are of about one length. Where there are fewer sequences than rows, each has its own.

    Args:
        lengths (Sequence[int]): Of the sequences, each from 1.
        rows (int): How many rows share the sequences. One row holds them in their order.

    Attributes:
        rows (list[list[int]]): The sequences of each row, by their numbers.
        places (list[tuple[int, int]]): Row and first step of each sequence.
        filled (list[int]): Steps of the sequences of each row.
        length (int): Of every row.

    Raises:
        TypeError: ``rows`` is no integer.
        ValueError: ``rows`` is below 1.
    """

    def __init__(self, lengths: Sequence[int], rows: int = 1):
        check_counts(rows=rows)
        self.lengths = [*lengths]
        self.rows: list[list[int]] = [[] for _ in range(min(rows, len(self.lengths)))]
        filled = [0] * len(self.rows)
        for i in sorted(range(len(self.lengths)), key=lambda i: -self.lengths[i]):
            row = filled.index(min(filled))
            self.rows[row].append(i)
            filled[row] += self.lengths[i]
        self.places = [(0, 0)] * len(self.lengths)
        for row, members in enumerate(self.rows):
            members.sort()
            start = 0
            for i in members:
                self.places[i] = row, start
                start += self.lengths[i]
        self.filled = filled
        self.length = -(-max(filled) // ALIGNMENT) * ALIGNMENT

    def pack(self, sequences: Sequence[Tensor]) -> Tensor:
        """Sequences (L_i, C), in the order of the lengths, to (R, L, C)."""
        pieces = []
        for row, filled in zip(self.rows, self.filled, strict=True):
            pieces += [sequences[i] for i in row]
            if filled < self.length:
                pieces.append(pieces[-1].new_zeros(self.length - filled, pieces[-1].shape[1]))
        return torch.cat(pieces).unflatten(0, (len(self.rows), self.length))

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """Undo :meth:`pack`: each sequence as (1, L_i, C), a view."""
        return [
            packed[row : row + 1, start : start + length]
            for (row, start), length in zip(self.places, self.lengths, strict=True)
        ]

    def reset(self, device: torch.device | str = 'cpu') -> Tensor:
        """(R, L), bool: where a sequence begins, and behind the last of a row."""
        # On the device from the first, because a CUDA graph takes no copy from the CPU.
        reset = torch.zeros(len(self.rows), self.length, dtype=torch.bool, device=device)
        for row, start in [*self.places, *enumerate(self.filled)]:
            reset[row, start : start + 1].fill_(True)
        return reset

    def drop(self, drop_path: nn.Module, packed: Tensor) -> Tensor:
        """Stochastic depth of each sequence by itself, where the module would drop rows."""
        if not drop_path.training or isinstance(drop_path, nn.Identity):
            return packed
        kept = drop_path(packed.new_ones(len(self.lengths), 1, 1))
        scales = [scale.expand(n, 1) for scale, n in zip(kept.unbind(0), self.lengths)]
        return packed * self.pack(scales)
