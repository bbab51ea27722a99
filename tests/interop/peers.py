"""The tests of mamba_ssm and VMamba find our functions: pytest's plugin of ``nox -s peers``.

``MAMBA`` is a folder of the repository state-spaces/mamba, whose reference functions they call.
"""

import os
import sys
from types import ModuleType

import torch
import torch.nn.functional as F

from vim_mm.interop import mamba_ssm as ours


def causal_conv1d_fn(x, weight, bias, activation):
    channels, width = weight.shape
    assert activation == 'silu'
    return F.silu(F.conv1d(F.pad(x, (width - 1, 0)), weight[:, None], bias, groups=channels))


for name in ('selective_scan_cuda', 'selective_scan_cuda_core', 'selective_scan_cuda_oflex'):
    sys.modules[name] = getattr(ours, name)
package = ModuleType('mamba_ssm')  # without what its own imports: Mamba-2 and 3
package.__path__ = [os.environ['MAMBA'] + '/mamba_ssm']
sys.modules['mamba_ssm'] = package

import mamba_ssm.ops.selective_scan_interface as theirs  # noqa: E402

theirs.causal_conv1d_fn = causal_conv1d_fn
theirs.selective_scan_fn = ours.selective_scan_fn
theirs.mamba_inner_fn = ours.mamba_inner_fn
if not torch.cuda.is_available():
    torch.Tensor.float = torch.Tensor.double  # the reference functions compute in float32
