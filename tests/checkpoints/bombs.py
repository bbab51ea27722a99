"""Files that make a folder where they are read carelessly, one for each way in that is known."""

import copy
import functools
import io
import os
import pickle
import tarfile
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from mmengine.config import ConfigDict
from mmengine.logging import HistoryBuffer
from torch.serialization import MAGIC_NUMBER

RECONSTRUCT = np.empty(0).__reduce__()[0]


class Call:
    """Pickles as a call of ``function``, which a careless loader makes."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


class Built(Call):
    """Pickles as what the call gives, with a state that it is then given."""

    def __init__(self, function, args, state):
        self.call = function, args, state


class SetsState:
    """Runs what it is given as its state."""

    def __init__(self, marker):
        self.marker = marker

    def __setstate__(self, state):
        os.mkdir(state['marker'])  # noqa: PTH102


def evil(marker: Path) -> Call:
    return Call(os.mkdir, str(marker))


def program(marker: Path) -> str:
    """A config that makes the folder."""
    return f'import os\nos.mkdir({str(marker)!r})\n'


def key(marker: Path) -> str:
    """A key that ends the text of a dict where a config is written without care."""
    return f"x': __import__('os').mkdir({str(marker)!r}) or 1, 'y"


def within(change: Callable[[dict, Path], None], **options) -> Callable:
    """A checkpoint in which something is changed, as torch.save writes it."""

    def write(path: Path, checkpoint: dict, marker: Path) -> None:
        checkpoint = copy.deepcopy(checkpoint)
        change(checkpoint, marker)
        torch.save(checkpoint, path, **options)

    return write


def put(*places: str, make: Callable[[Path], object] = evil) -> Callable:
    """Under a key of a part of the checkpoint."""

    def change(checkpoint: dict, marker: Path) -> None:
        *parts, last = places
        for part in parts:
            checkpoint = checkpoint.setdefault(part, {})
        checkpoint[last] = make(marker)

    return change


def attributes(make: Callable[[Path], dict]) -> Callable:
    """A meta with attributes beside its items; torch.load brings them back."""

    def change(checkpoint: dict, marker: Path) -> None:
        checkpoint['meta'] = OrderedDict(checkpoint.get('meta', {}))
        vars(checkpoint['meta']).update(make(marker))

    return change


def config_that_stays(checkpoint: dict, marker: Path) -> None:
    """A program under meta.config, and a ``pop`` that does not take it out."""
    checkpoint['meta'] = OrderedDict(checkpoint.get('meta', {}), config=program(marker))
    checkpoint['meta'].pop = RECONSTRUCT


def metadata(make: Callable[[Path], object], module: str = 'backbone') -> Callable:
    def change(checkpoint: dict, marker: Path) -> None:
        note = getattr(checkpoint['state_dict'], '_metadata', OrderedDict())
        note.setdefault(module, {})['arch'] = make(marker)
        checkpoint['state_dict']._metadata = note

    return change


def in_list(checkpoint: dict, marker: Path) -> None:
    checkpoint['param_schedulers'] = [dict(last_step=evil(marker))]


def as_key(checkpoint: dict, marker: Path) -> None:
    checkpoint['meta'][evil(marker)] = 1


def hooked(marker: Path) -> Call:
    """A tensor that calls something in its backward pass."""
    hooks = OrderedDict({0: functools.partial(os.mkdir, str(marker))})
    storage = torch.ones(1).storage()
    return Call(torch._utils._rebuild_tensor_v2, storage, 0, (1,), (1,), True, hooks)


def of_a_type(marker: Path) -> Call:
    return Call(
        torch._tensor._rebuild_from_type_v2, os.mkdir, torch.Tensor, (str(marker),), dict(a=1)
    )


def statistics(marker: Path) -> HistoryBuffer:
    """A log that brings methods of its own."""
    buffer = HistoryBuffer([1.0], [1])
    buffer._statistics_methods = dict(mean=functools.partial(os.mkdir, str(marker)))
    return buffer


def factory(marker: Path) -> defaultdict:
    return defaultdict(functools.partial(os.mkdir, str(marker)))


def plain_pickle(protocol: int) -> Callable:
    def write(path: Path, checkpoint: dict, marker: Path) -> None:
        path.write_bytes(pickle.dumps(dict(model=evil(marker)), protocol=protocol))

    return write


def old_instance(path: Path, checkpoint: dict, marker: Path) -> None:
    """By the opcode INST, which imports and calls."""
    path.write_bytes(b'\x80\x02(S' + repr(str(marker)).encode() + b'\nios\nmkdir\n.')


def archive(path: Path, content: bytes, **records: bytes) -> None:
    with zipfile.ZipFile(path, 'w') as file:
        for name, record in {'data.pkl': content, 'version': b'3\n', **records}.items():
            file.writestr(f'archive/{name}', record)


def torchscript(path: Path, checkpoint: dict, marker: Path) -> None:
    content = pickle.dumps(evil(marker), protocol=2)
    archive(path, content, **{'constants.pkl': content, 'code/a.py': b''})


def behind_a_storage(path: Path, checkpoint: dict, marker: Path) -> None:
    """In the identifier of a storage."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            if isinstance(value, bytearray):
                return ('storage', torch.FloatStorage, evil(marker), 'cpu', 1)
            return None

    content = io.BytesIO()
    Pickler(content, protocol=2).dump(dict(state_dict=bytearray(4)))
    archive(path, content.getvalue(), **{'data/0': b'1234'})


