"""Configs of other libraries find the models, from any directory, after importing vim_mm."""

import importlib.util

import pytest

from tests.registered.fresh import run_fresh
from vim_mm.engine.mmengine_patches import has_transformers_5

PROGRAM = """
from mmengine.registry import DefaultScope
from mmengine.utils import import_modules_from_strings

import_modules_from_strings(imports=['{module}'])
from {scope}.registry import MODELS

DefaultScope.get_instance('test', scope_name='{scope}')
backbone = MODELS.build(dict(type='VisionMamba', arch=dict(embed_dims=16, num_layers=1)))
neck = MODELS.build(dict(type='SimpleFPN', in_channels=16))
print(type(backbone).__module__, type(neck).__module__)
"""
REGISTERED = 'vim_mm.registered.vision_mamba vim_mm.registered.simple_fpn'


@pytest.mark.slow
@pytest.mark.parametrize('scope', ['mmengine', 'mmseg', 'mmdet', 'mmpretrain'])
def test_built_from_the_scope_of_another_library(scope, tmp_path):
    if importlib.util.find_spec(scope) is None:
        pytest.skip(f'needs {scope}')
    if scope == 'mmdet' and importlib.util.find_spec('mmcv._ext') is None:
        pytest.skip('mmdet needs mmcv with compiled ops')
    # Which lets MMPretrain, and what imports it, be imported beside any version of transformers.
    module = 'vim_mm.activated' if scope == 'mmpretrain' or has_transformers_5() else 'vim_mm'
    program = PROGRAM.format(scope=scope, module=module)
    assert run_fresh(program, tmp_path).splitlines()[-1] == REGISTERED


CHILD_REGISTRY = """
import sys
from types import ModuleType
from mmengine.registry import MODELS as ROOT, DefaultScope, Registry

library = ModuleType('{scope}.registry')
library.MODELS = Registry('model', parent=ROOT, scope='{scope}')
sys.modules['{scope}'], sys.modules['{scope}.registry'] = ModuleType('{scope}'), library
"""


@pytest.mark.slow
def test_built_from_a_scope_under_the_root_registry(tmp_path):
    """What mmpretrain's registry is, whether or not mmpretrain is installed."""
    program = (CHILD_REGISTRY + PROGRAM).format(scope='mmpretrain', module='vim_mm')
    assert run_fresh(program, tmp_path).splitlines()[-1] == REGISTERED
