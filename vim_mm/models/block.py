"""Block, a layer of the backbone: the residual add, the norm and the mixer."""

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from vim_mm.models.fused import (
    path_of_block,
    read,
    reads_all,
    why_call,
    why_call_norm,
    why_plain_norm,
)
from vim_mm.models.mamba import Mamba
from vim_mm.ops.block import add_rms_norm, fused_block


def add_norm(
    norm: nn.RMSNorm, residual: Tensor, update: Tensor | None, path: tuple[torch.dtype, str] | None
) -> tuple[Tensor, Tensor]:
    """The norm of residual + update, and that sum in the dtype of residual.

    In one launch of the ``path``'s dtype and backend, see :func:`path_of_norm`; None where the norm
    is called.
    """
    if path is None:
        stream = residual if update is None else residual + update
        # What stands in the place of a norm need not have a weight.
        weight = getattr(norm, 'weight', None)
        return norm(stream if weight is None else stream.to(weight.dtype)), stream
    dtype, backend = path
    stream, weight = _stream(residual, dtype), read(norm, 'weight')
    return add_rms_norm(stream, update, weight, norm.eps, dtype, backend=backend)


def _stream(residual: Tensor, dtype: torch.dtype) -> Tensor:
    """The residual stream as the fast block takes it: in no less than the dtype of activations."""
    return residual.to(torch.promote_types(residual.dtype, dtype))


class Block(nn.Module):
    """One layer: mixer(norm(stream)), where the stream is ``residual + update``.

    The update is ``drop_path`` of the previous layer's output. The caller takes that drop, so that
    it can have the output itself; the sum is made here, so that it is made along with the norm.
    """

    def __init__(self, embed_dims: int, drop_path: float, mixer_cfg: dict):
        super().__init__()
        self.norm = nn.RMSNorm(embed_dims, eps=1e-5)
        self.mixer = Mamba(embed_dims, **mixer_cfg)
        self.drop_path = DropPath(drop_path)

    def forward(
        self, residual: Tensor, update: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The mixer's output (B, L, C), and the stream in the dtype of residual.

        ``reset`` (B, L) says where sequences begin, see :class:`Mamba`.
        """
        norm, mixer = self.norm, self.mixer
        path = path_of_block(norm, mixer, Mamba, residual, reset is not None)
        if path.norm is None or path.mixer is None or path.mixer.fused is None:
            normed, stream = add_norm(norm, residual, update, path.norm)
            further = {} if reset is None else {'reset': reset}
            if path.mixer is not None:
                further['path'] = path.mixer
            return mixer(normed, **further), stream
        dtype = path.mixer.dtype
        stream, weight = _stream(residual, dtype), read(norm, 'weight')
        return fused_block(stream, update, weight, norm.eps, dtype, path.mixer.fused, reset)

    def calls_modules(self) -> bool:
        """Whether code that is not this package's runs, which may draw random numbers.

        That is hooks, modules in the place of others, and parametrizations, whose parameters are
        computed as they are read.
        """
        mixer, norm = self.mixer, self.norm
        return (
            why_call(self, Block) is not None
            or why_call(mixer, Mamba) is not None
            # Before the others, which read parameters: that alone would draw.
            or any('parametrizations' in m._modules for m in (norm, mixer, *mixer.children()))
            or why_call_norm(norm) is not None
            or not reads_all(mixer)
        )

    def plain_reasons(self, device_type: str, dtype: torch.dtype | None) -> dict[str, str | None]:
        """By part, see :func:`vim_mm.models.fused.path_of_layers`."""
        return {'norm': why_plain_norm(self.norm, self.mixer, device_type, dtype)}
