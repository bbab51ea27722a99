"""What the weights of a file compute: the arguments of a VisionMamba that they were trained with.

Names and shapes tell some of them. Others are told by the name of the model, which a file of DeiT's
kind holds, and by the config in one of MMCV's kind. The rest is taken as hustvl released it.
"""

import ast
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vim_mm.checkpoints.container import ConversionError
from vim_mm.errors import brief
from vim_mm.models.state_dict import wrong_entry
from vim_mm.models.tokens import rotary_table
from vim_mm.ops import METHODS

_LONGEST_CONFIG = 10**6  # characters; a config has some ten thousand


class Switches(NamedTuple):
    """Arguments of a VisionMamba by name.

    Attributes:
        told (dict): By the file.
        assumed (dict): As in hustvl's release of such a file, because it does not tell.
    """

    told: dict
    assumed: dict

    @property
    def all(self) -> dict:
        """Both."""
        return {**self.assumed, **self.told}


def find_switches(
    weights: Mapping[str, Tensor], kind: str, whole: Mapping[str, Any], note: Mapping[str, Any]
) -> Switches:
    """The arguments under which the weights of a Vim were trained.

    Args:
        weights (Mapping): Of the Vim alone, by their names in it.
        kind (str): Of the whole model: 'classifier', 'segmentor', 'detector' or 'backbone'.
        whole (Mapping): 'meta' and 'arguments' of the file.
        note (Mapping): What the file notes of this Vim, if it is ours.
    """
    told = _by_shapes(weights)
    model = whole['arguments'].get('model')
    told |= _by_model_name(model if isinstance(model, str) else '')
    config = backbone_of_config(whole['meta'].get('config'))
    if config is not None:
        told |= _by_config(config)
    method = whole['arguments'].get('discretization_method')
    if isinstance(method, str) and method in METHODS:
        told['discretization_method'] = method
    if (wrong := wrong_entry(told)) is not None:
        raise ConversionError(f'it tells {wrong} = {brief(told[wrong])}, which no Vim has')
    told |= {k: v for k, v in note.items() if k not in ('version', 'grid')}
    if kind == 'backbone' and 'norm_f.weight' in weights:  # a classifier's, without its head
        kind = 'classifier'
    return Switches(told, {k: v for k, v in _released(kind, told).items() if k not in told})


def _by_shapes(weights: Mapping[str, Tensor]) -> dict:
    """What names and shapes tell."""
    first = 'layers.0.mixer.'
    layers = {m[1] for m in (re.match(r'layers\.(\d+)\.', k) for k in weights) if m}
    if lacking := {str(i) for i in range(len(layers))} - layers:
        raise ConversionError(
            f'it has {len(layers)} layers, of which none is layers.{min(lacking, key=int)}'
        )
    embed_dims, in_channels, patch_size = weights['patch_embed.proj.weight'].shape[:3]
    switches: dict[str, Any] = dict(
        arch=dict(embed_dims=embed_dims, num_layers=len(layers)),
        in_channels=in_channels,
        patch_size=patch_size,
        bimamba_type='v2' if f'{first}D_b' in weights else 'v1',
        if_abs_pos_embed='pos_embed' in weights,
        if_rope='rope.freqs_cos' in weights,
    )
    if f'{first}A_b_log' not in weights:
        switches['bimamba_type'] = 'none'
    if 'cls_token_head' in weights:
        switches['cls_token'] = 'double'
    elif 'cls_token' not in weights:
        switches['cls_token'] = 'none'
    if switches['if_rope']:
        switches['rope_grid'] = _rope_grid(weights['rope.freqs_cos'], weights['rope.freqs_sin'])
    switches['ssm_cfg'] = _mixer_cfg(weights, embed_dims)
    return switches


def _mixer_cfg(weights: Mapping[str, Tensor], embed_dims: int) -> dict:
    """The arguments of the mixer that differ from its defaults."""
    first = 'layers.0.mixer.'
    inner, states = weights[f'{first}A_log'].shape
    found = dict(
        d_state=states,
        d_conv=weights[f'{first}conv1d.weight'].shape[-1],
        expand=inner / embed_dims,
        dt_rank=weights[f'{first}dt_proj.weight'].shape[1],
        bias=f'{first}in_proj.bias' in weights,
        conv_bias=f'{first}conv1d.bias' in weights,
    )
    rank = math.ceil(embed_dims / 16)
    usual = dict(d_state=16, d_conv=4, expand=2, dt_rank=rank, bias=False, conv_bias=True)
    return {name: value for name, value in found.items() if value != usual[name]}


