"""Models for other runtimes: what the tools for ONNX and AOTInductor call, and who exports too."""

from vim_mm.export.aoti import export_graph, load_package, write_package
from vim_mm.export.comparison import differences
from vim_mm.export.onnx_file import OnnxModule, export_onnx, quantize
from vim_mm.export.parts import PARTS, choose_part, part_of, put_in_place

__all__ = [
    'PARTS',
    'OnnxModule',
    'choose_part',
    'differences',
    'export_graph',
    'export_onnx',
    'load_package',
    'part_of',
    'put_in_place',
    'quantize',
    'write_package',
]
