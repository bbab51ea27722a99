"""What the study compares: seven methods and two variants, each as a small Vision Mamba."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vim_mm.models.mamba import Mamba
from vim_mm.models.vision_mamba import VisionMamba
from vim_mm.ops import METHODS, selective_scan_grouped_fn


@dataclass(frozen=True)
class Arm:
    """One of the things compared.

    Attributes:
        method (str): The discretization.
        matched (bool): Scale B at initialization so that `foh` has the input gain of `zoh`.
        averaged (bool): Scan each direction in both orders and average, as `poly` does.
    """

    method: str
    matched: bool = False
    averaged: bool = False


# Their titles and comparisons are in study.py.
ARMS = {name: Arm(name) for name in METHODS} | {
    'foh_matched': Arm('foh', matched=True),
    'zoh_exact_averaged': Arm('zoh_exact', averaged=True),
}


@dataclass(frozen=True)
class Size:
    """Of a model: pixels of the input's side and of a patch's, channels, layers, outputs."""

    image: int
    patch: int
    outputs: int
    channels: int = 128
    layers: int = 6


class StudyMamba(Mamba):
    """The mixer where the study needs more than the product has. Takes the plain composition.

    Attributes:
        averaged (bool): Scan each direction in both orders; the output is the mean of the two.
            D and the gate are the same in both, so the mean of gated outputs is the gated mean.
        dt_divisor (float): Divides every step size, after softplus.
    """

    averaged = False
    dt_divisor = 1.0

    def fused_path(self, hidden_states: Tensor) -> None:
        """None: the fused block knows neither attribute."""
        return None

    def scan_directions(self, hidden_states: Tensor) -> Tensor:
        """As in Mamba but for the attributes, (B, K, d_inner, L)."""
        arguments = self.scan_arguments(hidden_states)
        if self.dt_divisor != 1:
            # In float32: a step size of 0.001 has few digits left in 16 bits after a softplus.
            raw = arguments['delta'].float() + arguments['delta_bias'][:, :, None]
            delta = F.softplus(raw) / self.dt_divisor
            arguments |= dict(delta=delta, delta_bias=None, delta_softplus=False)
        y = selective_scan_grouped_fn(**arguments, reverse=self.reverse)
        if not self.averaged:
            return y
        other = [not flag for flag in self.reverse]
        return (y + selective_scan_grouped_fn(**arguments, reverse=other)) / 2


class Net(nn.Module):
    """A small Vim and a linear head.

    Args:
        arm (Arm): What to compare.
        size (Size): Of the model.
        dense (bool): Whether each token predicts its own pixels; else their mean predicts once.
        dt_range (tuple): Least and largest step size at initialization.
        drop_path (float): Of the last layer, growing linearly from 0.
    """

    def __init__(
        self,
        arm: Arm,
        size: Size,
        dense: bool,
        dt_range: tuple[float, float] = (1e-3, 0.1),
        drop_path: float = 0.1,
    ):
        super().__init__()
        self.dense = dense
        self.backbone = VisionMamba(
            arch=dict(embed_dims=size.channels, num_layers=size.layers),
            img_size=size.image,
            patch_size=size.patch,
            in_channels=1,
            out_type='raw',
            out_feature='norm',
            discretization_method=arm.method,
            ssm_cfg=dict(dt_min=dt_range[0], dt_max=dt_range[1]),
            drop_path_rate=drop_path,
        )
        self.head = nn.Linear(size.channels, size.outputs)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)
        if arm.matched:
            self._match_gain(dt_range)
        if arm.averaged:
            self.use_study_mixers(averaged=True)

    def mixers(self) -> list[Mamba]:
        return [layer.mixer for layer in self.backbone.layers]

    @torch.no_grad()
    def _match_gain(self, dt_range: tuple[float, float]) -> None:
        """Scale B by the mean of dt over the mean of dt² / 2, dt log-uniform in its range."""
        for mixer in self.mixers():
            rows = slice(mixer.dt_rank, mixer.dt_rank + mixer.d_state)
            for weight in mixer._each('x_proj', 'weight'):
                weight[rows] *= 4 / sum(dt_range)

    def use_study_mixers(self, **attributes: bool | float) -> None:
        """Turn every mixer into a :class:`StudyMamba` with these attributes, parameters kept."""
        for mixer in self.mixers():
            mixer.__class__ = StudyMamba
            for name, value in attributes.items():
                setattr(mixer, name, value)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 1, H, W) to (B, outputs), or (B, L, outputs) if dense; L tokens row by row."""
        (tokens,) = self.backbone(images)
        return self.head(tokens if self.dense else tokens.mean(1))


def make_net(
    arm: Arm, size: Size, dense: bool, seed: int, dt_range: tuple[float, float], drop_path: float
) -> Net:
    """The network of a seed, on the CPU: every arm has the same numbers, but for ``matched``."""
    torch.manual_seed(seed)
    return Net(arm, size, dense, dt_range, drop_path)