def _rope_grid(cos: Tensor, sin: Tensor) -> int:
    """``rope_grid`` of a rotary table (H W, C) over a square grid, which must be one of Vim's."""
    side, channels = math.isqrt(len(cos)), cos.shape[1]
    # The second token stands in the second column. Its last channel turns at the least frequency,
    # by much less than half a turn.
    half = channels // 2
    angle = math.atan2(sin[1, -1], cos[1, -1]) if len(cos) > 1 else 0.0
    rope_grid = round(angle * side * 10000 ** ((half - 2) / half))
    if rope_grid < 1 or side * side != len(cos):
        raise ConversionError('its rotary table is not that of Vim')
    own = rotary_table((side, side), channels, rope_grid, 'none', torch.device('cpu'))
    for table, theirs in zip(own, (cos, sin)):
        if not torch.allclose(table[0], theirs.float(), atol=1e-2):  # it may be in half precision
            raise ConversionError('its rotary table is not that of Vim')
    return rope_grid


def _by_model_name(name: str) -> dict:
    """What a name such as ``vim_tiny_patch16_224_bimambav2_..._with_midclstok_div2`` tells."""
    method = next((m for m in METHODS if re.fullmatch(rf'vim_\w+_bimambav2_{m}', name)), None)
    if not name.startswith('vim_'):
        return {}
    switches: dict[str, Any] = {}
    if stride := re.search(r'_stride(\d+)_', name):
        switches['stride'] = int(stride[1])
    if method is not None:  # of the six-method code base, which has the middle token and halves
        switches |= dict(discretization_method=method, cls_token='middle', if_divide_out=True)
    if 'midclstok' in name or 'middle_cls_token' in name:
        switches['cls_token'] = 'middle'
    elif 'with_cls_token' in name:
        switches['cls_token'] = 'head'
    if 'div2' in name:
        switches['if_divide_out'] = True
    if 'rope' in name:
        switches['if_rope_residual'] = 'rope_also_residual' in name
    return switches


def backbone_of_config(text: Any) -> dict | None:
    """``model.backbone`` of a config in MMCV's form, read as data: nothing of it is run."""
    try:
        tree = ast.parse(text) if isinstance(text, str) and len(text) < _LONGEST_CONFIG else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    for node in tree.body if tree is not None else ():
        names = [t.id for t in getattr(node, 'targets', ()) if isinstance(t, ast.Name)]
        if isinstance(node, ast.Assign) and names == ['model']:
            model = _plain(node.value)
            backbone = model.get('backbone') if isinstance(model, dict) else None
            return backbone if isinstance(backbone, dict) else None
    return None


def _plain(node: ast.AST) -> Any:
    """The value of a literal, of ``dict(...)``, or None for whatever else an expression is."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == 'dict':
        return {k.arg: _plain(k.value) for k in node.keywords if k.arg is not None}
    if isinstance(node, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
        return dict(zip(keys, map(_plain, node.values)))
    if isinstance(node, ast.List | ast.Tuple):
        return [_plain(element) for element in node.elts]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return None


def _by_config(config: Mapping[str, Any]) -> dict:
    """What the backbone of a segmentor's config tells.

    Defaults are those of the commit that trained the released segmentors (bb3928b): what is not set
    is off.
    """
    if config.get('type') != 'VisionMambaSeg':
        return {}
    switches = {
        name: bool(config.get(name, False)) for name in ('if_divide_out', 'residual_in_fp32')
    }
    if config.get('if_rope'):
        switches['if_rope_residual'] = bool(config.get('if_rope_residual', False))
    taps = config.get('out_indices') or (3, 5, 7, 11)
    switches['out_indices'] = tuple(taps) if isinstance(taps, list) else taps
    switches['out_feature'] = 'residual' if config.get('use_residual_as_feature') else 'mixer'
    switches['discretization_method'] = config.get('discretization_method', 'zoh')
    if isinstance(config.get('stride'), int):
        switches['stride'] = config['stride']
    return switches


def _released(kind: str, told: Mapping[str, Any]) -> dict:
    """The arguments of hustvl's released model of that kind."""
    rope, last = told['if_rope'], told['arch']['num_layers'] - 1
    released = dict(discretization_method='zoh', stride=told['patch_size'], out_type='featmap')
    released['cls_token'] = 'middle'
    if told['bimamba_type'] == 'v2':
        # Those with rotation were trained before the sum was halved by default.
        released['if_divide_out'] = not rope
    if rope:
        released['if_rope_residual'] = True
    if kind == 'classifier':
        pooled = 'avg_featmap' if told.get('cls_token') == 'none' else 'cls_token'
        return released | dict(out_type=pooled, out_feature='norm', out_indices=(last,))
    if kind == 'detector':
        return released | dict(out_feature='residual', out_indices=(last,))
    taps = tuple((last + 1) * k // 4 - 1 for k in range(1, 5)) if last >= 3 else (last,)
    return released | dict(out_feature='residual' if rope else 'mixer', out_indices=taps)
