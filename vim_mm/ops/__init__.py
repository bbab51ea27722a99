"""The selective scan and its discretizations: PyTorch and einops, no OpenMMLab library."""

from vim_mm.ops import flops
from vim_mm.ops.causal_conv1d import causal_conv1d
from vim_mm.ops.dense import selective_scan_dense_ref
from vim_mm.ops.discretization import METHODS, discretize
from vim_mm.ops.reference import selective_scan_ref
from vim_mm.ops.selective_scan import path_of, selective_scan_fn, selective_scan_grouped_fn

__all__ = [
    'METHODS',
    'causal_conv1d',
    'discretize',
    'flops',
    'path_of',
    'selective_scan_dense_ref',
    'selective_scan_fn',
    'selective_scan_grouped_fn',
    'selective_scan_ref',
]
