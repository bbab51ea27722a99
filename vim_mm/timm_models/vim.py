"""Vim's sizes as timm lists them: importing this registers ``vim_*`` for ``timm.create_model``."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import resample_patch_embed
from timm.models import (
    _factory,
    build_model_with_cfg,
    generate_default_cfgs,
    register_model,
    register_model_deprecations,
    resolve_pretrained_cfg,
)

from vim_mm.checkpoints.container import without_wrappers
from vim_mm.checkpoints.file import read_file
from vim_mm.errors import UserValueError
from vim_mm.models.state_dict import describe_differences, mark_initialized
from vim_mm.ops import METHODS
from vim_mm.timm_models.classifier import VisionMambaClassifier
from vim_mm.timm_models.pyramid import VisionMambaPyramid
from vim_mm.timm_models.weights import PLACES, read_weights

__all__ = ['checkpoint_filter_fn']  # timm adds the models

# Switches that a classifier of timm has of its own, or adapts weights to.
_OWN = ('arch', 'out_indices', 'out_type', 'out_feature', 'stride')


def checkpoint_filter_fn(
    state_dict: Mapping[str, Any], model: VisionMambaClassifier
) -> dict[str, Any]:
    """The weights of a classifier, from those of this package and of Vim's own checkpoints.

    Takes the model out of a whole checkpoint, the prefix ``backbone.`` and those of wrappers, as of
    ``torch.compile``, off its names, calls MMPretrain's ``head.fc`` by the name that it has here,
    and resizes the patches' weights. The position embedding is resized by the model itself when it
    loads.
    """
    state_dict = _weights(state_dict)
    weights = {
        name.removeprefix('backbone.').replace('head.fc.', 'head.'): value
        for name, value in state_dict.items()
    }
    patches = weights.get('patch_embed.proj.weight')
    size = model.patch_embed.patch_size
    if patches is not None and patches.shape[2:] != (size, size):
        weights['patch_embed.proj.weight'] = resample_patch_embed(patches, [size, size])
    return weights


def _weights(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in ('state_dict', 'model', 'module'):
        checkpoint = checkpoint.get(key, checkpoint)
    return without_wrappers(checkpoint)


def _check_notes(checkpoint: Mapping[str, Any], model: VisionMambaClassifier) -> None:
    """ValueError if a state dict of this package notes another function; a plain dict has no notes.

    :func:`checkpoint_filter_fn` cannot do this: timm gives it a copy without the notes.
    """
    notes = getattr(_weights(checkpoint), '_metadata', {})
    for name in ('', 'backbone'):
        noted = {k: v for k, v in notes.get(name, {}).items() if k not in _OWN}
        if differences := '; '.join(describe_differences(noted, model)):
            raise UserValueError(
                f'the weights were trained with {differences}. Give create_model the same, or '
                'insist with state_dict=dict(weights), which has no notes.'
            )


def _cfg() -> dict[str, Any]:
    """What timm knows of a variant: images as Vim's published training and evaluation take them."""
    return dict(
        url='',
        num_classes=1000,
        input_size=(3, 224, 224),
        pool_size=None,
        crop_pct=0.875,
        interpolation='bicubic',
        mean=IMAGENET_DEFAULT_MEAN,
        std=IMAGENET_DEFAULT_STD,
        first_conv='patch_embed.proj',
        classifier='head',
        paper_ids='arXiv:2401.09417',
    )


# By name: channels, and the distance of patches where it is not their side.
_SIZES: dict[str, dict[str, int]] = {
    'vim_tiny_patch16_224': dict(embed_dim=192),
    'vim_tiny_patch16_stride8_224': dict(embed_dim=192, stride=8),
    'vim_small_patch16_224': dict(embed_dim=384),
    'vim_small_patch16_stride8_224': dict(embed_dim=384, stride=8),
    'vim_base_patch16_224': dict(embed_dim=768),
}
# The plain names are zoh, Vim's own method. A suffix is for libraries that hand few arguments on to
# timm, such as transformers in TimmBackbone. '_pyramid' is for those that want features of four
# strides, and is the plain model elsewhere.
_VARIANTS: dict[str, dict[str, Any]] = {
    **_SIZES,
    **{
        f'{name}_{method}': dict(size, discretization_method=method)
        for name, size in _SIZES.items()
        for method in METHODS
        if method != 'zoh'
    },
    **{f'{name}_pyramid': size for name, size in _SIZES.items() if 'stride' not in size},
}
default_cfgs = generate_default_cfgs({f'{name}.untrained': _cfg() for name in _VARIANTS})


