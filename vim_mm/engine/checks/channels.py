"""Whether the parts of a model's config fit each other, before anything is built."""

from collections.abc import Sequence

from vim_mm.errors import UserValueError
from vim_mm.models.arguments import parse_arch, parse_out_indices


def check_channels(model: dict) -> None:
    """Compare a VisionMamba's ``embed_dims`` and ``out_indices`` with its neck and heads.

    Other backbones and necks are not looked at.

    Args:
        model (dict): Of a classifier, a segmentor or a detector, as a config holds it.

    Raises:
        ValueError: They differ; the message names both arguments.
        TypeError: ``arch`` or ``out_indices`` of the backbone is of a wrong type.
    """
    backbone, neck = model.get('backbone') or {}, model.get('neck') or {}
    if not isinstance(backbone, dict) or backbone.get('type') not in (
        'VisionMamba',
        'vim_mm.VisionMamba',
    ):
        return
    width, depth = parse_arch(backbone.get('arch', 'tiny'))
    maps = len(parse_out_indices(backbone.get('out_indices', -1), depth))
    kind = neck.get('type') if isinstance(neck, dict) else None
    if kind == 'SimpleFPN':
        _same('model.neck.in_channels', neck.get('in_channels'), width)
        _count('model.neck (SimpleFPN takes one map)', 1, maps)
    elif kind == 'Feature2Pyramid':
        _same('model.neck.embed_dim', neck.get('embed_dim'), width)
        _count('model.neck.rescales', len(neck.get('rescales', [4, 2, 1, 0.5])), maps)
    if kind not in (None, 'Feature2Pyramid'):
        return  # a neck decides what the heads get
    for name in ('decode_head', 'auxiliary_head', 'head'):
        heads = model.get(name) or []
        for head in heads if isinstance(heads, list | tuple) else [heads]:
            _check_head(f'model.{name}', head, width, maps)


def _check_head(name: str, head: dict, width: int, maps: int) -> None:
    """A head of MMSegmentation, which reads maps by ``in_index``, or of MMPretrain."""
    channels, index = head.get('in_channels'), head.get('in_index', -1)
    for value in channels if isinstance(channels, Sequence) else [channels]:
        _same(f'{name}.in_channels', value, width, channels)
    for i in index if isinstance(index, Sequence) else [index]:
        if isinstance(i, int) and not -maps <= i < maps:
            raise UserValueError(
                f'{name}.in_index is {index}, but the backbone returns {maps} maps '
                '(model.backbone.out_indices)'
            )


def _same(name: str, value: int | None, width: int, shown: object = None) -> None:
    if isinstance(value, int) and value != width:
        raise UserValueError(
            f'{name} is {value if shown is None else shown}, but the backbone gives {width} '
            'channels (embed_dims of model.backbone.arch)'
        )


def _count(name: str, expected: int, maps: int) -> None:
    if maps != expected:
        raise UserValueError(
            f'{name}: expected model.backbone.out_indices of {expected} '
            f'layer{"s" if expected > 1 else ""}, got {maps}'
        )
