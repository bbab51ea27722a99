"""What VisionMamba does when its weights are saved and loaded: grids differ, keys must not."""

import math
import re
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn

from vim_mm.errors import UserRuntimeError, UserValueError, brief
from vim_mm.models.tokens import CLS_TOKENS, insert_cls, resize_pos_embed, split_cls

LAYER_SCALE = r'\.mixer\.gamma$'
FASTVIM = 'FastVim, which pools tokens inside of its layers'
# Weights that other architectures have and Vim has not, and what a file with them is.
_OTHERS = (
    (r'\.mixer\.layernorm\.', FASTVIM),
    (r'\.(x_proj_weight|dt_projs_weight|A_logs)$', 'VMamba, which scans in four directions'),
    (r'layers\.\d+\.norm\.bias$', 'a Vim with LayerNorm, where this one has RMSNorm'),
    (
        LAYER_SCALE,
        'a Vim with scaled layers (init_layer_scale): convert_checkpoint.py folds them',
    ),
    (r'\.mixer\.(dt_bias|norm\.weight)$', 'Mamba-2'),
    (r'\b(word_)?embeddings?\.weight$', 'a language model'),
    (r'levels\.\d+\.blocks\.', 'MambaVision, or another backbone of several levels'),
    (r'\.attn\.(qkv|in_proj)', 'a transformer'),
    (r'\blayer\d\.\d+\.conv\d\.', 'a ResNet'),
)


def other_architecture(names: Iterable[str]) -> str | None:
    """What weights of these names are of, None if nothing speaks against a Vim."""
    names = [*names]
    return next((what for pat, what in _OTHERS if any(re.search(pat, n) for n in names)), None)


def function_switches(module: nn.Module) -> dict:
    """The arguments of a VisionMamba that change what its weights compute, as they are now.

    Two backbones with the same weights and the same switches are the same function, up to rounding
    and to the size of ``pos_embed``. A switch without effect is left out.

    Args:
        module (nn.Module): A VisionMamba.

    Returns:
        dict: Values by name of the argument, all of them plain data.
    """
    mixer = module.layers[0].mixer
    switches = dict(
        arch=dict(embed_dims=module.embed_dims, num_layers=module.num_layers),
        stride=module.patch_embed.stride,
        out_indices=module.out_indices,
        out_type=module.out_type,
        out_feature=module.out_feature,
        cls_token=module.placement,
        bimamba_type=mixer.bimamba_type,
        discretization_method=mixer.discretization_method,
        if_rope=module.if_rope,
    )
    if mixer.bimamba_type == 'v2':
        switches['if_divide_out'] = mixer.if_divide_out
    if module.if_rope:
        switches['rope_grid'] = module.rope_grid
        switches['if_rope_residual'] = module.if_rope_residual
    return switches


_WORDS = ('out_type', 'out_feature', 'cls_token', 'bimamba_type', 'discretization_method')
_FLAGS = ('if_rope', 'if_divide_out', 'if_rope_residual')


def wrong_entry(note: Mapping) -> str | None:
    """Which entry of a file's note of a VisionMamba is nothing that :func:`note_layout` writes.

    Returns:
        str | None: Its name; None where all that it has can be used.
    """
    arch, stride = note.get('arch', dict(embed_dims=1, num_layers=1)), note.get('stride', 1)
    sound = dict(
        arch=isinstance(arch, Mapping)
        and arch.keys() == {'embed_dims', 'num_layers'}
        and all(map(_is_size, arch.values())),
        stride=_is_size(stride) or (_are_sizes(stride) and len(stride) == 2),
        rope_grid=_is_size(note.get('rope_grid', 1)),
        grid=_are_sizes(note.get('grid', (1, 1))) and len(note.get('grid', (1, 1))) == 2,
        out_indices=_are_sizes(note.get('out_indices', ()), 0),
        **{name: type(note.get(name, '')) is str for name in _WORDS},
        **{name: type(note.get(name, False)) is bool for name in _FLAGS},
    )
    sound['cls_token'] = sound['cls_token'] and note.get('cls_token', 'none') in CLS_TOKENS
    return next((name for name, fine in sound.items() if not fine), None)


