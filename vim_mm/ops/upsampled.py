"""Losses and labels of logits that are upsampled to the size of an image, without the upsampled.

The obvious way keeps several tensors of (B, classes, H, W) until the backward pass. Here the
gradient with respect to the small logits is computed along with the loss, and only it is kept. On a
GPU with Triton a kernel does it without any logit of the size of the labels
(:mod:`vim_mm.ops.triton.upsampled`); elsewhere PyTorch does it for a few images at a time.
"""

from numbers import Integral
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vim_mm.errors import UserRuntimeError, UserTypeError, UserValueError
from vim_mm.ops import triton
from vim_mm.ops.discretization import check_tensor
from vim_mm.ops.library import without_autocast
from vim_mm.ops.resample import resample_gradient, resize

# Bytes that the upsampled logits of a chunk of images take at most, unless one image takes more.
CHUNK_BYTES = 256 * 2**20
# Of the kernel; its tiles hold all classes of a pixel.
_MAX_CLASSES = 1024


class CrossEntropy(NamedTuple):
    """Sums over the pixels whose label is not the ignored one; all scalars on the logits' device.

    Attributes:
        loss: Of the cross entropy times the weight of its class; float32, float64 of such logits.
        correct: Pixels whose class of the largest logit is the label, int64.
        counted: Pixels, int64.
        weight: Of the weights of their classes; without weights the number of pixels.
    """

    loss: Tensor
    correct: Tensor
    counted: Tensor
    weight: Tensor


def upsampled_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = 255,
    class_weight: Tensor | None = None,
    align_corners: bool | None = False,
) -> CrossEntropy:
    """Cross entropy of logits that are resized bilinearly to the size of the labels.

    The same numbers as ``F.interpolate`` and ``F.cross_entropy(..., reduction='sum')`` up to
    rounding, computed in float32 (float64 for such logits), under autocast as well. Deterministic
    on every device.

    Args:
        logits: (B, C, h, w), C at least 2, floating point, of any memory format.
        labels: (B, H, W), int64 or uint8, in [0, C) or ``ignore_index``.
        ignore_index: Label of pixels that do not count.
        class_weight: (C,), or None for ones; without a gradient.
        align_corners: As in ``F.interpolate``.

    Returns:
        CrossEntropy: Its ``loss`` can be differentiated once with respect to the logits.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A shape, dtype or device is another one, or ``class_weight`` wants a gradient.
        RuntimeError: A label is out of range, or the loss is differentiated twice. Of labels on a
            GPU it is a device-side assertion, as from ``F.cross_entropy``.

    Example:
        >>> sums = upsampled_cross_entropy(head(features), labels)
        >>> loss = sums.loss / sums.counted
        >>> loss.backward()
        >>> accuracy = sums.correct / sums.counted
    """
    _check(logits, labels, ignore_index, class_weight, align_corners)
    ignore_index, align_corners = int(ignore_index), bool(align_corners)
    wide = torch.promote_types(logits.dtype, torch.float32)
    weight = None if class_weight is None else class_weight.to(logits.device, wide)
    if _has_kernel(logits) and labels.numel() > 0:
        sums, _ = upsampled_cross_entropy_fwd(
            logits, labels, ignore_index, weight, align_corners, logits.requires_grad
        )
    else:
        sums = _EachChunk.apply(logits, labels.long(), ignore_index, weight, align_corners)
    loss, weights, correct, counted, impossible = sums.unbind()
    torch._assert_async(impossible == 0, f'a label is out of range [0, {logits.shape[1]})')
    return CrossEntropy(loss.to(wide), correct.long(), counted.long(), weights.to(wide))


