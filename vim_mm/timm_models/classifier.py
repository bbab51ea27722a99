"""The classifier: the backbone with a head, by the interface of timm's models."""

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import resample_patch_embed, trunc_normal_
from torch import Tensor, nn

from vim_mm.errors import UserValueError
from vim_mm.models.arguments import check_choice, check_counts, check_int, check_rate, parse_size
from vim_mm.models.tokens import split_cls
from vim_mm.models.vision_mamba import PatchEmbed, VisionMamba

POOLS = ('token', 'avg', '')


class VisionMambaClassifier(VisionMamba):
    """:class:`vim_mm.VisionMamba` with a linear classifier, by the interface of timm's models.

    Weights have the names of the backbone, and ``head.weight`` and ``head.bias``. Images may have
    any size. Features hold the class tokens first, as timm's models have them, wherever the layers
    see them.

    Args:
        img_size (int | tuple): (H, W) in pixels that ``pos_embed`` is made for.
        patch_size (int): Side of a patch in pixels.
        stride (int, optional): Distance of patches in pixels; None is ``patch_size``.
        in_chans (int): Channels of the image.
        num_classes (int): Classes of the head; 0 is no head.
        global_pool (str): What the head reads: 'token', the class token, the mean if there are
            two; 'avg', the mean over patches; '', all tokens.
        embed_dim (int): Channels of a token.
        depth (int): Number of layers.
        class_token (str): 'none', 'head', 'middle', 'tail' or 'double': where the class tokens
            stand in the sequence.
        drop_rate (float): Dropout before the head.
        drop_path_rate (float): Stochastic depth of the last layer, growing linearly from 0.
        **kwargs: Further arguments of :class:`vim_mm.VisionMamba`, such as
            ``discretization_method``.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An argument is not as above, or ``global_pool`` is 'token' without a class
            token.
    """

    head_names: tuple[str, ...] = ('head',)

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        stride: int | None = None,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = 'token',
        embed_dim: int = 192,
        depth: int = 24,
        class_token: str = 'middle',
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        **kwargs: Any,
    ):
        if stride is not None:  # timm's reduction of a feature is one number
            check_counts(stride=stride)
        super().__init__(
            arch=dict(embed_dims=embed_dim, num_layers=depth),
            img_size=img_size,
            patch_size=patch_size,
            stride=stride,
            in_channels=in_chans,
            out_type='raw',
            out_feature='norm',
            cls_token=class_token,
            drop_path_rate=drop_path_rate,
            **kwargs,
        )
        check_rate('drop_rate', drop_rate)
        self.img_size = parse_size('img_size', img_size)
        self.in_chans = in_chans
        self.num_features = self.head_hidden_size = embed_dim
        self.num_prefix_tokens = len(self.cls_names)
        self.feature_info = [
            dict(module=f'layers.{i}', num_chs=embed_dim, reduction=self.patch_embed.stride)
            for i in range(depth)
        ]
        self.head_drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes, global_pool)

    def get_classifier(self) -> nn.Module:
        """The linear layer, or ``nn.Identity`` where there is none."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Put a new head in place, and another pooling if one is given.

        Raises:
            TypeError: ``num_classes`` is no integer.
            ValueError: It is negative, or ``global_pool`` is unknown or needs a class token.
        """
        check_int('num_classes', num_classes, 0)
        if global_pool is not None:
            check_choice('global_pool', global_pool, POOLS)
            if global_pool == 'token' and not self.cls_names:
                raise UserValueError(
                    "global_pool 'token' needs a class_token, got class_token 'none'"
                )
            self.global_pool = global_pool
        self.num_classes = num_classes
        self.head: nn.Module = nn.Identity()
        if num_classes:
            weight = self.patch_embed.proj.weight
            self.head = nn.Linear(
                self.num_features, num_classes, device=weight.device, dtype=weight.dtype
            )
            self._init_head()
        self.head.train(self.training)

    def reset_parameters(self) -> None:
        """Initialize everything as Vim does, the head included."""
        super().reset_parameters()
        if 'head' in self._modules:  # the backbone's constructor calls this before there is one
            self._init_head()

    def _init_head(self) -> None:
        if isinstance(self.head, nn.Linear):
            trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)

    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
    ) -> None:
        """Resize ``pos_embed`` to images of another size, and the patches' weights to other ones.

        Patches that do not overlap stay so, others keep their distance. Images of any size are
        accepted before and after: this moves the one at which ``pos_embed`` is not resized.

        Raises:
            TypeError: A size is neither an integer nor two.
            ValueError: A size is below 1, or a patch is not square.
        """
        if img_size is not None:
            self.img_size = parse_size('img_size', img_size)
        if patch_size is not None:
            self._resize_patches(patch_size)
        grid = self.patch_embed.grid(self.img_size)
        if self.pos_embed is not None and grid != self.grid:
            old = self.pos_embed
            resized = self.resize_pos_embed(old.detach(), self.grid, grid, self.placement)
            self.pos_embed = nn.Parameter(resized, requires_grad=old.requires_grad)
        self.grid = grid

    def _resize_patches(self, patch_size: int | tuple[int, int]) -> None:
        height, width = parse_size('patch_size', patch_size)
        if height != width:
            raise UserValueError(f'patch_size must be square, got {patch_size}')
        old = self.patch_embed
        if height == old.patch_size:
            return
        stride = height if old.stride == old.patch_size else old.stride
        self.patch_embed = PatchEmbed(old.in_channels, self.embed_dims, height, stride)
        self.patch_embed.train(old.training)
        with torch.no_grad():
            weight = resample_patch_embed(old.proj.weight, [height, width])
        self.patch_embed.proj.weight = nn.Parameter(weight, old.proj.weight.requires_grad)
        self.patch_embed.proj.bias = old.proj.bias
        for level in self.feature_info:
            level['reduction'] = stride

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute layers in backward to save memory."""
        self.with_cp = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns of names, from the input to the output, for layer-wise learning rates."""
        return dict(
            stem=r'^cls_token|^pos_embed|^patch_embed',
            blocks=[(r'^layers\.(\d+)', None), (r'^norm_f', (99999,))],
        )

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
        output_dict: bool = False,
    ) -> Any:
        """The residual stream after some of the layers, and the features after the last one.

        Args:
            x: Images (B, in_chans, H, W).
            indices: The last so many layers, or layers by number, or None for all.
            return_prefix_tokens: Whether to return the class tokens (B, n, C) of each layer too.
            norm: Whether the final norm is applied to each.
            stop_early: Whether the layers after the last one that is asked for are left out, also
                of the final features.
            output_fmt: 'NCHW', maps (B, C, rows, columns); 'NLC', patch tokens (B, L, C).
            intermediates_only: Whether to leave out the final features.
            output_dict: Whether to return a dict.

        Returns:
            The final features (B, n + L, C) as :meth:`forward_features` gives them and a list of
            the intermediate ones in the order of the layers; that list alone; or a dict with
            'image_features', 'image_intermediates' and 'image_intermediates_prefix'. With
            ``return_prefix_tokens`` the list holds pairs, of patches and class tokens.

        Raises:
            ValueError: There is no such layer or format.
        """
        check_choice('output_fmt', output_fmt, ('NCHW', 'NLC'))
        taken = self._take(indices)
        last = taken[-1] if stop_early or intermediates_only else len(self.layers) - 1
        layers = sorted({*taken, last})

        def feature(i: int, mixed: Tensor, stream: Tensor, update: Tensor, turn: Any) -> tuple:
            normed = None
            if norm or i == last:
                normed = self._normalize(self.norm_f, i, mixed, stream, update)
            return normed if norm else stream + update, normed

        outputs, grid = self._tap(x, layers, feature)
        split = [
            split_cls(tokens, self.placement)
            for i, (tokens, _) in zip(layers, outputs)
            if i in taken
        ]
        maps = [patches for patches, _ in split]
        if output_fmt == 'NCHW':
            maps = [tokens.transpose(1, 2).unflatten(2, grid).contiguous() for tokens in maps]
        prefix = [cls for _, cls in split] if return_prefix_tokens and self.cls_names else None
        final = None if intermediates_only else self._prefix_first(outputs[-1][1])

        if output_dict:
            named = dict(
                image_intermediates=maps, image_intermediates_prefix=prefix, image_features=final
            )
            return {name: value for name, value in named.items() if value is not None}
        pairs = maps if prefix is None else [*zip(maps, prefix)]
        return pairs if intermediates_only else (final, pairs)

    def _take(self, indices: int | Sequence[int] | None) -> list[int]:
        """The layers in ascending order, as timm's models count them.

        Raises:
            ValueError: There is no such layer.
        """
        taps = self._num_taps()
        if isinstance(indices, int):
            taken = [*range(taps - indices, taps)]
        else:
            given = range(taps) if indices is None else indices
            taken = sorted({i + taps if i < 0 else i for i in given})
        if not taken or taken[0] < 0 or taken[-1] >= taps:
            raise UserValueError(f'indices must name some of {taps} features, got {indices}')
        return taken

    def _num_taps(self) -> int:
        return len(self.layers)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the layers after the last one that ``indices`` names; its layers in order.

        ``prune_norm`` and ``prune_head`` say whether the final norm and the head go too.

        Raises:
            ValueError: There is no such layer.
        """
        taken = self._take(indices)
        self.layers = self.layers[: taken[-1] + 1]
        self.out_indices = (taken[-1],)
        self.norm_names = {taken[-1]: 'norm_f'}
        if prune_norm:
            self.norm_f = nn.Identity()
        if prune_head:
            self.reset_classifier(0, '')
        return taken

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) to normalized tokens (B, n + L, C), class tokens first."""
        (tokens,), _ = self._tap(x, [len(self.layers) - 1], self._final)
        return self._prefix_first(tokens)

    def _final(self, *of_layer: Any) -> Tensor:
        """The feature of the last layer, after which nothing turns."""
        return self._normalize(self.norm_f, *of_layer[:-1])

    def forward_packed(  # type: ignore[override]
        self, images: Sequence[Tensor], rows: int = 1
    ) -> list[Tensor]:
        """As in VisionMamba: for each image (in_chans, H, W) its logits (1, num_classes)."""
        tokens, _ = self._tap_packed(images, rows, [len(self.layers) - 1], self._final)
        return [self.forward_head(self._prefix_first(last)) for (last,) in tokens]

    def _prefix_first(self, tokens: Tensor) -> Tensor:
        if not self.cls_names:
            return tokens
        patches, cls = split_cls(tokens, self.placement)
        return torch.cat([cls, patches], dim=1)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features (B, n + L, C) to logits (B, num_classes), or to what the head reads of them."""
        if self.global_pool == 'token':
            x = x[:, : self.num_prefix_tokens].mean(1)
        elif self.global_pool == 'avg':
            x = x[:, self.num_prefix_tokens :].mean(1)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Images (B, in_chans, H, W) to logits (B, num_classes)."""
        return self.forward_head(self.forward_features(x))
