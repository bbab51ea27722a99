"""PatchEmbed, the first layer of VisionMamba: an image becomes a map of patch embeddings."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vim_mm.models.arguments import parse_size
from vim_mm.models.fused import why_call_all, why_call_patches
from vim_mm.ops.exported import are_open


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype that autocast gives to x in a matrix product: its own where there is none."""
    # The meta device has no autocast, and float64 is left alone.
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


class PatchEmbed(nn.Module):
    """Image (B, C, H, W), zero-padded at the right and bottom, to a map of patch embeddings.

    Patches are squares; ``stride``, their distance in pixels, is one number or (vertical,
    horizontal).
    """

    def __init__(
        self, in_channels: int, embed_dims: int, patch_size: int, stride: int | Sequence[int]
    ):
        super().__init__()
        self.in_channels = in_channels
        self.patch_size = patch_size
        self.strides = parse_size('stride', stride)
        self.proj = nn.Conv2d(in_channels, embed_dims, patch_size, self.strides)

    @property
    def stride(self) -> int | tuple[int, int]:
        """Distance of patches in pixels: one number where both axes have the same."""
        vertical, horizontal = self.strides
        return vertical if vertical == horizontal else (vertical, horizontal)

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Number of patches that cover an image of (H, W) pixels, along each axis."""
        # Rounded up by floor division: torch.compile traces no ceil and no modulo of sizes. Of a
        # number that is not negative: ONNX divides integers towards zero.
        beyond = (max(s - self.patch_size, 0) for s in size)
        return tuple((n + step - 1) // step + 1 for n, step in zip(beyond, self.strides))

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = self.grid(x.shape[-2:])
        bottom, right = (
            (n - 1) * step + self.patch_size - s
            for n, step, s in zip((rows, columns), self.strides, x.shape[-2:])
        )
        # F.pad copies the image even where it adds nothing.
        if are_open(bottom, right) or bottom or right:
            x = F.pad(x, (0, right, 0, bottom))
        if self.why_not_fused() is not None:
            return self.proj(x)
        # Patches that do not overlap are the rows of a matrix. Convolutions of so few channels
        # miss the tensor cores, a product does not. Cast while the image is copied patch by patch.
        patches = rearrange(x, 'b c (h p) (w q) -> b h w c p q', h=rows, w=columns)
        patches = patches.to(product_dtype(x), memory_format=torch.contiguous_format).flatten(3)
        tokens = F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)
        return rearrange(tokens, 'b h w c -> b c h w')

    def why_not_fused(self) -> str | None:
        """Why the convolution is called, None where it is a product of its parameters."""
        return why_call_all() or why_call_patches(self.proj)

    def plain_reasons(self, device_type: str, dtype: torch.dtype | None) -> dict[str, str | None]:
        """By part, see :func:`vim_mm.models.fused.path_of_layers`."""
        return {'': self.why_not_fused()}
