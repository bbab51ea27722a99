"""What MMEngine reads checkpoints by: load_from, resume and Pretrained read them here, as data.

MMEngine asks :class:`CheckpointLoader` for a reader by the scheme of the path. Once
:func:`vim_mm.activate` was called, the readers of this module replace all of its own, which repeat
a refused load without protection. Files are read by :func:`vim_mm.checkpoints.file.read_file`;
nothing in them is ever called, imported or evaluated.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from mmengine.logging import print_log
from mmengine.runner.checkpoint import (
    CheckpointLoader,
    get_external_models,
    get_torchvision_models,
    load_state_dict,
)
from torch import nn

from vim_mm.checkpoints.container import ConversionError, bare_name, without_wrappers
from vim_mm.checkpoints.conversion import convert_checkpoint, needs_conversion
from vim_mm.checkpoints.converted_file import as_checkpoint, describe
from vim_mm.checkpoints.download import read_downloaded
from vim_mm.checkpoints.file import read_file
from vim_mm.checkpoints.state import prepare
from vim_mm.errors import UserError, UserRuntimeError, UserValueError
from vim_mm.mistakes import check_checkpoint


class NonFiniteWeightsError(UserError, ValueError):
    """A checkpoint holds weights that are NaN or infinite, with which a model predicts nothing."""


def _as_ours(name: str, checkpoint: dict) -> dict:
    """What a file holds, in the form that our models load: Vim's own files are converted."""
    if 'state_dict' not in checkpoint and isinstance(checkpoint.get('module'), Mapping):
        checkpoint = dict(state_dict=checkpoint['module'])  # of DeepSpeed
    if needs_conversion(checkpoint):
        try:
            conversion = convert_checkpoint(checkpoint)
        except ValueError as error:
            raise ConversionError(f'{name} cannot be converted: {error}') from error
        checkpoint = as_checkpoint(conversion, name)
        print_log(
            f'{name} is not in the form of this package, and was converted while it was read: '
            f'{describe(conversion)} tools/convert_checkpoint.py converts it once, and says what '
            'became of each weight.',
            logger='current',
            level=logging.WARNING,
        )
    prepare(name, checkpoint)
    _check_finite(name, checkpoint)
    return checkpoint


def _is_sound(weight: torch.Tensor) -> bool:
    """Whether it holds numbers. Masks of attention are made of minus infinity, which is one."""
    if not weight.is_floating_point() or weight.is_meta or weight.layout is not torch.strided:
        return True
    weight = weight.float() if weight.element_size() == 1 else weight
    return not bool((weight.isnan() | weight.isposinf()).any())


def _check_finite(name: str, checkpoint: Mapping) -> None:
    """Insist on numbers, also in averaged weights: NaN gives a metric like any other."""
    for weights in (checkpoint.get('state_dict', checkpoint), checkpoint.get('ema_state_dict', {})):
        for weight, value in weights.items() if isinstance(weights, Mapping) else ():
            if isinstance(value, torch.Tensor) and not _is_sound(value):
                raise NonFiniteWeightsError(
                    f'{name} cannot be used: {weight} is not finite, the training that wrote it '
                    'had failed. Take an earlier checkpoint.'
                )


def read_as_data(filename: str | Path, map_location: str | None = None) -> dict:
    """What a checkpoint file holds, in whatever form.

    Args:
        filename (str | Path): Path, with ``~`` for the home directory.
        map_location: The device of the tensors; None for the CPU.

    Raises:
        FileNotFoundError: There is no such file.
        NotACheckpointError: The file is something else, or a part of a checkpoint.
        UnsafeCheckpointError: The file holds more than tensors and plain data.
    """
    path = Path(filename).expanduser()
    check_checkpoint(filename)
    if not path.is_file():
        raise FileNotFoundError(f'{filename} is no file')
    return read_file(path, map_location)


