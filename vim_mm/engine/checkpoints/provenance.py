"""What a checkpoint says about the backbone that was trained, and who may use it.

Every checkpoint notes the version and commit of vim_mm and the switches that change what the
weights compute. Testing, inference and resuming insist that the config has the same switches;
a training may start from other ones, and then says so and records it.
"""

from collections.abc import Collection, Iterator, Mapping
from functools import cache

from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.model import PretrainedInit, is_model_wrapper
from mmengine.registry import HOOKS
from torch import nn

from vim_mm.models.checkpoint import describe_differences, function_switches, plain
from vim_mm.models.vision_mamba import VisionMamba
from vim_mm.version import __version__, commit


class CheckpointMismatchError(ValueError):
    """A checkpoint was trained with other switches than the config has."""


@cache
def code_version() -> dict:
    """The version of vim_mm and, in a git checkout, its commit with '-dirty' where it is changed.

    Returns:
        dict: 'version' and 'commit', the latter None for an installed package.
    """
    return dict(version=__version__, commit=commit(40))


def backbones(model: nn.Module) -> Iterator[tuple[str, VisionMamba]]:
    """Each VisionMamba of a model by its name, which is that of its weights in checkpoints."""
    model = model.module if is_model_wrapper(model) else model
    for name, module in model.named_modules():
        if isinstance(module, VisionMamba):
            yield name, module


def _noted_switches(checkpoint: Mapping, name: str) -> dict:
    state_dict = checkpoint.get('state_dict', checkpoint)
    noted = getattr(state_dict, '_metadata', {}).get(name, {})
    if 'discretization_method' not in noted:  # a state dict of FSDP has no notes, the meta has
        noted = checkpoint.get('meta', {}).get('vim_mm', {}).get('backbones', {}).get(name, {})
    return noted


def check_switches(
    model: nn.Module,
    checkpoint: Mapping,
    filename: str,
    allow: bool,
    apart_from: Collection[str] = (),
) -> list[str]:
    """Insist that every backbone of a model is the function that a checkpoint was trained as.

    Args:
        model (nn.Module): Holds any number of VisionMamba.
        checkpoint (Mapping): As it was read.
        filename (str): Of the checkpoint, for the message.
        allow (bool): Whether another function is allowed.
        apart_from (Collection[str]): Switches that the caller means to differ.

    Returns:
        list[str]: What a log should say, a line each; empty where all is as it was trained.

    Raises:
        CheckpointMismatchError: A switch differs, and ``allow`` is False.
    """
    lines = []
    for name, module in backbones(model):
        noted = _noted_switches(checkpoint, name)
        if 'discretization_method' not in noted:
            lines.append(f'{filename} does not say its discretization method: method unknown.')
        noted = {k: v for k, v in noted.items() if k not in apart_from}
        if differences := '; '.join(describe_differences(noted, module)):
            problem = f'{filename} was trained with {differences}.'
            if not allow:
                raise CheckpointMismatchError(
                    f'{problem} Correct the config, or insist with --allow-mismatch.'
                )
            lines.append(f'{problem} Used all the same, by --allow-mismatch.')
    return lines


@HOOKS.register_module()
class ProvenanceHook(Hook):
    """Notes in checkpoints what trained them, and compares it with the config when one is loaded.

    The meta of a checkpoint gets ``vim_mm``, a dict of version, commit and the switches of each
    backbone; and, if the training started from weights, ``started_from``: their file and what it
    notes, or None for what it does not. The config that the run dumps gets the latter too.
    """

    priority = 'VERY_HIGH'

    def __init__(self):
        self.resumed = False
        self.started_from = None

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Insist on the same function when resuming or testing."""
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
        if started_from is not None:
            runner.cfg.started_from = started_from
            if is_main_process():
                runner.dump_config()


def is_pretrained(init_cfg: Mapping) -> bool:
    """Whether one of MMEngine's initialization configs names a checkpoint, by string or class."""
    return init_cfg.get('type') in ('Pretrained', PretrainedInit)


def _pretrained_file(model: nn.Module, module: VisionMamba) -> str | None:
    """The file of ``init_cfg=dict(type='Pretrained')``, of the backbone or of the whole model."""
    model = model.module if is_model_wrapper(model) else model
    for owner in (module, model):
        init_cfg = getattr(owner, 'init_cfg', None) or []
        for cfg in init_cfg if isinstance(init_cfg, list) else [init_cfg]:
            if is_pretrained(cfg):
                return cfg['checkpoint']
    return None
