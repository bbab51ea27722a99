"""Mamba, the mixer: projections, short convolutions and the selective scan of one block."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vim_mm.models.arguments import (
    check_bools,
    check_choice,
    check_counts,
    check_int,
    check_positive,
)
from vim_mm.ops import causal_conv1d, selective_scan_grouped_fn
from vim_mm.ops.block import MAX_TAPS, FusedMixer, fused_mixer
from vim_mm.ops.discretization import get_method
from vim_mm.ops.selective_scan import MAX_STATES, use_compiled


def _parameter(module: nn.Module, name: str) -> Tensor | None:
    """The attribute, which need not be a parameter of its own (FSDP, parametrizations)."""
    found = module._parameters.get(name)
    return getattr(module, name) if found is None else found


def _weight_and_bias(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    return _parameter(module, 'weight'), _parameter(module, 'bias')


class Mamba(nn.Module):
    """The mixer of Mamba (arXiv 2312.00752) and, in both directions, of Vim (arXiv 2401.09417).

    Per direction, with x and the gate z from ``in_proj``:
    ``u = silu(conv1d(x))``, ``(dt, B, C) = x_proj(u)``, ``delta = softplus(dt_proj(dt))``,
    ``y = scan(u, delta, -exp(A_log), B, C, D) * silu(z)``; the sum over directions goes through
    ``out_proj``. The backward direction convolves and scans from the end of the sequence.
    Parameters are named as in Vim's released checkpoints.

    Args:
        d_model (int): Channels of input and output.
        d_state (int): States per channel, N.
        d_conv (int): Width of the convolution.
        expand (float): Inner channels per outer channel.
        dt_rank (int | str): Rank of the step-size projection; 'auto' is ceil(d_model / 16).
        dt_min (float): Least step size after softplus at initialization.
        dt_max (float): Largest step size after softplus at initialization.
        dt_init (str): 'random' (uniform) or 'constant', the weight of the step-size projection.
        dt_scale (float): Factor on that weight, which is about dt_rank^-0.5.
        dt_init_floor (float): Lower clamp on the drawn step sizes.
        conv_bias (bool): Whether the convolutions have a bias.
        bias (bool): Whether ``in_proj`` and ``out_proj`` have one.
        bimamba_type (str): 'none', forward only; 'v1', two directions that differ in ``A`` alone
            and are summed; 'v2', two directions with a convolution, projections, ``A`` and ``D``
            of their own.
        if_divide_out (bool): Halve the sum of the two directions of v2 (v1 stays a sum).
        discretization_method (str): Of both directions, a name in ``vim_mm.ops.METHODS``.
        use_cuda_kernel (bool, optional): As in ``selective_scan_fn``.
        dt_init_b (str): 'both' gives the step-size initialization to both directions of v2; 'vim'
            to the forward one only, as Vim's code does (the other keeps PyTorch's weight, bias 0).
        fused (bool): Whether CUDA may take the fast block. False keeps PyTorch's norm, convolution
            and projections around the scan that ``use_cuda_kernel`` chooses.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An unknown word in ``dt_init``, ``bimamba_type``, ``discretization_method`` or
            ``dt_init_b``, or a number out of range.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: float = 2,
        dt_rank: int | str = 'auto',
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        dt_init: str = 'random',
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        conv_bias: bool = True,
        bias: bool = False,
        bimamba_type: str = 'v2',
        if_divide_out: bool = True,
        discretization_method: str = 'zoh',
        use_cuda_kernel: bool | None = None,
        dt_init_b: str = 'both',
        *,
        fused: bool = True,
    ):
        super().__init__()
        check_choice('dt_init', dt_init, ('random', 'constant'))
        check_choice('bimamba_type', bimamba_type, ('none', 'v1', 'v2'))
        check_choice('dt_init_b', dt_init_b, ('both', 'vim'))
        get_method(discretization_method)
        check_counts(d_model=d_model, d_conv=d_conv)
        check_int('d_state', d_state, 1, MAX_STATES)
        if dt_rank != 'auto':
            check_counts(dt_rank=dt_rank)
        check_positive(expand=expand, dt_min=dt_min, dt_max=dt_max, dt_scale=dt_scale)
        if not dt_min <= dt_max:
            raise ValueError(f'dt_min must be at most dt_max = {dt_max}, got {dt_min}')
        if int(expand * d_model) < 1:
            raise ValueError(
                f'expand must leave at least one of d_model = {d_model} channels, got {expand}'
            )
        check_bools(conv_bias=conv_bias, bias=bias, if_divide_out=if_divide_out)
        if use_cuda_kernel is not None:
            check_bools(use_cuda_kernel=use_cuda_kernel)
        self.d_model = d_model
        self.d_state = d_state
        self.d_inner = int(expand * d_model)
        self.dt_rank = math.ceil(d_model / 16) if dt_rank == 'auto' else dt_rank
        self.dt_range = (dt_min, dt_max, dt_init_floor)
        self.dt_init = dt_init
        self.dt_scale = dt_scale
        self.dt_init_b = dt_init_b
        self.bimamba_type = bimamba_type
        self.if_divide_out = if_divide_out
        self.average = if_divide_out and bimamba_type == 'v2'
        self.discretization_method = discretization_method
        self.use_cuda_kernel = use_cuda_kernel
        self.may_fuse = fused
        self.d_conv = d_conv

        self.reverse = (False,) if bimamba_type == 'none' else (False, True)
        self.A_names = ('A_log', 'A_b_log')[: len(self.reverse)]
        # Endings of the names of what a direction owns besides A.
        self.endings = ('', '_b') if bimamba_type == 'v2' else ('',)

        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=bias)
        for end in self.endings:
            self._add_parameters(end, d_conv, conv_bias)
        for name in self.A_names:
            self.register_parameter(name, nn.Parameter(torch.empty(self.d_inner, d_state)))
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias)

        for param in (*self._each('D'), *self._each('dt_proj', 'bias'), *self._all_A_log()):
            param._no_weight_decay = True
        self.reset_parameters()

    def _add_parameters(self, end: str, d_conv: int, conv_bias: bool) -> None:
        """Add what a direction owns besides A, its names ending in ``end``."""
        channels = self.d_inner
        conv1d = nn.Conv1d(channels, channels, d_conv, groups=channels, bias=conv_bias)
        x_proj = nn.Linear(channels, self.dt_rank + 2 * self.d_state, bias=False)
        self.add_module(f'conv1d{end}', conv1d)
        self.add_module(f'x_proj{end}', x_proj)
        self.add_module(f'dt_proj{end}', nn.Linear(self.dt_rank, channels))
        self.register_parameter(f'D{end}', nn.Parameter(torch.empty(channels)))

    def _each(self, name: str, attribute: str | None = None) -> list:
        """What is called ``name`` in each set of parameters, or that attribute of it."""
        owned = [getattr(self, name + end) for end in self.endings]
        return owned if attribute is None else [getattr(module, attribute) for module in owned]

    def _all_A_log(self) -> list[nn.Parameter]:
        return [getattr(self, name) for name in self.A_names]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize as Mamba: dt log-uniform, A = -(1..N), D = 1, else PyTorch's defaults."""
        for module in self.children():
            module.reset_parameters()
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for end in self.endings:
            if end == '' or self.dt_init_b == 'both':
                self._init_step_size(getattr(self, f'dt_proj{end}'))
        for D in self._each('D'):
            nn.init.ones_(D)
        for A_log in self._all_A_log():
            A_log.copy_(torch.arange(1, self.d_state + 1).log().expand_as(A_log))

    def _init_step_size(self, dt_proj: nn.Linear) -> None:
        std = self.dt_rank**-0.5 * self.dt_scale
        if self.dt_init == 'constant':
            nn.init.constant_(dt_proj.weight, std)
        else:
            nn.init.uniform_(dt_proj.weight, -std, std)
        dt_min, dt_max, floor = self.dt_range
        log_dt = torch.empty_like(dt_proj.bias).uniform_(math.log(dt_min), math.log(dt_max))
        dt = log_dt.exp().clamp(min=floor)
        # The inverse of softplus, log(e^dt - 1), without overflow or cancellation.
        dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))

    def fused_dtype(self, hidden_states: Tensor) -> torch.dtype | None:
        """The dtype in which the fast block computes, None where the plain one is taken.

        The one place of that choice: the fast block is taken on CUDA where the compiled scan is,
        for ``d_conv`` up to 8, unless ``fused`` is False. Both have the same dtypes:
        autocast's, else the parameters'.
        """
        if not self.may_fuse or not hidden_states.is_cuda or self.d_conv > MAX_TAPS:
            return None
        autocast = torch.is_autocast_enabled('cuda')
        dtype = torch.get_autocast_dtype('cuda') if autocast else self.in_proj.weight.dtype
        return dtype if use_compiled(self.use_cuda_kernel, 'cuda', dtype) else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Mix along the sequence: (B, L, d_model) to the same shape."""
        dtype = self.fused_dtype(hidden_states)
        if dtype is None:
            return self.forward_plain(hidden_states)
        return fused_mixer(hidden_states.to(dtype), self.fused())

    def fused(self) -> FusedMixer:
        """What the fast block takes of this mixer."""
        # By the dicts of modules: through attributes this takes longer than several launches.
        modules = self._modules
        parameters = []
        for name in ('in_proj', 'out_proj'):
            parameters += _weight_and_bias(modules[name])
        for end in self.endings:
            parameters += _weight_and_bias(modules['conv1d' + end])
            parameters.append(_parameter(modules['x_proj' + end], 'weight'))
            parameters += _weight_and_bias(modules['dt_proj' + end])
            parameters.append(_parameter(self, 'D' + end))
        parameters += [_parameter(self, name) for name in self.A_names]
        method = get_method(self.discretization_method).id
        scale = 0.5 if self.average else 1.0
        return FusedMixer(parameters, method, [*self.reverse], scale)

    def forward_plain(self, hidden_states: Tensor) -> Tensor:
        """:meth:`forward`, on any device: the truth that the fast block is held to."""
        batch, length, _ = hidden_states.shape
        directions = len(self.reverse)

        def per_direction(t: Tensor) -> Tensor:
            """View (1 or K, rows, B L) as (B, K, rows, L), shared by the directions if it is 1."""
            t = t.unflatten(2, (batch, length)).permute(2, 0, 1, 3)
            return t.expand(-1, directions, -1, -1)

        # Weight times tokens, not tokens times weight: the rows of every projection are then
        # channels with L contiguous, and everything up to the scan is a view of them.
        xz = F.linear(self.in_proj.weight, hidden_states.flatten(0, 1))
        if self.in_proj.bias is not None:
            xz = xz + self.in_proj.bias.to(xz.dtype)[:, None]
        xz = xz.view(2, self.d_inner, batch, length).transpose(1, 2)
        x, z = xz.unbind(0)  # (B, D, L)

        convolved = [
            causal_conv1d(x, conv.weight.squeeze(1), conv.bias, reverse, activation='silu')
            for conv, reverse in zip(self._each('conv1d'), self.reverse)
        ]
        u = torch.stack([c.transpose(0, 1) for c in convolved]).flatten(2)  # (1 or K, D, B L)
        dt_B_C = torch.bmm(torch.stack(self._each('x_proj', 'weight')), u)
        dt, B, C = dt_B_C.split([self.dt_rank, self.d_state, self.d_state], dim=1)
        delta = torch.bmm(torch.stack(self._each('dt_proj', 'weight')), dt)
        y = selective_scan_grouped_fn(
            per_direction(u),
            per_direction(delta),
            -torch.exp(torch.stack(self._all_A_log())),
            per_direction(B),
            per_direction(C),
            D=torch.stack(self._each('D')).expand(directions, -1),
            z=z.unsqueeze(1).expand(-1, directions, -1, -1),
            delta_bias=torch.stack(self._each('dt_proj', 'bias')).expand(directions, -1),
            delta_softplus=True,
            discretization_method=self.discretization_method,
            use_cuda_kernel=self.use_cuda_kernel,
            reverse=self.reverse,
        )
        y = y.mean(1) if self.average else y.sum(1)
        return self.out_proj(y.transpose(1, 2))
