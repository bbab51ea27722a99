"""Which path a layer takes, fused or plain: decided here, once for each layer and call.

Fused operators read parameters and call no module. Hooks, adapters, quantized layers and whatever
else takes a module's place would be passed over, so each of them has the module called instead:
a module is read only where a call would do nothing else. :func:`path_of_block` decides for a norm
and its mixer, which are handed the answer; :func:`path_of_mixer` for a mixer that is called by
itself. Nothing is kept between calls, so nothing can be out of date; it takes a few microseconds a
layer.
"""

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vim_mm.compat import has_hooks_on_all_modules
from vim_mm.ops.backends import OPERATORS, chosen_backend
from vim_mm.ops.block import MAX_TAPS, FusedMixer
from vim_mm.ops.discretization import get_method
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


# What the formulas read of a mixer's module instead of calling it: why it must be called after all,
# and its parameters. The bias of the step size is added inside the scan.
READS = {
    'in_proj': (why_call_linear, ('weight', 'bias')),
    'out_proj': (why_call_linear, ('weight', 'bias')),
    'conv1d': (why_call_conv1d, ('weight', 'bias')),
    'x_proj': (why_call_unbiased, ('weight',)),
    'dt_proj': (why_call_biased, ('weight', 'bias')),
}


class MixerPath(NamedTuple):
    """The path of a mixer in one call.

    Attributes:
        fused (FusedMixer | None): What the fused operator takes, None where the path is plain.
        dtype (torch.dtype | None): In which that operator computes.
        called (Collection[str]): On the plain path, the names in ``READS`` of modules that must be
            called, of one direction at least; the others are read.
    """

    fused: FusedMixer | None
    dtype: torch.dtype | None
    called: Collection[str]


class BlockPath(NamedTuple):
    """The paths of a norm and its mixer in one call.

    Attributes:
        norm (tuple[torch.dtype, str] | None): Dtype and backend of the fused operator, None where
            the norm is called.
        mixer (MixerPath | None): None where the mixer must be called as a module, with tokens only.
    """

    norm: tuple[torch.dtype, str] | None
    mixer: MixerPath | None


def path_of_block(
    norm: nn.Module,
    mixer: nn.Module,
    kind: type[nn.Module],
    residual: Tensor,
    with_reset: bool = False,
) -> BlockPath:
    """The path of a layer that normalizes the stream ``residual`` and mixes it.

    Args:
        norm (nn.Module): In the place of an RMSNorm.
        mixer (nn.Module): In the place of a ``kind``.
        kind (type[nn.Module]): :class:`~vim_mm.models.Mamba`, whose forward takes a path.
        residual (Tensor): (B, L, C).
        with_reset (bool): As of :func:`path_of_mixer`.
    """
    if why_call_all() is not None:
        return BlockPath(None, None)
    fused = fused_path(mixer, residual)
    path = None
    if why_call(mixer, kind) is None:
        path = _path_of_mixer(mixer, fused, with_reset)
    if fused is None or why_call_norm(norm) is not None:
        return BlockPath(None, path)
    # Compiled code has a plain norm before a plain mixer, see path_of_norm.
    if torch.compiler.is_compiling() and (path is None or path.fused is None):
        return BlockPath(None, path)
    return BlockPath(fused, path)


def path_of_norm(
    norm: nn.Module, mixer: nn.Module, residual: Tensor
) -> tuple[torch.dtype, str] | None:
    """:attr:`BlockPath.norm` of a norm by itself, in the dtype and backend of ``mixer``.

    Compiled code has the plain one: Inductor fuses it, and of an operator that it has not met in
    the layers it prints the operands, with all that went before, which doubles with every layer.
    """
    fused = fused_path(mixer, residual)
    if fused is None or torch.compiler.is_compiling() or _why_call_norm(norm) is not None:
        return None
    return fused


def path_of_mixer(
    mixer: nn.Module, hidden_states: Tensor, with_reset: bool = False, with_states: bool = False
) -> MixerPath:
    """The path of a mixer by itself.

    Args:
        mixer (nn.Module): With the attributes of :class:`~vim_mm.models.Mamba`.
        hidden_states (Tensor): (B, L, C).
        with_reset (bool): Whether it is called with resets, which Triton's operator does not take.
        with_states (bool): Whether it takes or gives a state, as no fused operator does.
    """
    if why_call_all() is not None:
        return MixerPath(None, None, (*READS,))
    fused = None if with_states else fused_path(mixer, hidden_states)
    return _path_of_mixer(mixer, fused, with_reset)


