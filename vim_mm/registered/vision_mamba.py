"""The backbone as configs build it."""

import copy
from typing import Any

from mmengine.model import BaseModule
from mmengine.registry import MODELS

from vim_mm import models
from vim_mm.checkpoints.pretrained import PretrainedBackbone
from vim_mm.checkpoints.provenance import is_pretrained


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
        given = self.init_cfg
        self.init_cfg = _with_own_reader(given)
        try:
            super().init_weights()
        finally:
            self.init_cfg = given


def _with_own_reader(init_cfg: dict | list[dict] | None) -> list[dict]:
    """The config with this package's initializer in place of MMEngine's for checkpoints, last."""
    cfgs = init_cfg if isinstance(init_cfg, list) else [init_cfg] if init_cfg else []
    pretrained = [cfg for cfg in cfgs if is_pretrained(cfg)]
    others = [cfg for cfg in cfgs if cfg not in pretrained]
    return [*others, *({**cfg, 'type': PretrainedBackbone} for cfg in pretrained)]
