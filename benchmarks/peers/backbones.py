"""Backbones that ``benchmarks/benchmark_backbone.py`` holds side by side, and their runs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from statistics import median

import timm
import torch
from torch import Tensor, nn

from benchmarks.measure.timing import (
    DTYPES,
    count_launches,
    device_times,
    enqueue_times,
    peak_memory,
    wall_times,
)
from vim_mm.models import VisionMamba
from vim_mm.models.arguments import ARCHS

from . import published_vim
from .published_vim import PublishedVim

PATCH = 16
DEIT_LAYERS = 12
CONVNEXT_LAYERS = {'tiny': 18, 'small': 36, 'base': 36}
# By name, the class token: as released for classification, and as ours is for dense prediction.
PUBLIC_VIM = {'public Vim': 'middle', 'public Vim without class token': 'none'}
# timm's, which every mode can run.
TIMM_PEERS = ('DeiT', 'ConvNeXt')
PEERS = (*PUBLIC_VIM, *TIMM_PEERS)
# Of float32 tokens, relative to the largest: a peer that differs more computes something else.
AGREEMENT = 1e-3


@dataclass(frozen=True)
class Contender:
    """A backbone to measure.

    Attributes:
        name (str): What tables call it.
        layers (int): Its depth.
        build (Callable): From the side of the image in pixels and whether layers are recomputed in
            backward, to a module that takes images; its output is a tensor or a tuple of one.
        modes (tuple[str, ...]): Those of ``MODES`` that it can run in.
    """

    name: str
    layers: int
    build: Callable[[int, bool], nn.Module]
    modes: tuple[str, ...]


def vim(
    arch: str | dict[str, int],
    method: str,
    side: int,
    with_cp: bool = False,
    cls_token: str = 'none',
    ssm_cfg: dict | None = None,
) -> VisionMamba:
    """Ours, made for that size, with all tokens after the last norm as output."""
    torch.manual_seed(0)
    return VisionMamba(
        arch,
        img_size=side,
        out_type='raw',
        out_feature='norm',
        cls_token=cls_token,
        discretization_method=method,
        with_cp=with_cp,
        ssm_cfg=ssm_cfg,
    )


def published(arch: str, cls_token: str, side: int, with_cp: bool = False) -> PublishedVim:
    """Public Vim, with the weights of our ``zoh`` of the same class token."""
    if with_cp:
        raise ValueError('public Vim recomputes no layers')
    return PublishedVim(vim(arch, 'zoh', side, cls_token=cls_token))


def deit(arch: str, side: int, with_cp: bool = False) -> nn.Module:
    """timm's DeiT of that width, on PyTorch's fused attention, without its head."""
    torch.manual_seed(0)
    model = timm.create_model(f'deit_{arch}_patch{PATCH}_224', img_size=side, num_classes=0)
    model.set_grad_checkpointing(with_cp)
    model.forward = model.forward_features
    return model


def convnext(arch: str, side: int, with_cp: bool = False) -> nn.Module:
    """timm's ConvNeXt of that size, without its head: other parameters, and other widths."""
    torch.manual_seed(0)
    model = timm.create_model(f'convnext_{arch}', num_classes=0)
    model.set_grad_checkpointing(with_cp)
    model.forward = model.forward_features
    return model


MODES = {
    'infer': 'inference, eager',
    'graph': 'inference in a CUDA graph',
    'compiled_graph': 'inference, torch.compile for this size, in a CUDA graph',
    'compile': 'inference, torch.compile for this size',
    'dynamic': 'inference, torch.compile for any size',
    'train': 'training step, eager',
    'train_cp': 'training step, eager, layers recomputed in backward',
}

GRAPHS = ('graph', 'compiled_graph')
COMPILED = ('compile', 'dynamic', 'compiled_graph')


def contenders(arch: str, methods: list[str], peers: list[str]) -> dict[str, Contender]:
    """Ours by method, then those of ``PEERS`` that are asked for, by name."""
    depth = ARCHS[arch]['num_layers']
    everything = tuple(MODES)
    known = {
        **{
            # Its kernels are no operators that torch.compile could trace.
            name: (depth, partial(published, arch, cls_token), ('infer', 'graph', 'train'))
            for name, cls_token in PUBLIC_VIM.items()
        },
        'DeiT': (DEIT_LAYERS, partial(deit, arch), everything),
        'ConvNeXt': (CONVNEXT_LAYERS[arch], partial(convnext, arch), everything),
    }
    ours = {name: (depth, partial(vim, arch, name), everything) for name in methods}
    chosen = ours | {name: known[name] for name in peers}
    return {name: Contender(name, *what) for name, what in chosen.items()}


