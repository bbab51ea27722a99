"""The neck as configs build it."""

import copy
from typing import Any

from mmengine.model import BaseModule
from mmengine.registry import MODELS

from vim_mm import models
from vim_mm.checkpoints.pretrained import PretrainedPart, own_reader


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
        with own_reader(self, PretrainedPart):
            super().init_weights()
