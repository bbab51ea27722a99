"""ONNX files: written by torch's exporter, compared with PyTorch, quantized to 8 bits."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

OPSET = 20  # that of torch's exporter, and of the onnxruntimes of 2024 and later


def export_onnx(module: nn.Module, images: Tensor, path: str | Path, dynamic: bool = False) -> None:
    """Write a module of images to an ONNX file of standard operators.

    The selective scan of a layer becomes ``Scan``; docs/deploy.md names what does not export.

    Args:
        module: In evaluation mode. Its parameters stay as they are.
        images: An example (B, C, H, W), float32. For ``dynamic`` a batch of 2 or more, and height
            and width that differ from each other.
        path: Of the file.
        dynamic: Leave batch, height and width open.
    """
    open_sizes = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
    with torch.no_grad():
        program = torch.onnx.export(
            module,
            (images,),
            dynamo=True,
            input_names=['images'],
            opset_version=OPSET,
            dynamic_shapes=(open_sizes,) if dynamic else None,
            verbose=False,
        )
    program.save(str(path))


def differences(
    module: nn.Module, path: str | Path, images: Sequence[Tensor], threads: int = 0
) -> list[float]:
    """For each batch the greatest difference of any output from PyTorch's, relative to its maximum.

    Args:
        module: What was exported.
        path: Of the ONNX file, which onnxruntime runs on the CPU.
        images: Batches (B, C, H, W), float32.
        threads: Of onnxruntime, 0 is its own choice.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=['CPUExecutionProvider'])
    worst = []
    for batch in images:
        with torch.no_grad():
            expected = module(batch)
        expected = (expected,) if isinstance(expected, Tensor) else expected
        found = session.run(None, {'images': batch.numpy()})
        errors = [
            (torch.from_numpy(ours) - theirs).abs().max() / theirs.abs().max()
            for ours, theirs in zip(found, expected, strict=True)
        ]
        worst.append(max(map(float, errors)))
    return worst


def quantize(source: str | Path, target: str | Path) -> None:
    """Write an ONNX file whose linear layers multiply 8-bit integers.

    Their weights are quantized per channel when the file is written, their inputs when it runs, by
    the range of each batch. Everything else, the scan with it, stays float32.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        str(source),
        str(target),
        op_types_to_quantize=['MatMul', 'Gemm'],  # of constant weights only
        per_channel=True,
        weight_type=QuantType.QInt8,
    )
