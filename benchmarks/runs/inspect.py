"""What a trained backbone does inside: features, receptive fields, directions."""

from collections.abc import Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vim_mm.checkpoints.provenance import backbones
from vim_mm.models import VisionMamba
from vim_mm.models.tokens import split_cls


def find_backbone(model: nn.Module) -> VisionMamba:
    """The first Vision Mamba in a model.

    Raises:
        ValueError: There is none.
    """
    for _, backbone in backbones(model):
        return backbone
    raise ValueError(f'{type(model).__name__} holds no VisionMamba')


@contextmanager
def _recorded(backbone: VisionMamba):
    """Inputs of every mixer, outputs of every layer and the grid of patches, of the last call."""
    record = dict(mixer_inputs={}, layers={}, grid=None)

    def keep_grid(module, args, out):
        record['grid'] = tuple(out.shape[-2:])

    handles = [backbone.patch_embed.register_forward_hook(keep_grid)]
    for i, layer in enumerate(backbone.layers):

        def keep_input(module, args, out, i=i):
            record['mixer_inputs'][i] = args[0]

        def keep_output(module, args, out, i=i):
            mixed, stream = out
            record['layers'][i] = stream + mixed

        handles.append(layer.mixer.register_forward_hook(keep_input))
        handles.append(layer.register_forward_hook(keep_output))
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


def _to_map(tokens: Tensor, backbone: VisionMamba, grid: tuple[int, int]) -> Tensor:
    """Tokens (B, L, C) to (B, C, H, W), without class tokens."""
    patches, _ = split_cls(tokens, backbone.placement)
    return patches.transpose(1, 2).unflatten(2, grid)


@torch.no_grad()
def feature_maps(backbone: VisionMamba, images: Tensor, layers: Sequence[int]) -> list[Tensor]:
    """The residual stream after layers, (B, C, H, W) each, for images as the backbone takes them.

    The model has to be in evaluation mode: stochastic depth is not part of the stream here.
    """
    with _recorded(backbone) as record:
        backbone(images)
    return [_to_map(record['layers'][i], backbone, record['grid']).float() for i in layers]


def principal_components(features: Sequence[Tensor]) -> list[Tensor]:
    """The three principal components over all places, (3, H, W) each, scaled to [0, 1].

    Args:
        features: (C, H, W) each, C >= 3 the same for all.
    """
    rows = torch.cat([feature.flatten(1).T for feature in features])
    centred = (rows - rows.mean(0)).double()
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    components = centred @ directions[:3].T
    # The sign of a component is arbitrary: the longer tail of each is bright.
    components = components * components.pow(3).sum(0).sign().where(
        components.pow(3).sum(0) != 0, components.new_ones(())
    )
    low, high = components.quantile(0.01, dim=0), components.quantile(0.99, dim=0)
    scaled = ((components - low) / (high - low).clamp(min=1e-12)).clamp(0, 1).float()
    parts = scaled.split([feature[0].numel() for feature in features])
    return [part.T.unflatten(1, f.shape[1:]) for part, f in zip(parts, features, strict=True)]


def receptive_fields(backbone: VisionMamba, images: Tensor, layers: Sequence[int]) -> list[Tensor]:
    """Effective receptive field of the central patch after each layer, (H, W) in pixels.

    The absolute gradient of the sum of its channels by the image, as mean over images and colours
    (Luo et al., Understanding the Effective Receptive Field, arXiv 1701.04128), divided by its
    largest value.
    """
    fields = []
    images = images.detach().requires_grad_()
    with _recorded(backbone) as record, torch.enable_grad():
        backbone(images)
    for i in layers:
        features = _to_map(record['layers'][i], backbone, record['grid'])
        rows, columns = features.shape[-2:]
        centre = features[:, :, rows // 2, columns // 2].sum()
        (grad,) = torch.autograd.grad(centre, images, retain_graph=bool(i != layers[-1]))
        field = grad.abs().mean((0, 1))
        fields.append(field / field.max().clamp(min=torch.finfo(field.dtype).tiny))
    return fields


@torch.no_grad()
def forward_shares(backbone: VisionMamba, images: Tensor, layers: Sequence[int]) -> list[Tensor]:
    """What the forward scan contributes to the output of mixers, (B, H, W) in [0, 1] each.

    The norm of what it adds, behind the gate and ``out_proj``, by the sum of the norms of both
    directions' parts.

    Raises:
        ValueError: The backbone scans in one direction.
    """
    if len(backbone.layers[0].mixer.reverse) != 2:
        raise ValueError("bimamba_type 'none' has one direction, whose share is all")
    with _recorded(backbone) as record:
        backbone(images)
    shares = []
    for i in layers:
        mixer = backbone.layers[i].mixer
        y = mixer.scan_directions(record['mixer_inputs'][i])
        weight = mixer.out_proj.weight.to(y.dtype)
        norms = torch.einsum('oc,bkcl->bklo', weight, y).float().norm(dim=-1)
        share = norms[:, 0] / norms.sum(1).clamp(min=1e-12)
        shares.append(_to_map(share.unsqueeze(-1), backbone, record['grid']).squeeze(1))
    return shares