def absence(name: str, device: str) -> str | None:
    """Why a peer cannot run on this device, or None."""
    if name not in PUBLIC_VIM:
        return None
    return 'its kernels need CUDA' if device != 'cuda' else published_vim.missing()


class Workload:
    """A backbone on random images, in one of ``MODES``.

    Args:
        model (nn.Module): Takes images.
        images (Tensor): (B, 3, H, W).
        dtype (str): 'fp32', or the word of autocast's dtype.
    """

    def __init__(self, model: nn.Module, images: Tensor, dtype: str):
        self.model = model
        self.images = images
        self.dtype = dtype
        self.grad: Tensor | None = None

    def _autocast(self) -> AbstractContextManager:
        return torch.autocast(
            self.images.device.type, DTYPES[self.dtype], enabled=self.dtype != 'fp32'
        )

    def tokens(self) -> Tensor:
        """The output of the backbone under autocast."""
        with self._autocast():
            out = self.model(self.images)
        return out[0] if isinstance(out, tuple) else out

    def infer(self) -> Tensor:
        """:meth:`tokens` without autograd."""
        with torch.no_grad():
            return self.tokens()

    def train(self) -> None:
        """Forward and backward from a fixed gradient; the gradients are released at the end."""
        out = self.tokens()
        if self.grad is None:
            self.grad = torch.randn_like(out)
        out.backward(self.grad)
        self.model.zero_grad(set_to_none=True)

    def stored_bytes(self) -> int:
        """Of parameters, buffers and images."""
        tensors = [*self.model.parameters(), *self.model.buffers(), self.images]
        return sum(t.numel() * t.element_size() for t in tensors)


def measure(workload: Workload, mode: str, trials: int, seconds: float) -> dict[str, float]:
    """Figures of a workload in one mode.

    Args:
        workload (Workload): On CUDA for ``GRAPHS``. For 'train_cp' of a model that recomputes
            layers.
        mode (str): One of ``MODES``.
        trials (int): Calls that are timed at most.
        seconds (float): Limit on the time for them.

    Returns:
        dict[str, float]: Median ``seconds`` of a call. Eager modes also have ``peak_bytes``, the
        most that is allocated in a call including parameters and images, and on CUDA
        ``host_seconds``, after which a call returns, and ``launches`` of kernels, copies and fills.
    """
    device = workload.images.device.type
    training = mode.startswith('train')
    workload.model.train(training)
    run = workload.train if training else workload.infer
    if mode in COMPILED:
        torch.compiler.reset()
        model = torch.compile(workload.model, fullgraph=True, dynamic=mode == 'dynamic')
        run = Workload(model, workload.images, workload.dtype).infer
    if mode in GRAPHS:
        return {'seconds': median(device_times(lambda: run, trials))}
    figures = {'seconds': median(wall_times(run, trials, seconds))}
    if mode in COMPILED:
        return figures
    figures['peak_bytes'] = peak_memory(run, device) + workload.stored_bytes()
    if device == 'cuda':
        figures['host_seconds'] = median(enqueue_times(run, trials))
        figures['launches'] = count_launches(run)
    return figures


def hold_to(ours: nn.Module, theirs: nn.Module, images: Tensor) -> float:
    """Compare two backbones in float32.

    Args:
        ours (nn.Module): A backbone; takes images.
        theirs (nn.Module): One that should be the same function.
        images (Tensor): (B, 3, H, W).

    Returns:
        float: The largest difference of their tokens over the largest of ours.

    Raises:
        RuntimeError: It is above ``AGREEMENT``.
    """
    a, b = (Workload(model.eval(), images, 'fp32').infer() for model in (ours, theirs))
    error = float((a - b).abs().max() / a.abs().max())
    if not error <= AGREEMENT:
        raise RuntimeError(f'the outputs differ by {error:.1e}: not comparable')
    return error
