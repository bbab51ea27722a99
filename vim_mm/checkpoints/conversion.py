"""From what a file holds to the weights of one of our models, with an account of each of them."""

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from torch import Tensor

from vim_mm.checkpoints import names as naming
from vim_mm.checkpoints.container import (
    Contents,
    ConversionError,
    bare_name,
    require,
    unwrap,
)
from vim_mm.checkpoints.switches import Switches, find_switches
from vim_mm.errors import brief, did_you_mean
from vim_mm.models.arguments import parse_arch
from vim_mm.models.state_dict import (
    FASTVIM,
    LAYER_SCALE,
    other_architecture,
    plain,
    wrong_entry,
)
from vim_mm.models.vision_mamba import VisionMamba


@dataclass
class Conversion:
    """Weights under our names, and what became of each.

    Attributes:
        origin (str): In words, where the form is from.
        state_dict (OrderedDict): Of a whole model, whose backbone is called ``backbone``; torch's
            note of it holds what the weights compute.
        kind (str): 'classifier', 'segmentor', 'detector', or 'backbone' for a bare one.
        switches (Switches): The arguments of the backbone.
        mapped (dict): The new names by the old one.
        dropped (dict): Why, by the name of each weight and entry that is left out.
        unknown (list): Weights that nothing here knows.
        meta (dict): What the file's meta says of the data set.
    """

    origin: str
    state_dict: OrderedDict[str, Tensor]
    kind: str = 'backbone'
    switches: Switches = field(default_factory=lambda: Switches({}, {}))
    mapped: dict[str, list[str]] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    meta: dict = field(default_factory=dict)


_ORIGINS = {
    naming.CLASSIFICATION: 'the form of classification (hustvl/Vim, timm)',
    naming.MM: 'the form of MMSegmentation, MMDetection or this package',
    naming.DETECTRON2: 'the form of detectron2 (hustvl/Vim, det/)',
}


def convert_checkpoint(checkpoint: Any, switches: Mapping[str, Any] | None = None) -> Conversion:
    """Give the weights of a checkpoint the names that they have in our models.

    Args:
        checkpoint: What a file holds.
        switches (Mapping, optional): Arguments of the backbone that the file does not tell.

    Raises:
        ConversionError: It holds no weights of a Vim; the message says what it is instead. Or the
            backbone has no such argument, or the file tells another value.
    """
    contents, folded = _fold_layer_scales(unwrap(checkpoint))
    root = _find_root(contents)
    state_dict: OrderedDict[str, Tensor] = OrderedDict()
    conversion = Conversion(
        _ORIGINS.get(root, f'another form, with a Vim called {root}'), state_dict
    )
    stages = naming.cascade_stages(contents.weights)
    original = 'backbone.fpn1.0.weight' in contents.weights
    if original:
        conversion.origin = 'the form of MMSegmentation 0.x (hustvl/Vim, seg/)'
    of_two = original and 'backbone.fpn1.3.weight' not in contents.weights
    for name, weight in contents.weights.items():
        if (why := naming.unneeded(name, root, original)) is not None:
            conversion.dropped[name] = why
        elif new := naming.new_names(name, root, stages, of_two):
            _insist_on_numbers(name, weight)
            conversion.mapped[name] = new
            state_dict.update(dict.fromkeys(new, weight))
        else:
            conversion.unknown.append(name)
    conversion.dropped |= dict.fromkeys(folded, 'multiplied into out_proj, which computes the same')
    conversion.dropped |= dict.fromkeys(contents.left, 'no weight')
    conversion.kind = _kind(state_dict)
    conversion.meta = _dataset_meta(contents.meta)

    inner = {k.removeprefix(root): v for k, v in contents.weights.items() if k.startswith(root)}
    whole = dict(meta=contents.meta, arguments=contents.arguments)
    note = contents.note.get(root.rstrip('.'), {})
    if (wrong := wrong_entry(note)) is not None:
        raise ConversionError(f'it notes {wrong} = {brief(note[wrong])}, which is no Vim')
    found = find_switches(inner, conversion.kind, whole, note)
    for name, value in (switches or {}).items():
        _check_switch(name, value, found)
        found.assumed.pop(name, None)
        if name == 'ssm_cfg':
            value = {**found.told.get(name, {}), **value}
        found.told[name] = value
    conversion.switches = found
    others = contents.note if root == naming.MM else {}
    _add_note(state_dict, others, note, found.all)
    return conversion


