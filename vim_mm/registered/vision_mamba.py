"""The backbone as configs build it."""

import copy
from typing import Any

from mmengine.model import BaseModule
from mmengine.registry import MODELS

from vim_mm import models
from vim_mm.checkpoints.pretrained import PretrainedBackbone, own_reader


@MODELS.register_module()
class VisionMamba(models.VisionMamba, BaseModule):
    """:class:`vim_mm.VisionMamba` as a module of MMEngine.

    The arguments, the weights and their names are those of the plain class.

    Args:
        init_cfg (dict | list[dict], optional): MMEngine's initialization config. A checkpoint of
            ``type='Pretrained'`` is read as data, in any form: see
            :class:`vim_mm.checkpoints.pretrained.PretrainedBackbone`.
    """

    def __init__(self, *args: Any, init_cfg: dict | list[dict] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)  # BaseModule's part runs without an init_cfg
        self.init_cfg = copy.deepcopy(init_cfg)

    def init_weights(self) -> None:
        """Initialize as :meth:`reset_parameters`, then as ``init_cfg`` says."""
        if not self.is_init:
            self.reset_parameters()
        with own_reader(self, PretrainedBackbone):
            super().init_weights()
