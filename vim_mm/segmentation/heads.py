"""MMSegmentation's decode heads with the same loss in a fraction of the time and memory.

A fast head is its original, a subclass of it, with the same parameters, names and arguments:

- the loss and the accuracy of upsampled logits come from :mod:`vim_mm.ops.upsampled`;
- gradients of resizing and pooling inside of the head come from :mod:`vim_mm.ops.resample`.

Both are deterministic. A loss other than cross entropy, or a head with a loss of its own, takes
MMSegmentation's path, which the log says once.
"""

import logging
from functools import cache

import torch
from mmengine.logging import print_log
from mmseg.models.decode_heads.decode_head import BaseDecodeHead
from mmseg.models.losses import CrossEntropyLoss
from mmseg.registry import MODELS
from torch import Tensor, nn

from vim_mm.errors import UserTypeError
from vim_mm.ops.resample import matrix_gradients
from vim_mm.ops.upsampled import CrossEntropy, upsampled_cross_entropy

# What MMSegmentation adds to counts of pixels that may be zero.
_EPS = torch.finfo(torch.float32).eps


class FastDecodeHead(BaseDecodeHead):
    """A ``BaseDecodeHead`` whose ``loss_by_feat`` makes no logits of the size of the labels.

    To be inherited from behind a head, which then finds it in place of ``BaseDecodeHead``; see
    :func:`fast_head_class`.
    """

    def loss_by_feat(self, seg_logits: Tensor, batch_data_samples: list) -> dict[str, Tensor]:
        """As in ``BaseDecodeHead``: losses by name, and ``acc_seg`` in percent, (1,)."""
        obstacle = self._obstacle(seg_logits)
        if obstacle is not None:
            _say_once(f'{type(self).__name__} uses the loss of MMSegmentation: {obstacle}')
            return super().loss_by_feat(seg_logits, batch_data_samples)
        labels = self._stack_batch_gt(batch_data_samples).squeeze(1)
        results = {}
        for criterion in self._criteria():
            sums = self._cross_entropy(criterion, seg_logits, labels)
            loss = criterion.loss_weight * self._reduced(criterion, sums, labels)
            name = criterion.loss_name
            results[name] = results[name] + loss if name in results else loss
        # In MMSegmentation's order, and so with its last bit.
        percent = (100.0 / (sums.counted.double() + _EPS)).float()
        results['acc_seg'] = (sums.correct.float() + _EPS)[None] * percent
        return results

    def _criteria(self) -> list[nn.Module]:
        several = isinstance(self.loss_decode, nn.ModuleList)
        return [*self.loss_decode] if several else [self.loss_decode]

    def _obstacle(self, seg_logits: Tensor) -> str | None:
        """Why the loss is not one of :func:`upsampled_cross_entropy`, None if it is."""
        if not isinstance(seg_logits, Tensor) or seg_logits.dim() != 4:
            return 'its logits are no (B, C, H, W)'
        if self.sampler is not None:
            return f'{type(self.sampler).__name__} samples pixels'
        if self.ignore_index is None:
            return 'its ignore_index is None'
        if seg_logits.shape[1] == 1:
            return 'it has one output channel'
        if not self._criteria():
            return 'it has no loss'
        for criterion in self._criteria():
            name = type(criterion).__name__
            if type(criterion) is not CrossEntropyLoss:
                return f'{name} is no plain CrossEntropyLoss'
            if criterion.use_sigmoid or criterion.use_mask:
                return f'{name} is binary'
            if criterion.reduction not in ('mean', 'sum'):
                return f'{name} has reduction {criterion.reduction!r}'
        return None

    def _cross_entropy(
        self, criterion: CrossEntropyLoss, logits: Tensor, labels: Tensor
    ) -> CrossEntropy:
        weight = criterion.class_weight
        if weight is not None:
            weight = _class_weights(tuple(map(float, weight)), logits.device)
        return upsampled_cross_entropy(
            logits, labels, self.ignore_index, weight, self.align_corners
        )

    @staticmethod
    def _reduced(criterion: CrossEntropyLoss, sums: CrossEntropy, labels: Tensor) -> Tensor:
        """The sum, or what MMSegmentation calls its mean."""
        if criterion.reduction == 'sum':
            return sums.loss
        if criterion.class_weight is not None:
            return sums.loss / (sums.weight + _EPS)
        if criterion.avg_non_ignore:
            return sums.loss / (sums.counted.double() + _EPS).float()
        return sums.loss / (labels.numel() + _EPS)


@cache
def fast_head_class(name: str) -> type[FastDecodeHead]:
    """The fast form of a decode head, named Fast and the name of the original.

    Args:
        name: A head in MMSegmentation's registry.

    Raises:
        TypeError: It is no subclass of ``BaseDecodeHead``.
    """
    head = MODELS.get(name)
    if not (isinstance(head, type) and issubclass(head, BaseDecodeHead)):
        raise UserTypeError(f'{name!r} must name a subclass of BaseDecodeHead, got {head}')

    if 'loss_by_feat' in vars(head) or 'loss' in vars(head):
        _say_once(f'{name} has a loss of its own: fast is what it leaves to BaseDecodeHead')

    class Fast(head, FastDecodeHead):
        def forward(self, *args, **kwargs):
            """As in the original."""
            with matrix_gradients():
                return super().forward(*args, **kwargs)

    Fast.__name__ = Fast.__qualname__ = f'Fast{name}'
    Fast.__doc__ = f"""MMSegmentation's ``{name}`` with the loss of :class:`FastDecodeHead`."""
    return Fast


@cache
def _class_weights(weights: tuple[float, ...], device: torch.device) -> Tensor:
    """On the device, where they stay: the host waits for each copy."""
    return torch.tensor(weights, dtype=torch.float32, device=device)


@cache
def _say_once(message: str) -> None:
    print_log(message, logger='current', level=logging.INFO)
