"""Checkpoints of a training note what trained them, and what they started from."""

import json
from pathlib import Path

from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from torch import nn

from vim_mm.checkpoints.provenance import (
    backbones,
    check_switches,
    code_version,
    inner_model,
    is_pretrained,
)
from vim_mm.checkpoints.reading import fit_names
from vim_mm.models.state_dict import describe_differences, function_switches, plain
from vim_mm.models.vision_mamba import VisionMamba
from vim_mm.whole_file import whole_file


@HOOKS.register_module()
class ProvenanceHook(Hook):
    """Notes in checkpoints what trained them, and compares it with the config when one is loaded.

    The meta of a checkpoint gets ``vim_mm``, a dict of version, commit and the switches of each
    backbone; and, if the training started from weights, ``started_from``: their file and what it
    notes, or None for what it does not. The latter stands in ``started_from.json`` in the working
    directory too: not in the config, which is a program, and what a file notes is data.
    """

    priority = 'VERY_HIGH'

    def __init__(self):
        self.resumed = False
        self.started_from = None

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Name weights as the model does; insist on the same function when resuming or testing."""
        fit_names(inner_model(runner.model), checkpoint)  # notes are found by these names, too
        if not getattr(runner, 'insists_on_checkpoint', False):
            return
        self.resumed = True
        allow = runner.cfg.get('allow_mismatch', False)
        for line in check_switches(runner.model, checkpoint, runner._load_from, allow):
            runner.logger.info(line)
        self._record(runner, checkpoint.get('meta', {}).get('started_from'))

    def before_train(self, runner) -> None:
        """Say and record which weights a training starts from."""
        if self.resumed:
            return
        for name, module in backbones(runner.model):
            noted = module.loaded_switches
            if noted is None:
                continue
            filename = runner._load_from or _pretrained_file(runner.model, module)
            filename = filename or 'weights that it was given'
            if 'discretization_method' not in noted:
                story = 'which does not say its discretization method: method unknown'
            elif differences := '; '.join(describe_differences(noted, module)):
                story = f'which was trained with {differences}'
            else:
                story = f'which was trained with the same {noted["discretization_method"]!r}'
            runner.logger.info(f'{name or "The model"} starts from {filename}, {story}.')
            self._record(runner, dict(file=str(filename), **{k: plain(noted[k]) for k in noted}))

    def before_save_checkpoint(self, runner, checkpoint: dict) -> None:
        """Add the notes to the meta."""
        switches = {
            name.replace('_fsdp_wrapped_module.', ''): {
                k: plain(v) for k, v in function_switches(module).items()
            }
            for name, module in backbones(runner.model)
        }
        checkpoint['meta']['vim_mm'] = {**code_version(), 'backbones': switches}
        if self.started_from is not None:
            checkpoint['meta']['started_from'] = self.started_from

    def _record(self, runner, started_from: dict | None) -> None:
        self.started_from = started_from
        if started_from is not None and is_main_process():
            with whole_file(Path(runner.work_dir) / 'started_from.json') as part:
                part.write_text(json.dumps(started_from, indent=2) + '\n')


def _pretrained_file(model: nn.Module, module: VisionMamba) -> str | None:
    """The file of ``init_cfg=dict(type='Pretrained')``, of the backbone or of the whole model."""
    for owner in (module, inner_model(model)):
        init_cfg = getattr(owner, 'init_cfg', None) or []
        for cfg in init_cfg if isinstance(init_cfg, list) else [init_cfg]:
            if is_pretrained(cfg):
                return cfg['checkpoint']
    return None
