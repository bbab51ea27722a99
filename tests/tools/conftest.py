"""The tools in processes of their own, on models and images so small that they take seconds."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.forked import forked_python
from tests.scripts import ROOT, script
from vim_mm.datasets.shapes import ShapesConfig, write_dataset

# What users of a shipped config write: here one line to inherit it, and some to shrink it.
SHRUNK = """
model = dict(backbone=dict(arch=dict(_delete_=True, embed_dims=8, num_layers=4)), {model})
train_dataloader = dict(batch_size=2, num_workers=0, persistent_workers=False)
val_dataloader = dict(num_workers=0, persistent_workers=False)
test_dataloader = val_dataloader
auto_scale_lr = dict(base_batch_size=4)
train_cfg = dict(max_iters=4, val_interval=4)
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=2))
"""
CONFIGS = {
    'seg': (
        'vim_mm::seg/upernet_vim_shapes.py',
        'neck=dict(embed_dim=8), decode_head=dict(in_channels=[8] * 4, channels=8), '
        'auxiliary_head=dict(in_channels=8, channels=8)',
    ),
    'det': ('vim_mm::det/mask_rcnn_vim_shapes.py', 'neck=dict(in_channels=8)'),
}


def command(tool: str, *args, python: str | None = None) -> list[str]:
    """The command line of a Python or shell script, see :func:`script`."""
    python = python or forked_python()
    return [python if tool.endswith('.py') else 'bash', str(script(tool)), *map(str, args)]


def environment(**variables) -> dict[str, str]:
    """Of a machine without a GPU, whose cores the tests do not claim, and with this vim_mm."""
    path = filter(None, [str(ROOT), os.environ.get('PYTHONPATH')])
    ours = {
        'CUDA_VISIBLE_DEVICES': '',
        'OMP_NUM_THREADS': '1',
        # torchrun calls by the second name what starts its processes.
        'PYTHON': forked_python(),
        'PYTHON_EXEC': forked_python(),
        'PYTHONPATH': os.pathsep.join(path),
    }
    return {**os.environ, **ours, **variables}


def run_tool(
    tool: str,
    *args,
    cwd: Path,
    fails: bool = False,
    under: Sequence[str] = (),
    fresh: bool = False,
    **variables,
) -> str:
    """Run a script in tools/ from the directory ``cwd``; returns all that it printed.

    ``under`` is a command that runs another one, with its arguments. It takes what it takes from a
    fresh interpreter, not from a fork of another; ``fresh`` asks for one that reads sitecustomize.
    """
    python = sys.executable if under or fresh else None
    done = subprocess.run(
        [*under, *command(tool, *args, python=python)],
        cwd=cwd,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert (done.returncode != 0) == fails, done.stdout
    return done.stdout


@pytest.fixture(scope='session')
def configs(tmp_path_factory) -> dict[str, Path]:
    """A config of four iterations for each task, and eight images."""
    folder = tmp_path_factory.mktemp('configs')
    write_dataset(folder / 'shapes', ShapesConfig(train=4, val=4, size=64))
    paths = {}
    for task, (base, model) in CONFIGS.items():
        paths[task] = folder / f'tiny_{task}.py'
        paths[task].write_text(f'_base_ = {base!r}\n' + SHRUNK.replace('{model}', model))
    return paths


@pytest.fixture(scope='session')
def data_root(configs) -> Path:
    """Of the eight images."""
    return configs['seg'].parent / 'shapes'
