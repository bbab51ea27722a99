"""The released recipes: what each parameter learns and decays by, and the learning rate over time.

The rules of the original code stand here in words of their own, by the original's names of
parameters; what they say of each parameter is compared with the optimizer that a config builds.
"""

import re

import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, PARAM_SCHEDULERS, init_default_scope
from torch import nn

from vim_mm.config import config_names, config_path
from vim_mm.engine import activate
from vim_mm.engine.cli import import_task_library

LAYERS = 24


def load(name: str) -> Config:
    activate()
    return Config.fromfile(config_path(name))


def settings(cfg: Config) -> dict[str, tuple[float, float, nn.Parameter]]:
    """(learning rate, weight decay, the parameter) by name; each is in one group."""
    init_default_scope(cfg.default_scope)
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
    names = {param: name for name, param in model.named_parameters()}
    found = {}
    for group in build_optim_wrapper(model, cfg.optim_wrapper).optimizer.param_groups:
        for param in group['params']:
            assert names[param] not in found
            found[names[param]] = (group['lr'], group['weight_decay'], param)
    assert found.keys() == set(names.values())
    return found


def released_segmentation(name: str, param: nn.Parameter, decay: float) -> tuple[float, bool]:
    """hustvl/Vim at bb3928b, seg/mmcv_custom/layer_decay_optimizer_constructor.py.

    Depth 0 of 26 are the class token, pos_embed and patch_embed. Depths 1 to 24 are of parameters
    that begin with ``backbone.blocks``, which none does. All else is depth 25. No weight decay for
    one dimension, for biases, and for the names ``pos_embed`` and ``cls_token`` without a prefix.
    """
    first = name == 'backbone.pos_embed' or name.startswith('backbone.patch_embed')
    scale = decay ** (25 - (0 if first else 25))
    return scale, not (param.dim() == 1 or name.endswith('.bias'))


def released_detection(name: str, param: nn.Parameter) -> tuple[float, bool]:
    """hustvl/Vim at dd0358a, det/detectron2/modeling/backbone/vim.py and solver/build.py.

    pos_embed and patch_embed are depth 0, layer i is i + 1, all else 25. Parameters of PyTorch's
    norm classes and those named pos_embed do not decay; there are none of the former, because the
    backbone has mamba_ssm's RMSNorm, and detectron2's LN is a class of its own.
    """
    depth = LAYERS + 1
    if name.startswith('backbone.'):
        if '.pos_embed' in name or '.patch_embed' in name:
            depth = 0
        elif layer := re.search(r'\.layers\.(\d+)\.', name):
            depth = int(layer[1]) + 1
    return 0.837 ** (LAYERS + 1 - depth), not name.endswith('pos_embed')


def released_classification(name: str, param: nn.Parameter) -> tuple[float, bool]:
    """timm 0.4.12, which hustvl/Vim's vim/main.py builds its optimizer by.

    No weight decay for one dimension, for biases, and for what the model's no_weight_decay() names:
    pos_embed and the class token.
    """
    exempt = name in ('backbone.pos_embed', 'backbone.cls_token')
    return 1.0, not (param.dim() == 1 or name.endswith('.bias') or exempt)


