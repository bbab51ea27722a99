"""``init_cfg=dict(type='Pretrained', ...)`` of our modules: files are read as data."""

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from mmengine.logging import print_log
from mmengine.model.weight_init import PretrainedInit, update_init_info
from mmengine.runner.checkpoint import load_state_dict
from torch import Tensor, nn

from vim_mm.checkpoints.container import (
    Contents,
    ConversionError,
    bare_name,
    unwrap,
    without_wrappers,
)
from vim_mm.checkpoints.names import backbone_roots
from vim_mm.checkpoints.provenance import is_pretrained
from vim_mm.checkpoints.reading import naming_file, read_checkpoint
from vim_mm.errors import UserValueError


class PretrainedBackbone(PretrainedInit):
    """As MMEngine's PretrainedInit, for a VisionMamba: it finds the backbone in the file.

    The file is read as data. A file in Vim's own form is converted. ``prefix`` is needed only
    where a file holds several backbones. The note of what the weights compute is kept.

    Args:
        checkpoint (str): Path or URL.
        prefix (str, optional): What stands before the backbone's names, with or without the last
            dot: 'backbone', 'backbone.', 'model.backbone'.
        map_location (str): The device of the tensors.
    """

    def __call__(self, module: nn.Module) -> None:
        """Load the weights into ``module``, a VisionMamba, which insists on all that it needs."""
        checkpoint = read_checkpoint(self.checkpoint, self.map_location)
        try:
            self._load(module, unwrap(checkpoint))
        except (ConversionError, RuntimeError) as error:
            raise type(error)(f'{self.checkpoint}: {error}') from error
        if hasattr(module, '_params_init_info'):
            update_init_info(module, init_info=self._get_init_info())

    def _load(self, module: nn.Module, contents: Contents) -> None:
        root = find_backbone(contents.weights, self.prefix, self.checkpoint)
        where = f'{root.rstrip(".")} in ' if root else ''
        print_log(f'load {where}{self.checkpoint}', logger='current')
        names = (name for name in contents.weights if name.startswith(root))
        part = OrderedDict((name.removeprefix(root), contents.weights[name]) for name in names)
        part._metadata = OrderedDict({'': contents.note.get(root.rstrip('.'), {})})
        load_state_dict(module, part, strict=False, logger='current')


class PretrainedPart(PretrainedInit):
    """As MMEngine's PretrainedInit, for any module; the file is read as data.

    Raises:
        ValueError: The file has no weights under ``prefix``.
    """

    def __call__(self, module: nn.Module) -> None:
        """Load what the file has for ``module``."""
        checkpoint = read_checkpoint(self.checkpoint, self.map_location)
        root = '' if self.prefix is None else f'{self.prefix.rstrip(".")}.'
        with naming_file(self.checkpoint):
            weights = without_wrappers(
                checkpoint.get('state_dict', checkpoint),
                [f'{root}{name}' for name in module.state_dict()],
            )
        part = {n.removeprefix(root): x for n, x in weights.items() if n.startswith(root)}
        if not part:
            raise UserValueError(
                f'{self.checkpoint} has no weights under the prefix {self.prefix!r}'
            )
        load_state_dict(module, part, strict=False, logger='current')
        if hasattr(module, '_params_init_info'):
            update_init_info(module, init_info=self._get_init_info())


@contextmanager
def own_reader(module: nn.Module, reader: type[PretrainedInit]) -> Iterator[None]:
    """Meanwhile ``init_cfg`` has this initializer in place of MMEngine's for checkpoints, last."""
    given = module.init_cfg
    cfgs = given if isinstance(given, list) else [given] if given else []
    pretrained = [cfg for cfg in cfgs if is_pretrained(cfg)]
    others = [cfg for cfg in cfgs if cfg not in pretrained]
    module.init_cfg = [*others, *({**cfg, 'type': reader} for cfg in pretrained)] or None
    try:
        yield
    finally:
        module.init_cfg = given


def find_backbone(state_dict: Mapping[str, Tensor], prefix: str | None, filename: str) -> str:
    """What stands before the names of the backbone's weights, with its dot.

    Args:
        state_dict (Mapping): Weights of a whole model, or of a backbone.
        prefix (str, optional): What the user calls it. A wrong name of the only one is a warning.
        filename (str): For the message.

    Returns:
        str: Empty for a bare backbone, and for weights that are of no Vim.

    Raises:
        ValueError: There are several backbones, and ``prefix`` names none of them.
    """
    roots = backbone_roots(state_dict)
    asked = None if prefix is None else f'{bare_name(prefix.rstrip("."))}.'.lstrip('.')
    if len(roots) < 2:
        root = roots[0] if roots else ''
        if asked not in (None, root):
            where = f'under {root!r}' if root else 'at its top'
            print_log(
                f'{filename} has nothing under the prefix {prefix!r}: its backbone is {where}',
                'current',
                logging.WARNING,
            )
        return root
    if asked not in roots:
        names = [root.rstrip('.') for root in roots]
        raise UserValueError(
            f'{filename} holds {len(roots)} backbones: '
            f'prefix must be one of {names}, got {prefix!r}'
        )
    return asked
