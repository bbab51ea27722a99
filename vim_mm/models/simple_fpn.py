"""SimpleFPN, ViTDet's neck: from the backbone's one map to the pyramid that detectors expect."""

from collections.abc import Sequence

from timm.layers import LayerNorm2d
from torch import Tensor, nn

from vim_mm.errors import UserValueError
from vim_mm.models.arguments import check_counts, check_int

OUTPUT_STRIDES = (8, 16, 32)


def _lateral(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, bias=False),
        LayerNorm2d(out_channels),
        nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
        LayerNorm2d(out_channels),
    )


def _rescale(channels: int, level: int) -> nn.Module:
    """To four, two, one or half times the size."""
    half, quarter = channels // 2, channels // 4
    if level == 0:
        return nn.Sequential(
            nn.ConvTranspose2d(channels, half, 2, stride=2),
            LayerNorm2d(half),
            nn.GELU(),
            nn.ConvTranspose2d(half, quarter, 2, stride=2),
        )
    if level == 1:
        return nn.ConvTranspose2d(channels, half, 2, stride=2)
    return nn.Identity() if level == 2 else nn.MaxPool2d(2)


class SimpleFPN(nn.Module):
    """The simple feature pyramid of ViTDet (Li et al., arXiv 2203.16527).

    One map of stride 16 becomes maps of strides 4, 8, 16 and 32, by transposed convolutions and
    max pooling; each further level halves the one before, as region proposal networks want it.
    One-stage detectors want none of stride 4.

    Args:
        in_channels (int): Channels of the map.
        out_channels (int): Channels of every level.
        num_outs (int): Number of levels, at least ``4 - start_level``.
        start_level (int): The finest level that is made: 0 is stride 4, 1 is stride 8.
        output_stride (int): 8, 16 or 32: levels that would be coarser have this stride, as a
            dilated network has them. The levels are of their own all the same.

    Raises:
        TypeError: A number is no integer.
        ValueError: ``start_level`` is not in [0, 3], ``output_stride`` none of the three,
            ``num_outs`` too small, ``in_channels`` not divisible by 4, or forward gets more than
            one map, one of other channels, or one too small to be halved.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int = 256,
        num_outs: int = 5,
        *,
        start_level: int = 0,
        output_stride: int = 32,
    ):
        super().__init__()
        check_int('start_level', start_level, 0, 3)
        if output_stride not in OUTPUT_STRIDES:
            raise UserValueError(f'output_stride must be 8, 16 or 32, got {output_stride!r}')
        check_int('num_outs', num_outs, 4 - start_level)
        check_counts(in_channels=in_channels, out_channels=out_channels)
        if in_channels % 4:
            raise UserValueError(f'in_channels must be divisible by 4, got {in_channels}')
        self.in_channels = in_channels
        self.num_outs = num_outs
        self.halves = output_stride == 32
        coarsest = 1 + OUTPUT_STRIDES.index(output_stride)
        levels = [min(level, coarsest) for level in range(start_level, 4)]
        channels = (in_channels // 4, in_channels // 2, in_channels, in_channels)
        self.rescale = nn.ModuleList(_rescale(in_channels, level) for level in levels)
        self.lateral = nn.ModuleList(_lateral(channels[level], out_channels) for level in levels)

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """One map (B, in_channels, H, W), in a sequence, to ``num_outs`` maps, finest first."""
        if len(inputs) != 1:
            raise UserValueError(
                f'SimpleFPN takes one map, got {len(inputs)}: out_indices of the backbone must be '
                'one layer'
            )
        if inputs[0].shape[1] != self.in_channels:
            raise UserValueError(
                f'in_channels of SimpleFPN is {self.in_channels}, but the backbone (its '
                f'embed_dims) gives {inputs[0].shape[1]} channels'
            )
        if self.halves and min(inputs[0].shape[-2:]) < 2:
            rows, columns = inputs[0].shape[-2:]
            raise UserValueError(
                'the coarsest level of SimpleFPN is half the size of its map, which must have two '
                f'rows and columns of patches or more, got {rows} x {columns}: give larger images'
            )
        # LayerNorm2d makes channels-last maps, which mmcv's RoIAlign, unchecked, reads as if NCHW.
        outs = [
            lateral(rescale(inputs[0])).contiguous()
            for rescale, lateral in zip(self.rescale, self.lateral, strict=True)
        ]
        while len(outs) < self.num_outs:
            # No pooling, whose export would fix whether the size is even.
            outs.append(outs[-1][..., ::2, ::2].contiguous())
        return tuple(outs)
