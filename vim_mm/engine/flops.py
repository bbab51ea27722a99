"""MMEngine's complexity analysis counts the scan: importing this registers its operators.

``FlopAnalyzer`` traces a model with hooks on every module, so modules are called one by one and the
fused mixer never occurs: a traced mixer is its projections, convolutions and scans.
"""

import torch
from mmengine.analysis import complexity_analysis, jit_analysis

from vim_mm.ops.counted import counting_trace
from vim_mm.ops.discretization import method_name
from vim_mm.ops.flops import SCANS_OF_PYTHON, scan_multiply_adds
from vim_mm.ops.reference import ScanInputs


def scan_handle(inputs: list, outputs: list) -> int:
    """Multiply-adds of a traced scan, of whatever backend: MMEngine counts one."""
    given = ScanInputs(*inputs)
    u, A, method = given.u.type(), given.A.type(), given.method.toIValue()
    complex_A = A.dtype() in (torch.complex64, torch.complex128)
    return scan_multiply_adds(u.sizes(), A.sizes()[-1], method_name(method), complex_A)


# get_model_complexity_info takes no handles of its own, this table is all that it knows.
for _name in ('selective_scan_fwd', *(f'{name}_scan_fwd' for name in SCANS_OF_PYTHON)):
    complexity_analysis._DEFAULT_SUPPORTED_FLOP_OPS[f'vim_mm::{_name}'] = scan_handle


def count_scans_of_pytorch() -> None:
    """Have MMEngine's analysis trace a scan of PyTorch's operators as one operator, which counts.

    Other traces, which export a model, take such a scan apart. Called by ``activate()``.
    """
    trace = jit_analysis._get_scoped_trace_graph

    def counting(*args, **kwargs):
        with counting_trace():
            return trace(*args, **kwargs)

    jit_analysis._get_scoped_trace_graph = counting
