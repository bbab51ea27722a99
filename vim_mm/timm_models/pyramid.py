"""Vim with maps of four strides, for decoders that want those of a convolutional network."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from vim_mm.errors import UserValueError
from vim_mm.models.arguments import check_choice, check_counts
from vim_mm.models.simple_fpn import SimpleFPN
from vim_mm.timm_models.classifier import VisionMambaClassifier


class VisionMambaPyramid(VisionMambaClassifier):
    """:class:`VisionMambaClassifier` whose intermediate features are the levels of a pyramid.

    :class:`vim_mm.models.SimpleFPN` makes them of the normalized patches of the last layer: a
    quarter, a half, once and twice the distance of patches, which is strides 4, 8, 16 and 32.

    Args:
        *args: As of :class:`VisionMambaClassifier`.
        pyramid_channels (int): Channels of every level.
        output_stride (int, optional): Levels that would be coarser have this stride in pixels, as
            decoders of dilated networks want it: 8, 16 or 32 for patches 16 pixels apart.
        **kwargs: As of :class:`VisionMambaClassifier`.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An argument is not as above, or patches are not a multiple of 4 pixels apart.
    """

    head_names = ('head', 'pyramid')

    def __init__(
        self,
        *args: Any,
        pyramid_channels: int = 256,
        output_stride: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.coarsest = 32  # of patches 16 pixels apart, as SimpleFPN counts
        if output_stride is not None:
            check_counts(output_stride=output_stride)
            self.coarsest = min(output_stride * 16 // self.patch_embed.strides[0], 32)
        self.pyramid = SimpleFPN(
            self.embed_dims, pyramid_channels, num_outs=4, output_stride=self.coarsest
        )
        self.feature_info = [
            dict(module=f'pyramid.lateral.{i}', num_chs=pyramid_channels) for i in range(4)
        ]
        self._note_strides()

    def _note_strides(self) -> None:
        stride = self.patch_embed.strides[0]
        if stride % 4:
            raise UserValueError(f'a pyramid needs a stride divisible by 4, got {stride}')
        for i, level in enumerate(self.feature_info):
            level['reduction'] = stride * min(2**i * 4, self.coarsest) // 16

    def _resize_patches(self, patch_size: int | tuple[int, int]) -> None:
        super()._resize_patches(patch_size)
        self._note_strides()

    def forward_intermediates(  # type: ignore[override]
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = True,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Levels of the pyramid, and the features after the last layer.

        Args:
            x: Images (B, in_chans, H, W).
            indices: The last so many levels, or levels by number, 0 the finest, or None for all.
            norm: Without effect: levels are made of normalized patches.
            output_fmt: 'NCHW'.
            intermediates_only: Whether to leave out the final features.
            **kwargs: What timm passes to every model; without effect.

        Returns:
            The final features (B, n + L, C), class tokens first, and a list of maps
            (B, pyramid_channels, H / stride, W / stride), finest first; or that list alone.

        Raises:
            ValueError: There is no such level or format.
        """
        check_choice('output_fmt', output_fmt, ('NCHW',))
        taken = self._take(indices)
        final = self.forward_features(x)
        grid = self.patch_embed.grid((x.shape[2], x.shape[3]))
        patches = final[:, self.num_prefix_tokens :].transpose(1, 2).unflatten(2, grid)
        levels = self.pyramid([patches.contiguous()])
        maps = [levels[i] for i in taken]
        return maps if intermediates_only else (final, maps)

    def _num_taps(self) -> int:
        return len(self.feature_info)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """The levels that ``indices`` names; with ``prune_head`` the classifier goes.

        Layers and the norm stay, as all levels are made of their result.

        Raises:
            ValueError: There is no such level.
        """
        if prune_head:
            self.reset_classifier(0, '')
        return self._take(indices)
