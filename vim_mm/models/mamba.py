"""Mamba, the mixer: projections, short convolutions and the selective scan of one block."""

import math
from typing import Any, NamedTuple

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
from vim_mm.ops.causal_conv1d import extend, last_state_of, taps_within
from vim_mm.ops.discretization import check_device, check_reset, check_tensor, get_method
from vim_mm.ops.selective_scan import MAX_STATES

_OUTER, _EACH = ('in_proj', 'out_proj'), ('conv1d', 'x_proj', 'dt_proj', 'D')


class MambaState(NamedTuple):
    """What a mixer of one direction hands from one piece of a sequence to the next.

    Attributes:
        conv (Tensor): (B, d_inner, d_conv - 1), the last inputs of the convolution.
        scan (Tensor): (B, d_inner, d_state), the state of the scan, float32 (or float64).
    """

    conv: Tensor
    scan: Tensor


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

    def forward(
        self,
        hidden_states: Tensor,
        path: MixerPath | None = None,
        *,
        return_last_state: bool = False,
        initial_state: MambaState | None = None,
        reset: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, MambaState]:
        """Mix along the sequence: (B, L, d_model), L from 1, to the same shape.

        With a state the mixer takes its plain path on every device, see docs/block.md.

        Args:
            hidden_states (Tensor): Floating point.
            path (MixerPath, optional): What :mod:`vim_mm.models.fused` has decided for this call;
                None asks it.
            return_last_state (bool): Also return the state after the last token, with which the
                next piece of the sequence continues.
            initial_state (MambaState, optional): The state before the first token; None is 0.
            reset (Tensor, optional): (B, L), bool. True at the first token of each of several
                sequences that stand in one row: nothing passes between it and the token before it,
                in either direction.

        Returns:
            The output, in the dtype of the parameters or autocast's; with ``return_last_state``
            also the state.

        Raises:
            TypeError: No dense tensor, or of another dtype.
            ValueError: Another shape, or a state of a mixer that also scans from the end.
        """
        check_tokens(hidden_states, self.d_model)
        states = self._check_states(hidden_states, return_last_state, initial_state, reset)
        with_reset = reset is not None
        with_states = return_last_state or initial_state is not None
        if path is None:
            path = path_of_mixer(self, hidden_states, with_reset, with_states)
        if path.fused is None or with_states:
            return self.forward_plain(hidden_states, path, **states)
        return fused_mixer(hidden_states.to(path.dtype), path.fused, reset)

    def _check_states(
        self,
        hidden_states: Tensor,
        return_last_state: bool,
        initial_state: MambaState | None,
        reset: Tensor | None,
    ) -> dict[str, Any]:
        """Those of the arguments that are given."""
        check_bools(return_last_state=return_last_state)
        causal = len(self.reverse) == 1 and get_method(self.discretization_method).causal
        if not causal and (return_last_state or initial_state is not None):
            raise UserValueError(
                f"initial_state and return_last_state need bimamba_type 'none' and a causal "
                f'method, got {self.bimamba_type!r} and {self.discretization_method!r}: what also '
                f'scans from the end can be reset and not continued'
            )
        given: dict[str, Any] = {'return_last_state': True} if return_last_state else {}
        if initial_state is not None:
            given['initial_state'] = self._check_state(initial_state, hidden_states)
        if reset is not None:
            check_reset(reset, (*hidden_states.shape[:2],), 'hidden_states', hidden_states)
            given['reset'] = reset
        return given

    def _check_state(self, state: MambaState, hidden_states: Tensor) -> MambaState:
        if not isinstance(state, tuple | list) or len(state) != 2:
            raise UserTypeError(
                f'initial_state: expected a MambaState (conv, scan), got {type(state).__name__}'
            )
        sizes = {'conv': self.d_conv - 1, 'scan': self.d_state}
        for (name, size), tensor in zip(sizes.items(), state, strict=True):
            check_tensor(f'initial_state.{name}', tensor)
            check_device(f'initial_state.{name}', tensor, 'hidden_states', hidden_states)
            shape = (hidden_states.shape[0], self.d_inner, size)
            if tuple(tensor.shape) != shape:
                raise UserValueError(
                    f'initial_state.{name}: expected shape {shape}, got {tuple(tensor.shape)}'
                )
        return MambaState(*state)

    def plain_reasons(self, device_type: str, dtype: torch.dtype | None) -> dict[str, str | None]:
        """By part, see :func:`vim_mm.models.fused.path_of_layers`."""
        return {'': why_plain_mixer(self, device_type, dtype)}

    def forward_plain(
        self, hidden_states: Tensor, path: MixerPath | None = None, **states: Any
    ) -> Tensor | tuple[Tensor, MambaState]:
        """:meth:`forward`, on any device: the truth that the fast block is held to.

        Modules that are what they were made as are read, so that nothing is transposed; others
        (hooks, adapters, replacements) are called, with (B, L, channels) or (B, channels, L). With
        ``reset`` a convolution is called with the taps of each token, (B L, channels, d_conv).
        """
        y, last_state = self.scan_directions(hidden_states, path, **states), None
        if states.get('return_last_state'):
            y, last_state = y
        y = y.mean(1) if self.average else y.sum(1)
        out = self.out_proj(rearrange(y, 'b d l -> b l d'))
        return out if last_state is None else (out, last_state)

    def scan_directions(
        self,
        hidden_states: Tensor,
        path: MixerPath | None = None,
        *,
        return_last_state: bool = False,
        initial_state: MambaState | None = None,
        reset: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, MambaState]:
        """The gated scan of each direction, (B, K, d_inner, L), before they are summed.

        With ``return_last_state`` also the state after the last token, of one direction.
        """
        arguments, x = self._scan_arguments(hidden_states, path, initial_state, reset)
        if not return_last_state:
            return selective_scan_grouped_fn(**arguments, reverse=self.reverse)
        y, scan = selective_scan_grouped_fn(
            **arguments, reverse=self.reverse, return_last_state=True
        )
        before = None if initial_state is None else initial_state.conv
        conv = last_state_of(x, self.d_conv, False, before, reset)
        return y, MambaState(conv, scan.squeeze(1))

    def scan_arguments(
        self, hidden_states: Tensor, path: MixerPath | None = None
    ) -> dict[str, Any]:
        """What :func:`selective_scan_grouped_fn` takes for (B, L, d_model), but ``reverse``."""
        return self._scan_arguments(hidden_states, path, None, None)[0]

    def _scan_arguments(
        self,
        hidden_states: Tensor,
        path: MixerPath | None,
        initial_state: MambaState | None,
        reset: Tensor | None,
    ) -> tuple[dict[str, Any], Tensor]:
        """:meth:`scan_arguments`, and the input of the convolutions, (B, d_inner, L)."""
        called = (path or path_of_mixer(self, hidden_states, with_states=True)).called
        batch, length, _ = hidden_states.shape
        directions = len(self.reverse)

        def per_direction(t: Tensor) -> Tensor:
            """View (1 or K, rows, B L) as (B, K, rows, L), shared by the directions if it is 1."""
            t = rearrange(t, 'k rows (b l) -> b k rows l', b=batch, l=length)
            return t.expand(-1, directions, -1, -1)

        x, z = self._project_in(hidden_states, 'in_proj' in called)  # (B, D, L)
        before = None
        if initial_state is not None:
            _check_dtypes(initial_state, x)
            before = initial_state.conv
        convolved = self._convolve(x, 'conv1d' in called, before, reset)
        # Stacked of views: rearranged after it, u would be copied twice.
        u = torch.stack([rearrange(c, 'b d l -> d b l') for c in convolved]).flatten(2)
        dt_B_C = self._project('x_proj', u, length, 'x_proj' in called)  # u is (1 or K, D, B L)
        dt, B, C = dt_B_C.split([self.dt_rank, self.d_state, self.d_state], dim=1)
        delta = self._project('dt_proj', dt, length, 'dt_proj' in called)
        delta_bias = None
        if 'dt_proj' not in called:
            delta_bias = torch.stack(self._each('dt_proj', 'bias')).expand(directions, -1)
        arguments = dict(
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
        if initial_state is not None:
            arguments['initial_state'] = initial_state.scan.unsqueeze(1)
        if reset is not None:
            arguments['reset'] = reset
        return arguments, x

    def _project_in(self, hidden_states: Tensor, call: bool) -> tuple[Tensor, Tensor]:
        """x and the gate z, (B, D, L) each."""
        if call:
            # Copied: CUDA's fast kernels of the scan are for rows contiguous in time alone, and of
            # float32 with channels contiguous PyTorch's convolution may round to TF32.
            xz = self.in_proj(hidden_states).transpose(1, 2).contiguous()
            return xz.chunk(2, dim=1)
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

    def _convolve(
        self, x: Tensor, call: bool, initial_state: Tensor | None, reset: Tensor | None
    ) -> list[Tensor]:
        """silu(conv1d(x)), (B, D, L), of each set of parameters."""
        states: dict[str, Any] = dict(initial_state=initial_state, reset=reset)
        return [
            F.silu(self._call_conv1d(conv, x, reverse, **states))
            if call
            else causal_conv1d(x, conv.weight.squeeze(1), conv.bias, reverse, 'silu', **states)
            for conv, reverse in zip(self._each('conv1d'), self.reverse)
        ]

    def _call_conv1d(
        self,
        conv: nn.Module,
        x: Tensor,
        reverse: bool,
        initial_state: Tensor | None,
        reset: Tensor | None,
    ) -> Tensor:
        if reset is None:
            past = extend(x, self.d_conv, reverse, initial_state)
        else:  # each token as a row of its own
            past = taps_within(x, self.d_conv, reverse, initial_state, reset)
            past = rearrange(past, 'b d l w -> (b l) d w')
        past = past.flip(2) if reverse else past
        out = conv(past)
        expected = (*past.shape[:2], past.shape[2] - self.d_conv + 1)
        if out.shape != expected:
            raise UserValueError(
                f'conv1d must turn (B, D, L + d_conv - 1) = {tuple(past.shape)} into '
                f'(B, D, L) = {expected}, got {tuple(out.shape)}'
            )
        if reset is not None:
            return rearrange(out, '(b l) d 1 -> b d l', l=x.shape[2])
        return out.flip(2) if reverse else out

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


def _check_dtypes(state: MambaState, x: Tensor) -> None:
    """Of a state, beside the input of the convolutions: operators call either `initial_state`."""
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    cast = torch.is_autocast_enabled(x.device.type) and state.conv.is_floating_point()
    for name, expected in (('conv', state.conv.dtype if cast else x.dtype), ('scan', kind)):
        found = getattr(state, name).dtype
        if found != expected:
            raise UserTypeError(f'initial_state.{name}: expected {expected}, got {found}')
