"""ONNX files: written by torch's exporter, run by onnxruntime, quantized to 8 bits."""

import ast
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from vim_mm.compat import why_no_onnx_export
from vim_mm.errors import UserRuntimeError, UserValueError
from vim_mm.ops.exported import export_to_onnx
from vim_mm.whole_file import whole_file

OPSET = 18  # of torch's translations and of vim_mm.export.recurrence: nothing is converted
_PRODUCTS = ['MatMul', 'Gemm']


def export_onnx(module: nn.Module, images: Tensor, path: str | Path, dynamic: bool = False) -> None:
    """Write a module of images to an ONNX file of standard operators.

    The selective scan of a layer becomes ``Scan``, see docs/deploy.md.

    Args:
        module: In evaluation mode. Its parameters stay as they are.
        images: An example (B, C, H, W), float32. For ``dynamic`` a batch of 2 or more, and height
            and width that differ from each other.
        path: Of the file.
        dynamic: Leave batch, height and width open.

    Raises:
        RuntimeError: torch is too old.
    """
    reason = why_no_onnx_export()
    if reason is not None:
        raise UserRuntimeError(reason)
    from vim_mm.export.recurrence import recurrence as translated

    open_sizes = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
    with torch.no_grad(), export_to_onnx():
        program = torch.onnx.export(
            module,
            (images,),
            dynamo=True,
            input_names=['images'],
            opset_version=OPSET,
            dynamic_shapes=(open_sizes,) if dynamic else None,
            custom_translation_table={torch.ops.vim_mm.recurrence.default: translated},
            verbose=False,
        )
    with whole_file(Path(path)) as part:
        program.save(str(part))


class OnnxModule(nn.Module):
    """An ONNX file of images as a module, which onnxruntime computes on the CPU.

    Args:
        path: Of the file.
        threads: Of onnxruntime, 0 is its own choice.
    """

    def __init__(self, path: str | Path, threads: int = 0):
        import onnxruntime

        super().__init__()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.path = Path(path)
        self.session = onnxruntime.InferenceSession(
            str(path), options, providers=['CPUExecutionProvider']
        )

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """All outputs of the file for images (B, C, H, W), float32, on the CPU.

        A file of a fixed batch computes any number of images in parts, of which the last is padded.

        Raises:
            ValueError: The file is of another fixed size.
        """
        batch, *size = self.session.get_inputs()[0].shape
        if any(isinstance(n, int) and n != m for n, m in zip(size, images.shape[1:], strict=True)):
            raise UserValueError(
                f'{self.path} takes images of {_by(size)} (C x H x W), got '
                f'{_by(images.shape[1:])}: export it with open sizes (--dynamic)'
            )
        parts, count = [images], len(images)
        if isinstance(batch, int):
            rest = -count % batch if count else batch
            parts = torch.cat([images, images.new_zeros(rest, *images.shape[1:])]).split(batch)
        outputs = [self.session.run(None, {'images': part.numpy()}) for part in parts]
        return tuple(torch.cat([*map(torch.from_numpy, each)])[:count] for each in zip(*outputs))


def _by(size: Sequence[int | str]) -> str:
    return ' x '.join(map(str, size))


def linear_layers(path: str | Path) -> dict[str, str]:
    """Names of the nodes of a file that multiply by a constant matrix, to those of their modules.

    Args:
        path: Of a file that torch's exporter wrote, which notes the module of each node.
    """
    import onnx

    graph = onnx.load(path).graph
    constant = {tensor.name for tensor in graph.initializer}
    layers = {}
    for node in graph.node:
        if node.op_type in _PRODUCTS and node.input[1] in constant:
            notes = {note.key: note.value for note in node.metadata_props}
            scopes = ast.literal_eval(notes['pkg.torch.onnx.name_scopes'])
            layers[node.name] = scopes[-2]  # the last is the node's own
    return layers


def quantize(
    source: str | Path,
    target: str | Path,
    images: Iterable[Tensor],
    keep: Sequence[str] = ('out_proj',),
) -> None:
    """Write an ONNX file whose linear layers multiply 8-bit integers.

    Weights have a scale for each output channel; inputs of the layers have one for each layer, of
    the range that they have in the images. Everything else, the scan with it, stays float32.

    Args:
        source: The file in float32, of :func:`export_onnx`.
        target: Of the file that is written: operators in float32 between ``QuantizeLinear`` and
            ``DequantizeLinear``, the form that TensorRT reads too.
        images: Batches (B, C, H, W), float32, for calibration.
        keep: Last parts of the names of linear layers that stay float32. The gated output of the
            scan, which ``out_proj`` takes, has a few large values: 8 bits round the others away.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self):
            self.batches: Iterator[Tensor] = iter(images)

        def get_next(self) -> dict | None:
            batch = next(self.batches, None)
            return None if batch is None else {'images': batch.numpy()}

    with whole_file(Path(target)) as part:
        quantize_static(
            str(source),
            str(part),
            Reader(),
            op_types_to_quantize=_PRODUCTS,
            nodes_to_quantize=[
                node
                for node, module in linear_layers(source).items()
                if module.rpartition('.')[2] not in keep
            ],
            per_channel=True,
            # Without VNNI a processor adds pairs of products of 8 bits in 16 bits, which overflow.
            reduce_range=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            extra_options=dict(
                # The scan takes float32: what a layer gives is not rounded again.
                OpTypesToExcludeOutputQuantization=_PRODUCTS,
            ),
        )
