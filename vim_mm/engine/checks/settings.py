"""Whether the numbers and names of a config that MMEngine takes as they are can be used."""

import difflib
from collections.abc import Mapping

from mmengine.config import Config
from mmengine.registry import OPTIMIZERS

from vim_mm.models.arguments import check_int, check_number

_NUMBERS = ('lr', 'weight_decay', 'momentum', 'eps')  # of optimizers


def check_settings(cfg: Config) -> None:
    """Examine optimizer, length of the training and loaders, of which MMEngine's errors name none.

    What a config leaves out is not looked at.

    Args:
        cfg (Config): Its task library is imported, so that its optimizers are registered.

    Raises:
        ValueError: A number is out of its range, or there is no such optimizer.
        TypeError: A setting is of another type; either message names it.
    """
    _check_optimizer(_part(_part(cfg, 'optim_wrapper'), 'optimizer'), cfg.get('default_scope'))
    train_cfg = _part(cfg, 'train_cfg')
    for name in ('max_iters', 'max_epochs', 'val_interval'):
        if name in train_cfg:
            _check_length(f'train_cfg.{name}', train_cfg[name])
    for loader in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        options = _part(cfg, loader)
        for name, least in (('batch_size', 1), ('num_workers', 0)):
            if options.get(name) is not None:
                check_int(f'{loader}.{name}', options[name], least)


def _part(cfg: Mapping, name: str) -> Mapping:
    part = cfg.get(name)
    return part if isinstance(part, Mapping) else {}


def _check_optimizer(optimizer: Mapping, scope: str | None) -> None:
    for name in _NUMBERS:
        if name in optimizer:
            check_number(f'optim_wrapper.optimizer.{name}', optimizer[name])
    kind = optimizer.get('type')
    if not isinstance(kind, str):
        return
    with OPTIMIZERS.switch_scope_and_registry(scope) as registry:
        if registry.get(kind) is None:
            similar = difflib.get_close_matches(kind, OPTIMIZERS.module_dict, n=1)
            hint = f'; did you mean {similar[0]!r}?' if similar else ''
            raise ValueError(
                f'optim_wrapper.optimizer.type must name a registered optimizer, got {kind!r}{hint}'
            )


def _check_length(name: str, value: float) -> None:
    """As MMEngine reads it: 1e5 is 100000, and an infinite interval never ends."""
    check_number(name, value)
    whole = (value == float('inf') and name.endswith('interval')) or value % 1 == 0
    if not whole or value < 1:
        raise ValueError(f'{name} must be a whole number from 1, got {value}')
