"""The backbone as configs build it."""

import copy
import logging
from typing import Any

from mmengine.logging import print_log
from mmengine.model import BaseModule
from mmengine.registry import MODELS

from vim_mm import models
from vim_mm.engine.activation import is_active


@MODELS.register_module()
class VisionMamba(models.VisionMamba, BaseModule):
    """:class:`vim_mm.VisionMamba` as a module of MMEngine.

    The arguments, the weights and their names are those of the plain class.

    Args:
        init_cfg (dict | list[dict], optional): MMEngine's initialization config.
    """

    def __init__(self, *args: Any, init_cfg: dict | list[dict] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)  # BaseModule's part runs without an init_cfg
        self.init_cfg = copy.deepcopy(init_cfg)

    def init_weights(self) -> None:
        """Initialize as :meth:`reset_parameters`, then as ``init_cfg`` says."""
        if not self.is_init:
            self.reset_parameters()
            if self._is_pretrained() and not is_active():
                print_log(
                    "MMEngine reads the backbone's checkpoint, and falls back to a reader that "
                    'runs code from the file. Call vim_mm.activate(), or import vim_mm.activated '
                    'by custom_imports, to read checkpoints as data.',
                    logger='current',
                    level=logging.WARNING,
                )
        super().init_weights()

    def _is_pretrained(self) -> bool:
        cfgs = self.init_cfg if isinstance(self.init_cfg, list) else [self.init_cfg or {}]
        return any('checkpoint' in cfg for cfg in cfgs)
