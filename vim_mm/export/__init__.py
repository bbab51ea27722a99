"""Models as ONNX files: what ``tools/export_onnx.py`` calls, and whoever exports from Python."""

from vim_mm.export.onnx_file import OnnxModule, differences, export_onnx, quantize
from vim_mm.export.parts import PARTS, choose_part, part_of, put_in_place

__all__ = [
    'PARTS',
    'OnnxModule',
    'choose_part',
    'differences',
    'export_onnx',
    'part_of',
    'put_in_place',
    'quantize',
]
