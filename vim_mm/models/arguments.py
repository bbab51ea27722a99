"""Checks of constructor arguments: each error names the argument, what came, what was expected."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from vim_mm.errors import UserTypeError, UserValueError, did_you_mean
from vim_mm.ops.discretization import check_device, check_tensor

ARCHS = {
    'tiny': dict(embed_dims=192, num_layers=24),
    'small': dict(embed_dims=384, num_layers=24),
    'base': dict(embed_dims=768, num_layers=24),
}


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """ValueError if the argument called ``name`` is not one of the words ``choices``."""
    words = [*choices]
    if not isinstance(value, str) or value not in words:
        hint = did_you_mean(value, words) if isinstance(value, str) else ''
        raise UserValueError(f'{name} must be one of {words}, got {value!r}{hint}')


def check_bools(**arguments: bool) -> None:
    """TypeError if one of the arguments is neither True nor False."""
    for name, value in arguments.items():
        if not isinstance(value, bool):
            raise UserTypeError(f'{name} must be True or False, got {value!r}')


def check_int(name: str, value: int, least: int = 1, greatest: int | None = None) -> None:
    """TypeError if the argument is no integer, ValueError if it is not in [least, greatest]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserTypeError(f'{name} must be an integer, got {value!r}')
    if greatest is not None and not least <= value <= greatest:
        raise UserValueError(f'{name} must lie in [{least}, {greatest}], got {value}')
    if value < least:
        raise UserValueError(f'{name} must be at least {least}, got {value}')


def check_counts(**arguments: int) -> None:
    """TypeError if one of the arguments is no integer, ValueError if it is below 1."""
    for name, value in arguments.items():
        check_int(name, value)


def check_number(name: str, value: float) -> None:
    """TypeError if the argument is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserTypeError(f'{name} must be a number, got {value!r}')


def check_positive(**arguments: float) -> None:
    """TypeError if one of the arguments is no number, ValueError if it is not finite, above 0."""
    for name, value in arguments.items():
        check_number(name, value)
        if not 0 < value < float('inf'):
            raise UserValueError(f'{name} must be positive, got {value}')


def check_rate(name: str, value: float) -> None:
    """TypeError if the argument is no number, ValueError if it is not in [0, 1)."""
    check_number(name, value)
    if not 0 <= value < 1:
        raise UserValueError(f'{name} must lie in [0, 1), got {value}')


def parse_arch(arch: str | dict) -> tuple[int, int]:
    """``(embed_dims, num_layers)`` of an architecture; its name may be in any case.

    Raises:
        ValueError: Unknown name, other keys, or a number below 1.
        TypeError: A number is not an integer.
    """
    if isinstance(arch, str):
        arch = ARCHS.get(arch.lower(), arch)
    if not isinstance(arch, dict) or set(arch) != {'embed_dims', 'num_layers'}:
        hint = did_you_mean(arch.lower(), ARCHS) if isinstance(arch, str) else ''
        raise UserValueError(
            f'arch must be one of {[*ARCHS]} or a dict of embed_dims and num_layers, got {arch!r}'
            f'{hint}'
        )
    for key, value in arch.items():
        check_int(f'arch.{key}', value)
    return arch['embed_dims'], arch['num_layers']


def parse_size(name: str, size: int | Sequence[int]) -> tuple[int, int]:
    """``(height, width)`` of one integer, or of a list or tuple of one or two.

    Raises:
        TypeError: Not that.
        ValueError: Another number of integers, or one below 1.
    """
    given = [size] if isinstance(size, int) else size
    if not isinstance(given, list | tuple):
        raise UserTypeError(f'{name} must be an integer or (height, width), got {size!r}')
    if len(given) not in (1, 2):
        raise UserValueError(f'{name} must be one integer or two, got {size!r}')
    for value in given:
        check_int(name, value)
    return given[0], given[-1]


def parse_out_indices(out_indices: int | Sequence[int], depth: int) -> tuple[int, ...]:
    """The layers in ascending order, counted from the first.

    Raises:
        TypeError: Neither an integer nor a sequence of integers.
        ValueError: Not in ascending order, or there is no such layer.
    """
    single = isinstance(out_indices, int)
    given = [out_indices] if single else out_indices
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UserTypeError(
            f'out_indices must be an integer or a sequence of integers, got {out_indices!r}'
        )
    for i in given:
        if isinstance(i, bool) or not isinstance(i, int):
            raise UserTypeError(f'out_indices must hold integers, got {out_indices!r}')
    indices = [i + depth if i < 0 else i for i in given]
    ascending = indices == sorted(set(indices))
    if not indices or not ascending or indices[0] < 0 or indices[-1] >= depth:
        raise UserValueError(
            f'out_indices must name layers in [-{depth}, {depth}) in ascending order, '
            f'got {out_indices}'
        )
    return tuple(indices)


def check_images(x: Any, in_channels: int) -> None:
    """TypeError or ValueError if ``x`` is no batch of images (B, in_channels, H, W)."""
    check_tensor('images', x)
    if not x.is_floating_point():
        raise UserTypeError(f'images: expected floating-point numbers, got {x.dtype}')
    if x.dim() != 4 or x.shape[1] != in_channels:
        raise UserValueError(
            f'images: expected shape (B, in_channels = {in_channels}, H, W), got {tuple(x.shape)}'
        )
    if x.shape[2] == 0 or x.shape[3] == 0:
        raise UserValueError(f'images: expected at least one pixel, got shape {tuple(x.shape)}')


def check_tokens(x: Tensor, d_model: int) -> None:
    """TypeError or ValueError if ``x`` is no batch of tokens (B, L, d_model)."""
    check_tensor('hidden_states', x)
    if not x.is_floating_point():
        raise UserTypeError(f'hidden_states: expected floating-point numbers, got {x.dtype}')
    if x.dim() != 3 or x.shape[2] != d_model:
        raise UserValueError(
            f'hidden_states: expected shape (B, L, {d_model}), got {tuple(x.shape)}'
        )


def check_image_list(images: Any, in_channels: int) -> None:
    """TypeError or ValueError if ``images`` are no images (in_channels, H, W) of any sizes.

    They have one dtype and one device.
    """
    if not isinstance(images, list | tuple):
        raise UserTypeError(f'images: expected a list of tensors, got {type(images).__name__}')
    if not images:
        raise UserValueError('images: expected at least one image, got none')
    for i, image in enumerate(images):
        name = f'images[{i}]'
        check_tensor(name, image)
        check_device(name, image, 'images[0]', images[0])
        if not image.is_floating_point():
            raise UserTypeError(f'{name}: expected floating-point numbers, got {image.dtype}')
        if image.dtype != images[0].dtype:
            raise UserTypeError(
                f'{name}: expected {images[0].dtype}, as images[0] is, got {image.dtype}'
            )
        if image.dim() != 3 or image.shape[0] != in_channels or 0 in image.shape:
            raise UserValueError(
                f'{name}: expected shape (in_channels = {in_channels}, H, W), at least one pixel, '
                f'got {tuple(image.shape)}'
            )


def check_like(x: Tensor, weight: Tensor) -> None:
    """Whether tokens are where the weights are that multiply them, and of their dtype.

    Raises:
        TypeError: Another dtype, and no autocast that converts it.
        ValueError: Another device.
    """
    check_device('hidden_states', x, 'in_proj', weight)
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise UserTypeError(f'hidden_states: expected {weight.dtype}, as in_proj is, got {x.dtype}')
