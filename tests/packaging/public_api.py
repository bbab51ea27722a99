"""Uses the public API as typed code does. `make lint` checks this file; no test runs it."""

import torch
from torch import Tensor, nn

import vim_mm
from vim_mm.ops import (
    METHODS,
    causal_conv1d,
    discretize,
    selective_scan_dense_ref,
    selective_scan_fn,
    selective_scan_grouped_fn,
    selective_scan_ref,
)


def backbones(images: Tensor) -> list[tuple[Tensor, ...]]:
    """Every way to make one."""
    models: list[vim_mm.VisionMamba] = [
        vim_mm.VisionMamba(),
        vim_mm.VisionMamba(arch='tiny', img_size=(224, 256), out_indices=[-1], with_cp=True),
        vim_mm.VisionMamba({'embed_dims': 64, 'num_layers': 2}, ssm_cfg={'fused': False}),
        vim_mm.vim_tiny(discretization_method='foh'),
        vim_mm.vim_small(),
        vim_mm.vim_base(),
        vim_mm.registered.VisionMamba('tiny', init_cfg={'type': 'Pretrained', 'checkpoint': 'x'}),
    ]
    depths: tuple[int, int] = models[0].get_layer_depth('backbone.pos_embed')
    assert depths
    return [model.forward(images) for model in models]


def classifiers(images: Tensor) -> list[Tensor]:
    """The one that timm knows by name."""
    model = vim_mm.timm_models.VisionMambaClassifier(num_classes=10, discretization_method='foh')
    model.reset_classifier(5, 'avg')
    model.set_input_size((224, 320))
    return [model(images), model.forward_head(model.forward_features(images), pre_logits=True)]


def mixers() -> nn.ModuleList:
    """And their options."""
    return nn.ModuleList([vim_mm.Mamba(64), vim_mm.Mamba(64, dt_rank=4, fused=False)])


def operators(u: Tensor, A: Tensor, B: Tensor) -> list[Tensor | tuple[Tensor, Tensor]]:
    """The functions of vim_mm.ops."""
    A_bar, beta = discretize(u, A, 'zoh')
    names: list[str] = [*METHODS]
    return [
        A_bar + beta,
        causal_conv1d(u, A, reverse=True, activation='silu'),
        selective_scan_fn(u, u, A, B, B, z=u, discretization_method=names[0], reverse=True),
        selective_scan_grouped_fn(u, u, A, B, B, reverse=[True, False], return_last_state=True),
        selective_scan_ref(u, u, A, B, B, delta_bias=None),
        selective_scan_dense_ref(u, u, A, B, B, return_last_state=True),
    ]


def configs() -> list[str]:
    """What is MMEngine's."""
    vim_mm.activate()
    return [vim_mm.config_path(name) for name in vim_mm.config_names()]


def neck(maps: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The detector's."""
    return (*vim_mm.models.SimpleFPN(192, num_outs=5).forward(maps), torch.zeros(1))
