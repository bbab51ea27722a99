"""The neck as configs build it."""

import copy
from typing import Any

from mmengine.model import BaseModule
from mmengine.registry import MODELS

from vim_mm import models


@MODELS.register_module()
class SimpleFPN(models.SimpleFPN, BaseModule):
    """:class:`vim_mm.models.SimpleFPN` as a module of MMEngine.

    Args:
        init_cfg (dict | list[dict], optional): MMEngine's initialization config.
    """

    def __init__(self, *args: Any, init_cfg: dict | list[dict] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)  # BaseModule's part runs without an init_cfg
        self.init_cfg = copy.deepcopy(init_cfg)