def _fold_layer_scales(contents: Contents) -> tuple[Contents, list[str]]:
    """Multiply each layer's scale into the projection before it, whose output it scales.

    A Vim with ``init_layer_scale`` has one, as the Base models of the code with six methods. Also
    returns the names of the scales.
    """
    weights = dict(contents.weights)
    scales = [name for name in weights if re.search(LAYER_SCALE, name)]
    for name in scales:
        projection = re.sub(LAYER_SCALE, '.mixer.out_proj.', name)
        require(weights, {name: 1, f'{projection}weight': 2})
        scale, width = weights.pop(name), len(weights[f'{projection}weight'])
        if len(scale) != width:
            raise ConversionError(f'its {name} has {len(scale)} entries for {width} channels')
        weights[f'{projection}weight'] = weights[f'{projection}weight'] * scale[:, None]
        if f'{projection}bias' in weights:
            weights[f'{projection}bias'] = weights[f'{projection}bias'] * scale
    return contents._replace(weights=weights), scales


def _check_switch(name: str, value: Any, found: Switches) -> None:
    known = signature(VisionMamba).parameters
    if name not in known:
        raise ConversionError(f'the backbone has no argument {name!r}{did_you_mean(name, known)}')
    if name in found.told and _contradict(name, found.told[name], value):
        told = f'the file tells {name} = {found.told[name]!r}'
        raise ConversionError(f'{told}, which contradicts {value!r}')


def _contradict(name: str, told: Any, value: Any) -> bool:
    """Whether an argument cannot be both; a mapping may say more than another."""
    if name == 'arch':
        return parse_arch(told) != parse_arch(value)
    if isinstance(told, Mapping) and isinstance(value, Mapping):
        return any(plain(told[key]) != plain(value[key]) for key in told.keys() & value.keys())
    return bool(plain(told) != plain(value))


def needs_conversion(checkpoint: Any) -> bool:
    """Whether a checkpoint is of a Vim, in a form that our models do not load as it is."""
    if not isinstance(checkpoint, Mapping):
        return False
    wrapped = 'state_dict' not in checkpoint and isinstance(checkpoint.get('model'), Mapping)
    weights = checkpoint.get('state_dict', checkpoint.get('model', checkpoint))
    if not isinstance(weights, Mapping):
        return False
    weights = [bare_name(name) for name in weights if isinstance(name, str)]
    if not any('layers.0.mixer.A_log' in name for name in weights):
        return False
    unscaled = [name for name in weights if not re.search(LAYER_SCALE, name)]
    if other_architecture(unscaled):
        return False
    foreign = ('backbone.fpn', 'backbone.rope.', 'backbone.net.')
    return (
        wrapped or len(unscaled) < len(weights) or any(name.startswith(foreign) for name in weights)
    )


def _find_root(contents: Contents) -> str:
    """What stands before the names of the Vim; ConversionError for none, and for several."""
    other = other_architecture(contents.weights) or _named_otherwise(contents)
    if other is not None:
        raise ConversionError(f'it is of another architecture than Vim: {other}')
    roots = naming.backbone_roots(contents.weights)
    if not roots:
        first = ', '.join([*contents.weights][:3])
        raise ConversionError(f'it holds no weights of a Vim (its first ones are {first})')
    if len(roots) > 1:
        raise ConversionError(f'it holds several Vims, under {roots}')
    _check_sizes(contents.weights, roots[0])
    return roots[0]


