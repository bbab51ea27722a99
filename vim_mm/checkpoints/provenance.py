"""What a checkpoint says about the backbone that was trained, and who may use it.

Every checkpoint notes the version and commit of vim_mm and the switches that change what the
weights compute. Testing, inference and resuming insist that the config has the same switches;
a training may start from other ones, and then says so and records it.
"""

from collections.abc import Collection, Iterator, Mapping
from functools import cache

from mmengine.model import BaseTTAModel, PretrainedInit, is_model_wrapper
from torch import nn

from vim_mm.errors import UserError
from vim_mm.models.state_dict import describe_differences
from vim_mm.models.vision_mamba import VisionMamba
from vim_mm.version import __version__, commit


class CheckpointMismatchError(UserError, ValueError):
    """A checkpoint was trained with other switches than the config has."""


@cache
def code_version() -> dict:
    """The version of vim_mm and, in a git checkout, its commit with '-dirty' where it is changed.

    Returns:
        dict: 'version' and 'commit', the latter None for an installed package.
    """
    return dict(version=__version__, commit=commit(40))


def inner_model(model: nn.Module) -> nn.Module:
    """What a wrapper for distributed runs or for test-time augmentation holds; else the model."""
    while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
        model = model.module
    return model


def backbones(model: nn.Module) -> Iterator[tuple[str, VisionMamba]]:
    """Each VisionMamba of a model by its name, which is that of its weights in checkpoints."""
    for name, module in inner_model(model).named_modules():
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


def is_pretrained(init_cfg: Mapping) -> bool:
    """Whether one of MMEngine's initialization configs names a checkpoint, by string or class."""
    return init_cfg.get('type') in ('Pretrained', PretrainedInit)
