"""Models as ONNX files: what ``tools/export_onnx.py`` calls, and whoever exports from Python."""

from vim_mm.export.onnx_file import differences, export_onnx, quantize
from vim_mm.export.parts import PARTS, part_of

__all__ = ['PARTS', 'differences', 'export_onnx', 'part_of', 'quantize']