def _path_of_mixer(
    mixer: nn.Module, fused: tuple[torch.dtype, str] | None, with_reset: bool
) -> MixerPath:
    if fused is not None and not (with_reset and fused[1] != 'native'):
        dtype, backend = fused
        arguments = fused_arguments(mixer, backend)
        if arguments is not None:
            return MixerPath(arguments, dtype, ())
    called = []
    for name, (why, names) in mixer.reads.items():
        # The plain path calls out_proj whatever it is.
        if why is None or name == 'out_proj':
            continue
        module = mixer._modules[name]
        own = module._parameters
        if why(module) is not None or why_not_read(*(own.get(n) for n in names)) is not None:
            called.append(name.removesuffix('_b'))
    return MixerPath(None, None, called)


def fused_path(mixer: nn.Module, hidden_states: Tensor) -> tuple[torch.dtype, str] | None:
    """Dtype and backend of the fused operators by device and dtype, None where there are none.

    Fused and plain operators have the same dtypes: autocast's, which leaves float64 alone, else the
    parameters'. A mixer in a wrapper that passes attributes on is asked like any other.
    """
    if not hidden_states.is_cuda or not hasattr(mixer, 'may_fuse'):
        return None
    autocast = torch.is_autocast_enabled('cuda') and hidden_states.dtype != torch.float64
    dtype = torch.get_autocast_dtype('cuda') if autocast else mixer.parameters_dtype()
    backend, reason = _choose_backend(mixer, 'cuda', dtype)
    return (dtype, backend) if reason is None else None


def _choose_backend(
    mixer: nn.Module, device_type: str, dtype: torch.dtype
) -> tuple[str, str | None]:
    """The backend of the fused operators, which is that of the scan, or why there are none."""
    if not mixer.may_fuse:
        return '', 'fused is False'
    if device_type != 'cuda':
        return '', f'there is none for {device_type}'
    if mixer.d_conv > MAX_TAPS:
        return '', f'd_conv is {mixer.d_conv}, more than {MAX_TAPS}'
    backend = chosen_backend(mixer.backend, mixer.use_cuda_kernel, device_type, dtype)
    if backend not in OPERATORS:
        return backend, f'the compiled scan is not taken for {dtype}'
    return backend, None


def fused_arguments(mixer: nn.Module, backend: str = 'native') -> FusedMixer | None:
    """What the fused operator takes of a mixer, None where a module of it must be called."""
    parameters, reason = _read_modules(mixer)
    if reason is not None:
        return None
    method = get_method(mixer.discretization_method).id
    scale = 0.5 if mixer.average else 1.0
    return FusedMixer(parameters, method, [*mixer.reverse], scale, backend)


def reads_all(mixer: nn.Module) -> bool:
    """Whether the parameters of all modules of a mixer are read, and none of them is called."""
    return why_call_all() is None and _read_modules(mixer)[1] is None


def _read_modules(mixer: nn.Module) -> tuple[list[Tensor | None], str | None]:
    """Parameters in the order of :class:`FusedMixer`, and why a module must be called.

    By the dicts of modules and parameters, because through attributes it takes longer than several
    launches.
    """
    modules, parameters = mixer._modules, []
    for name, (why, names) in mixer.reads.items():
        module = mixer if why is None else modules[name]
        reason = None if why is None else why(module)
        if reason is not None:
            return [], f'{name} {reason}'
        own = module._parameters
        for attribute in names or (name,):  # read(), without a call for each
            parameters.append(own[attribute] if attribute in own else getattr(module, attribute))
    return parameters, why_not_read(*parameters)


def why_plain_mixer(mixer: nn.Module, device_type: str, dtype: torch.dtype | None) -> str | None:
    """Why a mixer would take its plain path; arguments as of :func:`path_of_layers`."""
    return _why_not_fused(mixer, device_type, dtype) or why_call_all() or _read_modules(mixer)[1]


def why_plain_norm(
    norm: nn.Module, mixer: nn.Module, device_type: str, dtype: torch.dtype | None
) -> str | None:
    """Why a norm beside that mixer would be called; arguments as of :func:`path_of_layers`."""
    return _why_not_fused(mixer, device_type, dtype) or _why_call_norm(norm)


def _why_not_fused(mixer: nn.Module, device_type: str, dtype: torch.dtype | None) -> str | None:
    """Why there are no fused operators for a device and a dtype, None where there are."""
    if not hasattr(mixer, 'may_fuse'):
        return f'the mixer is a {type(mixer).__module__}.{type(mixer).__qualname__}'
    return _choose_backend(mixer, device_type, dtype or mixer.parameters_dtype())[1]


def _why_call_norm(norm: nn.Module) -> str | None:
    return why_call_all() or why_call_norm(norm)


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