def _is_size(value: Any, least: int = 1) -> bool:
    return type(value) is int and least <= value < 2**31


def _are_sizes(values: Any, least: int = 1) -> bool:
    return isinstance(values, list | tuple) and all(_is_size(value, least) for value in values)


def describe_differences(noted: Mapping, module: nn.Module) -> list[str]:
    """Each switch in which a checkpoint and a backbone differ, with both values.

    Args:
        noted (Mapping): What the checkpoint notes; names that it lacks are not compared.
        module (nn.Module): The backbone, a VisionMamba.
    """
    return [
        f'{name} {plain(noted[name])!r}, here {plain(value)!r}'
        for name, value in function_switches(module).items()
        if name in noted and plain(noted[name]) != plain(value)
    ]


def plain(value):
    """A value as JSON and safe checkpoints keep it, which know no tuples."""
    return list(value) if isinstance(value, tuple) else value


def mark_initialized(weights: Iterable[Tensor]) -> None:
    """Mark for transformers what its models shall not initialize: the constructors have done it."""
    for weight in weights:
        if not weight.is_meta:
            weight._is_hf_initialized = True  # type: ignore[attr-defined]


def note_layout(
    module: nn.Module, state_dict: MutableMapping, prefix: str, local_metadata: dict
) -> None:
    """State-dict hook: note in the metadata what names and shapes of weights do not tell."""
    local_metadata.update(grid=module.grid, **function_switches(module))


def adapt_checkpoint(
    module: nn.Module, state_dict: MutableMapping, prefix: str, local_metadata: dict, *_
) -> None:
    """Pre-hook of loading: fit ``pos_embed`` to the backbone, then insist on complete weights.

    What the checkpoint notes of :func:`function_switches` is kept as ``module.loaded_switches``.

    A class token that the backbone lacks is taken out of ``pos_embed`` and the patches' part is
    resized to the backbone's grid. Checkpoints from elsewhere hold no note of their layout: then
    the class token is taken to stand where the backbone has its own, or if it has none in the
    middle, as in Vim's released checkpoints; and the grid to be the backbone's if the number of
    patches is, or else square.

    Raises:
        ValueError: ``pos_embed`` has another number of patches than the noted grid, or an unknown,
            non-square one.
        RuntimeError: Weights are missing, of another shape, or of a part of a layer that this
            backbone's layers do not have. MMEngine loads with strict=False and would train on
            without them. Only the norms ``norm{i}`` of taps and ``module.head_names`` may be
            missing; layers and embeddings that the backbone does not make may be there, but none
            beyond its ``num_layers``.
    """
    if (wrong := wrong_entry(local_metadata)) is not None:
        raise UserRuntimeError(f'the checkpoint notes {wrong} = {brief(local_metadata[wrong])}')
    module.loaded_switches = {
        name: local_metadata[name] for name in function_switches(module) if name in local_metadata
    }
    _check_architecture(module, state_dict, prefix)
    key = prefix + 'pos_embed'
    if module.pos_embed is not None and key in state_dict and state_dict[key].dim() == 3:
        state_dict[key] = fit_pos_embed(module, state_dict, prefix, local_metadata)

    norms = [name for name in module.norm_names.values() if name != 'norm_f']
    fresh = tuple(f'{prefix}{name}.' for name in (*norms, *module.head_names))
    own = {k: v for k, v in module.state_dict(prefix=prefix).items() if not k.startswith(fresh)}
    missing = [k for k in own if k not in state_dict]
    mismatched = [
        f'{k} {tuple(state_dict[k].shape)} for {tuple(v.shape)}'
        for k, v in own.items()
        if k in state_dict and state_dict[k].shape != v.shape
    ]
    layers = tuple(f'{prefix}layers.{i}.' for i in range(len(module.layers)))
    foreign = [k for k in state_dict if k.startswith(layers) and k not in own]
    for keys, problem in (
        (missing, 'lacks {} of'),
        (mismatched, 'has the wrong shape of {} of'),
        (foreign, 'has layers with {} weights beyond'),
    ):
        if keys:
            where = _elsewhere(state_dict) if len(keys) == len(own) else ''
            raise UserRuntimeError(
                f'the checkpoint {problem.format(len(keys))} {len(own)} weights of '
                f'{type(module).__name__}{where}: '
                f'{", ".join(keys[:3])}{", ..." if keys[3:] else ""}'
            )


