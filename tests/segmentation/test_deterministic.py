"""Two trainings from one seed end in the same bits, under deterministic algorithms."""

import os
import subprocess
import sys

import pytest
import torch
from mmengine.runner import Runner

from tests.scripts import TOOLS
from vim_mm.engine import VimRunner

pytest.importorskip('mmseg')
ROOT = TOOLS.parent


def digest(*options) -> str:
    """What deterministic_training prints, in a process of its own."""
    program = [sys.executable, '-m', 'tests.segmentation.deterministic_training']
    done = subprocess.run(
        [*program, *map(str, options)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
@pytest.mark.parametrize(
    'options',
    [(512,), (224,), pytest.param((224, '--compile'), marks=pytest.mark.slowest)],
    ids=['512', '224', 'compiled'],
)
def test_upernet_vim_t_repeats_on_a_gpu(options):
    """224: the position embedding is resized at every forward."""
    first, second = (digest('--img-size', *options) for _ in range(2))
    assert first == second


@pytest.mark.slow
def test_upernet_vim_t_repeats_on_the_cpu():
    options = ('--size', 64, '--img-size', 32, '--batch', 2, '--steps', 1, '--device', 'cpu')
    assert digest(*options) == digest(*options)


def test_the_runner_sets_what_cublas_needs(monkeypatch):
    monkeypatch.delenv('CUBLAS_WORKSPACE_CONFIG', raising=False)
    monkeypatch.setattr(Runner, 'set_randomness', lambda self, *args: None)
    runner = VimRunner.__new__(VimRunner)
    runner.set_randomness(seed=0)
    assert 'CUBLAS_WORKSPACE_CONFIG' not in os.environ
    runner.set_randomness(seed=0, deterministic=True)
    assert os.environ['CUBLAS_WORKSPACE_CONFIG'] == ':4096:8'
    monkeypatch.setenv('CUBLAS_WORKSPACE_CONFIG', ':16:8')
    runner.set_randomness(seed=0, deterministic=True)
    assert os.environ['CUBLAS_WORKSPACE_CONFIG'] == ':16:8'