def _named_otherwise(contents: Contents) -> str | None:
    """Which other architecture a file says that it is of, where its weights do not show it.

    FastVim without the norm behind its scan has Vim's names and shapes.
    """
    meta, model = contents.meta, contents.arguments.get('model')
    named = isinstance(model, str) and 'fastvim' in model.lower()
    configs = [text for text in (meta.get('config'), meta.get('cfg')) if isinstance(text, str)]
    return FASTVIM if named or any(map(_TYPE_FASTVIM.search, configs)) else None


_TYPE_FASTVIM = re.compile(r"""type['"]?\s*[=:]\s*['"]\w*fastvim""", re.IGNORECASE)


# The weights whose shapes tell the arguments of a VisionMamba, and their numbers of dimensions.
_SIZES = {
    'patch_embed.proj.weight': 4,
    'layers.0.mixer.A_log': 2,
    'layers.0.mixer.conv1d.weight': 3,
    'layers.0.mixer.dt_proj.weight': 2,
}
_SIZES_OF_OPTIONS = {'pos_embed': 3, 'rope.freqs_cos': 2, 'rope.freqs_sin': 2}


def _check_sizes(weights: Mapping[str, Tensor], root: str) -> None:
    """Insist on what the arguments of the Vim under ``root`` are read from."""
    ranks = {name: rank for name, rank in _SIZES_OF_OPTIONS.items() if f'{root}{name}' in weights}
    if 'rope.freqs_cos' in ranks or 'rope.freqs_sin' in ranks:
        ranks |= {name: _SIZES_OF_OPTIONS[name] for name in ('rope.freqs_cos', 'rope.freqs_sin')}
    require(weights, {f'{root}{name}': rank for name, rank in (_SIZES | ranks).items()})
    tokens = sum(name.startswith(f'{root}cls_token') for name in weights)
    if 'pos_embed' in ranks and weights[f'{root}pos_embed'].shape[1] <= tokens:
        raise ConversionError(f'its {root}pos_embed has no entry for a patch')


def is_half(weight: Tensor) -> bool:
    """Whether a weight is rounded to fewer bits than float32 has."""
    return weight.is_floating_point() and weight.element_size() < 4


def _insist_on_numbers(name: str, weight: Tensor) -> None:
    """Refuse weights of a training that had failed."""
    values = weight.float() if weight.element_size() == 1 else weight  # float8 has no isfinite
    if weight.is_floating_point() and not weight.is_meta and not values.isfinite().all():
        raise ConversionError(f'{name} has values that are NaN or infinite')


def _kind(state_dict: Mapping[str, Tensor]) -> str:
    parts = {name.partition('.')[0] for name in state_dict}
    if 'decode_head' in parts:
        return 'segmentor'
    if parts & {'rpn_head', 'roi_head', 'bbox_head'}:
        return 'detector'
    return 'classifier' if 'head' in parts else 'backbone'


def _dataset_meta(meta: Mapping[str, Any]) -> dict:
    """The classes, under the names of MMCV 1.x and of MMEngine."""
    kept = {name: meta[name] for name in ('CLASSES', 'PALETTE', 'dataset_meta') if name in meta}
    if 'CLASSES' in kept and 'dataset_meta' not in kept:
        kept['dataset_meta'] = dict(classes=kept['CLASSES'])
        if kept.get('PALETTE') is not None:
            kept['dataset_meta']['palette'] = kept['PALETTE']
    return kept


def _add_note(state_dict: OrderedDict, others: Mapping, note: Mapping, switches: dict) -> None:
    """Note what the weights compute where loading and testing look for it."""
    unnoted = ('in_channels', 'patch_size', 'ssm_cfg', 'if_abs_pos_embed', 'residual_in_fp32')
    noted = {name: value for name, value in switches.items() if name not in unnoted}
    state_dict._metadata = OrderedDict(others, backbone={**note, **noted})
