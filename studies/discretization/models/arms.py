"""What the study compares: methods, rules of two samples and variants, as small Vision Mambas."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from studies.discretization.models.two_sample import two_sample_scan
from vim_mm.models.fused import MixerPath
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
        plain (bool): Take the plain composition of the block, not the fused one.
        rule (str): In place of the method, one in ``RULES``; '' for none.
        weight (str): Of exp_trapezoidal: 'half', or what learns one, 'channel' or 'token'.
        dt (tuple, optional): dt_min, dt_max and dt_scale of its own; None for those of the setting.
    """

    method: str
    matched: bool = False
    averaged: bool = False
    plain: bool = False
    rule: str = ''
    weight: str = 'half'
    dt: tuple[float, float, float] | None = None


# dt_min, dt_max and dt_scale of the published segmentation runs, see protocol.md. zoh's range there
# is the one that all methods have in round one.
PUBLISHED = {
    'bilinear': (0.0005, 0.03, 0.3),
    'foh': (0.0005, 0.02, 0.25),
    'poly': (0.0005, 0.02, 0.3),
    'highorder': (0.0003, 0.015, 0.2),
    'rk4': (0.0005, 0.05, 0.5),
}
ROUND_ONE = {name: Arm(name) for name in METHODS} | {
    'foh_matched': Arm('foh', matched=True),
    'zoh_exact_averaged': Arm('zoh_exact', averaged=True),
}
# What is tested at other distances of patches, and the control's runs once more.
SPACED = ('zoh', 'zoh_exact', 'bilinear', 'exp_trapezoidal', 'foh_two_sample')
AGAIN = ('zoh_exact_again', 'zoh_exact_plain')
# Their titles and comparisons are in study.py and second.py.
ARMS = {
    **ROUND_ONE,
    **{f'{name}_published': Arm(name, dt=dt) for name, dt in PUBLISHED.items()},
    'zoh_exact_again': Arm('zoh_exact'),
    'zoh_exact_plain': Arm('zoh_exact', plain=True),
    # Where a rule has a scan of a method, the rule says which.
    'exp_trapezoidal': Arm('zoh', rule='exp_trapezoidal'),
    'exp_trapezoidal_channel': Arm('zoh', rule='exp_trapezoidal', weight='channel'),
    'exp_trapezoidal_token': Arm('zoh', rule='exp_trapezoidal', weight='token'),
    'foh_two_sample': Arm('zoh', rule='foh_two_sample'),
}


@dataclass(frozen=True)
class Size:
    """Of a model: pixels of the input's side and of a patch's, channels, layers, outputs."""

    image: int
    patch: int
    outputs: int
    channels: int = 128
    layers: int = 6


@cache
def _compiled_scan() -> Callable[..., Tensor]:
    """:func:`two_sample_scan` in fewer passes over memory. Sums over many values round otherwise.

    Its kernels are not chosen by how fast they ran, so that a run repeats.
    """
    options = {'deterministic': True}
    return torch.compile(two_sample_scan, dynamic=False, fullgraph=True, options=options)