RULES = {
    'cls/vim_t_zoh_released.py': (1e-3, 0.1, released_classification),
    'cls/vim_s_zoh_released.py': (1e-3, 0.05, released_classification),
    # There is no script of the original for Vim-B: the values of Vim-S.
    'cls/vim_b_zoh_released.py': (1e-3, 0.05, released_classification),
    # Of the parameter groups the paper says nothing.
    'cls/vim_t_zoh_paper.py': (1e-3, 0.05, released_classification),
    'cls/vim_s_zoh_paper.py': (1e-3, 0.05, released_classification),
    'cls/vim_b_zoh_paper.py': (1e-3, 0.05, released_classification),
    'cls/vim_t_stride8_zoh_released.py': (1e-5, 1e-8, released_classification),
    'cls/vim_s_stride8_zoh_released.py': (1e-5, 1e-8, released_classification),
    'seg/upernet_vim_t_zoh_released.py': (2e-4, 0.1, lambda *a: released_segmentation(*a, 0.92)),
    'seg/upernet_vim_s_zoh_released.py': (1e-4, 0.05, lambda *a: released_segmentation(*a, 0.95)),
    'det/cascade_mask_rcnn_vim_t_zoh_released.py': (1e-4, 0.1, released_detection),
    'det/cascade_mask_rcnn_vim_t_zoh_paper.py': (1e-4, 0.1, released_detection),
    # The paper's words name no layer-wise decay.
    'seg/upernet_vim_t_zoh_paper.py': (6e-5, 0.01, lambda *a: released_segmentation(*a, 1.0)),
    'seg/upernet_vim_s_zoh_paper.py': (6e-5, 0.01, lambda *a: released_segmentation(*a, 1.0)),
}
# Some rows of the tables, as factors of the learning rate and whether weight decay is on, worked
# out by hand from the original's source.
ROWS = {
    'cls/vim_t_zoh_released.py': {
        'backbone.pos_embed': (1.0, False),
        'backbone.cls_token': (1.0, False),
        'backbone.layers.0.mixer.A_log': (1.0, True),
        'backbone.layers.0.mixer.D': (1.0, False),
        'backbone.norm_f.weight': (1.0, False),
        'head.fc.weight': (1.0, True),
    },
    'seg/upernet_vim_t_zoh_released.py': {
        'backbone.pos_embed': (0.124364, True),
        'backbone.patch_embed.proj.weight': (0.124364, True),
        'backbone.patch_embed.proj.bias': (0.124364, False),
        'backbone.layers.0.mixer.A_log': (1.0, True),
        'backbone.layers.0.mixer.A_b_log': (1.0, True),
        'backbone.layers.0.mixer.D': (1.0, False),
        'backbone.layers.23.mixer.conv1d.weight': (1.0, True),
        'backbone.layers.23.mixer.dt_proj.bias': (1.0, False),
        'backbone.layers.5.norm.weight': (1.0, False),
        'decode_head.conv_seg.weight': (1.0, True),
    },
    'seg/upernet_vim_s_zoh_released.py': {
        'backbone.pos_embed': (0.277390, True),
        'backbone.layers.11.mixer.A_log': (1.0, True),
        'auxiliary_head.conv_seg.bias': (1.0, False),
    },
    'det/cascade_mask_rcnn_vim_t_zoh_released.py': {
        'backbone.pos_embed': (0.0116987, False),
        'backbone.patch_embed.proj.bias': (0.0116987, True),
        'backbone.layers.0.mixer.D': (0.0139769, True),
        'backbone.layers.23.mixer.A_log': (0.837, True),
        'backbone.layers.23.norm.weight': (0.837, True),
        'neck.lateral.0.0.weight': (1.0, True),
        'roi_head.bbox_head.2.fc_reg.bias': (1.0, True),
    },
}


# In a hurry one recipe of each rule; the others have its parameters in other sizes and numbers.
EACH_RECIPE = [
    pytest.param(name, marks=() if name in ROWS and '_t_' in name else pytest.mark.slow)
    for name in RULES
]


@pytest.mark.parametrize('name', EACH_RECIPE)
def test_parameter_groups(name):
    cfg = load(name)
    if cfg.default_scope == 'mmdet':
        pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
    import_task_library(cfg)
    lr, decay, rule = RULES[name]
    found = settings(cfg)
    for parameter, (actual_lr, actual_decay, param) in found.items():
        scale, decays = rule(parameter, param)
        print(f'{parameter:60} lr x {actual_lr / lr:.6f}  weight decay {actual_decay}')
        assert actual_lr == pytest.approx(lr * scale, rel=1e-9), parameter
        assert actual_decay == (decay if decays else 0.0), parameter
    for parameter, (scale, decays) in ROWS.get(name, {}).items():
        assert found[parameter][0] == pytest.approx(lr * scale, rel=1e-5), parameter
        assert (found[parameter][1] > 0) == decays, parameter


