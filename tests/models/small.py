"""Models small enough for many tests, with no two parameters alike."""

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


def small_backbone(**kwargs):
    arch = dict(embed_dims=16, num_layers=DEPTH)
    config = dict(arch=arch, img_size=32, patch_size=8, ssm_cfg=dict(d_state=4))
    return scramble(VisionMamba(**config | kwargs))
