"""Which part of a model is exported, as a module from images to tensors."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vim_mm.ops.resample import averaging_matrix

PARTS = ('backbone', 'features', 'segmentor')
_OF_SCOPE = {'mmseg': 'segmentor', 'mmdet': 'features', 'mmpretrain': 'backbone'}


class Segmentor(nn.Module):
    """Normalized images (B, 3, H, W) to logits (B, classes, H, W) of the whole image."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the decode head, enlarged to the size of the images."""
        with _MatrixAverages():
            logits = self.model.decode_head(self.model.extract_feat(x))
        corners = self.model.align_corners
        return F.interpolate(logits, x.shape[-2:], mode='bilinear', align_corners=corners)


class Features(nn.Module):
    """Normalized images (B, 3, H, W) to the maps of backbone and neck."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the heads get."""
        return tuple(self.model.extract_feat(x))


class _MatrixAverages(TorchFunctionMode):
    """Adaptive average pooling as products with two matrices, for images of any size.

    ONNX has no such operator, and torch's translation of it takes sizes that are known.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """PyTorch's function, but for the pooling."""
        if function is F.adaptive_avg_pool2d:
            return _average(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _average(input: Tensor, output_size) -> Tensor:
    sizes = output_size if isinstance(output_size, list | tuple) else (output_size, output_size)
    sizes = [n if n is not None else m for n, m in zip(sizes, input.shape[-2:], strict=True)]
    rows, columns = (averaging_matrix(n, m, input) for n, m in zip(sizes, input.shape[-2:]))
    return rows @ (input @ columns.T)


def part_of(model: nn.Module, scope: str, part: str | None = None) -> nn.Module:
    """The part of a model that is exported.

    Args:
        model: Of MMEngine's kin, in evaluation mode.
        scope: Its library, 'mmseg', 'mmdet' or 'mmpretrain'.
        part: A name in ``PARTS``: 'backbone'; 'features', with the neck; 'segmentor'. None is the
            most that the library's models have.

    Raises:
        ValueError: The model has no such part.
    """
    part = _OF_SCOPE[scope] if part is None else part
    if part not in PARTS:
        raise ValueError(f'part: expected one of {[*PARTS]}, got {part!r}')
    if part == 'backbone':
        return model.backbone
    if part == 'features':
        return Features(model)
    if not hasattr(getattr(model, 'decode_head', None), 'conv_seg'):
        raise ValueError(
            f'part: {type(model).__name__} has no decode head that gives logits of pixels, export '
            "'features' or 'backbone'"
        )
    return Segmentor(model)
