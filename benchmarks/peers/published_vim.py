"""Vim as its authors publish it, for ``benchmarks/benchmark_backbone.py`` to time beside ours.

Written anew over the same kernels: mamba_ssm's CUDA scan, causal_conv1d's, and mamba_ssm's fused
addition and norm in Triton. What is launched, what is kept for backward and what is computed again
there is as in the public code (hustvl/Vim); parameters are those of one of our backbones, so that
outputs and gradients can be held to ours.
"""

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vim_mm.models.mamba import Mamba
from vim_mm.models.tokens import insert_cls
from vim_mm.models.vision_mamba import VisionMamba

# By the distribution that has it, the module that is imported.
NEEDS = {
    'mamba_ssm (its CUDA scan)': 'selective_scan_cuda',
    'causal_conv1d': 'causal_conv1d_cuda',
}


def missing() -> str | None:
    """Which of its kernels are not installed, or None."""
    absent = [name for name, module in NEEDS.items() if find_spec(module) is None]
    return f'not installed: {", ".join(absent)}' if absent else None


class _Direction(torch.autograd.Function):
    """From the projected input of one direction to its gated scan; u and delta are not kept."""

    @staticmethod
    def forward(ctx, xz, conv_weight, conv_bias, x_proj, dt_proj, A, D, dt_bias):
        import selective_scan_cuda

        x_proj, dt_proj = x_proj.to(xz.dtype), dt_proj.to(xz.dtype)
        batch, _, length = xz.shape
        rank, states = dt_proj.shape[1], A.shape[1]
        u = _convolve(xz, conv_weight, conv_bias)
        x_dbl = F.linear(_rows(u), x_proj)  # (B L, rank + 2 N)
        delta = _step_sizes(dt_proj, x_dbl, batch)
        B, C = (
            part.reshape(batch, 1, length, states).transpose(2, 3).contiguous()
            for part in x_dbl[:, rank:].split(states, dim=1)
        )
        z = xz.chunk(2, dim=1)[1]
        ungated, carried, out = selective_scan_cuda.fwd(u, delta, A, B, C, D, z, dt_bias, True)
        ctx.save_for_backward(
            xz,
            conv_weight,
            conv_bias,
            x_proj,
            dt_proj,
            A,
            D,
            dt_bias,
            x_dbl,
            B,
            C,
            carried,
            ungated,
        )
        return out

    @staticmethod
    def backward(ctx, grad_out):
        import causal_conv1d_cuda
        import selective_scan_cuda

        (
            xz, conv_weight, conv_bias, x_proj, dt_proj, A, D, dt_bias, x_dbl, B, C,
            carried, ungated,
        ) = ctx.saved_tensors  # fmt: skip
        batch, _, length = xz.shape
        rank = dt_proj.shape[1]
        x, z = xz.chunk(2, dim=1)
        u = _convolve(xz, conv_weight, conv_bias)
        delta = _step_sizes(dt_proj, x_dbl, batch)
        grad_xz = torch.empty_like(xz)
        grad_x, grad_z = grad_xz.chunk(2, dim=1)
        if grad_out.stride(-1) != 1:
            grad_out = grad_out.contiguous()
        grad_u, grad_delta, grad_A, grad_B, grad_C, grad_D, grad_dt_bias, *_ = (
            selective_scan_cuda.bwd(
                u, delta, A, B, C, D, z, dt_bias, grad_out, carried, ungated, grad_z, True, False
            )
        )
        grad_x_dbl = torch.empty_like(x_dbl)
        for part, grad in zip(grad_x_dbl[:, rank:].chunk(2, dim=1), (grad_B, grad_C), strict=True):
            part.copy_(grad.squeeze(1).transpose(1, 2).reshape(batch * length, -1))
        grad_delta = grad_delta.transpose(0, 1).reshape(len(dt_proj), -1)  # (D, B L)
        grad_dt_proj = grad_delta @ x_dbl[:, :rank]
        grad_x_dbl[:, :rank] = grad_delta.t() @ dt_proj
        grad_u = grad_u.transpose(0, 1).reshape(len(dt_proj), -1)
        grad_x_proj = grad_x_dbl.t() @ _rows(u)
        grad_u = torch.addmm(grad_u, x_proj.t(), grad_x_dbl.t())
        grad_u = grad_u.view(-1, batch, length).transpose(0, 1)
        grad_conv, grad_conv_bias = torch.zeros_like(conv_weight), torch.zeros_like(conv_bias)
        causal_conv1d_cuda.causal_conv1d_bwd(
            x, conv_weight, conv_bias, grad_u, None, None, None,
            grad_x, grad_conv, grad_conv_bias, None, True,
        )  # fmt: skip
        return (
            grad_xz, grad_conv, grad_conv_bias, grad_x_proj, grad_dt_proj, grad_A, grad_D,
            grad_dt_bias,
        )  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    """(B, D, L) to (B L, D)."""
    return x.transpose(1, 2).reshape(-1, x.shape[1])


