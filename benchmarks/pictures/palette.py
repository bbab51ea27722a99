"""The colours of every picture: a method or a model has one colour, kind of line and marker.

The first eight colours are those of Okabe and Ito, which people with colour blindness tell apart.
"""

import re
from collections.abc import Sequence
from typing import Any

# Colour, kind of line, its width and marker. Lines that lie on each other show by their gaps.
_LINES = {
    'zoh': ('#D55E00', '-', 1.6, 's'),
    'foh': ('#0072B2', '-.', 1.6, 'v'),
    'bilinear': ('#009E73', (0, (6, 2)), 1.6, 'x'),
    'poly': ('#CC79A7', (0, (4, 1, 1, 1, 1, 1)), 1.8, 'd'),
    'highorder': ('#E69F00', (0, (1, 1)), 2.2, '^'),
    'rk4': ('#56B4E9', (0, (3, 2)), 1.8, '+'),
    'zoh_exact': ('black', (0, (2, 3)), 1.6, 'o'),
    'mamba3': ('#8C564B', (0, (8, 2, 2, 2)), 1.4, '1'),
}
STYLES: dict[str, dict[str, Any]] = {
    name: dict(color=colour, linestyle=line, linewidth=width)
    for name, (colour, line, width, _) in _LINES.items()
}
MARKERS = {name: marker for name, (*_, marker) in _LINES.items()}
METHOD_NAMES = [name for name in STYLES if name != 'mamba3']

# Other models, by a word of their name. Ours have the colours of their methods.
_MODELS = {'deit': '#332288', 'vit': '#332288', 'convnext': '#882255', 'swin': '#999933',
           'resnet': '#117733', 'public': '#7F7F7F'}  # fmt: skip
_OTHERS = ('#44AA99', '#AA4499', '#DDCC77', '#88CCEE', '#661100', '#6699CC', '#888888')
LOSS, METRICS = '#0072B2', ('#D55E00', '#009E73', '#CC79A7', '#E69F00')


def styles_of(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Matplotlib's options of a line for each name.

    A method has its own, whatever stands beside it: also where a name holds it and other words, as
    'upernet_vim_shapes_foh' does, if no other name holds the same. So have the known models. Others
    get the remaining colours in their order, dotted, because they may lie on a line of a method.

    Args:
        names: Each once.
    """
    methods = {name: _method_in(name) for name in names}
    styles, others = {}, 0
    for name, method in methods.items():
        if method == name or (method and [*methods.values()].count(method) == 1):
            styles[name] = STYLES[method]
            continue
        known = next((colour for word, colour in _MODELS.items() if word in name.lower()), None)
        if known is None:
            known, others = _OTHERS[others % len(_OTHERS)], others + 1
        styles[name] = dict(color=known, linestyle=(0, (2, 1)), linewidth=1.6)
    return styles


def _method_in(name: str) -> str | None:
    """The method whose name is a part of a name, between other letters than those of words."""
    for method in sorted(METHOD_NAMES, key=len, reverse=True):
        if re.search(rf'(?<![a-z0-9]){method}(?![a-z0-9])', name.lower()):
            return method
    return None
