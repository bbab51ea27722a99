"""Whether the numbers and names of a config that MMEngine takes as they are can be used."""

from collections.abc import Mapping

from mmengine.config import Config
from mmengine.registry import MODELS

from vim_mm.config import part, type_name
from vim_mm.errors import UserValueError, did_you_mean
from vim_mm.models.arguments import check_bools, check_int, check_number
from vim_mm.ops.discretization import get_method
from vim_mm.segmentation.guards import check_windows

_MOST_SEED = 2**32 - 1  # NumPy's
_NUMBERS = ('lr', 'weight_decay', 'momentum', 'eps')  # of optimizers


def check_settings(cfg: Config) -> None:
    """Examine what has its first error elsewhere, and without its name.

    These are optimizer, method of discretization, length of the training, loaders, random numbers,
    the interval of the log, and of a segmentor its windows and the label that it ignores. What a
    config leaves out is not looked at.

    Args:
        cfg (Config): As it was read.

    Raises:
        ValueError: A number is out of its range.
        TypeError: A setting is of another type; either message names it.
    """
    optimizer = part(cfg, 'optim_wrapper.optimizer')
    for name in _NUMBERS:
        if name in optimizer:
            check_number(f'optim_wrapper.optimizer.{name}', optimizer[name])
    if 'betas' in optimizer:
        _check_betas('optim_wrapper.optimizer.betas', optimizer['betas'])
    backbone = part(cfg, 'model.backbone')
    if type_name(backbone) == 'VisionMamba' and 'discretization_method' in backbone:
        get_method(backbone['discretization_method'])
    train_cfg = part(cfg, 'train_cfg')
    for name in ('max_iters', 'max_epochs', 'val_interval'):
        if name in train_cfg:
            _check_length(f'train_cfg.{name}', train_cfg[name])
    for loader in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        options = part(cfg, loader)
        for name, least in (('batch_size', 1), ('num_workers', 0)):
            if options.get(name) is not None:
                check_int(f'{loader}.{name}', options[name], least)
    _check_randomness(part(cfg, 'randomness'))
    logger = part(cfg, 'default_hooks.logger')
    if 'interval' in logger:
        check_int('default_hooks.logger.interval', logger['interval'])
    if cfg.get('default_scope') == 'mmseg':
        check_windows('model.test_cfg', part(cfg, 'model.test_cfg'))
        # MMEngine puts one that stands beside the model into it.
        preprocessor = part(cfg, 'model.data_preprocessor') or part(cfg, 'data_preprocessor')
        _check_ignored_label(part(cfg, 'model'), preprocessor)
        _check_narrow_labels(cfg, preprocessor)


def _check_betas(name: str, value) -> None:
    """Adam's averages keep a part of what they were, from 0 to less than 1."""
    if not isinstance(value, list | tuple) or len(value) not in (2, 3):
        raise UserValueError(f'{name} must be two numbers, such as 0.9,0.999, got {value!r}')
    for i, each in enumerate(value):
        check_number(f'{name}.{i}', each)
        if not 0 <= each < 1:
            raise UserValueError(f'{name}.{i} must be from 0 to less than 1, got {each}')


def _check_length(name: str, value: float) -> None:
    """As MMEngine reads it: 1e5 is 100000, and an infinite interval never ends."""
    check_number(name, value)
    whole = (value == float('inf') and name.endswith('interval')) or value % 1 == 0
    if not whole or value < 1:
        raise UserValueError(f'{name} must be a whole number from 1, got {value}')


def _check_randomness(randomness: Mapping) -> None:
    known = ('seed', 'deterministic', 'diff_rank_seed')
    for name, value in randomness.items():
        if name not in known:
            hint = did_you_mean(name, known)
            raise UserValueError(f'randomness.{name} must be one of {[*known]}{hint}')
        if name != 'seed':
            check_bools(**{f'randomness.{name}': value})
        elif value is not None:
            check_int('randomness.seed', value, 0, _MOST_SEED)


def _check_ignored_label(model: Mapping, preprocessor: Mapping) -> None:
    """Pictures and maps of labels are padded, and no loss takes a label that is no class."""
    padding = preprocessor.get('seg_pad_val', 255)
    for key in ('decode_head', 'auxiliary_head'):
        heads = model.get(key)
        for head in heads if isinstance(heads, list | tuple) else [heads]:
            # Without a label to ignore, the loss of masks leaves out what is no class.
            if not isinstance(head, Mapping) or head.get('ignore_index', 255) is None:
                continue
            name, ignored = f'model.{key}.ignore_index', head.get('ignore_index', 255)
            check_int(name, ignored, -(2**31))
            classes = head.get('num_classes')
            if ignored != padding and not (isinstance(classes, int) and 0 <= padding < classes):
                raise UserValueError(
                    f'{name} must be the label of padding, '
                    f'model.data_preprocessor.seg_pad_val = {padding}, got {ignored}'
                )


def _check_narrow_labels(cfg: Config, preprocessor: Mapping) -> None:
    """MMSegmentation's preprocessor hands labels of 8 bits to losses that want 64."""
    # Mixing data sets have a pipeline themselves.
    if 'FastPackSegInputs' not in str(part(cfg, 'train_dataloader').get('dataset')):
        return
    kind, name = preprocessor.get('type'), type_name(preprocessor)
    names = {name}
    if name not in ('SegDataPreProcessor', 'FastSegDataPreProcessor'):
        with MODELS.switch_scope_and_registry('mmseg') as registry:
            kind = registry.get(kind) if isinstance(kind, str) else kind
        names |= {each.__name__ for each in getattr(kind, '__mro__', ())}
    if 'SegDataPreProcessor' in names and 'FastSegDataPreProcessor' not in names:
        raise UserValueError(
            'train_dataloader.dataset: FastPackSegInputs needs '
            f"model.data_preprocessor.type='FastSegDataPreProcessor'; with {name} take "
            'PackSegInputs'
        )
