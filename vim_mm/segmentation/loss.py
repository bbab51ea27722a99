"""Cross entropy of logits that are enlarged to the size of their labels, in the memory of a chunk.

The obvious way keeps several tensors of (B, classes, H, W) until the backward pass. Here the
gradient with respect to the small logits is computed along with the loss, for a few images at a
time, and only it is kept.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vim_mm.ops.resample import resample_gradient, resize

# Bytes that the enlarged logits of a chunk of images take at most, unless one image takes more.
CHUNK_BYTES = 256 * 2**20


def enlarged_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    class_weight: Tensor | None = None,
    align_corners: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sum of the cross entropy of bilinearly enlarged logits, and the pixels that they get right.

    The same numbers as enlarging by ``F.interpolate`` and ``F.cross_entropy(..., reduction='sum')``
    up to rounding, computed in float32 (float64 for such logits), under autocast as well.
    Deterministic on every device.

    Args:
        logits: (B, C, h, w), C at least 2, floating point.
        labels: (B, H, W), int64, in [0, C) or ``ignore_index``.
        ignore_index: Label of pixels that do not count.
        class_weight: (C,), or None for ones.
        align_corners: As in ``F.interpolate``.

    Returns:
        tuple[Tensor, Tensor]: The sum, a scalar that can be differentiated once with respect to the
        logits, and the number of pixels whose class of the largest logit is the label, int64.
    """
    return _EnlargedCrossEntropy.apply(logits, labels, ignore_index, class_weight, align_corners)


class _EnlargedCrossEntropy(torch.autograd.Function):
    """:func:`enlarged_cross_entropy`; keeps the gradient of the logits, at their size."""

    @staticmethod
    def forward(ctx, logits, labels, ignore_index, class_weight, align_corners):
        wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        if class_weight is not None:
            class_weight = class_weight.to(wide)
        pixels = labels.shape[-2] * labels.shape[-1]
        images = max(1, CHUNK_BYTES // (wide.shape[1] * pixels * wide.element_size()))
        with_grad = ctx.needs_input_grad[0]
        total = wide.new_zeros((), dtype=torch.float64)
        correct = labels.new_zeros(())
        grads = []
        with torch.autocast(wide.device.type, enabled=False):
            for x, y in zip(wide.split(images), labels.split(images), strict=True):
                loss, hits, grad = _chunk(
                    x, y, ignore_index, class_weight, align_corners, with_grad
                )
                total, correct = total + loss, correct + hits
                grads.append(grad)
        if with_grad:
            ctx.save_for_backward(torch.cat(grads))
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(correct)
        return total.to(wide.dtype), correct

    @staticmethod
    def backward(ctx, grad_loss, _):
        # once_differentiable would not see that the gradient depends on the logits, too.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError('enlarged_cross_entropy has no second derivative (create_graph)')
        (grad,) = ctx.saved_tensors
        return (grad * grad_loss).to(ctx.dtype), None, None, None, None


def _chunk(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    class_weight: Tensor | None,
    align_corners: bool,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sum of the loss in float64, correct pixels, and the gradient of the sum, for some images."""
    enlarged = resize(logits, tuple(labels.shape[-2:]), 'bilinear', align_corners)
    counts = (labels != ignore_index)[:, None]
    target = torch.where(counts, labels[:, None], 0)
    largest, predicted = enlarged.max(dim=1, keepdim=True)
    correct = ((predicted == target) & counts).sum()

    probability = F.softmax(enlarged, dim=1)
    # log sum exp(x) = max x - log p of the largest, which is at least 1 / C.
    log_sum = largest - probability.gather(1, predicted).log()
    weight = counts.to(logits.dtype)
    if class_weight is not None:
        weight = weight * class_weight[target]
    # Not a product with the weight alone: the loss of a pixel that does not count may be infinite.
    losses = torch.where(counts, (log_sum - enlarged.gather(1, target)) * weight, 0)
    loss = losses.sum(dtype=torch.float64)
    if not with_grad:
        return loss, correct, None
    del enlarged

    # weight * (p - one hot), in the memory of p.
    probability = probability.mul_(weight)
    at_target = probability.gather(1, target) - weight
    probability = probability.scatter_(1, target, at_target)
    kind = 'bilinear_corners' if align_corners else 'bilinear'
    return loss, correct, resample_gradient(probability, kind, tuple(logits.shape[-2:]))