def tar(path: Path, checkpoint: dict, marker: Path) -> None:
    with tarfile.open(path, 'w') as file:
        for name in ('storages', 'tensors', 'pickle'):
            content = pickle.dumps(evil(marker), protocol=2)
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))


def after_the_first_pickles(path: Path, checkpoint: dict, marker: Path) -> None:
    """In the list of storages, which torch before 1.6 has behind the objects."""
    parts = (MAGIC_NUMBER, 1001, dict(little_endian=True), {}, evil(marker))
    path.write_bytes(b''.join(pickle.dumps(part, protocol=2) for part in parts))


BOMBS: dict[str, Callable[[Path, dict, Path], None]] = {
    'call': within(put('x')),
    'call, before torch 1.6': within(put('x'), _use_new_zipfile_serialization=False),
    'call, protocol 4': within(put('x'), pickle_protocol=4),
    **{f'pickle of protocol {n}': plain_pickle(n) for n in range(6)},
    'exec': within(put('x', make=lambda marker: Call(exec, program(marker)))),
    'state_dict': within(put('state_dict', 'head.weight')),
    'optimizer': within(put('optimizer', 'state')),
    'param_schedulers': within(in_list),
    'message_hub': within(put('message_hub', 'runtime_info', 'iter')),
    'meta': within(put('meta', 'dataset_meta')),
    'key': within(as_key),
    'pop is replaced': within(config_that_stays),
    'get is replaced': within(
        attributes(lambda marker: dict(get=functools.partial(os.mkdir, str(marker))))
    ),
    'config': within(put('meta', 'config', make=program)),
    'cfg': within(put('meta', 'cfg', make=program)),
    'cfg of the hub': within(put('message_hub', 'runtime_info', 'cfg', make=program)),
    'metadata with a call': within(metadata(evil)),
    'metadata with a key': within(metadata(lambda marker: {key(marker): 1})),
    'metadata with a text': within(metadata(lambda marker: f"'{key(marker)}")),
    'started_from': within(
        put('meta', 'started_from', make=lambda m: dict(file='', x={key(m): 1}))
    ),
    'started_from, its name': within(put('meta', 'started_from', make=lambda m: dict(file=key(m)))),
    'vim_mm': within(
        put('meta', 'vim_mm', make=lambda m: dict(backbones={'backbone': {key(m): 1}}))
    ),
    'ConfigDict': within(put('meta', 'x', make=lambda marker: ConfigDict(x=evil(marker)))),
    'array of objects': within(put('x', make=lambda m: np.array([evil(m)], dtype=object))),
    'state of a class': within(put('x', make=SetsState)),
    'state of numpy': within(
        put('x', make=lambda m: Built(RECONSTRUCT, (np.ndarray, (0,), b'b'), evil(m)))
    ),
    'log with methods': within(put('message_hub', 'log_scalars', 'x', make=statistics)),
    'getattr': within(put('x', make=lambda m: Call(getattr, HistoryBuffer, '__globals__'))),
    'factory': within(put('x', make=factory)),
    'partial': within(put('x', make=lambda m: functools.partial(os.mkdir, str(m)))),
    'hooks': within(put('state_dict', 'head.weight', make=hooked)),
    'type': within(put('state_dict', 'head.weight', make=of_a_type)),
    'opcode INST': old_instance,
    'TorchScript': torchscript,
    'storage': behind_a_storage,
    'tar': tar,
    'list of storages': after_the_first_pickles,
}