def _elsewhere(names: Iterable[str]) -> str:
    """Where the weights of a Vim stand in a checkpoint, if not where they are looked for."""
    last = 'layers.0.mixer.A_log'
    found = next((name.removesuffix(last) for name in names if name.endswith(last)), '')
    return f' (they stand under {found!r})' if found else ''


def _check_architecture(module: nn.Module, state_dict: MutableMapping, prefix: str) -> None:
    """RuntimeError that names what the checkpoint is of, or the argument by which it differs."""
    for name, own in module.named_parameters():
        if not isinstance(state_dict.get(prefix + name, own), Tensor):
            raise UserRuntimeError(f'{prefix}{name} of the checkpoint is no tensor')
    other = other_architecture(name for name in state_dict if name.startswith(prefix))
    if other is not None:
        raise UserRuntimeError(f'the checkpoint is of another architecture than Vim: {other}')
    layer = re.compile(rf'{re.escape(prefix)}layers\.(\d+)\.')
    found = [int(match[1]) for match in map(layer.match, state_dict) if match]
    depth = max(found, default=-1) + 1
    mixer, embed = module.layers[0].mixer, module.patch_embed
    in_channels, patch_size = embed.in_channels, embed.patch_size
    sizes = {
        'embed_dims': ('patch_embed.proj.weight', 0, module.embed_dims),
        'in_channels': ('patch_embed.proj.weight', 1, in_channels),
        'patch_size': ('patch_embed.proj.weight', 2, patch_size),
        'd_state': ('layers.0.mixer.A_log', 1, mixer.d_state),
    }
    differences = []
    if depth > module.num_layers:
        differences.append(f'num_layers {depth}, the backbone {module.num_layers}')
    for name, (key, axis, own) in sizes.items():
        weight = state_dict.get(prefix + key)
        if weight is not None and axis < weight.dim() and weight.shape[axis] != own:
            here = tuple(module.get_parameter(key).shape)
            differences.append(
                f'{name} {weight.shape[axis]}, the backbone {own} '
                f'({prefix}{key} is {tuple(weight.shape)}, here {here})'
            )
    if differences:
        raise UserRuntimeError(
            f'the checkpoint was made by another architecture than this {type(module).__name__}: '
            f'it has {"; ".join(differences)}'
        )


def fit_pos_embed(
    module: nn.Module, state_dict: MutableMapping, prefix: str, local_metadata: dict
) -> Tensor:
    """The checkpoint's position embedding over the backbone's grid, with its class tokens only."""
    if 'cls_token' in local_metadata:
        placement = local_metadata['cls_token']
    elif prefix + 'cls_token_head' in state_dict:
        placement = 'double'
    elif prefix + 'cls_token' in state_dict:
        placement = module.placement if 'cls_token' in module.cls_names else 'middle'
    else:
        placement = 'none'
    patches, cls = split_cls(state_dict[prefix + 'pos_embed'], placement)

    if 'grid' in local_metadata:
        grid = tuple(local_metadata['grid'])
        if math.prod(grid) != patches.shape[1]:
            raise UserValueError(
                f'pos_embed of the checkpoint is for {patches.shape[1]} patches, and the '
                f'checkpoint notes a grid of {grid[0]}x{grid[1]}'
            )
    else:
        grid = _guess_grid(patches.shape[1], module.grid)
    patches = resize_pos_embed(patches, grid, module.grid)
    num_cls = len(CLS_TOKENS[module.placement](0))
    return insert_cls(patches, cls[:, :num_cls], module.placement)


def _guess_grid(num_patches: int, own: tuple[int, int]) -> tuple[int, int]:
    if num_patches == math.prod(own):
        return own
    side = math.isqrt(num_patches)
    if side * side != num_patches or not side:
        raise UserValueError(
            f'pos_embed of the checkpoint is for {num_patches} patches: not the {own[0]}x{own[1]} '
            'of this backbone, nor a square, and the checkpoint does not tell its grid'
        )
    return side, side
