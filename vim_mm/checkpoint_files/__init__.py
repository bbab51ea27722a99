"""Files of checkpoints as data, whoever reads them: nothing here needs an OpenMMLab library."""

from vim_mm.checkpoint_files.array_pickle import CLASSES, NUMPY_FUNCTIONS
from vim_mm.checkpoint_files.file import NotACheckpointError, read_file

__all__ = ['CLASSES', 'NUMPY_FUNCTIONS', 'NotACheckpointError', 'read_file']
