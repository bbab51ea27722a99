"""Weights of Vim from elsewhere, under the names of our models: what a file holds, and what of it.

Everything here is a function of names, shapes and plain data;
:mod:`vim_mm.engine.checkpoints.conversion` reads and writes the files.
"""

from vim_mm.convert.container import ConversionError
from vim_mm.convert.conversion import Conversion, convert_checkpoint, needs_conversion
from vim_mm.convert.report import Report, fit

__all__ = [
    'Conversion',
    'ConversionError',
    'Report',
    'convert_checkpoint',
    'fit',
    'needs_conversion',
]
