"""VisionMamba, the backbone: what configs build, and what feeds tokens to the Mamba mixers."""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from einops import rearrange
from timm.layers import lecun_normal_, trunc_normal_
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vim_mm.compat import after_state_dict, before_load_state_dict
from vim_mm.errors import UserTypeError, UserValueError, did_you_mean
from vim_mm.models.arguments import (
    check_bools,
    check_choice,
    check_counts,
    check_image_list,
    check_images,
    check_int,
    check_rate,
    parse_arch,
    parse_out_indices,
    parse_size,
)
from vim_mm.models.block import Block, add_norm
from vim_mm.models.fused import LayerPath, path_of_layers, path_of_norm, why_plain_norm
from vim_mm.models.mamba import Mamba
from vim_mm.models.packing import Packing
from vim_mm.models.patch_embed import PatchEmbed
from vim_mm.models.state_dict import adapt_checkpoint, note_layout
from vim_mm.models.tokens import (
    CLS_TOKENS,
    insert_cls,
    resize_pos_embed,
    rotary_table,
    rotate,
    split_cls,
)
from vim_mm.models.weight_decay import undecayed_parameters
from vim_mm.ops.library import without_autocast

OUT_TYPES = ('featmap', 'cls_token', 'avg_featmap', 'raw')
OUT_FEATURES = ('mixer', 'residual', 'norm')


def parse_ssm_cfg(ssm_cfg: dict | None, of_backbone: Iterable[str]) -> dict:
    """Further arguments of the mixer, none of which the backbone has itself.

    Raises:
        TypeError: Not a dict, or a name that the mixer does not have.
        ValueError: A name that the backbone has itself.
    """
    if ssm_cfg is None:
        return {}
    if not isinstance(ssm_cfg, dict):
        raise UserTypeError(f'ssm_cfg must be a dict of arguments of Mamba, got {ssm_cfg!r}')
    names = {*inspect.signature(Mamba).parameters} - {'d_model'}
    for name in ssm_cfg:
        if name in of_backbone:
            raise UserValueError(f'ssm_cfg must not have {name!r}: give it to the backbone itself')
        if name not in names:
            expected = sorted(names.difference(of_backbone))
            hint = did_you_mean(name, expected)
            raise UserTypeError(f'ssm_cfg has no {name!r}: expected some of {expected}{hint}')
    return dict(ssm_cfg)