def test_no_released_recipe_is_left_out():
    named = [name for name in config_names() if name.endswith(('_released.py', '_paper.py'))]
    assert sorted(RULES) == named


@pytest.mark.parametrize(
    ('name', 'lr'), [('seg/upernet_vim_t_zoh.py', 6e-5), ('cls/vim_t_zoh.py', 1e-3)]
)
def test_the_recommended_recipe_decays_no_state(name, lr):
    found = settings(load(name))
    for parameter in (
        'backbone.pos_embed',
        'backbone.layers.7.mixer.A_log',
        'backbone.layers.7.mixer.D',
    ):
        assert found[parameter][:2] == (lr, 0.0)


# Images of a GPU, of eight, and epochs: vim/scripts of hustvl/Vim, and section 4.1 of the paper.
LENGTHS = {
    'cls/vim_t_zoh_released.py': (128, 300),
    'cls/vim_s_zoh_released.py': (64, 300),
    'cls/vim_b_zoh_released.py': (64, 300),  # as Vim-S, for want of a script
    'cls/vim_t_stride8_zoh_released.py': (128, 30),
    'cls/vim_s_stride8_zoh_released.py': (128, 30),
    'cls/vim_t_zoh_paper.py': (128, 300),
    'cls/vim_s_zoh_paper.py': (128, 300),
    'cls/vim_b_zoh_paper.py': (128, 300),
}


@pytest.mark.parametrize('name', LENGTHS)
def test_batch_and_length_of_classification(name):
    """An epoch is what DeiT's repeated augmentation draws, in whole batches."""
    per_gpu, epochs = LENGTHS[name]
    epoch = 1281167 // 256 * 256 // 8 // per_gpu
    cfg = load(name)
    assert cfg.auto_scale_lr.base_batch_size == 8 * per_gpu
    assert cfg.train_cfg.max_iters == epochs * epoch
    if 'released' in name:
        assert cfg.train_cfg.val_interval == cfg.default_hooks.checkpoint.interval == epoch
    for scheduler in cfg.param_scheduler:
        if scheduler.type == 'DeiTCosineLR':
            assert (scheduler.iters_per_epoch, scheduler.epochs) == (epoch, epochs)
        if scheduler.type == 'LinearLR':
            assert scheduler.end == 5 * epoch


def test_no_length_of_classification_is_left_out():
    assert sorted(LENGTHS) == sorted(name for name in RULES if name.startswith('cls/'))


def learning_rates(cfg: Config, iterations: list[int]) -> list[float]:
    """The factor of the learning rate in some iterations."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedulers = [
        PARAM_SCHEDULERS.build({'end': cfg.train_cfg.max_iters, **s, 'optimizer': optimizer})
        for s in cfg.param_scheduler
    ]
    factors = []
    for i in range(max(iterations) + 1):
        if i in iterations:
            factors.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return factors


def test_rates_of_the_released_classification():
    """timm's cosine by epochs, stepped at the end of each with its own number."""
    (scheduler,) = load('cls/vim_t_zoh_released.py').param_scheduler
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
    built = PARAM_SCHEDULERS.build({**scheduler, 'optimizer': optimizer})
    for epoch, expected in ((0, 1e-6), (1, 1e-6), (2, 1e-6 + 0.999e-3 / 5), (5, 0.8002e-3)):
        built.last_step = epoch * 1251 + 7
        assert built._get_value() == [pytest.approx(expected, rel=1e-9)], epoch
    built.last_step = 151 * 1251  # half of the cosine
    assert built._get_value() == [pytest.approx((1e-3 + 1e-5) / 2, rel=1e-9)]


