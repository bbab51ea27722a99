"""Converted weights as a checkpoint of MMEngine, and in words."""

import io
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

from vim_mm.checkpoints.conversion import Conversion, is_half
from vim_mm.checkpoints.provenance import backbones, code_version
from vim_mm.models.state_dict import describe_differences
from vim_mm.whole_file import whole_file


def as_checkpoint(conversion: Conversion, source: str) -> dict:
    """What a checkpoint file of the converted weights holds.

    Args:
        conversion (Conversion): The weights.
        source (str): Path of the file that they are from.

    Returns:
        dict: 'state_dict' and 'meta', whose 'converted_from' names file, form and converter.
    """
    origin = dict(file=Path(source).name, form=conversion.origin, converter=code_version())
    return dict(
        state_dict=conversion.state_dict, meta=dict(**conversion.meta, converted_from=origin)
    )


def describe(conversion: Conversion) -> str:
    """One or two sentences: what the file is, and what was assumed of it."""
    text = f'it is a {conversion.kind} in {conversion.origin}.'
    assumed = conversion.switches.assumed
    if assumed:
        text += f' It does not tell, and was taken to be as released: {as_arguments(assumed)}.'
    if halves := sum(map(is_half, conversion.state_dict.values())):
        text += f' {halves} of its weights are in half precision.'
    return text


def as_arguments(switches: dict) -> str:
    """Arguments as a call in Python has them."""
    return ', '.join(f'{name}={value!r}' for name, value in switches.items())


def differences(conversion: Conversion, target: nn.Module) -> list[str]:
    """In which arguments the backbone of a model differs from what the weights were trained as."""
    notes = conversion.state_dict._metadata
    return [
        difference
        for name, module in backbones(target)
        if name in notes
        for difference in describe_differences(notes[name], module)
    ]


def keep_backbone(conversion: Conversion) -> None:
    """Leave of a whole model the backbone, under the names of a bare VisionMamba."""
    note = conversion.state_dict._metadata['backbone']
    conversion.state_dict = OrderedDict(
        (name.removeprefix('backbone.'), weight)
        for name, weight in conversion.state_dict.items()
        if name.startswith('backbone.')
    )
    conversion.state_dict._metadata = OrderedDict({'': note})


def write(checkpoint: dict, path: Path) -> None:
    """Write a checkpoint, whole or not at all; its folder is made where there is none.

    Raises:
        OSError: It cannot be written, as on a full disk; nothing is left of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()  # torch.save tells of a full disk by a RuntimeError of its writer
    torch.save(checkpoint, content)
    # A view that an error's traceback keeps ends Python 3.12.1 in its garbage collector.
    with whole_file(path) as part, content.getbuffer() as view:
        part.write_bytes(view)
