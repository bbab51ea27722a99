"""Where a fused operator may stand in for a module: only where a call would do nothing else.

Fused operators read parameters and call no module. Hooks, adapters, quantized layers and whatever
else takes a module's place would be passed over, so each of them has the module called instead.
The question is asked at every call: it takes a few microseconds a layer, and nothing that is kept
could be out of date (``benchmarks/benchmark_host.py`` measures it).
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vim_mm.compat import has_hooks_on_all_modules
from vim_mm.ops.exported import exporting_to_onnx

# A parameter, what FSDP or a parametrization puts in its place, or none. Subclasses of tensors
# (sharded, quantized) have products of their own.
_PLAIN_TENSORS = frozenset((nn.Parameter, Tensor, type(None)))


class LayerPath(NamedTuple):
    """The path that a part of a model takes: fused if there is no reason against it.

    Attributes:
        name (str): Of the module, as ``named_modules`` gives it.
        reason (str | None): Why its plain path is taken, None where the fused one is.
    """

    name: str
    reason: str | None

    def __str__(self) -> str:
        return f'{self.name}: ' + ('fused' if self.reason is None else f'plain, {self.reason}')


def why_call(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Why ``module`` must be called, None where that is ``kind.forward`` on its parameters.

    A parametrized module (``torch.nn.utils.parametrize``) has the forward of its kind; its
    parameters are then to be read as attributes. Hooks on all modules are not looked at here, see
    :func:`why_call_all`.
    """
    # Hooks have no public names. By the dict: eight modules a layer are asked at every call.
    own = module.__dict__
    if (
        own['_forward_hooks']
        or own['_forward_pre_hooks']
        or own['_backward_hooks']
        or own['_backward_pre_hooks']
    ):
        return 'has hooks'
    if 'forward' in own:
        return 'has a forward of its own'
    if type(module) is not kind and type(module).forward is not kind.forward:
        return f'is a {type(module).__module__}.{type(module).__qualname__}'
    return None


def why_call_all() -> str | None:
    """Why every module must be called, None outside of exports and of hooks on all modules."""
    # Linear layers that are called have their weight where ONNX's quantization looks for it.
    if exporting_to_onnx():
        return 'the model is exported to ONNX'
    return 'there are hooks on all modules' if has_hooks_on_all_modules() else None


def why_call_linear(module: nn.Module) -> str | None:
    """:func:`why_call` of a linear layer, with a bias or without."""
    return why_call(module, nn.Linear)


def why_call_biased(module: nn.Module) -> str | None:
    """:func:`why_call` of a linear layer with a bias."""
    reason = why_call(module, nn.Linear)
    return 'has no bias' if reason is None and read(module, 'bias') is None else reason


def why_call_unbiased(module: nn.Module) -> str | None:
    """:func:`why_call` of a linear layer without a bias."""
    reason = why_call(module, nn.Linear)
    return 'has a bias' if reason is None and read(module, 'bias') is not None else reason


def why_call_conv1d(module: nn.Module) -> str | None:
    """:func:`why_call` of a depthwise convolution along the sequence."""
    reason = why_call(module, nn.Conv1d)
    if reason is None and not (
        module.stride == module.dilation == (1,)
        and module.padding == (0,)
        and module.groups == module.in_channels == module.out_channels
    ):
        reason = 'has another stride, dilation, padding or number of groups'
    return reason


def why_call_patches(module: nn.Module) -> str | None:
    """:func:`why_call` of a convolution of patches that do not overlap."""
    reason = why_call(module, nn.Conv2d)
    if reason is None and not (
        module.stride == module.kernel_size
        and module.padding == (0, 0)
        and module.dilation == (1, 1)
        and module.groups == 1
    ):
        reason = 'has another stride, dilation, padding or number of groups'
    return reason or why_not_read(module.weight, module.bias)


def why_call_norm(module: nn.Module) -> str | None:
    """:func:`why_call` of an RMSNorm over the last dimension, with a weight and an epsilon."""
    reason = why_call(module, nn.RMSNorm)
    if reason is not None:
        return reason
    if module.eps is None or module.weight is None or len(module.normalized_shape) != 1:
        return 'has no weight, no epsilon or several dimensions'
    return why_not_read(module.weight)


def why_not_read(*parameters: Tensor | None) -> str | None:
    """Why an operator that knows plain tensors only cannot take these, or None."""
    if _PLAIN_TENSORS.issuperset(map(type, parameters)):
        return None
    odd = next(type(p) for p in parameters if type(p) not in _PLAIN_TENSORS)
    return f'has a parameter of {odd.__module__}.{odd.__qualname__}'


def read(module: nn.Module, name: str) -> Tensor | None:
    """The attribute, which need not be a parameter of its own (FSDP, parametrizations)."""
    own = module._parameters
    return own[name] if name in own else getattr(module, name)


def path_of_layers(
    model: nn.Module, device: str | torch.device | None = None, dtype: torch.dtype | None = None
) -> list[LayerPath]:
    """The path that each patch embedding, norm and mixer of a model takes, and why.

    The patch embedding's is one product in place of a convolution, on any device; those of norm
    and mixer are the operators of :mod:`vim_mm.ops.block`, on CUDA alone.

    Args:
        model (nn.Module): Anything that holds backbones, mixers or neither.
        device (optional): Where it would run; None is where its first parameter is.
        dtype (optional): Of the activations, such as autocast's; None is that of the mixer's
            parameters.

    Returns:
        list[LayerPath]: In the order of ``named_modules``.
    """
    if device is None:
        device = next((p.device for p in model.parameters()), 'cpu')
    paths = []
    for name, module in model.named_modules():
        reasons = getattr(module, 'plain_reasons', None)
        if reasons is not None:
            found = reasons(torch.device(device).type, dtype)
            paths += [LayerPath(f'{name}.{part}'.strip('.'), why) for part, why in found.items()]
    return paths


def summarize_paths(paths: Iterable[LayerPath]) -> list[LayerPath]:
    """One path for all layers whose same part takes it for the same reason.

    Args:
        paths (Iterable[LayerPath]): As :func:`path_of_layers` gives them.

    Returns:
        list[LayerPath]: Names such as 'layers.0-3,5.mixer', in the order of their first.
    """
    groups: dict[tuple[str, str, str | None], list[int]] = {}
    for name, reason in paths:
        layer = re.match(r'(.*\blayers\.)(\d+)(\..*)', name)
        before, number, after = layer.groups() if layer else (name, None, '')
        groups.setdefault((before, after, reason), []).extend([int(number)] if number else [])
    return [
        LayerPath(f'{before}{_ranges(numbers)}{after}', reason)
        for (before, after, reason), numbers in groups.items()
    ]


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers as '0-3,5'."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ','.join(str(a) if a == b else f'{a}-{b}' for a, b in runs)
