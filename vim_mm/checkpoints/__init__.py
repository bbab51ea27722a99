"""Everything about files of weights: what they hold, as data; what of it is ours; who may use it.

- :mod:`~vim_mm.checkpoints.file` reads a file as data, whatever its format, by
  :mod:`~vim_mm.checkpoints.torch_file`, :mod:`~vim_mm.checkpoints.unpickle` and
  :mod:`~vim_mm.checkpoints.plain`; :mod:`~vim_mm.checkpoints.download` brings it from a URL;
- :mod:`~vim_mm.checkpoints.conversion` gives weights of Vim from elsewhere the names of our models,
  by :mod:`~vim_mm.checkpoints.container`, :mod:`~vim_mm.checkpoints.names` and
  :mod:`~vim_mm.checkpoints.switches`, and :mod:`~vim_mm.checkpoints.report` accounts for them;
- :mod:`~vim_mm.checkpoints.reading` is what MMEngine reads by, and
  :mod:`~vim_mm.checkpoints.state` checks the state of a training in a file,
  :mod:`~vim_mm.checkpoints.pretrained` what ``init_cfg`` of a backbone does;
- :mod:`~vim_mm.checkpoints.provenance` compares what a file notes with a model.

What is imported here needs no OpenMMLab library. The last four and
``converted_file`` need MMEngine.
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
