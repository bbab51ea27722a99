"""Models small enough for many tests, no two parameters alike, and what tests do with them."""

import torch

from vim_mm.models import Mamba, VisionMamba

DEPTH = 2


@torch.no_grad()
def scramble(module):
    """Add noise to every parameter, so that one taken for another shows."""
    for param in module.parameters():
        param += 0.2 * torch.randn_like(param)
    return module


def small_mixer(**kwargs):
    return scramble(Mamba(**dict(d_model=8, d_state=4) | kwargs))


def small_backbone(cls=VisionMamba, **kwargs):
    arch = dict(embed_dims=16, num_layers=DEPTH)
    config = dict(arch=arch, img_size=32, patch_size=8, ssm_cfg=dict(d_state=4))
    return scramble(cls(**config | kwargs))


def images(height=32, width=32, batch=2):
    return torch.randn(batch, 3, height, width)


def total(outputs):
    """A scalar that depends on every entry of every output, with no symmetry to cancel in."""
    return sum(
        (o.float() * torch.linspace(-1, 2, o.numel(), device=o.device).view(o.shape)).sum()
        for o in outputs
    )


def compute_gradients(model, x):
    model.zero_grad()
    total(model(x)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
