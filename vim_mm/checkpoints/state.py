"""The state of a training in a checkpoint of MMEngine's form: what of it is used, and its checks.

MMEngine believes this part of a file: it evaluates configs in it, and continues at whatever
iteration it names.
"""

from collections.abc import Mapping
from typing import Any

from mmengine.logging import HistoryBuffer

from vim_mm.checkpoints.file import NotACheckpointError
from vim_mm.checkpoints.plain import is_note
from vim_mm.checkpoints.unpickle import History
from vim_mm.errors import brief


def prepare(name: str, checkpoint: dict) -> None:
    """Check the parts of a checkpoint that MMEngine reads, and take out what it would evaluate.

    Args:
        name (str): Of the file, for messages.
        checkpoint (dict): Changed in place: its texts of configs are dropped, and histories of the
            log become MMEngine's.

    Raises:
        NotACheckpointError: A part is of another kind; it is named.
    """
    for part in ('meta', 'message_hub', 'state_dict', 'ema_state_dict', 'optimizer'):
        _insist(name, part, checkpoint.get(part, {}), Mapping, 'a dict')
    _insist(name, 'param_schedulers', checkpoint.get('param_schedulers', []), list | dict, 'a list')
    weights = checkpoint.get('state_dict', checkpoint)
    if (other := next((key for key in weights if type(key) is not str), None)) is not None:
        raise NotACheckpointError(f'{name} cannot be used: {other!r} is no name of a weight')
    _prepare_meta(name, checkpoint.get('meta', {}))
    _prepare_message_hub(name, checkpoint.get('message_hub', {}))


def require_training(name: str, checkpoint: Mapping) -> None:
    """Insist on what a training needs to continue.

    Raises:
        NotACheckpointError: The file has it not, as one of weights alone.
    """
    meta = checkpoint.get('meta', {})
    lacking = [f'meta.{key}' for key in ('iter', 'epoch') if key not in meta]
    hub, optimizer = checkpoint.get('message_hub', {}), checkpoint.get('optimizer')
    parts = ('log_scalars', 'runtime_info', 'resumed_keys')
    lacking += [f'message_hub.{part}' for part in parts if part not in hub]
    lacking += [] if 'state_dict' in checkpoint else ['state_dict']
    # Several optimizers are a dict of their states; a file may be saved without any.
    states = [optimizer] if optimizer is None or 'param_groups' in optimizer else optimizer.values()
    for state in states:
        if state is not None and not (isinstance(state, Mapping) and 'param_groups' in state):
            lacking.append('optimizer.param_groups')
    if lacking:
        raise NotACheckpointError(
            f'{name} cannot be resumed: it has weights and no state of a training '
            f'({", ".join(lacking)}). To start from its weights, give it as load_from, without '
            '--resume.'
        )


def _prepare_meta(name: str, meta: dict) -> None:
    # Runner.resume evaluates the one (to compare two lists of GPU ids that MMEngine has not written
    # for years), MMEngine's inferencers evaluate the other.
    for text in ('config', 'cfg'):
        meta.pop(text, None)
    _check_steps(name, 'meta', meta)
    seed = meta.get('seed')
    if seed is not None and not (type(seed) is int and 0 <= seed < 2**32):
        raise NotACheckpointError(f'{name} cannot be used: meta.seed is {brief(seed)}')
    started_from = meta.get('started_from')
    if started_from is not None:
        _insist(name, 'meta.started_from', started_from, Mapping, 'a dict')
        rest = {k: v for k, v in started_from.items() if k != 'file'}
        if type(started_from.get('file')) is not str or not is_note(rest):
            raise NotACheckpointError(f'{name} cannot be used: meta.started_from is no note')
    ours = meta.get('vim_mm', {})
    _insist(name, 'meta.vim_mm', ours, Mapping, 'a dict')
    backbones = ours.get('backbones', {})
    _insist(name, 'meta.vim_mm.backbones', backbones, Mapping, 'a dict')
    for backbone, note in backbones.items():
        if type(backbone) is not str or not is_note(note):
            raise NotACheckpointError(f'{name} cannot be used: meta.vim_mm.backbones is no note')


def _prepare_message_hub(name: str, hub: dict) -> None:
    for part in ('log_scalars', 'runtime_info', 'resumed_keys'):
        _insist(name, f'message_hub.{part}', hub.get(part, {}), Mapping, 'a dict')
    info, scalars = hub.get('runtime_info', {}), hub.get('log_scalars', {})
    info.pop('cfg', None)  # text that MMEngine's inferencers evaluate
    _check_steps(name, 'message_hub.runtime_info', info)
    for key, value in scalars.items():
        if type(key) is not str:
            raise NotACheckpointError(f'{name} cannot be used: {key!r} is no name of a log')
        if type(value) is History:
            scalars[key] = HistoryBuffer(*value)


def _check_steps(name: str, part: str, values: Mapping) -> None:
    for key in ('iter', 'epoch'):
        step = values.get(key, 0)
        if type(step) is not int or not 0 <= step < 2**62:
            raise NotACheckpointError(
                f'{name} cannot be used: {part}.{key} must be a whole number from 0, got '
                f'{brief(step)}'
            )


def _insist(name: str, part: str, value: Any, kind: Any, word: str) -> None:
    if not isinstance(value, kind):
        raise NotACheckpointError(
            f'{name} cannot be used: its {part} must be {word}, got a {type(value).__name__}'
        )
