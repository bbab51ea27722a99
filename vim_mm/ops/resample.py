"""Resizing and average pooling whose gradients are products with matrices.

On CUDA PyTorch computes these gradients by atomic additions, slowly and in no fixed order. Each
operation here is linear and separable, ``out = R x C^T`` with one matrix for the rows and one
for the columns, so that its gradient is ``R^T grad C``: two matrix products, fast and in a fixed
order. The output is PyTorch's own, bit for bit.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vim_mm.ops.library import without_autocast

_aten = torch.ops.aten
# From (x, output size) to the output. The operators themselves, because F.interpolate takes a slow
# path of many operators under deterministic algorithms.
_OPERATORS: dict[str, Callable[[Tensor, list[int]], Tensor]] = {
    'bilinear': lambda x, size: _aten.upsample_bilinear2d(x, size, False, None, None),
    'bilinear_corners': lambda x, size: _aten.upsample_bilinear2d(x, size, True, None, None),
    'bicubic': lambda x, size: _aten.upsample_bicubic2d(x, size, False, None, None),
    'bicubic_corners': lambda x, size: _aten.upsample_bicubic2d(x, size, True, None, None),
    'average': lambda x, size: _aten.adaptive_avg_pool2d(x, size),
}
_MAX_MATRICES = 256
_matrices: dict[tuple, Tensor] = {}


def _make_matrix(kind: str, out_size: int, in_size: int, like: Tensor) -> Tensor:
    """The (out_size, in_size) matrix of a 1-D operation, by applying it to the unit vectors."""
    unit = torch.eye(in_size, dtype=like.dtype, device=like.device)[None, None]
    # Along the rows of unit vectors nothing changes size.
    return _OPERATORS[kind](unit, [in_size, out_size])[0, 0].T.contiguous()


def resampling_matrix(kind: str, out_size: int, in_size: int, like: Tensor) -> Tensor:
    """The matrix of an operation along one dimension.

    The first 256 that are asked for are kept as long as the process lives; others are made anew in
    each call. None is dropped, because a captured CUDA graph may read it. What a call makes while
    it is compiled or captured is not kept.

    Args:
        kind: 'bilinear', 'bilinear_corners' (align_corners), 'bicubic', 'bicubic_corners' or
            'average' (adaptive average pooling).
        out_size: Length of the result.
        in_size: Length of the input.
        like: A tensor of the dtype, float32 or float64, and the device of the matrix.

    Returns:
        Tensor: (out_size, in_size).
    """
    key = (kind, out_size, in_size, like.dtype, like.device)
    if torch.compiler.is_compiling():
        return _make_matrix(kind, out_size, in_size, like)
    if key in _matrices:
        return _matrices[key]
    # A tensor made under inference_mode could not take part in a later backward pass.
    with torch.inference_mode(False), torch.no_grad():
        matrix = _make_matrix(kind, out_size, in_size, like)
    capturing = matrix.is_cuda and torch.cuda.is_current_stream_capturing()
    # A matrix of a captured graph belongs to the graph's memory; a fake one is no matrix.
    if type(matrix) is Tensor and not capturing and len(_matrices) < _MAX_MATRICES:
        _matrices[key] = matrix
    return matrix


def averaging_matrix(out_size: int, in_size: int, like: Tensor) -> Tensor:
    """The matrix 'average' of :func:`resampling_matrix`, by arithmetic of sizes that are symbolic.

    Args:
        out_size: Number of bins.
        in_size: Length of the input, which an exported graph may leave open.
        like: A tensor of the dtype and the device of the matrix.

    Returns:
        Tensor: (out_size, in_size).
    """
    bins = torch.arange(out_size, device=like.device)[:, None]
    first, last = bins * in_size // out_size, ((bins + 1) * in_size + out_size - 1) // out_size
    places = torch.arange(in_size, device=like.device)
    inside = (places >= first) & (places < last)
    return inside.to(like.dtype) / (last - first).to(like.dtype)


def resample_gradient(grad: Tensor, kind: str, in_size: tuple[int, int]) -> Tensor:
    """Gradient with respect to the input of an operation.

    Args:
        grad: Gradient of the output, (..., H', W'), floating point.
        kind: As in :func:`resampling_matrix`.
        in_size: (H, W) of the input.

    Returns:
        Tensor: (..., H, W).
    """
    rows = resampling_matrix(kind, grad.shape[-2], in_size[0], grad)
    columns = resampling_matrix(kind, grad.shape[-1], in_size[1], grad)
    # The one first that leaves less to do to the other.
    if grad.shape[-1] * in_size[0] < grad.shape[-2] * in_size[1]:
        return (rows.T @ grad) @ columns
    return rows.T @ (grad @ columns)


class _Resample(torch.autograd.Function):
    """An operation of ``_OPERATORS`` with :func:`resample_gradient` as its backward pass."""

    @staticmethod
    def forward(x: Tensor, size: list[int], kind: str) -> Tensor:
        return _OPERATORS[kind](x, size)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:
        x, _, ctx.kind = inputs
        ctx.in_size = tuple(x.shape[-2:])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        # 16 bits round the sums between the two products. Who compiles has chosen speed.
        wide = grad
        if not torch.compiler.is_compiling():
            wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        with without_autocast(grad):
            return resample_gradient(wide, ctx.kind, ctx.in_size).to(grad.dtype), None, None


def resize(
    x: Tensor, size: tuple[int, int], mode: str = 'bilinear', align_corners: bool | None = None
) -> Tensor:
    """As ``F.interpolate(x, size, mode=mode, align_corners=align_corners)``, see the module.

    Args:
        x: (B, C, H, W), floating point.
        size: (H', W').
        mode: 'bilinear' or 'bicubic'.
        align_corners: As in ``F.interpolate``; None is False.

    Returns:
        Tensor: (B, C, H', W') in the dtype of x.
    """
    return _Resample.apply(x, [*size], mode + ('_corners' if align_corners else ''))


def adaptive_average_pool(x: Tensor, size: tuple[int, int]) -> Tensor:
    """As ``F.adaptive_avg_pool2d``, see the module: x (B, C, H, W) to (B, C, *size)."""
    return _Resample.apply(x, [*size], 'average')


def pooled_size(input: Tensor, output_size: int | Sequence[int | None] | None) -> tuple[int, int]:
    """Rows and columns that adaptive pooling makes of (..., H, W), whose own stand for None."""
    sizes = output_size if isinstance(output_size, list | tuple) else (output_size, output_size)
    (rows, columns), (height, width) = sizes, input.shape[-2:]
    return height if rows is None else rows, width if columns is None else columns


class matrix_gradients(TorchFunctionMode):
    """Context in which ``F.interpolate`` and ``F.adaptive_avg_pool2d`` are those of this module.

    It reaches modules that call them, such as ``nn.AdaptiveAvgPool2d`` and the heads of
    MMSegmentation. Only 2-D bilinear and bicubic resizing to a given size and pooling of 4-D inputs
    are taken; every other call, and every input that needs no gradient, goes to PyTorch.

    Example:
        >>> with matrix_gradients():
        ...     out = head(features)
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """PyTorch's function, or the one of this module."""
        kwargs = kwargs or {}
        if function is torch.nn.functional.interpolate:
            ours = _interpolate(*args, **kwargs)
        elif function is torch.nn.functional.adaptive_avg_pool2d:
            ours = _adaptive_avg_pool2d(*args, **kwargs)
        else:
            ours = None
        return function(*args, **kwargs) if ours is None else ours


def _differentiates(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_floating_point() and x.requires_grad and torch.is_grad_enabled()


def _is_size(size) -> bool:
    """Whether it is one of two dimensions; what else PyTorch makes of it is PyTorch's to say."""
    return isinstance(size, int) or (isinstance(size, list | tuple) and len(size) == 2)


def _interpolate(
    input: Tensor,
    size=None,
    scale_factor=None,
    mode: str = 'nearest',
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor | None:
    """:func:`resize` for a call of ``F.interpolate``, None where it does something else."""
    other = scale_factor is not None or recompute_scale_factor or antialias
    other = other or not _is_size(size)
    if other or mode not in ('bilinear', 'bicubic') or not _differentiates(input):
        return None
    size = (size, size) if isinstance(size, int) else tuple(int(n) for n in size)
    return resize(input, size, mode, align_corners)


def _adaptive_avg_pool2d(input: Tensor, output_size) -> Tensor | None:
    """:func:`adaptive_average_pool` for a call of ``F.adaptive_avg_pool2d``, or None."""
    if not _differentiates(input) or not _is_size(output_size):
        return None
    return adaptive_average_pool(input, pooled_size(input, output_size))