def _check(
    logits: Any, labels: Any, ignore_index: Any, class_weight: Any, align_corners: Any
) -> None:
    check_tensor('logits', logits)
    check_tensor('labels', labels)
    if logits.dim() != 4 or not logits.is_floating_point() or logits.shape[1] < 2:
        raise UserValueError(
            'logits must be (B, C, h, w) of floating point with at least 2 classes, got '
            f'{logits.dtype} {tuple(logits.shape)}'
        )
    if labels.dim() != 3 or len(labels) != len(logits) or labels.device != logits.device:
        raise UserValueError(
            f'labels must be (B, H, W) of the {len(logits)} images on {logits.device}, got '
            f'{tuple(labels.shape)} on {labels.device}'
        )
    if labels.dtype not in (torch.int64, torch.uint8):
        raise UserValueError(f'labels must be int64 or uint8, got {labels.dtype}')
    if not isinstance(ignore_index, Integral) or isinstance(ignore_index, bool):
        raise UserTypeError(f'ignore_index must be an integer, got {ignore_index!r}')
    if not -(2**63) <= ignore_index < 2**63:
        raise UserValueError(f'ignore_index must fit 64 bits, got {ignore_index}')
    if not isinstance(align_corners, (bool, type(None))):  # None is False, as F.interpolate has it
        raise UserTypeError(f'align_corners must be a bool, got {align_corners!r}')
    if class_weight is None:
        return
    check_tensor('class_weight', class_weight)
    if class_weight.shape != logits.shape[1:2] or class_weight.is_complex():
        raise UserValueError(
            f'class_weight must have one real weight for each of the {logits.shape[1]} classes, '
            f'got {class_weight.dtype} {tuple(class_weight.shape)}'
        )
    if class_weight.requires_grad and torch.is_grad_enabled():
        raise UserValueError('class_weight gets no gradient: detach it')


def has_kernel(x: Tensor, classes: int) -> bool:
    """Whether logits of the device and dtype of ``x`` have kernels.

    :func:`upsampled_labels` needs one.
    """
    # device.type makes a new string each time, and predictions on a GPU wait for this answer.
    device = 'cuda' if x.is_cuda else x.device.type
    return triton.obstacle(device, x.dtype) is None and classes <= _MAX_CLASSES


def _has_kernel(logits: Tensor) -> bool:
    return has_kernel(logits, logits.shape[1]) and logits.numel() > 0


def upsampled_labels(logits: Tensor, size: tuple[int, int], align_corners: bool = False) -> Tensor:
    """Classes of the largest logits after a bilinear resize.

    Args:
        logits: (B, C, h, w), floating point, of any memory format; compared in float32.
        size: (H, W).
        align_corners: As in ``F.interpolate``.

    Returns:
        Tensor: (B, H, W), int64, of equal logits the first class.

    Raises:
        RuntimeError: These logits have no kernel, see :func:`has_kernel`.
    """
    if not _has_kernel(logits):
        raise UserRuntimeError(
            f'there is no kernel for the labels of {logits.dtype} {tuple(logits.shape)} on '
            f'{logits.device}'
        )
    return _labels(logits, [*size], align_corners)


@torch.library.custom_op('vim_mm::upsampled_labels', mutates_args=())
def _labels(logits: Tensor, size: list[int], align_corners: bool) -> Tensor:
    from vim_mm.ops.triton.upsampled import upsampled_labels

    with torch.cuda.device_of(logits):
        return upsampled_labels(logits, size, align_corners)


@_labels.register_fake
def _(logits, size, align_corners):
    return logits.new_empty((len(logits), *size), dtype=torch.int64)


@torch.library.custom_op('vim_mm::upsampled_cross_entropy_fwd', mutates_args=())
def upsampled_cross_entropy_fwd(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    class_weight: Tensor | None,
    align_corners: bool,
    with_grad: bool,
) -> tuple[Tensor, Tensor]:
    """The sums, (5,) float64, and what the gradient is made of."""
    from vim_mm.ops.triton.upsampled import cross_entropy_forward

    with torch.cuda.device_of(logits):
        return cross_entropy_forward(
            logits, labels, ignore_index, class_weight, align_corners, with_grad
        )


@torch.library.custom_op('vim_mm::upsampled_cross_entropy_bwd', mutates_args=())
def upsampled_cross_entropy_bwd(
    columns: Tensor, factor: Tensor, shape: list[int], dtype: torch.dtype
) -> Tensor:
    """The gradient of the logits, channels last."""
    from vim_mm.ops.triton.upsampled import cross_entropy_backward

    with torch.cuda.device_of(columns):
        return cross_entropy_backward(columns, factor, shape, dtype)