def _convolve(xz: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    import causal_conv1d_cuda

    x = xz.chunk(2, dim=1)[0]
    out = torch.empty_like(x)
    causal_conv1d_cuda.causal_conv1d_fwd(x, weight, bias, None, None, out, None, True)
    return out


def _step_sizes(dt_proj: Tensor, x_dbl: Tensor, batch: int) -> Tensor:
    """Before bias and softplus, (B, D, L)."""
    delta = dt_proj @ x_dbl[:, : dt_proj.shape[1]].t()
    return delta.view(len(dt_proj), batch, -1).transpose(0, 1)


def _mix(mixer: Mamba, hidden: Tensor) -> Tensor:
    """The mixer of bimamba v2: (B, L, C) to the same shape."""
    batch, length, channels = hidden.shape
    xz = mixer.in_proj.weight @ hidden.reshape(-1, channels).t()
    xz = xz.view(-1, batch, length).transpose(0, 1)

    def direction(xz: Tensor, end: str, A_log: Tensor) -> Tensor:
        conv, x_proj, dt_proj = (
            getattr(mixer, name + end) for name in ('conv1d', 'x_proj', 'dt_proj')
        )
        return _Direction.apply(
            xz,
            conv.weight.squeeze(1),
            conv.bias,
            x_proj.weight,
            dt_proj.weight,
            -torch.exp(A_log.float()),
            getattr(mixer, f'D{end}').float(),
            dt_proj.bias.float(),
        )

    out = direction(xz, '', mixer.A_log)
    out = out + direction(xz.flip(-1), '_b', mixer.A_b_log).flip(-1)
    return F.linear(out.transpose(1, 2) / 2, mixer.out_proj.weight)


def _add_norm(update: Tensor, residual: Tensor | None, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    """The norm of their sum in the update's dtype, and the sum in float32."""
    if update.is_cuda and find_spec('mamba_ssm') is not None:
        from mamba_ssm.ops.triton.layer_norm import rms_norm_fn

        return rms_norm_fn(
            update, norm.weight, None, residual, eps=norm.eps, prenorm=True, residual_in_fp32=True
        )
    stream = update.float() if residual is None else residual + update
    return norm(stream).to(update.dtype), stream


class PublishedVim(nn.Module):
    """The public model with the parameters of ``backbone``, which it shares.

    Args:
        backbone (VisionMamba): Of bimamba v2 that halves the sum of directions, method 'zoh',
            without RoPE and stochastic depth, whose output is the tokens after the last norm
            (``out_type`` 'raw', ``out_feature`` 'norm'). Released models have a class token in the
            middle, which makes the length odd and costs them their vectorized loads.
    """

    def __init__(self, backbone: VisionMamba):
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> tuple[Tensor]:
        """Images of the size that the position embedding is made for, to tokens (B, L, C)."""
        backbone = self.backbone
        # As published, a convolution; ours is a product.
        tokens = backbone.patch_embed.proj(images).flatten(2).transpose(1, 2)
        if backbone.placement != 'none':
            cls = backbone.cls_token.expand(len(tokens), -1, -1)
            tokens = insert_cls(tokens, cls, backbone.placement)
        hidden, residual = tokens + backbone.pos_embed, None
        for layer in backbone.layers:
            hidden, residual = _add_norm(hidden, residual, layer.norm)
            hidden = _mix(layer.mixer, hidden)
        return (_add_norm(hidden, residual, backbone.norm_f)[0],)
