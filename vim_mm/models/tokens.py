"""Where VisionMamba's tokens stand: class tokens in the sequence, position embedding, rotation."""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from vim_mm.ops.exported import are_open
from vim_mm.ops.library import without_autocast
from vim_mm.ops.resample import resampling_matrix

# Tables of one axis, see _kept_turns: some kilobytes for each length that a grid has had. None is
# dropped, because a CUDA graph reads at every replay those that it was recorded with.
_kept: dict[tuple, tuple[Tensor, Tensor]] = {}

# Indices of the class tokens in the whole sequence, given the number of patches.
CLS_TOKENS = {
    'none': lambda num_patches: (),
    'head': lambda num_patches: (0,),
    'middle': lambda num_patches: (num_patches // 2,),
    'tail': lambda num_patches: (num_patches,),
    'double': lambda num_patches: (0, num_patches + 1),
}


def insert_cls(patches: Tensor, cls: Tensor, placement: str) -> Tensor:
    """Put class tokens (B, n, C) among patch tokens (B, M, C): (B, M + n, C)."""
    pieces, start = [], 0
    for k, index in enumerate(CLS_TOKENS[placement](patches.shape[1])):
        pieces += [patches[:, start : index - k], cls[:, k : k + 1]]
        start = index - k
    return torch.cat([*pieces, patches[:, start:]], dim=1) if pieces else patches


def split_cls(tokens: Tensor, placement: str) -> tuple[Tensor, Tensor]:
    """Undo :func:`insert_cls`: patch tokens (B, M, C) and class tokens (B, n, C)."""
    num_cls = len(CLS_TOKENS[placement](0))
    if num_cls == 0:
        return tokens, tokens[:, :0]
    indices = CLS_TOKENS[placement](tokens.shape[1] - num_cls)
    starts = [0, *(i + 1 for i in indices)]
    ends = [*indices, tokens.shape[1]]
    patches = torch.cat([tokens[:, s:e] for s, e in zip(starts, ends, strict=True)], dim=1)
    return patches, torch.stack([tokens[:, i] for i in indices], dim=1)


def resize_pos_embed(
    pos_embed: Tensor,
    old_grid: tuple[int, int],
    new_grid: tuple[int, int],
    placement: str = 'none',
) -> Tensor:
    """Resize the patches' part of a position embedding, class tokens kept at their placement.

    Args:
        pos_embed: (1, H W + n, C) over the old grid.
        old_grid: Its (H, W), in patches.
        new_grid: (H', W') wanted.
        placement: Where the n class tokens stand, a key of ``CLS_TOKENS``.

    Returns:
        (1, H' W' + n, C) in the same dtype; bicubic, as DeiT and Vim do it.
    """
    if not are_open(*new_grid) and tuple(old_grid) == tuple(new_grid):
        return pos_embed
    patches, cls = split_cls(pos_embed, placement)
    patches = patches.to(torch.promote_types(patches.dtype, torch.float32))
    # Not timm's resample_abs_pos_embed: it does nothing where another grid becomes a square of as
    # many patches, and its antialiasing has no backward for dynamic shapes in torch.compile.
    if are_open(*new_grid) or torch.compiler.is_compiling():
        # Matrices would fix the size of the image in the graph.
        image = rearrange(patches, 'b (h w) c -> b c h w', h=old_grid[0], w=old_grid[1])
        image = F.interpolate(image, size=new_grid, mode='bicubic')
        resized = rearrange(image, 'b c h w -> b (h w) c')
    else:
        resized = _resize_by_matrices(patches, old_grid, new_grid)
    return insert_cls(resized.to(pos_embed.dtype), cls, placement)


def _resize_by_matrices(
    patches: Tensor, old_grid: tuple[int, int], new_grid: tuple[int, int]
) -> Tensor:
    """Bicubic resizing of patches (1, H W, C) as two products with matrices that are kept.

    PyTorch's kernel goes through the channels one after the other: 1.4 ms in place of some
    microseconds, in each forward pass. The embedding itself cannot be kept: that weights were
    changed is not always to be seen, as with ``param.data``.
    """
    rows, columns = (
        resampling_matrix('bicubic', new, old, patches)
        for new, old in zip(new_grid, old_grid, strict=True)
    )
    # 16 bits would round the weights.
    with without_autocast(patches):
        image = rows @ patches.reshape(old_grid[0], -1)
        image = columns @ image.view(new_grid[0], old_grid[1], -1)
    return image.view(1, new_grid[0] * new_grid[1], -1)


def rotary_table(
    grid: tuple[int, int], channels: int, base_grid: int, placement: str, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each (1, L, channels), of the 2-D rotary embedding as EVA-02 and Vim use it.

    The first half of the channels turns with the row, the second with the column, both scaled such
    that any grid spans ``base_grid`` positions. Class tokens do not turn. Float32, in the bits that
    the CPU gives on every device: those of the tables in Vim's checkpoints.
    """
    turns = _turns if torch.compiler.is_compiling() else _kept_turns
    num_cls = len(CLS_TOKENS[placement](0))
    table = []
    along = zip(*(turns(n, channels // 2, base_grid, device) for n in grid), strict=True)
    for (rows, columns), still in zip(along, (torch.ones, torch.zeros)):
        rows, columns = rows[:, None].expand(*grid, -1), columns[None].expand(*grid, -1)
        values = torch.cat([rows, columns], dim=2).flatten(0, 1)[None]
        table.append(insert_cls(values, still(1, num_cls, channels, device=device), placement))
    return table[0], table[1]


def _turns(
    positions: int, channels: int, base_grid: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each (positions, channels), along one axis of the grid."""
    # In the order of operations of Vim's own table. Through 24 rotations of the stream, another
    # rounding of a frequency grows to 1e-5 of the features.
    exponent = torch.arange(0, channels, 2, dtype=torch.float32, device=device) / channels
    frequency = 1 / 10000**exponent
    position = torch.arange(positions, dtype=torch.float32, device=device) / positions * base_grid
    angle = (position[:, None] * frequency).repeat_interleave(2, dim=1)
    return angle.cos(), angle.sin()


def _kept_turns(
    positions: int, channels: int, base_grid: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """:func:`_turns` as the CPU rounds them, kept on the device."""
    key = (positions, channels, base_grid, device)
    if key in _kept:
        return _kept[key]
    with torch.inference_mode(False):  # whoever asks first, others may need them for gradients
        cos, sin = _turns(positions, channels, base_grid, torch.device('cpu'))
        turns = cos.to(device), sin.to(device)
    if type(cos) is Tensor:  # a fake one is no table
        _kept[key] = turns
    return turns


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of neighbouring channels of x (B, L, C) by its token's angle."""
    cos, sin = table
    # At every layer and bound by the host: einops takes longer, and stacks by another copy.
    even, odd = x[..., ::2], x[..., 1::2]
    quarter_turn = torch.stack([-odd, even], dim=-1).flatten(-2)
    return (x * cos + quarter_turn * sin).to(x.dtype)