@upsampled_cross_entropy_fwd.register_fake
def _(logits, labels, ignore_index, class_weight, align_corners, with_grad):
    from vim_mm.ops.triton.upsampled import columns_shape

    shape = columns_shape(logits.shape) if with_grad else (0,)
    sums = logits.new_empty(5, dtype=torch.float64)
    return sums, logits.new_empty(shape, dtype=torch.float32)


@upsampled_cross_entropy_bwd.register_fake
def _(columns, factor, shape, dtype):
    images, classes, height, width = shape
    return columns.new_empty((images, height, width, classes), dtype=dtype).permute(0, 3, 1, 2)


def _keep(ctx, inputs: tuple, output: tuple) -> None:
    logits, *_ = inputs
    ctx.save_for_backward(output[1])
    ctx.shape, ctx.dtype = logits.shape, logits.dtype
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_sums: Tensor | None, _) -> tuple:
    _refuse_second_derivative()
    grad = None
    if grad_sums is not None:
        (columns,) = ctx.saved_tensors
        grad = upsampled_cross_entropy_bwd(columns, grad_sums[0], list(ctx.shape), ctx.dtype)
    return grad, None, None, None, None, None


upsampled_cross_entropy_fwd.register_autograd(_backward, setup_context=_keep)


def _refuse_second_derivative() -> None:
    # once_differentiable would not see that the gradient depends on the logits, too.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError('upsampled_cross_entropy has no second derivative (create_graph)')


class _EachChunk(torch.autograd.Function):
    """The same sums by PyTorch's operators; keeps the gradient of the logits, at their size."""

    @staticmethod
    def forward(ctx, logits, labels, ignore_index, class_weight, align_corners):
        wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        pixels = labels.shape[-2] * labels.shape[-1]
        images = max(1, CHUNK_BYTES // max(1, wide.shape[1] * pixels * wide.element_size()))
        with_grad = ctx.needs_input_grad[0]
        sums = wide.new_zeros(5, dtype=torch.float64)
        grads = []
        with without_autocast(wide):
            for x, y in zip(wide.split(images), labels.split(images), strict=True):
                own, grad = _chunk(x, y, ignore_index, class_weight, align_corners, with_grad)
                sums = sums + own
                grads.append(grad)
        if with_grad:
            ctx.save_for_backward(torch.cat(grads))
        ctx.dtype = logits.dtype
        return sums

    @staticmethod
    def backward(ctx, grad_sums):
        _refuse_second_derivative()
        (grad,) = ctx.saved_tensors
        return (grad * grad_sums[0].to(grad)).to(ctx.dtype), None, None, None, None


def _chunk(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    class_weight: Tensor | None,
    align_corners: bool,
    with_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    """The sums of some images, (5,) float64, and the gradient of the first."""
    upsampled = resize(logits, tuple(labels.shape[-2:]), 'bilinear', align_corners)
    target = labels[:, None]
    counts = target != ignore_index
    known = counts & (target >= 0) & (target < logits.shape[1])
    impossible = (counts & ~known).sum()
    target = torch.where(known, target, 0)
    largest, predicted = upsampled.max(dim=1, keepdim=True)
    correct = ((predicted == target) & counts).sum()

    probability = F.softmax(upsampled, dim=1)
    # log sum exp(x) = max x - log p of the largest, which is at least 1 / C.
    log_sum = largest - probability.gather(1, predicted).log()
    weight = counts.to(logits.dtype)
    if class_weight is not None:
        weight = weight * class_weight[target]
    # Not a product with the weight alone: the loss of a pixel that does not count may be infinite.
    losses = torch.where(counts, (log_sum - upsampled.gather(1, target)) * weight, 0)
    sums = torch.stack(
        [x.sum(dtype=torch.float64) for x in (losses, weight, correct, counts, impossible)]
    )
    if not with_grad:
        return sums, None
    del upsampled

    # weight * (p - one hot), in the memory of p.
    probability = probability.mul_(weight)
    at_target = probability.gather(1, target) - weight
    probability = probability.scatter_(1, target, at_target)
    kind = 'bilinear_corners' if align_corners else 'bilinear'
    return sums, resample_gradient(probability, kind, tuple(logits.shape[-2:]))