@pytest.mark.slow
def test_rates_of_the_released_segmentation():
    """MMCV 1.x: polynomial of power 1 to 0, times 1 - (1 - i / 1500) (1 - 1e-6) in the warmup."""

    def expected(i: int) -> float:
        warmup = 1 - (1 - i / 1500) * (1 - 1e-6) if i < 1500 else 1
        return (1 - i / 60000) * warmup

    iterations = [0, 1, 750, 1499, 1500, 30000, 59000, 59999]
    factors = learning_rates(load('seg/upernet_vim_t_zoh_released.py'), iterations)
    for i, factor in zip(iterations, factors):
        # MMEngine's polynomial ends one iteration earlier.
        assert factor == pytest.approx(expected(i), rel=1e-4, abs=2e-5), i


def test_rates_of_the_released_detection():
    """fvcore: linear from 0.001 in 250 iterations, then steps of 0.1."""
    iterations = [0, 1, 125, 249, 250, 300]
    factors = learning_rates(load('det/cascade_mask_rcnn_vim_t_zoh_released.py'), iterations)
    for i, factor in zip(iterations, factors):
        assert factor == pytest.approx(min(0.001 + 0.999 * i / 250, 1), rel=1e-9), i


@pytest.mark.slow
def test_steps_of_the_released_detection():
    cfg = load('det/cascade_mask_rcnn_vim_t_zoh_released.py')
    assert cfg.train_cfg.max_iters == 184375
    factors = learning_rates(cfg, [163888, 163889, 177545, 177546, 184374])
    assert factors == pytest.approx([1, 0.1, 0.1, 0.01, 0.01])


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'max_iters', 'warmup'),
    [
        ('seg/upernet_vim_t_zoh.py', 160000, 1500),
        ('det/cascade_mask_rcnn_vim_t_zoh.py', 380000, 250),
    ],
)
def test_rates_of_the_papers(name, max_iters, warmup):
    """A linear warmup, times a linear decay that ends with the training."""
    cfg = load(name)
    assert cfg.train_cfg.max_iters == max_iters
    iterations = [warmup // 2, warmup, max_iters // 2, max_iters - 1]
    for i, factor in zip(iterations, learning_rates(cfg, iterations), strict=True):
        expected = min(i / warmup, 1) * (1 - i / max_iters)
        assert factor == pytest.approx(expected, rel=1e-2, abs=1e-4), i


def test_released_switches():
    """Of the backbones and the heads, as the original's configs set them."""
    for size, drop_path in (('t', 0.0), ('s', 0.05)):
        backbone = load(f'cls/vim_{size}_zoh_released.py').model.backbone
        assert (backbone.cls_token, backbone.out_type) == ('middle', 'cls_token')
        assert (backbone.out_feature, backbone.drop_path_rate) == ('norm', drop_path)
    backbones = {name: load(name).model.backbone for name in RULES if 'released' in name}
    small = backbones['seg/upernet_vim_s_zoh_released.py']
    detection = backbones['det/cascade_mask_rcnn_vim_t_zoh_released.py']
    for backbone in (small, detection):
        assert backbone.out_feature == 'residual' and not backbone.if_divide_out
        assert backbone.if_rope and backbone.if_rope_residual and backbone.rope_grid == 14
    tiny = backbones['seg/upernet_vim_t_zoh_released.py']
    assert tiny.out_feature == 'mixer' and not tiny.residual_in_fp32
    assert tiny.get('if_divide_out', True) and not tiny.get('if_rope', False)


def test_released_detection_heads():
    model = load('det/cascade_mask_rcnn_vim_t_zoh_released.py').model
    deviations = [head.bbox_coder.target_stds for head in model.roi_head.bbox_head]
    assert deviations == [[1 / a, 1 / a, 1 / b, 1 / b] for a, b in ((10, 5), (20, 10), (30, 15))]
    assert {head.loss_bbox.type for head in (model.rpn_head, *model.roi_head.bbox_head)} == {
        'L1Loss'
    }
    assert {
        head.norm_cfg.eps for head in (model.roi_head.mask_head, *model.roi_head.bbox_head)
    } == {1e-6}
    assert model.train_cfg.rpn_proposal.nms_pre == 2000
    assert model.train_cfg.rpn_proposal.max_per_img == model.test_cfg.rpn.max_per_img == 1000
    assert model.train_cfg.rpn.allowed_border == -1
