"""Configs of other libraries find the models, from any directory, after importing vim_mm."""

import importlib.util
import subprocess
import sys

import pytest

PROGRAM = """
from mmengine.registry import DefaultScope
from mmengine.utils import import_modules_from_strings

import_modules_from_strings(imports=['vim_mm'])
from {scope}.registry import MODELS

DefaultScope.get_instance('test', scope_name='{scope}')
backbone = MODELS.build(dict(type='VisionMamba', arch=dict(embed_dims=16, num_layers=1)))
neck = MODELS.build(dict(type='SimpleFPN', in_channels=16))
print(type(backbone).__module__, type(neck).__module__)
"""


@pytest.mark.slow
@pytest.mark.parametrize('scope', ['mmengine', 'mmseg', 'mmdet'])
def test_built_from_the_scope_of_another_library(scope, tmp_path):
    if importlib.util.find_spec(scope) is None:
        pytest.skip(f'needs {scope}')
    if scope == 'mmdet' and importlib.util.find_spec('mmcv._ext') is None:
        pytest.skip('mmdet needs mmcv with compiled ops')
    done = subprocess.run(
        [sys.executable, '-c', PROGRAM.format(scope=scope)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ['vim_mm.models.vision_mamba', 'vim_mm.models.simple_fpn']
