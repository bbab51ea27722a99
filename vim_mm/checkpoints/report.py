"""Whether converted weights are all that a model needs, and an account of them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from vim_mm.checkpoints.container import ConversionError
from vim_mm.checkpoints.conversion import Conversion, is_half
from vim_mm.models.state_dict import fit_pos_embed
from vim_mm.models.vision_mamba import VisionMamba

_SHOWN = 12  # names in a list of the report


@dataclass
class Report:
    """What became of each weight of a file, and of each that the target needs.

    Attributes:
        mapped (int): Weights of the file that the target takes.
        targets (int): Weights of the target that they fill.
        resized (list[str]): Position embeddings, with both grids.
        halves (list[str]): Weights in half precision; loading widens them, their rounding stays.
        dropped (dict[str, str]): Why, by the name in the file.
        unknown (list[str]): Weights of the file without a place in the target.
        missing (list[str]): Weights of the target without a counterpart in the file.
        misshapen (list[str]): Weights of another shape, with both shapes.
        allowed (list[str]): What of the last three was allowed.
    """

    mapped: int = 0
    targets: int = 0
    resized: list[str] = field(default_factory=list)
    halves: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether the target gets every weight from the file, and every weight finds a place."""
        return not (self.missing or self.misshapen or self.unknown)

    def lines(self) -> list[str]:
        """The report as text: a line for each kind, and the names below it."""
        lines = [f'mapped: {self.mapped} weights of the file, to {self.targets} of the model']
        by_reason: dict[str, list[str]] = {}
        for name, why in self.dropped.items():
            by_reason.setdefault(why, []).append(name)
        groups = {
            'resized': self.resized,
            'in half precision': self.halves,
            **{f'dropped, {why}': names for why, names in by_reason.items()},
            'unknown': self.unknown,
            'missing': self.missing,
            'of another shape': self.misshapen,
            'allowed to be missing or left over': self.allowed,
        }
        for title, names in groups.items():
            if names or title in ('resized', 'missing'):
                lines += [f'{title}: {len(names)}', *(f'    {n}' for n in names[:_SHOWN])]
                if len(names) > _SHOWN:
                    lines.append(f'    ... and {len(names) - _SHOWN} more')
        return lines


def fit(
    conversion: Conversion, target: nn.Module, allow: Sequence[str] = (), part: str = ''
) -> Report:
    """Fit converted weights to a model, and account for all of them.

    ``conversion.state_dict`` keeps what the model takes, with its position embedding resized.

    Args:
        conversion (Conversion): Changed in place.
        target (nn.Module): The model; its tensors may be on the meta device.
        allow (Sequence[str]): Beginnings of names that may be missing, or left over.
        part (str): Only weights whose name begins so are looked at, such as ``backbone.``.

    Raises:
        ConversionError: A position embedding is of an unknown grid.
    """
    weights = conversion.state_dict
    own = {k: v for k, v in target.state_dict().items() if k.startswith(part)}
    report = Report(dropped=dict(conversion.dropped), unknown=[*conversion.unknown])
    report.resized = _resize(weights, target, part)
    taken = {name for name in weights if name in own}
    for old, new in conversion.mapped.items():
        if taken.isdisjoint(new):
            _leave_out(report, old, new[0], own, part)
    for name in [*weights]:
        if name not in own:
            del weights[name]
    report.mapped = sum(not taken.isdisjoint(new) for new in conversion.mapped.values())
    report.targets = len(taken)
    report.halves = [name for name, weight in weights.items() if is_half(weight)]
    report.misshapen = [
        f'{k} {tuple(weights[k].shape)} for {tuple(own[k].shape)}'
        for k in own
        if k in weights and weights[k].shape != own[k].shape
    ]
    # Counters of batches have no part in prediction, and old files lack them.
    needed = [name for name in own if not name.endswith('num_batches_tracked')]
    report.missing = [name for name in needed if name not in weights]
    for kind in ('unknown', 'missing', 'misshapen'):
        names = getattr(report, kind)
        fine = [name for name in names if name.startswith(tuple(allow))] if allow else []
        report.allowed += fine
        setattr(report, kind, [name for name in names if name not in fine])
    return report


# Parts that a model without use for them has not.
_OPTIONAL = {
    'backbone.cls_token': 'the model has no such token',
    'backbone.norm_f': 'the model does not normalize its features',
    'backbone.layers.': 'the model ends before this layer',
    'head.fc.': 'the model is no classifier',
}


def _leave_out(report: Report, old: str, new: str, own: Mapping, part: str) -> None:
    """Note a weight that the target does not take: with a reason, or as one without a place."""
    why = None if new.startswith(part) else f'not of the {part.rstrip(".")}'
    for beginning, reason in _OPTIONAL.items():
        if why is None and new.startswith(beginning) and _has_no(beginning, new, own):
            why = reason
    if why is None:
        report.unknown.append(old)
    else:
        report.dropped[old] = why


def _has_no(beginning: str, name: str, own: Mapping) -> bool:
    """Whether a model lacks the whole part that a weight belongs to."""
    layer = re.match(r'backbone\.layers\.\d+\.', name)
    return not any(key.startswith(layer[0] if layer else beginning) for key in own)


def _resize(weights: dict[str, Tensor], target: nn.Module, part: str) -> list[str]:
    """Fit the position embeddings of all backbones of the target; what was changed."""
    resized = []
    for name, module in target.named_modules():
        key = f'{name}.pos_embed'.strip('.')
        if isinstance(module, VisionMamba) and key in weights and key.startswith(part):
            before = weights[key].shape[1]
            note = getattr(weights, '_metadata', {}).get(name, {})
            prefix = key.removesuffix('pos_embed')
            try:
                weights[key] = fit_pos_embed(module, weights, prefix, note).clone()
            except ValueError as error:
                raise ConversionError(str(error)) from error
            after = weights[key].shape[1]
            if after != before or note.get('grid', module.grid) != module.grid:
                rows, columns = module.grid
                resized.append(f'{key}: {before} entries to {after}, for {rows}x{columns} patches')
            note.update(grid=module.grid, cls_token=module.placement)
    return resized
