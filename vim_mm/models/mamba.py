"""Mamba, the mixer: projections, short convolutions and the selective scan of one block."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vim_mm.errors import UserTypeError, UserValueError
from vim_mm.models.arguments import (
    check_bools,
    check_choice,
    check_counts,
    check_int,
    check_like,
    check_number,
    check_positive,
    check_tokens,
)
from vim_mm.models.fused import READS, MixerPath, path_of_mixer, why_plain_mixer
from vim_mm.ops import causal_conv1d, selective_scan_grouped_fn
from vim_mm.ops.backends import BACKENDS, wish_of_arguments
from vim_mm.ops.block import fused_mixer
from vim_mm.ops.discretization import get_method
from vim_mm.ops.selective_scan import MAX_STATES

_OUTER, _EACH = ('in_proj', 'out_proj'), ('conv1d', 'x_proj', 'dt_proj', 'D')


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
            and projections around the scan that ``backend`` chooses.
        backend (str, optional): As in ``selective_scan_fn``.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An unknown word in ``dt_init``, ``bimamba_type``, ``discretization_method`` or
            ``dt_init_b``, a number out of range, or ``backend`` and ``use_cuda_kernel`` that
            contradict each other.
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
        backend: str | None = None,
    ):
        super().__init__()
        check_choice('dt_init', dt_init, ('random', 'constant'))
        check_choice('bimamba_type', bimamba_type, ('none', 'v1', 'v2'))
        check_choice('dt_init_b', dt_init_b, ('both', 'vim'))
        get_method(discretization_method)
        check_counts(d_model=d_model, d_conv=d_conv)
        check_int('d_state', d_state, 1, MAX_STATES)
        if isinstance(dt_rank, str) and dt_rank != 'auto':
            raise UserTypeError(
                f"dt_rank must be an integer, got {dt_rank!r}; the one word is 'auto'"
            )
        if dt_rank != 'auto':
            check_counts(dt_rank=dt_rank)
        check_positive(expand=expand, dt_min=dt_min, dt_max=dt_max, dt_scale=dt_scale)
        check_number('dt_init_floor', dt_init_floor)
        if not 0 <= dt_init_floor < math.inf:
            raise UserValueError(f'dt_init_floor must be at least 0, got {dt_init_floor}')
        if not dt_min <= dt_max:
            raise UserValueError(f'dt_min must be at most dt_max = {dt_max}, got {dt_min}')
        if int(expand * d_model) < 1:
            raise UserValueError(
                f'expand must leave at least one of d_model = {d_model} channels, got {expand}'
            )
        check_bools(conv_bias=conv_bias, bias=bias, if_divide_out=if_divide_out, fused=fused)
        if use_cuda_kernel is not None:
            check_bools(use_cuda_kernel=use_cuda_kernel)
        if backend is not None:
            check_choice('backend', backend, BACKENDS)
        wish_of_arguments(backend, use_cuda_kernel)
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
        self.backend = backend
        self.may_fuse = fused
        self.d_conv = d_conv

        self.reverse = (False,) if bimamba_type == 'none' else (False, True)
        self.A_names = ('A_log', 'A_b_log')[: len(self.reverse)]
        # Endings of the names of what a direction owns besides A.
        self.endings = ('', '_b') if bimamba_type == 'v2' else ('',)

        # Modules and parameters in the order of FusedMixer.
        each = [part + end for end in self.endings for part in _EACH]
        self.reads = {
            name: READS.get(name.removesuffix('_b'), (None, ()))
            for name in (*_OUTER, *each, *self.A_names)
        }

        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=bias)
        for end in self.endings:
            self._add_parameters(end, d_conv, conv_bias)
        for name in self.A_names:
            self.register_parameter(name, nn.Parameter(torch.empty(self.d_inner, d_state)))
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias)

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

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that are not decayed: A, D and the bias of ``dt``."""
        own = {*self.A_names, *(f'D{end}' for end in self.endings)}
        biased = {f'dt_proj{end}' for end in self.endings}
        # By parts of the names: a parametrization or an adapter puts others between them.
        parts = {name: name.split('.') for name, _ in self.named_parameters()}
        return {
            name
            for name, of in parts.items()
            if not own.isdisjoint(of) or (of[0] in biased and of[-1] == 'bias')
        }

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

    def parameters_dtype(self) -> torch.dtype:
        """That of ``in_proj``, or of ``A_log`` where what stands in its place has no weight."""
        weight = self._modules['in_proj']._parameters.get('weight')
        if weight is None:
            weight = getattr(self.in_proj, 'weight', None)
        # Quantized layers have a method of that name.
        return weight.dtype if isinstance(weight, Tensor) else self.A_log.dtype

    def forward(self, hidden_states: Tensor, path: MixerPath | None = None) -> Tensor:
        """Mix along the sequence: (B, L, d_model), L from 1, to the same shape.

        Args:
            hidden_states (Tensor): Floating point.
            path (MixerPath, optional): What :mod:`vim_mm.models.fused` has decided for this call;
                None asks it.

        Raises:
            TypeError: No dense tensor, or not floating point.
            ValueError: Another number of dimensions or channels.
        """
        check_tokens(hidden_states, self.d_model)
        if path is None:
            path = path_of_mixer(self, hidden_states)
        if path.fused is None:
            return self.forward_plain(hidden_states, path)
        return fused_mixer(hidden_states.to(path.dtype), path.fused)

    def plain_reasons(self, device_type: str, dtype: torch.dtype | None) -> dict[str, str | None]:
        """By part, see :func:`vim_mm.models.fused.path_of_layers`."""
        return {'': why_plain_mixer(self, device_type, dtype)}

    def forward_plain(self, hidden_states: Tensor, path: MixerPath | None = None) -> Tensor:
        """:meth:`forward`, on any device: the truth that the fast block is held to.

        Modules that are what they were made as are read, so that nothing is transposed; others
        (hooks, adapters, replacements) are called, with (B, L, channels) or (B, channels, L).
        """
        y = self.scan_directions(hidden_states, path)
        y = y.mean(1) if self.average else y.sum(1)
        return self.out_proj(rearrange(y, 'b d l -> b l d'))

    def scan_directions(self, hidden_states: Tensor, path: MixerPath | None = None) -> Tensor:
        """The gated scan of each direction, (B, K, d_inner, L), before they are summed."""
        arguments = self.scan_arguments(hidden_states, path)
        return selective_scan_grouped_fn(**arguments, reverse=self.reverse)

    def scan_arguments(
        self, hidden_states: Tensor, path: MixerPath | None = None
    ) -> dict[str, Any]:
        """What :func:`selective_scan_grouped_fn` takes for (B, L, d_model), but ``reverse``."""
        called = (path or path_of_mixer(self, hidden_states)).called
        batch, length, _ = hidden_states.shape
        directions = len(self.reverse)

        def per_direction(t: Tensor) -> Tensor:
            """View (1 or K, rows, B L) as (B, K, rows, L), shared by the directions if it is 1."""
            t = rearrange(t, 'k rows (b l) -> b k rows l', b=batch, l=length)
            return t.expand(-1, directions, -1, -1)

        x, z = self._project_in(hidden_states, 'in_proj' in called)  # (B, D, L)
        convolved = self._convolve(x, 'conv1d' in called)
        # Stacked of views: rearranged after it, u would be copied twice.
        u = torch.stack([rearrange(c, 'b d l -> d b l') for c in convolved]).flatten(2)
        dt_B_C = self._project('x_proj', u, length, 'x_proj' in called)  # u is (1 or K, D, B L)
        dt, B, C = dt_B_C.split([self.dt_rank, self.d_state, self.d_state], dim=1)
        delta = self._project('dt_proj', dt, length, 'dt_proj' in called)
        delta_bias = None
        if 'dt_proj' not in called:
            delta_bias = torch.stack(self._each('dt_proj', 'bias')).expand(directions, -1)
        return dict(
            u=per_direction(u),
            delta=per_direction(delta),
            A=-torch.exp(torch.stack(self._all_A_log())),
            B=per_direction(B),
            C=per_direction(C),
            D=torch.stack(self._each('D')).expand(directions, -1),
            z=z.unsqueeze(1).expand(-1, directions, -1, -1),
            delta_bias=delta_bias,
            delta_softplus=True,
            discretization_method=self.discretization_method,
            use_cuda_kernel=self.use_cuda_kernel,
            backend=self.backend,
        )

    def _project_in(self, hidden_states: Tensor, call: bool) -> tuple[Tensor, Tensor]:
        """x and the gate z, (B, D, L) each."""
        if call:
            xz = self.in_proj(hidden_states)
            return rearrange(xz, 'b l (two d) -> two b d l', two=2).unbind(0)
        weight = self.in_proj.weight
        check_like(hidden_states, weight)
        # Weight times tokens, not tokens times weight: the rows of every projection are then
        # channels with L contiguous, and everything up to the scan is a view of them.
        xz = F.linear(weight, rearrange(hidden_states, 'b l c -> (b l) c'))
        if self.in_proj.bias is not None:
            xz = xz + self.in_proj.bias.to(xz.dtype)[:, None]
        batch, length, _ = hidden_states.shape  # both: einops divides by the one, and it may be 0
        xz = rearrange(xz, '(two d) (b l) -> two b d l', two=2, b=batch, l=length)
        return xz.unbind(0)

    def _convolve(self, x: Tensor, call: bool) -> list[Tensor]:
        """silu(conv1d(x)), (B, D, L), of each set of parameters."""
        convolved = []
        for conv, reverse in zip(self._each('conv1d'), self.reverse):
            if not call:
                weight = conv.weight.squeeze(1)
                convolved.append(causal_conv1d(x, weight, conv.bias, reverse, activation='silu'))
                continue
            past = F.pad(x.flip(2) if reverse else x, (self.d_conv - 1, 0))
            out = conv(past)
            if out.shape != x.shape:
                raise UserValueError(
                    f'conv1d must turn (B, D, L + d_conv - 1) = {tuple(past.shape)} into '
                    f'(B, D, L) = {tuple(x.shape)}, got {tuple(out.shape)}'
                )
            convolved.append(F.silu(out.flip(2) if reverse else out))
        return convolved

    def _project(self, part: str, u: Tensor, length: int, call: bool) -> Tensor:
        """Apply the linear layers of that name to (1 or K, channels, B L): (1 or K, rows, B L).

        Without the bias where they are read, with it where they are called.
        """
        if not call:
            return torch.bmm(torch.stack(self._each(part, 'weight')), u)
        projected = [
            rearrange(module(rearrange(tokens, 'c (b l) -> b l c', l=length)), 'b l c -> c (b l)')
            for module, tokens in zip(self._each(part), u)
        ]
        return torch.stack(projected)
