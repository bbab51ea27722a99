"""The model that converted weights are for: a config's, or the shipped one of their kind and size.

Models are built on the meta device, because only names and shapes are asked.
"""

import inspect
import math
from collections.abc import Iterable

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from vim_mm.checkpoints import Conversion, ConversionError
from vim_mm.checkpoints.container import require
from vim_mm.config import config_path
from vim_mm.engine.cli import import_task_library
from vim_mm.engine.mmengine_patches import activate
from vim_mm.models import VisionMamba
from vim_mm.models.arguments import parse_size

_BY_CONFIG = 'name its config by --config'


def build_target(conversion: Conversion) -> nn.Module:
    """The shipped model of the kind and size of the weights, for as many classes.

    Raises:
        ConversionError: There is none: its config has to be named.
        SystemExit: MMSegmentation or MMDetection is missing.
    """
    if conversion.kind == 'segmentor':
        return build_model(_segmentor(conversion))
    if conversion.kind == 'detector':
        return build_model(_detector(conversion))
    arguments = _backbone_arguments(conversion)
    if 'backbone.norm_f.weight' not in conversion.state_dict:  # a whole model's, without its head
        arguments['out_feature'] = 'mixer'
    with torch.device('meta'):
        model = nn.ModuleDict(dict(backbone=VisionMamba(**arguments)))
        if conversion.kind == 'classifier':
            require(conversion.state_dict, {'head.fc.weight': 2})
            classes, channels = conversion.state_dict['head.fc.weight'].shape
            model['head'] = nn.ModuleDict(dict(fc=nn.Linear(channels, classes)))
    return model


def build_model(cfg: Config) -> nn.Module:
    """The model of a config, on the meta device."""
    import_task_library(cfg)
    init_default_scope(cfg.default_scope)
    with torch.device('meta'):
        return MODELS.build(cfg.model)


def _backbone_arguments(conversion: Conversion) -> dict:
    """Arguments of a VisionMamba that takes the weights as they are."""
    switches = conversion.switches.all
    known = inspect.signature(VisionMamba).parameters
    arguments = {name: value for name, value in switches.items() if name in known}
    note = conversion.state_dict._metadata['backbone']
    if 'grid' in note:
        grid = note['grid']
    elif 'backbone.pos_embed' in conversion.state_dict:
        of_classes = sum(name.startswith('backbone.cls_token') for name in conversion.state_dict)
        patches = conversion.state_dict['backbone.pos_embed'].shape[1] - of_classes
        grid = (math.isqrt(patches),) * 2
    else:
        grid = (14, 14)
    strides = parse_size('stride', arguments['stride'])
    arguments['img_size'] = tuple(
        (n - 1) * step + arguments['patch_size'] for n, step in zip(grid, strides)
    )
    return arguments


def _segmentor(conversion: Conversion) -> Config:
    weights = conversion.state_dict
    activate()
    cfg = Config.fromfile(config_path('_base_/models/upernet_vim_t.py'))
    cfg.default_scope = 'mmseg'
    if 'decode_head.psp_modules.0.1.conv.weight' not in weights:
        raise ConversionError(f'its segmentation head is not that of UPerNet: {_BY_CONFIG}')
    conv_seg = {f'{head}.conv_seg.weight': 4 for head in _heads(weights)}
    require(weights, conv_seg)
    model, arguments = cfg.model, _backbone_arguments(conversion)
    width = arguments['arch']['embed_dims']
    model.backbone.update(arguments)
    model.neck.embed_dim = width
    if 'neck.upsample_4x.0.weight' not in weights:  # patches of 8 pixels
        model.neck.rescales = [2, 1, 0.5, 0.25]
    classes, channels = weights['decode_head.conv_seg.weight'].shape[:2]
    model.decode_head.update(in_channels=[width] * 4, channels=channels, num_classes=classes)
    if 'auxiliary_head' in _heads(weights):
        channels = weights['auxiliary_head.conv_seg.weight'].shape[1]
        model.auxiliary_head.update(in_channels=width, channels=channels, num_classes=classes)
    else:
        model.pop('auxiliary_head')
    return cfg


def _heads(weights: Iterable[str]) -> set[str]:
    return {name.partition('.')[0] for name in weights} & {'decode_head', 'auxiliary_head'}


def _detector(conversion: Conversion) -> Config:
    weights = conversion.state_dict
    activate()
    cascade = 'roi_head.bbox_head.0.fc_cls.weight' in weights
    if not cascade and 'roi_head.bbox_head.fc_cls.weight' not in weights:
        raise ConversionError(f'it is neither Mask R-CNN nor Cascade Mask R-CNN: {_BY_CONFIG}')
    first = 'roi_head.bbox_head.0.' if cascade else 'roi_head.bbox_head.'
    require(
        weights,
        {f'{first}fc_cls.weight': 2, f'{first}fc_reg.weight': 2, 'neck.lateral.0.0.weight': 4},
    )
    name = 'cascade_mask_rcnn_vim_t' if cascade else 'mask_rcnn_vim_t'
    cfg = Config.fromfile(config_path(f'_base_/models/{name}.py'))
    cfg.default_scope = 'mmdet'
    model, arguments = cfg.model, _backbone_arguments(conversion)
    model.backbone.update(arguments)
    classes = weights[f'{first}fc_cls.weight'].shape[0] - 1
    channels = weights['neck.lateral.0.0.weight'].shape[0]
    model.neck.update(in_channels=arguments['arch']['embed_dims'], out_channels=channels)
    model.rpn_head.update(in_channels=channels, feat_channels=channels)
    roi_head = model.roi_head
    for head in roi_head.bbox_head if cascade else [roi_head.bbox_head]:
        head.update(
            in_channels=channels,
            conv_out_channels=channels,
            fc_out_channels=weights[f'{first}fc_cls.weight'].shape[1],
            num_classes=classes,
            reg_class_agnostic=weights[f'{first}fc_reg.weight'].shape[0] == 4,
        )
    roi_head.mask_head.update(in_channels=channels, conv_out_channels=channels, num_classes=classes)
    for extractor in (roi_head.bbox_roi_extractor, roi_head.mask_roi_extractor):
        extractor.out_channels = channels
    return cfg