class StudyMamba(Mamba):
    """The mixer where the study needs more than the product has. Takes the plain composition.

    Attributes:
        averaged (bool): Scan each direction in both orders; the output is the mean of the two.
            D and the gate are the same in both, so the mean of gated outputs is the gated mean.
        dt_divisor (float): Divides every step size, after softplus.
        rule (str): The rule of two samples that takes the place of the method, '' for none.
        compiled (bool): Pass the rule through ``torch.compile`` in training: operator by operator
            it moves three times the bytes.
        observe (Callable): Called with the step sizes (B, K, d_inner, L) and A (K, d_inner, N) of
            every forward, None for nothing.
    """

    averaged = False
    dt_divisor = 1.0
    rule = ''
    compiled = False
    observe: Callable[[Tensor, Tensor], None] | None = None

    def scan_directions(self, hidden_states: Tensor, path: MixerPath | None = None) -> Tensor:
        """As in Mamba but for the attributes, (B, K, d_inner, L)."""
        arguments = self.scan_arguments(hidden_states, path)
        if self.dt_divisor != 1 or self.observe is not None:
            # In float32: a step size of 0.001 has few digits left in 16 bits after a softplus.
            raw = arguments['delta'].float() + arguments['delta_bias'][:, :, None]
            delta = F.softplus(raw) / self.dt_divisor
            if self.observe is not None:
                self.observe(delta, arguments['A'])
            arguments |= dict(delta=delta, delta_bias=None, delta_softplus=False)
        if self.rule:
            del arguments['discretization_method']
            weight = self.weight(arguments['u'])
            # Tests have other shapes, each of which would be compiled anew.
            scan = _compiled_scan() if self.compiled and self.training else two_sample_scan
            return scan(self.rule, **arguments, reverse=self.reverse, weight=weight)
        y = selective_scan_grouped_fn(**arguments, reverse=self.reverse)
        if not self.averaged:
            return y
        other = [not flag for flag in self.reverse]
        return (y + selective_scan_grouped_fn(**arguments, reverse=other)) / 2

    def learn_weight(self, each: str) -> None:
        """Make the weight of exp_trapezoidal a parameter, 1/2 at first: of a channel or a token.

        The weight of a token is a sigmoid of a linear function of its channels, as in Mamba-3.
        """
        shape = (len(self.reverse), self.d_inner)
        if each == 'channel':
            self.weight_logit = nn.Parameter(torch.zeros(shape))
        else:
            self.weight_proj = nn.Parameter(torch.zeros(shape))
            self.weight_bias = nn.Parameter(torch.zeros(shape[0]))

    def weight(self, u: Tensor) -> Tensor | float:
        """The weight of exp_trapezoidal for u (B, K, d_inner, L), which broadcasts to that."""
        if 'weight_logit' in self._parameters:
            return self.weight_logit.sigmoid()[:, :, None]
        if 'weight_proj' not in self._parameters:
            return 0.5
        logit = torch.einsum('bkdl,kd->bkl', u, self.weight_proj.to(u.dtype))
        return (logit.float() + self.weight_bias[:, None]).sigmoid().unsqueeze(2)

    def no_weight_decay(self) -> set[str]:
        """As in Mamba, and the weight of a channel, which decay would draw to 1/2."""
        return super().no_weight_decay() | {'weight_logit', 'weight_bias'} & {*self._parameters}

    def dilate(self, by: int) -> None:
        """Put ``by`` - 1 zeros between the taps of the convolutions, so that they reach as far."""
        for end in self.endings:
            conv = getattr(self, f'conv1d{end}')
            width = by * (self.d_conv - 1) + 1
            wider = nn.Conv1d(
                self.d_inner, self.d_inner, width, groups=self.d_inner, bias=conv.bias is not None
            ).to(conv.weight)
            with torch.no_grad():
                wider.weight.zero_()
                wider.weight[:, :, ::by] = conv.weight
                if conv.bias is not None:
                    wider.bias.copy_(conv.bias)
            self.add_module(f'conv1d{end}', wider)
        self.d_conv = width


