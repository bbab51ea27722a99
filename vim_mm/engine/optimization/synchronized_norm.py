"""SyncBN of which ``torch.compile`` makes one graph with the layers around it.

At PyTorch's own, graphs break: a head with 15 of these layers is compiled in dozens of pieces, and
its functions meet the compiler's limit of recompilations. Here the exchange is one operator that
the compiler does not look into, and all else are operators that it fuses.
"""

from collections.abc import Callable
from types import MethodType

import torch
from mmengine.dist import get_rank, get_world_size
from torch import Tensor, distributed, nn
from torch.nn import functional as F


@torch.library.custom_op('vim_mm::sum_over_processes', mutates_args=())
def sum_over_processes(x: Tensor) -> Tensor:
    """The sum over all processes of a tensor that has one shape in each.

    The derivative is that of the sum of all processes' losses, and itself such a sum.
    """
    total = x.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total)
    return total


@sum_over_processes.register_fake
def _sum_over_processes_fake(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _sum_of_gradients(ctx, grad: Tensor) -> Tensor:
    return sum_over_processes(grad)


sum_over_processes.register_autograd(_sum_of_gradients)


def trace_synchronized_norms(model: nn.Module) -> list[Callable[[], None]]:
    """Let ``torch.compile`` see :func:`synchronized_batch_norm` in place of SyncBN's own forward.

    Calls that are not compiled stay PyTorch's, and so do layers with a process group of their own,
    with cumulative averages or with a forward of their own. Each process must compile the same
    calls: images must have one size.

    Returns:
        list: What undoes it.
    """
    if get_world_size() == 1:
        return []
    layers = [
        module
        for module in model.modules()
        if isinstance(module, nn.SyncBatchNorm)
        and type(module).forward is nn.SyncBatchNorm.forward
        and 'forward' not in vars(module)
        and module.momentum is not None
        and module.process_group in (None, distributed.group.WORLD)
    ]
    for layer in layers:
        # A method, which a copy of the layer has of itself.
        layer.forward = MethodType(_traced, layer)
    return [lambda layer=layer: delattr(layer, 'forward') for layer in layers]


def _traced(layer: nn.SyncBatchNorm, x: Tensor) -> Tensor:
    if layer.training and torch.compiler.is_compiling():
        return synchronized_batch_norm(layer, x)
    return nn.SyncBatchNorm.forward(layer, x)


def synchronized_batch_norm(layer: nn.SyncBatchNorm, x: Tensor) -> Tensor:
    """SyncBN's training pass: normalized by the statistics of all processes' inputs together.

    Args:
        layer: In training, whose running statistics are updated.
        x: (B, C, ...), floating point; B and what follows C may differ between processes, and
            B may be 0 in some.

    Returns:
        Tensor: Of the shape and dtype of x; computed in float32, float64 of such inputs.
    """
    channels, processes = x.shape[1], get_world_size()
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    var, mean = torch.var_mean(wide, [0, *range(2, x.dim())], correction=0)
    own = torch.cat([mean, var, mean.new_full((1,), x.numel() // channels)])
    # Each process fills its row: statistics are combined exactly, not by sums of squares.
    rows = F.pad(own[None], (0, 0, get_rank(), processes - 1 - get_rank()))
    means, variances, counts = sum_over_processes(rows).split([channels, channels, 1], dim=1)
    # Of a process without values they are NaN.
    means, variances = (torch.where(counts > 0, each, 0) for each in (means, variances))
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    var = (counts * (variances + (means - mean).square())).sum(0) / total
    if layer.track_running_stats:
        with torch.no_grad():
            layer.num_batches_tracked.add_(1)
            layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), layer.momentum)
            unbiased = var * (total / (total - 1))
            layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), layer.momentum)
    scale, shape = torch.rsqrt(var + layer.eps), (-1, *(1 for _ in x.shape[2:]))
    y = (wide - mean.view(shape)) * scale.view(shape)
    if layer.affine:
        y = y * layer.weight.view(shape) + layer.bias.view(shape)
    return y.to(x.dtype)