def load_from_local(filename: str, map_location: str | None = None) -> dict:
    """:func:`read_as_data`, in the form that our models load.

    Returns:
        dict: A runner's checkpoint or a state dict.

    Raises:
        NonFiniteWeightsError: A weight is NaN or infinite.
    """
    return _as_ours(str(filename), read_as_data(filename, map_location))


def load_from_http(filename: str, map_location: str | None = None) -> dict:
    """As :func:`load_from_local`, for a URL; see :mod:`vim_mm.checkpoints.download`."""
    return _as_ours(filename, read_downloaded(filename, map_location))


def load_from_zoo(filename: str, map_location: str | None = None) -> dict:
    """As :func:`load_from_http`, for a name in the lists of weights that MMEngine ships."""
    scheme, _, name = filename.partition('://')
    urls = get_external_models() if 'mmlab' in scheme else get_torchvision_models()
    if name not in urls:
        raise UserValueError(
            f'{filename} is not among the {len(urls)} weights that MMEngine knows.'
        )
    return load_from_http(urls[name], map_location)


def load_from_unsupported(filename: str, map_location: str | None = None) -> dict:
    """Refuse the schemes whose readers in MMEngine unpickle without protection."""
    raise UserValueError(f'Cannot load {filename}: download the file and give its path or URL.')


_READERS = {
    load_from_local: ('',),
    load_from_http: ('http://', 'https://'),
    load_from_zoo: ('torchvision://', 'modelzoo://', 'open-mmlab://', 'openmmlab://'),
    load_from_unsupported: ('mmcls://', 'pavi://', r'(\S+\:)?s3://', r'(\S+\:)?petrel://'),
}


def read_checkpoint(name: str, map_location: str | None = None) -> dict:
    """Read a checkpoint by the scheme of its name, whether or not ``vim_mm`` is activated."""
    schemes = [(p, reader) for reader, prefixes in _READERS.items() for p in prefixes if p]
    reader = next((reader for p, reader in schemes if re.match(p, name)), load_from_local)
    return reader(name, map_location)


def fit_names(module: nn.Module, checkpoint: dict) -> None:
    """Give the weights of a checkpoint the names that they have in a module, in place.

    Raises:
        ConversionError: Two weights would have one name.
    """
    weights = checkpoint.get('state_dict', checkpoint)
    if all(bare_name(name) == name for name in weights):  # FSDP gathers what state_dict() gives
        return
    fitting = without_wrappers(weights, module.state_dict())
    if 'state_dict' in checkpoint:
        checkpoint['state_dict'] = fitting
        return
    checkpoint.clear()
    checkpoint.update(fitting)
    if hasattr(fitting, '_metadata'):
        checkpoint._metadata = fitting._metadata


def load_whole_model(model: nn.Module, name: str | Path) -> dict:
    """Load a model from a checkpoint that must fit all of it.

    Args:
        model (nn.Module): On any device.
        name (str | Path): Path or URL.

    Returns:
        dict: The checkpoint, with the names of the model.

    Raises:
        RuntimeError: Weights are missing, are of another shape or belong to no part of the model.
    """
    with naming_file(name):
        checkpoint = read_checkpoint(str(name), 'cpu')
        fit_names(model, checkpoint)
        load_state_dict(model, checkpoint.get('state_dict', checkpoint), strict=True)
    return checkpoint


# Errors whose message says nothing of a file yet.
_UNNAMED = (RuntimeError, ValueError, UserRuntimeError, UserValueError, ConversionError)


@contextmanager
def naming_file(filename: str | Path) -> Iterator[None]:
    """Have errors about weights that do not fit a model begin with the name of their file."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if type(error) not in _UNNAMED or str(filename) in str(error):
            raise
        raise type(error)(f'{filename}: {error}') from error


def read_checkpoints_as_data() -> None:
    """Replace MMEngine's readers in this process; :func:`vim_mm.activate` calls this."""
    for reader, prefixes in _READERS.items():
        CheckpointLoader.register_scheme(prefixes, reader, force=True)
