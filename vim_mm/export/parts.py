"""Which part of a model is exported, and a file in the place of that part."""

from contextlib import nullcontext
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vim_mm.errors import UserValueError
from vim_mm.export.onnx_file import OnnxModule
from vim_mm.ops.exported import are_open, exporting_to_onnx
from vim_mm.ops.resample import averaging_matrix, pooled_size

PARTS = ('backbone', 'features', 'segmentor')
_OF_SCOPE = {'mmseg': 'segmentor', 'mmdet': 'features', 'mmpretrain': 'backbone'}


class Segmentor(nn.Module):
    """Normalized images (B, 3, H, W) to logits (B, classes, H, W) of the whole image."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the decode head, enlarged to the size of the images."""
        in_a_graph = exporting_to_onnx() or are_open(*x.shape)
        with _MatrixAverages() if in_a_graph else nullcontext():
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

    ONNX has no such operator, and torch's translation of it, as Inductor's, takes known sizes.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """PyTorch's function, but for the pooling."""
        if function is F.adaptive_avg_pool2d:
            return _average(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _average(input: Tensor, output_size) -> Tensor:
    sizes = pooled_size(input, output_size)
    rows, columns = (averaging_matrix(n, m, input) for n, m in zip(sizes, input.shape[-2:]))
    return rows @ (input @ columns.T)


def choose_part(model: nn.Module, scope: str, part: str | None = None) -> str:
    """The name of the part that is exported.

    Args:
        model: Of MMEngine's kin.
        scope: Its library, 'mmseg', 'mmdet' or 'mmpretrain'.
        part: A name in ``PARTS``: 'backbone'; 'features', with the neck; 'segmentor'. None is the
            most that the library's models have.

    Raises:
        ValueError: There is no such part, or the model has none.
    """
    part = _OF_SCOPE[scope] if part is None else part
    if part not in PARTS:
        raise UserValueError(f'part: expected one of {[*PARTS]}, got {part!r}')
    if part == 'segmentor' and not hasattr(getattr(model, 'decode_head', None), 'conv_seg'):
        raise UserValueError(
            f'part: {type(model).__name__} has no decode head that gives logits of pixels, export '
            "'features' or 'backbone'"
        )
    return part


def part_of(model: nn.Module, part: str) -> nn.Module:
    """The part of that name, as a module from images to tensors."""
    if part == 'backbone':
        return model.backbone
    module = Features(model) if part == 'features' else Segmentor(model)
    return module.train(model.training)


def put_in_place(model: nn.Module, part: str, path: str | Path, threads: int = 0) -> None:
    """Have a model call an ONNX file where it would compute a part; the rest stays PyTorch's.

    Args:
        model: On the CPU.
        part: What the file holds, of :func:`choose_part`.
        path: Of the file.
        threads: Of onnxruntime, 0 is its own choice.
    """
    file = OnnxModule(path, threads)
    if part == 'backbone':
        model.backbone.forward = file.forward
    elif part == 'features':
        model.extract_feat = file.forward
    else:
        # Else FastEncoderDecoder calls backbone and head by themselves, and never encode_decode.
        model.test_cfg['store_logits'] = True
        model.encode_decode = lambda inputs, batch_img_metas: file(inputs)[0]
