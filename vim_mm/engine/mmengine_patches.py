"""The one place where this package changes MMEngine: only where it is asked to."""

from contextlib import suppress
from functools import cache, wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
from mmengine.config.utils import MODULE2PACKAGE
from mmengine.logging import HistoryBuffer
from mmengine.utils import is_installed

from vim_mm.checkpoints.reading import read_checkpoints_as_data
from vim_mm.config import resolve_shipped_bases
from vim_mm.engine.batches.loading import pin_samples
from vim_mm.engine.flops import count_scans_of_pytorch


@cache
def activate() -> None:
    """Change, for this process, how MMEngine reads checkpoints and bases, and counts operations.

    ``import vim_mm`` registers classes and operators, and changes nothing else. After this call

    - checkpoints are read as data on every path, see :mod:`vim_mm.checkpoints.reading`;
    - YAML is read as data, where MMEngine calls whatever a tag names;
    - ``_base_ = 'vim_mm::seg/upernet_vim_t_bilinear.py'`` finds a config of this package;
    - ``_base_ = 'mmseg::...'`` finds one of MMSegmentation, whichever distribution holds it;
    - MMPretrain can be imported beside a version of transformers that it does not know;
    - MMEngine's complexity analysis counts the scans of PyTorch's operators;
    - a loader pins labels and boxes with the images, so that their copy to a GPU waits for nothing;
    - the history of a logged value grows in place, so that late iterations take no longer.

    The runner and the tools of this package call it. Other tools need the call before they read
    their config, or ``python -m vim_mm.activated`` in front of them; for checkpoints alone
    ``custom_imports = dict(imports=['vim_mm.activated'])`` is enough, because MMEngine resolves
    bases before it imports. Further calls change nothing.
    """
    read_checkpoints_as_data()
    _read_yaml_as_data()
    resolve_shipped_bases()
    _resolve_bases_of_other_distributions()
    _leave_out_multimodal_models()
    count_scans_of_pytorch()
    pin_samples()
    _grow_histories_in_place()


def _read_yaml_as_data() -> None:
    """Let ``mmengine.load`` take plain values, and the tuples that MMEngine itself writes."""
    handler = import_module('mmengine.fileio.handlers.yaml_handler')
    safe = getattr(handler.yaml, 'CSafeLoader', handler.yaml.SafeLoader)
    loader: Any = type('PlainLoader', (safe,), {})  # PyYAML's own stays as it is
    loader.add_constructor(
        'tag:yaml.org,2002:python/tuple',
        lambda loader, node: tuple(loader.construct_sequence(node, deep=True)),
    )
    vars(handler)['Loader'] = loader


def _resolve_bases_of_other_distributions() -> None:
    """Look for the configs of a library by its module where its usual distribution is missing.

    MMEngine takes ``mmseg::`` to the distribution mmsegmentation. The maintained one has another
    name, onedl-mmsegmentation, and the same module.
    """
    for module, distribution in MODULE2PACKAGE.items():
        with suppress(ModuleNotFoundError):  # an importer may say so by raising
            if not is_installed(distribution) and find_spec(module) is not None:
                MODULE2PACKAGE[module] = module


def _leave_out_multimodal_models() -> None:
    """Let MMPretrain's models be imported beside transformers 5.

    MMPretrain 1.3 reads transformers 4 for its multimodal models alone. It leaves them out where
    transformers is missing; where it is newer, ``import mmpretrain.models`` raises TypeError.
    """
    if has_transformers_5() and find_spec('mmpretrain') is not None:
        vars(import_module('mmpretrain.utils.dependency'))['WITH_MULTIMODAL'] = False


def has_transformers_5() -> bool:
    """Whether transformers is installed, in version 5 or later."""
    try:
        return int(version('transformers').partition('.')[0]) >= 5
    except PackageNotFoundError:
        return False


def _grow_histories_in_place() -> None:
    """Let an iteration late in a training take as long as the first.

    In each one MMEngine copies the whole history of every value that is logged, which takes
    milliseconds after 100,000. Histories hold the same as with it, in memory and in a checkpoint.
    """
    rooms: WeakKeyDictionary[HistoryBuffer, _Room] = WeakKeyDictionary()
    update = HistoryBuffer.update

    @wraps(update)
    def update_in_place(self: HistoryBuffer, log_val: float, count: float = 1) -> None:
        room = rooms.get(self)
        if room is None or not room.append(self, log_val, count):
            update(self, log_val, count)
            rooms[self] = _Room(self)

    HistoryBuffer.update = update_in_place


class _Room:
    """Memory that the two arrays of a history are parts of."""

    # What an array of a dtype takes and keeps it. MMEngine's own are of float and, of counts, int.
    KEPT: ClassVar = {np.dtype(float): (int, float), np.dtype(int): (int,)}

    def __init__(self, history: HistoryBuffer):
        self.arrays, self.end = history.data, len(history.data[0])
        self.memories = [np.empty(2 * self.end, array.dtype) for array in self.arrays]
        for memory, array in zip(self.memories, self.arrays, strict=True):
            memory[: self.end] = array

    def append(self, history: HistoryBuffer, *values: float) -> bool:
        """Whether it could: there is room, and the history is as it was left."""
        is_ours = all(a is b for a, b in zip(history.data, self.arrays, strict=True))
        if not is_ours or self.end == len(self.memories[0]):
            return False
        pairs = [*zip(self.memories, values, strict=True)]
        if not all(isinstance(value, self.KEPT.get(memory.dtype, ())) for memory, value in pairs):
            return False
        for memory, value in pairs:
            memory[self.end] = value
        self.end += 1
        begin = max(0, self.end - history.max_length)  # the oldest values go
        self.arrays = history._log_history, history._count_history = (
            *(memory[begin : self.end] for memory in self.memories),
        )
        return True
