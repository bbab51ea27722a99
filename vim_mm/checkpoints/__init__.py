"""Everything about files of weights: what they hold, as data; what of it is ours; who may use it.

Start at :mod:`~vim_mm.checkpoints.file` for how a file is read, at
:mod:`~vim_mm.checkpoints.conversion` for weights from elsewhere, at
:mod:`~vim_mm.checkpoints.reading` for what MMEngine reads by. What is imported here needs no
OpenMMLab library; ``converted_file``, ``pretrained``, ``provenance``, ``reading`` and ``state`` do.
"""

from vim_mm.checkpoints.container import ConversionError
from vim_mm.checkpoints.conversion import Conversion, convert_checkpoint, needs_conversion
from vim_mm.checkpoints.file import NotACheckpointError, UnsafeCheckpointError, read_file
from vim_mm.checkpoints.report import Report, fit

__all__ = [
    'Conversion',
    'ConversionError',
    'NotACheckpointError',
    'Report',
    'UnsafeCheckpointError',
    'convert_checkpoint',
    'fit',
    'needs_conversion',
    'read_file',
]
