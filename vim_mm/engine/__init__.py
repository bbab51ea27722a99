"""Training: the runner, its optimizers and hooks; importing this registers them."""

from vim_mm.checkpoints.file import UnsafeCheckpointError
from vim_mm.checkpoints.provenance import CheckpointMismatchError
from vim_mm.engine import flops
from vim_mm.engine.label_file import LabelFile, LabelMaps
from vim_mm.engine.mmengine_patches import activate
from vim_mm.engine.optimization.averaging import SideEMAHook
from vim_mm.engine.optimization.flat_data_parallel import FlatDataParallel
from vim_mm.engine.optimization.graphed_step import GraphedStepHook
from vim_mm.engine.optimization.layer_decay import LayerDecayOptimWrapperConstructor
from vim_mm.engine.optimization.mixed_precision import BFloat16OptimWrapper
from vim_mm.engine.optimization.schedule import DeiTCosineLR
from vim_mm.engine.runner import VimRunner
from vim_mm.engine.strategy import build_runner, wrap_vim_blocks

__all__ = [
    'BFloat16OptimWrapper',
    'CheckpointMismatchError',
    'DeiTCosineLR',
    'FlatDataParallel',
    'GraphedStepHook',
    'LabelFile',
    'LabelMaps',
    'LayerDecayOptimWrapperConstructor',
    'SideEMAHook',
    'UnsafeCheckpointError',
    'VimRunner',
    'activate',
    'build_runner',
    'flops',
    'wrap_vim_blocks',
]