def _create(
    variant: str, pretrained: bool, kwargs: dict[str, Any], **of_variant: Any
) -> VisionMambaClassifier:
    of_pyramid = variant.endswith('_pyramid') and kwargs.get('features_only', False)
    method = of_variant.get('discretization_method')
    if method and kwargs.get('discretization_method', method) != method:
        raise UserValueError(
            f'{variant} has discretization_method {method!r}, got '
            f'{kwargs["discretization_method"]!r}'
        )
    out_indices = kwargs.pop('out_indices', (0, 1, 2, 3) if of_pyramid else 3)
    # timm's models take these in their constructors, the backbone does not.
    device, dtype = kwargs.pop('device', None), kwargs.pop('dtype', None)
    given = None
    if pretrained:
        overlay = dict(kwargs.pop('pretrained_cfg_overlay', None) or {})
        cfg = resolve_pretrained_cfg(variant, kwargs.pop('pretrained_cfg', None), overlay)
        given = read_weights(cfg, kwargs.get('cache_dir')) or cfg.state_dict
        kwargs['pretrained_cfg'] = replace(cfg, **PLACES, state_dict=given)
    with nullcontext() if device is None else torch.device(device):
        model = build_model_with_cfg(
            VisionMambaPyramid if of_pyramid else VisionMambaClassifier,
            variant,
            pretrained,
            pretrained_filter_fn=checkpoint_filter_fn,
            feature_cfg=dict(out_indices=out_indices, feature_cls='getter'),
            **{**of_variant, **kwargs},
        )
    if pretrained and given is not None:
        _check_notes(given, getattr(model, 'model', model))  # features_only wraps it
    model = model if dtype is None else model.to(dtype=dtype)
    mark_initialized(model.parameters())
    return model


def _entry_point(variant: str, of_variant: dict[str, Any]) -> Callable[..., Any]:
    """The function that timm calls by the name of the variant."""

    def create(pretrained: bool = False, **kwargs: Any) -> VisionMambaClassifier:
        return _create(variant, pretrained, kwargs, **of_variant)

    create.__name__ = create.__qualname__ = variant
    create.__doc__ = f'Vim, {", ".join(f"{k}={v}" for k, v in of_variant.items())}.'
    return register_model(create)


globals().update({name: _entry_point(name, variant) for name, variant in _VARIANTS.items()})


# Vim's own names of the same models, which its scripts and logs use.
_ENDING = '_bimambav2_final_pool_mean_abs_pos_embed_with_midclstok_div2'
register_model_deprecations(
    __name__,
    {
        f'vim_tiny_patch16_224{_ENDING}': 'vim_tiny_patch16_224',
        f'vim_tiny_patch16_stride8_224{_ENDING}': 'vim_tiny_patch16_stride8_224',
        f'vim_small_patch16_224{_ENDING}': 'vim_small_patch16_224',
        f'vim_small_patch16_stride8_224{_ENDING}': 'vim_small_patch16_stride8_224',
        f'vim_base_patch16_224{_ENDING.replace("midclstok", "middle_cls_token")}': (
            'vim_base_patch16_224'
        ),
    },
)


def _read_as_data(theirs: Any) -> Any:
    """timm's reader of ``create_model(checkpoint_path=...)``, which runs what a pickle asks for.

    timm calls it after the model is made, so that no argument could give it another one.
    """

    def load_checkpoint(model: Any, checkpoint_path: str, *args: Any, **kwargs: Any) -> Any:
        vim = model if isinstance(model, VisionMambaClassifier) else getattr(model, 'model', None)
        if not isinstance(vim, VisionMambaClassifier):
            return theirs(model, checkpoint_path, *args, **kwargs)
        given = read_file(Path(checkpoint_path), 'cpu')
        done = vim.load_state_dict(checkpoint_filter_fn(given, vim))
        _check_notes(given, vim)
        return done

    return load_checkpoint


_factory.load_checkpoint = _read_as_data(_factory.load_checkpoint)
