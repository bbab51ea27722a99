"""Files as Vim's code writes them: names, shapes and wrapping from hustvl/Vim, values at random.

The sources are vim/models_mamba.py and vim/main.py (classification), seg/backbone/vim.py and
seg/train.py (MMSegmentation 0.29), det/configs/common/models/mask_rcnn_vimdet.py and what it names
(detectron2). Sizes are arguments, so that tests of values can be small and tests of names complete.
"""

import argparse
import math
import re
from collections import OrderedDict

import torch

SIZES = dict(tiny=192, small=384, base=768)
DEPTH, STATES, CONV = 24, 16, 4
MODEL_NAME = 'vim_{}_patch16_224_bimambav2_final_pool_mean_abs_pos_embed_with_midclstok_div2'


def mixer_shapes(width):
    """One layer's weights; both directions have all but the outer projections."""
    inner, rank = 2 * width, -(-width // 16)
    shapes = {'A_log': (inner, STATES), 'D': (inner,), 'A_b_log': (inner, STATES), 'D_b': (inner,)}
    for end in ('', '_b'):
        shapes |= {
            f'conv1d{end}.weight': (inner, 1, CONV),
            f'conv1d{end}.bias': (inner,),
            f'x_proj{end}.weight': (rank + 2 * STATES, inner),
            f'dt_proj{end}.weight': (inner, rank),
            f'dt_proj{end}.bias': (inner,),
        }
    return shapes | {'in_proj.weight': (2 * inner, width), 'out_proj.weight': (width, inner)}


def vim_shapes(width, depth=DEPTH, tokens=197, patch=16, cls=True, norm_f=True):
    """The backbone's weights by name."""
    shapes = {'cls_token': (1, 1, width)} if cls else {}
    shapes |= {
        'pos_embed': (1, tokens, width),
        'patch_embed.proj.weight': (width, 3, patch, patch),
        'patch_embed.proj.bias': (width,),
    }
    for i in range(depth):
        shapes |= {f'layers.{i}.mixer.{k}': v for k, v in mixer_shapes(width).items()}
        shapes[f'layers.{i}.norm.weight'] = (width,)
    return shapes | ({'norm_f.weight': (width,)} if norm_f else {})


def rope_table(side, width, pretrained_side=14):
    """The buffers of vim/rope.py: float32, computed in this order of operations."""
    half = width // 2
    frequency = 1.0 / (10000 ** (torch.arange(0, half, 2).float() / half))
    position = torch.arange(side) / side * pretrained_side
    angle = torch.outer(position, frequency).repeat_interleave(2, dim=-1)
    both = [angle[:, None].expand(side, side, half), angle[None].expand(side, side, half)]
    angle = torch.cat(both, dim=-1).view(side * side, width)
    return {'rope.freqs_cos': angle.cos(), 'rope.freqs_sin': angle.sin()}


def random_weights(shapes, dtype=torch.float32):
    """Drawn as Vim initializes them, with noise, so that no two weights are alike."""
    weights = OrderedDict()
    for name, shape in shapes.items():
        value = torch.randn(shape, dtype=torch.float64)
        if name.endswith(('A_log', 'A_b_log')):
            value = torch.arange(1, shape[1] + 1).log() + 0.2 * value
        elif name.endswith('num_batches_tracked'):
            value = torch.tensor(7)
        elif name.endswith('running_var'):
            value = 1 + value.square()
        elif name.endswith(('.D', '.D_b')) or (len(shape) == 1 and name.endswith('.weight')):
            value = 1 + 0.2 * value
        elif re.search(r'dt_proj(_b)?\.bias', name):
            value = value - 4.5
        elif name.endswith(('pos_embed', 'cls_token')) or len(shape) == 1:
            value *= 0.1
        else:
            value *= math.prod(shape[1:]) ** -0.5 / (DEPTH**0.5 if 'out_proj' in name else 1)
        weights[name] = value.to(dtype if value.is_floating_point() else value.dtype)
    return weights


def as_classifier(weights, name=MODEL_NAME.format('tiny')):  # noqa: B008  a constant
    """What vim/main.py writes."""
    args = argparse.Namespace(model=name, lr=5e-4, data_path='/data', input_size=224, drop_path=0.0)
    return dict(
        model=weights,
        optimizer=dict(state={0: dict(exp_avg=torch.zeros(2))}, param_groups=[dict(lr=0.1)]),
        lr_scheduler=dict(base_values=[5e-4], t_initial=300),
        epoch=299,
        model_ema=OrderedDict((k, v + 1) for k, v in weights.items()),
        scaler=None,
        args=args,
    )


def classifier_shapes(width, classes=1000, **options):
    return vim_shapes(width, **options) | {'head.weight': (classes, width), 'head.bias': (classes,)}


def batch_norm(name, channels):
    return {
        f'{name}.{k}': (channels,) for k in ('weight', 'bias', 'running_mean', 'running_var')
    } | {f'{name}.num_batches_tracked': ()}


def conv_module(name, out, channels, side):
    return {f'{name}.conv.weight': (out, channels, side, side)} | batch_norm(f'{name}.bn', out)


def segmentor_shapes(width, classes=150, auxiliary=256, **options):
    """UPerNet of MMSegmentation 0.29 over a backbone that holds its own pyramid."""
    vim = vim_shapes(width, cls=False, **options)
    pyramid = {
        f'{name}.{k}': (width, width, 2, 2) if k == 'weight' else (width,)
        for name in ('fpn1.0', 'fpn1.3', 'fpn2.0')
        for k in ('weight', 'bias')
    } | batch_norm('fpn1.1', width)
    shapes = {f'backbone.{k}': v for k, v in (vim | pyramid).items()}
    head = {'conv_seg.weight': (classes, width, 1, 1), 'conv_seg.bias': (classes,)}
    for i in range(4):
        head |= conv_module(f'psp_modules.{i}.1', width, width, 1)
    head |= conv_module('bottleneck', width, 5 * width, 3)
    for i in range(3):
        head |= conv_module(f'lateral_convs.{i}', width, width, 1)
        head |= conv_module(f'fpn_convs.{i}', width, width, 3)
    head |= conv_module('fpn_bottleneck', width, 4 * width, 3)
    aux = {'conv_seg.weight': (classes, auxiliary, 1, 1), 'conv_seg.bias': (classes,)}
    aux |= conv_module('convs.0', auxiliary, width, 3)
    shapes |= {f'decode_head.{k}': v for k, v in head.items()}
    return shapes | {f'auxiliary_head.{k}': v for k, v in aux.items()}


SMALL_SEGMENTOR_CONFIG = """
norm_cfg = dict(type='SyncBN', requires_grad=True)
model = dict(
    type='EncoderDecoder',
    pretrained=None,
    backbone=dict(
        type='VisionMambaSeg', img_size=512, out_indices=[5, 11, 17, 23], residual_in_fp32=True,
        if_rope=True, if_rope_residual=True, bimamba_type='v2', final_pool_type='all',
        if_cls_token=True, use_residual_as_feature=True, last_layer_process='add'))
lr = __import__('os').system('touch executed')
"""


def as_segmentor(weights, config=None):
    """What seg/train.py writes by MMCV 1.7."""
    meta = dict(
        mmseg_version='0.29.1+', CLASSES=('wall', 'building'), PALETTE=[[120] * 3, [180] * 3]
    )
    return dict(
        meta=meta | dict(mmcv_version='1.7.1', epoch=24, iter=60000, config=config),
        state_dict=weights,
        optimizer=dict(state={}, param_groups=[]),
    )


def detector_shapes(width, classes=80, channels=256, fc=1024, stages=3, depth=DEPTH, tokens=4096):
    """ViTDet's Cascade Mask R-CNN (stages 0: Mask R-CNN) in detectron2."""
    half, quarter = width // 2, width // 4
    vim = vim_shapes(width, depth, tokens, cls=False, norm_f=False)
    shapes = {f'backbone.net.{k}': v for k, v in vim.items()}
    up = {'2.0': (width, half), '2.3': (half, quarter), '3.0': (width, half)}
    for name, size in up.items():
        shapes |= {
            f'backbone.simfp_{name}.weight': (*size, 2, 2),
            f'backbone.simfp_{name}.bias': size[1:],
        }
    shapes |= {f'backbone.simfp_2.1.{k}': (half,) for k in ('weight', 'bias')}
    for level, first, given in ((2, 4, quarter), (3, 1, half), (4, 0, width), (5, 1, width)):
        for k, (into, side) in enumerate(((given, 1), (channels, 3))):
            shapes |= layer_normed(f'backbone.simfp_{level}.{first + k}', channels, into, side)
    rpn = 'proposal_generator.rpn_head'
    for name, out, side in (('conv.conv0', channels, 3), ('conv.conv1', channels, 3),
                            ('objectness_logits', 3, 1), ('anchor_deltas', 12, 1)):  # fmt: skip
        shapes |= {
            f'{rpn}.{name}.weight': (out, channels, side, side),
            f'{rpn}.{name}.bias': (out,),
        }
    for stage in [f'{k}.' for k in range(stages)] or ['']:
        box, predictor = f'roi_heads.box_head.{stage}', f'roi_heads.box_predictor.{stage}'
        for k in range(4):
            shapes |= layer_normed(f'{box}conv{k + 1}', channels, channels, 3)
        shapes |= linear(f'{box}fc1', fc, channels * 49)
        shapes |= linear(f'{predictor}cls_score', classes + 1, fc)
        shapes |= linear(f'{predictor}bbox_pred', 4 if stages else 4 * classes, fc)
    mask = 'roi_heads.mask_head'
    for k in range(4):
        shapes |= layer_normed(f'{mask}.mask_fcn{k + 1}', channels, channels, 3)
    return shapes | {
        f'{mask}.deconv.weight': (channels, channels, 2, 2),
        f'{mask}.deconv.bias': (channels,),
        f'{mask}.predictor.weight': (classes, channels, 1, 1),
        f'{mask}.predictor.bias': (classes,),
    }


def layer_normed(name, out, channels, side):
    return {f'{name}.weight': (out, channels, side, side)} | {
        f'{name}.norm.{k}': (out,) for k in ('weight', 'bias')
    }


def linear(name, out, channels):
    return {f'{name}.weight': (out, channels), f'{name}.bias': (out,)}


def as_detector(weights):
    """What detectron2's checkpointer writes."""
    return dict(
        model=weights, optimizer=dict(state={}), scheduler=dict(last_epoch=1), iteration=184374
    )
