"""The neck as configs build it."""

import copy
from typing import Any

from mmengine.model import BaseModule
from mmengine.registry import MODELS

from vim_mm import models
from vim_mm.checkpoints.pretrained import PretrainedPart, with_own_reader


@MODELS.register_module()
class SimpleFPN(models.SimpleFPN, BaseModule):
    """:class:`vim_mm.models.SimpleFPN` as a module of MMEngine.

    Args:
        init_cfg (dict | list[dict], optional): MMEngine's initialization config. A checkpoint of
            ``type='Pretrained'`` is read as data.
    """

    def __init__(self, *args: Any, init_cfg: dict | list[dict] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)  # BaseModule's part runs without an init_cfg
        self.init_cfg = copy.deepcopy(init_cfg)

    def init_weights(self) -> None:
        """Initialize as ``init_cfg`` says."""
        given = self.init_cfg
        self.init_cfg = with_own_reader(given, PretrainedPart) or None
        try:
            super().init_weights()
        finally:
            self.init_cfg = given
