"""Names of weights elsewhere, and their names in our models.

The names are those of hustvl/Vim: ``vim/models_mamba.py`` (classification), ``seg/backbone/vim.py``
under MMSegmentation 0.x, and ``det/``, which is detectron2 with the heads of ViTDet.
"""

import re
from collections.abc import Callable, Iterable

# Of what a whole model is called here, the part that a Vim is called there: nothing in
# classification, 'backbone.' in MMSegmentation and in our own models, the last in detectron2.
_FIRST_LAYER = re.compile(r'(.*?)layers\.0\.mixer\.A_log')
CLASSIFICATION, MM, DETECTRON2 = '', 'backbone.', 'backbone.net.'

# Tables and constants that ours computes, and what a model without use for it keeps.
_UNNEEDED = (
    (r'rope\.freqs_(cos|sin)', 'the rotary table is computed here'),
    (r'.*anchor_generator\.cell_anchors\..*', 'anchors are computed here'),
    (r'pixel_(mean|std)', 'in the config here'),
)


def backbone_roots(names: Iterable[str]) -> list[str]:
    """What stands before the names of each Vim among the weights, such as ``backbone.``."""
    return [match[1] for match in map(_FIRST_LAYER.fullmatch, names) if match]


def unneeded(name: str, root: str, original: bool) -> str | None:
    """Why a weight has no counterpart in our models, None for one that has.

    Args:
        name (str): Its name there.
        root (str): Of the Vim there, see :func:`backbone_roots`.
        original (bool): The Vim there is one of hustvl/Vim's segmentors.
    """
    name = name.removeprefix(root)
    if original and name == 'norm_f.weight':
        return 'the segmentor does not normalize its features'
    return next((why for pattern, why in _UNNEEDED if re.fullmatch(pattern, name)), None)


def new_names(name: str, root: str, stages: int, pyramid_of_two: bool) -> list[str]:
    """What a weight is called here: one name, several for a shared head, none for an unknown one.

    Args:
        name (str): Its name there.
        root (str): Of the Vim there, see :func:`backbone_roots`.
        stages (int): Of a cascade, 0 for a detector without one.
        pyramid_of_two (bool): The neck of a segmentor begins with a scale of 2, not 4.
    """
    if root not in (CLASSIFICATION, MM) and name.startswith(root):
        return [f'backbone.{name.removeprefix(root)}']
    for pattern, new in _RULES.get(root, ()):
        if match := re.fullmatch(pattern, name):
            renamed = new(match) if callable(new) else match.expand(new)
            break
    else:
        return []
    if pyramid_of_two:
        renamed = renamed.replace('neck.upsample_4x.', 'neck.upsample_2x.')
    shared = re.fullmatch(r'roi_head\.mask_head\.(.*)', renamed)
    if root == DETECTRON2 and shared and stages:
        # One mask head serves all stages there, each stage has its own here.
        return [f'roi_head.mask_head.{k}.{shared[1]}' for k in range(stages)]
    return [renamed]


_Rules = tuple[tuple[str, str | Callable[[re.Match], str]], ...]

_CLASSIFIER: _Rules = (
    (r'head\.(weight|bias)', r'head.fc.\1'),
    (r'(head\.fc\..*)', r'\1'),
    (r'((?:cls_token|pos_embed|patch_embed|layers|norm).*)', r'backbone.\1'),
)

_SEGMENTOR: _Rules = (
    (r'backbone\.fpn1\.(.*)', r'neck.upsample_4x.\1'),
    (r'backbone\.fpn2\.(.*)', r'neck.upsample_2x.\1'),
    (r'((?:backbone|neck|\w*head)\..*)', r'\1'),
)


def _convolution(new: str) -> Callable[[re.Match], str]:
    """Numbers from 1, with a norm inside, to numbers from 0, with convolution and norm apart."""

    def rename(match: re.Match) -> str:
        *outer, number, rest = (group or '' for group in match.groups())
        layer = f'ln.{rest.removeprefix("norm.")}' if rest.startswith('norm.') else f'conv.{rest}'
        return f'{new.format(*outer)}.{int(number) - 1}.{layer}'

    return rename


def _pyramid(level: int, index: int, lateral: int) -> _Rules:
    """The two convolutions of a level, of which the first is number ``lateral`` there."""
    here = f'neck.lateral.{index}'
    there = rf'backbone\.simfp_{level}\.'
    return tuple(
        rule
        for k in range(2)
        for rule in (
            (rf'{there}{lateral + k}\.norm\.(.*)', rf'{here}.{2 * k + 1}.\1'),
            (rf'{there}{lateral + k}\.(weight|bias)', rf'{here}.{2 * k}.\1'),
        )
    )


_SIMPLE_FPN: _Rules = (
    *_pyramid(2, 0, 4),
    *_pyramid(3, 1, 1),
    *_pyramid(4, 2, 0),
    *_pyramid(5, 3, 1),
    (r'backbone\.simfp_2\.([013]\..*)', r'neck.rescale.0.\1'),
    (r'backbone\.simfp_3\.0\.(.*)', r'neck.rescale.1.\1'),
)

_RPN: _Rules = (
    (r'proposal_generator\.rpn_head\.conv\.conv(\d+)\.(.*)', r'rpn_head.rpn_conv.\1.conv.\2'),
    (r'proposal_generator\.rpn_head\.conv\.(weight|bias)', r'rpn_head.rpn_conv.\1'),
    (r'proposal_generator\.rpn_head\.objectness_logits\.(.*)', r'rpn_head.rpn_cls.\1'),
    (r'proposal_generator\.rpn_head\.anchor_deltas\.(.*)', r'rpn_head.rpn_reg.\1'),
)

_BOX_HEAD: _Rules = (
    (
        r'roi_heads\.box_head\.(\d+\.)?conv(\d+)\.(.*)',
        _convolution('roi_head.bbox_head.{}shared_convs'),
    ),
    (
        r'roi_heads\.box_head\.(\d+\.)?fc(\d+)\.(.*)',
        lambda m: f'roi_head.bbox_head.{m[1] or ""}shared_fcs.{int(m[2]) - 1}.{m[3]}',
    ),
    (r'roi_heads\.box_predictor\.(\d+\.|)cls_score\.(.*)', r'roi_head.bbox_head.\1fc_cls.\2'),
    (r'roi_heads\.box_predictor\.(\d+\.|)bbox_pred\.(.*)', r'roi_head.bbox_head.\1fc_reg.\2'),
)

_MASK_HEAD: _Rules = (
    (r'roi_heads\.mask_head\.mask_fcn(\d+)\.(.*)', _convolution('roi_head.mask_head.convs')),
    (r'roi_heads\.mask_head\.deconv\.(.*)', r'roi_head.mask_head.upsample.\1'),
    (r'roi_heads\.mask_head\.predictor\.(.*)', r'roi_head.mask_head.conv_logits.\1'),
)

_RULES = {
    CLASSIFICATION: _CLASSIFIER,
    MM: _SEGMENTOR,
    DETECTRON2: (*_SIMPLE_FPN, *_RPN, *_BOX_HEAD, *_MASK_HEAD),
}


def cascade_stages(names: Iterable[str]) -> int:
    """Stages of detectron2's cascade of box heads, 0 where there is one head."""
    stages = (re.match(r'roi_heads\.box_predictor\.(\d+)\.', name) for name in names)
    return max((int(match[1]) + 1 for match in stages if match), default=0)