class Net(nn.Module):
    """A small Vim and a linear head.

    Args:
        arm (Arm): What to compare.
        size (Size): Of the model.
        dense (bool): Whether each token predicts its own pixels; else their mean predicts once.
        dt_range (tuple): Least and largest step size at initialization.
        drop_path (float): Of the last layer, growing linearly from 0.
        stride (int, optional): Horizontal distance of patches in pixels; None for that of the size.
    """

    def __init__(
        self,
        arm: Arm,
        size: Size,
        dense: bool,
        dt_range: tuple[float, float] = (1e-3, 0.1),
        drop_path: float = 0.1,
        stride: int | None = None,
    ):
        super().__init__()
        self.arm, self.size, self.dense, self.dt_range = arm, size, dense, dt_range
        stride = stride or size.patch
        dt_min, dt_max, dt_scale = arm.dt or (*dt_range, 1.0)
        self.backbone = VisionMamba(
            arch=dict(embed_dims=size.channels, num_layers=size.layers),
            img_size=(size.image, width_at(size, stride)),
            patch_size=size.patch,
            stride=(size.patch, stride),
            in_channels=1,
            out_type='raw',
            out_feature='norm',
            discretization_method=arm.method,
            ssm_cfg=dict(dt_min=dt_min, dt_max=dt_max, dt_scale=dt_scale),
            drop_path_rate=drop_path,
        )
        self.head = nn.Linear(size.channels, size.outputs)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)
        if arm.matched:
            self._match_gain(dt_range)
        if arm.averaged or arm.plain or arm.rule:
            self.use_study_mixers(averaged=arm.averaged, rule=arm.rule)
        if arm.weight != 'half':
            for mixer in self.mixers():
                mixer.learn_weight(arm.weight)

    def mixers(self) -> list[Mamba]:
        return [layer.mixer for layer in self.backbone.layers]

    @torch.no_grad()
    def _match_gain(self, dt_range: tuple[float, float]) -> None:
        """Scale B by the mean of dt over the mean of dt² / 2, dt log-uniform in its range."""
        for mixer in self.mixers():
            rows = slice(mixer.dt_rank, mixer.dt_rank + mixer.d_state)
            for weight in mixer._each('x_proj', 'weight'):
                weight[rows] *= 4 / sum(dt_range)

    def use_study_mixers(self, **attributes: Any) -> None:
        """Turn every mixer into a :class:`StudyMamba` with these attributes, parameters kept."""
        for mixer in self.mixers():
            mixer.__class__ = StudyMamba
            mixer.may_fuse = False  # the fused block knows none of these attributes
            for name, value in attributes.items():
                setattr(mixer, name, value)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 1, H, W) to (B, outputs), or (B, L, outputs) if dense; L tokens row by row."""
        (tokens,) = self.backbone(images)
        return self.head(tokens if self.dense else tokens.mean(1))


def width_at(size: Size, stride: int) -> int:
    """Pixels along an image that patches of that horizontal distance see.

    At other distances than that of the size a row has as many patches as fit into its length in
    time: half as many at twice the distance, twice as many at half.
    """
    return size.image if stride == size.patch else size.image - stride + size.patch


@torch.no_grad()
def at_spacing(net: Net, stride: int) -> Net:
    """The same network, in evaluation mode, for patches of another horizontal distance in pixels.

    Each patch has the position embedding of its place in pixels, bicubic between the places that
    there were in training. Step sizes are as trained.
    """
    patch, side = net.size.patch, net.size.image // net.size.patch
    other = Net(net.arm, net.size, net.dense, net.dt_range, stride=stride)
    other.use_study_mixers()
    weights = dict(net.named_parameters())
    places = weights['backbone.pos_embed'].unflatten(1, (side, side)).movedim(3, 1)
    if stride < patch:
        finer = patch // stride
        # One place beyond the last, so that all are multiples of 1 / finer.
        places = F.interpolate(
            F.pad(places, (0, 1, 0, 0), mode='replicate'),
            (side, side * finer + 1),
            mode='bicubic',
            align_corners=True,
        )[..., :-1]
    else:
        places = places[..., :: stride // patch]
    weights['backbone.pos_embed'] = places.movedim(1, 3).flatten(1, 2)
    for name, param in other.named_parameters():
        param.copy_(weights[name])
    return other.to(weights['head.weight'].device).eval()


def make_net(
    arm: Arm, size: Size, dense: bool, seed: int, dt_range: tuple[float, float], drop_path: float
) -> Net:
    """The network of a seed, on the CPU: every arm has the same numbers, but for ``matched``."""
    torch.manual_seed(seed)
    return Net(arm, size, dense, dt_range, drop_path)