class VisionMamba(nn.Module):
    """Vision Mamba (Vim, arXiv 2401.09417) as a backbone for images of any size.

    Parameters of the v2 model at 224x224 with the class token in the middle and ``out_feature``
    'norm', and in brackets with Vim's head of 1000 classes: tiny 6,955,008 (7,148,008), small
    25,411,584 (25,796,584), base 96,829,440 (97,598,440).

    Args:
        arch (str | dict): 'tiny', 'small', 'base', or a dict of embed_dims and num_layers.
        img_size (int | tuple): (H, W) in pixels that ``pos_embed`` is made for; one number is a
            square. Other sizes have it resized at every forward.
        patch_size (int): Side of a patch in pixels. Images are padded at the right and bottom
            until patches cover them.
        stride (int | tuple, optional): Distance of patches in pixels, one number or (vertical,
            horizontal); None is ``patch_size``.
        in_channels (int): Channels of the image.
        out_indices (int | Sequence[int]): Layers whose output is returned, in ascending order;
            negative ones count from the end. Layers after the last one are not made.
        out_type (str): 'featmap', maps (B, C, H, W); 'cls_token', (B, C), the mean if there are
            two; 'avg_featmap', (B, C), the mean over patches; 'raw', all tokens (B, L, C).
        out_feature (str): What of a layer is returned: 'mixer', the mixer's output before it is
            added to the residual stream (Vim's released tiny segmentor); 'residual', the stream as
            the next layer takes it, and of the model's last layer the plain sum, without stochastic
            depth (Vim's released detector and small segmentor); 'norm', the stream after the
            layer, normalized: by ``norm_f`` at the last layer, by ``norm{i}`` at layer i, in the
            dtype of the mixer's output.
        cls_token (str): 'none', 'head', 'middle', 'tail', or 'double' (head and tail).
        bimamba_type (str): 'none', 'v1' or 'v2', see :class:`Mamba`.
        if_divide_out (bool): See :class:`Mamba`.
        discretization_method (str): Of all layers, a name in ``vim_mm.ops.METHODS``.
        ssm_cfg (dict, optional): Further arguments of :class:`Mamba`, such as ``fused=False``.
        if_abs_pos_embed (bool): Whether to add a learned position embedding.
        if_rope (bool): Whether to rotate the input of every layer by its position: the tokens in
            front of the first, the output of the layer before in front of the others.
        rope_grid (int): Positions that any grid spans under ``if_rope``: the side in patches of the
            grid in pre-training.
        residual_in_fp32 (bool): Keep the residual stream in at least float32.
        drop_path_rate (float): Stochastic depth of the last layer, growing linearly from 0.
        frozen_stages (int): -1 freezes nothing, 0 the embeddings, n also the first n layers and the
            norms of their outputs.
        with_cp (bool): Recompute layers in backward to save memory.
        if_rope_residual (bool): Whether ``if_rope`` rotates the residual stream along with the
            output of the layer before, as in Vim's released detector and small segmentor.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An argument is not as above.
    """

    def __init__(
        self,
        arch: str | dict = 'tiny',
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        stride: int | tuple[int, int] | None = None,
        in_channels: int = 3,
        out_indices: int | Sequence[int] = -1,
        out_type: str = 'featmap',
        out_feature: str = 'mixer',
        cls_token: str = 'none',
        bimamba_type: str = 'v2',
        if_divide_out: bool = True,
        discretization_method: str = 'zoh',
        ssm_cfg: dict | None = None,
        if_abs_pos_embed: bool = True,
        if_rope: bool = False,
        rope_grid: int = 14,
        residual_in_fp32: bool = True,
        drop_path_rate: float = 0.0,
        frozen_stages: int = -1,
        with_cp: bool = False,
        *,
        if_rope_residual: bool = False,
    ):
        super().__init__()
        check_choice('out_type', out_type, OUT_TYPES)
        check_choice('out_feature', out_feature, OUT_FEATURES)
        check_choice('cls_token', cls_token, CLS_TOKENS)
        if out_type == 'cls_token' and cls_token == 'none':
            raise UserValueError("out_type 'cls_token' needs a cls_token, got cls_token 'none'")
        stride = patch_size if stride is None else stride
        check_counts(patch_size=patch_size, in_channels=in_channels, rope_grid=rope_grid)
        check_bools(if_abs_pos_embed=if_abs_pos_embed, if_rope=if_rope, with_cp=with_cp)
        check_bools(residual_in_fp32=residual_in_fp32, if_rope_residual=if_rope_residual)
        check_rate('drop_path_rate', drop_path_rate)
        self.embed_dims, self.num_layers = parse_arch(arch)
        if if_rope and self.embed_dims % 4:
            raise UserValueError(f'if_rope needs embed_dims divisible by 4, got {self.embed_dims}')
        if if_rope_residual and not if_rope:
            raise UserValueError('if_rope_residual needs if_rope, got if_rope False')
        self.out_indices = parse_out_indices(out_indices, self.num_layers)
        check_int('frozen_stages', frozen_stages, -1, self.out_indices[-1] + 1)
        self.out_type = out_type
        self.out_feature = out_feature
        self.placement = cls_token
        self.if_rope = if_rope
        self.if_rope_residual = if_rope_residual
        self.rope_grid = rope_grid
        self.residual_in_fp32 = residual_in_fp32
        self.frozen_stages = frozen_stages
        self.with_cp = with_cp

        self.patch_embed = PatchEmbed(in_channels, self.embed_dims, patch_size, stride)
        self.grid = self.patch_embed.grid(parse_size('img_size', img_size))
        self._make_embeddings(if_abs_pos_embed)
        mixer_cfg = dict(
            bimamba_type=bimamba_type,
            if_divide_out=if_divide_out,
            discretization_method=discretization_method,
        )
        self._make_layers(drop_path_rate, {**parse_ssm_cfg(ssm_cfg, mixer_cfg), **mixer_cfg})
        self.loaded_switches = None  # of the last checkpoint, see adapt_checkpoint
        before_load_state_dict(self, adapt_checkpoint)
        after_state_dict(self, note_layout)
        self.reset_parameters()
        self._freeze()

    # Modules that a subclass puts on top: a checkpoint need not have their weights.
    head_names: tuple[str, ...] = ()

    # By the name that mmpretrain's and mmseg's backbones have it.
    resize_pos_embed = staticmethod(resize_pos_embed)

    def _make_embeddings(self, if_abs_pos_embed: bool) -> None:
        num_patches = math.prod(self.grid)
        num_cls = len(CLS_TOKENS[self.placement](num_patches))
        self.cls_names = ((), ('cls_token',), ('cls_token_head', 'cls_token_tail'))[num_cls]
        for name in self.cls_names:
            self.register_parameter(name, nn.Parameter(torch.empty(1, 1, self.embed_dims)))
        pos_embed = torch.empty(1, num_patches + num_cls, self.embed_dims)
        self.pos_embed = nn.Parameter(pos_embed) if if_abs_pos_embed else None

    def _make_layers(self, drop_path_rate: float, mixer_cfg: dict) -> None:
        depth = self.num_layers
        self.layers = nn.ModuleList(
            Block(self.embed_dims, drop_path_rate * i / max(depth - 1, 1), mixer_cfg)
            for i in range(self.out_indices[-1] + 1)
        )
        self.norm_names = {}
        if self.out_feature == 'norm':
            self.norm_names = {
                i: 'norm_f' if i == depth - 1 else f'norm{i}' for i in self.out_indices
            }
        for name in self.norm_names.values():
            self.add_module(name, nn.RMSNorm(self.embed_dims, eps=1e-5))

    def _embeddings(self) -> list[nn.Parameter]:
        """The class tokens and the position embedding, those that there are."""
        params = [getattr(self, name) for name in self.cls_names]
        return params if self.pos_embed is None else [*params, self.pos_embed]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize everything as Vim does for classification."""
        lecun_normal_(self.patch_embed.proj.weight)
        nn.init.zeros_(self.patch_embed.proj.bias)
        for param in self._embeddings():
            trunc_normal_(param, std=0.02)
        for layer in self.layers:
            layer.norm.reset_parameters()
            layer.mixer.reset_parameters()
            # As in GPT-2: the residual stream sums this many mixers.
            layer.mixer.out_proj.weight /= math.sqrt(len(self.layers))
        for name in self.norm_names.values():
            getattr(self, name).reset_parameters()

    def _freeze(self) -> None:
        if self.frozen_stages < 0:
            return
        frozen = [self.patch_embed, *self.layers[: self.frozen_stages]]
        frozen += [getattr(self, n) for i, n in self.norm_names.items() if i < self.frozen_stages]
        for module in frozen:
            module.eval()
            module.requires_grad_(False)
        for param in self._embeddings():
            param.requires_grad_(False)

    def train(self, mode: bool = True) -> 'VisionMamba':
        """As ``nn.Module.train``, frozen stages stay in evaluation mode."""
        super().train(mode)
        self._freeze()
        return self

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that are not decayed: embeddings, and those of the mixers."""
        own, of_mixers = {*self.cls_names, 'pos_embed'}, undecayed_parameters(self.layers)
        return {
            name
            for name, param in self.named_parameters()
            if param in of_mixers or not own.isdisjoint(name.split('.'))
        }

    def get_layer_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        """Depth of a parameter for layer-wise learning rates, as mmpretrain's backbones tell it.

        Args:
            param_name (str): Name of the parameter in the whole model.
            prefix (str): Name of this backbone in the model, with a dot: 'backbone.' in most.

        Returns:
            tuple[int, int]: The depth and the number of depths: 0 for the embeddings, i + 1 for
            layer i, the greatest for everything else, in the backbone and outside of it.
        """
        num_depths = len(self.layers) + 2
        name = param_name.removeprefix(prefix)
        if param_name.startswith(prefix):
            if name.startswith(('patch_embed', 'pos_embed', 'cls_token')):
                return 0, num_depths
            if name.startswith('layers.'):
                return int(name.split('.')[1]) + 1, num_depths
        return num_depths - 1, num_depths

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Images (B, in_channels, H, W) to one output per entry of ``out_indices``.

        Raises:
            TypeError: ``x`` is no tensor.
            ValueError: ``x`` has another shape.
        """
        tokens, grid = self._tap(x, self.out_indices, self._feature)
        return tuple(self._format(t, grid) for t in tokens)

    def forward_packed(self, images: Sequence[Tensor], rows: int = 1) -> list[tuple[Tensor, ...]]:
        """Images of different sizes, packed without padding: each to what it gives alone.

        All tokens of all images stand in ``rows`` rows, where every recurrence is reset between two
        images, see docs/block.md. Position embedding, class tokens, rotation and stochastic depth
        are those of each image.

        Args:
            images (Sequence[Tensor]): (in_channels, H, W) each, of one dtype and device.
            rows (int): Among how many rows of about one length the images are shared.

        Returns:
            list[tuple[Tensor, ...]]: For each image what ``forward(image[None])`` returns.

        Raises:
            TypeError: ``images`` is no list of floating-point tensors of one dtype.
            ValueError: No image, or one of another shape or device.
        """
        tokens, grids = self._tap_packed(images, rows, self.out_indices, self._feature)
        return [
            tuple(self._format(t, grid) for t in of_image)
            for of_image, grid in zip(tokens, grids, strict=True)
        ]

    def _tap(
        self, x: Tensor, indices: Collection[int], feature: Callable[..., Any]
    ) -> tuple[list, tuple[int, int]]:
        """``feature`` of the layers in ``indices``, called as :meth:`_feature`, and the grid.

        Layers after the last of them do not run.
        """
        check_images(x, self.patch_embed.in_channels)
        x, grid = self._make_tokens(x)
        table = self._rotary_table(grid, x.device) if self.if_rope else None
        return self._run_layers(x, table, indices, feature), grid

    def _tap_packed(
        self,
        images: Sequence[Tensor],
        rows: int,
        indices: Collection[int],
        feature: Callable[..., Any],
    ) -> tuple[list[list[Tensor]], list[tuple[int, int]]]:
        """For each image :meth:`_tap` of a feature that is a tensor, (1, L, C), and the grid."""
        check_image_list(images, self.patch_embed.in_channels)
        alike: dict[tuple[int, ...], list[int]] = {}
        for i, image in enumerate(images):
            alike.setdefault(tuple(image.shape), []).append(i)
        sequences, grids = [images[0]] * len(images), [(0, 0)] * len(images)
        for members in alike.values():
            with without_autocast(images[0]):
                batch = torch.stack([images[i] for i in members])
            tokens, grid = self._make_tokens(batch)
            for i, of_image in zip(members, tokens.unbind(0), strict=True):
                sequences[i], grids[i] = of_image, grid

        packing = Packing([len(tokens) for tokens in sequences], rows)
        x, table = packing.pack(sequences), None
        if self.if_rope:
            tables = [self._rotary_table(grid, x.device) for grid in grids]
            cos, sin = (packing.pack([t.squeeze(0) for t in part]) for part in zip(*tables))
            table = cos, sin
        outputs = self._run_layers(x, table, indices, feature, packing)
        return [*map(list, zip(*map(packing.unpack, outputs), strict=True))], grids

    def _make_tokens(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """The residual stream in front of the first layer, (B, L, C), and the grid."""
        x = self.patch_embed(images)
        grid = tuple(x.shape[-2:])
        x = self._embed(rearrange(x, 'b c h w -> b (h w) c'), grid)
        if self.residual_in_fp32:
            x = x.to(torch.promote_types(x.dtype, torch.float32))
        return x, grid

    def _rotary_table(self, grid: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
        return rotary_table(grid, self.embed_dims, self.rope_grid, self.placement, device)

    def _run_layers(
        self,
        x: Tensor,
        table: tuple[Tensor, Tensor] | None,
        indices: Collection[int],
        feature: Callable[..., Any],
        packing: Packing | None = None,
    ) -> list:
        """``feature`` of the layers in ``indices``, given tokens and what turns them."""
        turn = None
        if table is not None:
            turn = partial(rotate, table=table)
            x = turn(x)
        packed = () if packing is None else (packing.reset(x.device),)
        outputs = []
        update = None
        for i, layer in enumerate(self.layers):
            if self.with_cp and (x.requires_grad or (update is not None and update.requires_grad)):
                # To keep the state of random numbers takes longer than to run a layer.
                draws = layer.calls_modules()
                mixed, x = checkpoint(
                    layer, x, update, *packed, use_reentrant=False, preserve_rng_state=draws
                )
            else:
                mixed, x = layer(x, update, *packed)
            drop = layer.drop_path
            update = drop(mixed) if packing is None else packing.drop(drop, mixed)
            if i in indices:
                outputs.append(feature(i, mixed, x, update, turn))
            if i == max(indices):
                break
            if turn is not None:
                x, update = self._turn(x, update, turn)
        return outputs

    def _embed(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Add class tokens and position embedding to patch tokens (B, M, C): (B, L, C)."""
        tokens = patches
        if self.cls_names:
            cls = torch.cat([getattr(self, name) for name in self.cls_names], dim=1)
            tokens = insert_cls(patches, cls.expand(patches.shape[0], -1, -1), self.placement)
        if self.pos_embed is None:
            return tokens
        return tokens + resize_pos_embed(self.pos_embed, self.grid, grid, self.placement)

    def _turn(
        self, residual: Tensor, update: Tensor, turn: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """The stream and its update as the next layer takes them under ``if_rope``."""
        if self.if_rope_residual:  # a sum that turns is a sum of what turns, at half the cost
            return turn(residual + update), None
        return residual, turn(update)

    def _feature(
        self,
        i: int,
        mixed: Tensor,
        residual: Tensor,
        update: Tensor,
        turn: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        """What is returned of layer i, given its output, and the stream before and its update."""
        if self.out_feature == 'mixer':
            return mixed
        if self.out_feature == 'residual':
            if i == self.num_layers - 1:
                return residual + mixed
            if turn is not None:
                residual, update = self._turn(residual, update, turn)
            return residual if update is None else residual + update
        return self._normalize(getattr(self, self.norm_names[i]), i, mixed, residual, update)

    def _normalize(
        self, norm: nn.Module, i: int, mixed: Tensor, residual: Tensor, update: Tensor
    ) -> Tensor:
        """The norm of the stream after layer i, in the dtype of the mixer's output."""
        path = path_of_norm(norm, self.layers[i].mixer, residual)
        normed, _ = add_norm(norm, residual, update, path)
        return normed.to(mixed.dtype)

    def _format(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        if self.out_type == 'raw':
            return tokens
        patches, cls = split_cls(tokens, self.placement)
        if self.out_type == 'cls_token':
            return cls.mean(1)
        if self.out_type == 'avg_featmap':
            return patches.mean(1)
        h, w = grid
        return rearrange(patches, 'b (h w) c -> b c h w', h=h, w=w).contiguous()

    def paths(
        self, device: str | torch.device | None = None, dtype: torch.dtype | None = None
    ) -> list[LayerPath]:
        """Which layers take the fast path and why others do not: :func:`path_of_layers`."""
        return path_of_layers(self, device, dtype)

    def plain_reasons(self, device_type: str, dtype: torch.dtype | None) -> dict[str, str | None]:
        """By part, see :func:`vim_mm.models.fused.path_of_layers`."""
        return {
            name: why_plain_norm(getattr(self, name), self.layers[i].mixer, device_type, dtype)
            for i, name in self.norm_names.items()
        }
