"""What `import vim_mm` does to a process, with MMEngine and without; each in a fresh one."""

import sys

import pytest

from tests.registered.fresh import run_fresh

# All modules of MMEngine and their classes, attribute by attribute, but for what registries and the
# table of FLOP handles hold: that is what an import may add to.
NOTHING_ELSE_CHANGES = """
import importlib, inspect, pkgutil, sys
import mmengine, torch

for module in pkgutil.walk_packages(mmengine.__path__, 'mmengine.', onerror=lambda name: None):
    try:
        importlib.import_module(module.name)
    except ImportError:  # of a library that is not installed
        pass

def contents(value):
    if isinstance(value, dict):
        return {k: contents(v) for k, v in value.items()}
    return [*map(id, value)] if isinstance(value, (list, set, tuple)) else id(value)

def snapshot(modules):
    found = {}
    for name in modules:
        for key, value in vars(sys.modules[name]).items():
            if inspect.ismodule(value) or key.startswith('__'):
                continue
            found[name, key] = contents(value)
            if key == HANDLES:
                found[name, key] = {k: v for k, v in found[name, key].items() if 'vim_mm' not in k}
            if inspect.isclass(value) and value.__module__.startswith('mmengine'):
                own = {k: v for k, v in vars(value).items() if k not in CACHES}
                found[name, key] = contents(own)
    return found

# Python's cache of isinstance() against abstract classes.
CACHES = ('_abc_impl',)
HANDLES = '_DEFAULT_SUPPORTED_FLOP_OPS'
modules = [name for name in sys.modules if name.split('.')[0] == 'mmengine']
before = snapshot(modules)
assert len(modules) > 100, modules
assert ('mmengine.analysis.complexity_analysis', HANDLES) in before
defaults = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
{action}
after = snapshot(modules)
changed = [key for key in before.keys() | after.keys() if after.get(key) != before.get(key)]
assert defaults == (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads())
print(sorted(changed))
"""


def changes(action, tmp_path):
    return run_fresh(NOTHING_ELSE_CHANGES.replace('{action}', action), tmp_path).splitlines()[-1]


def test_import_changes_nothing_in_mmengine(tmp_path):
    action = 'import vim_mm, vim_mm.engine.cli, benchmarks.runs.work_dir'
    assert changes(action, tmp_path) == '[]'


@pytest.mark.slow
def test_activate_changes_the_readers_and_the_bases(tmp_path):
    changed = changes('import vim_mm; vim_mm.activate()', tmp_path)
    for name in ('CheckpointLoader', 'Config', 'MODULE2PACKAGE', '_get_scoped_trace_graph'):
        assert f"'{name}')" in changed
    assert "'Runner')" not in changed


BLOCK_ALL_BUT_TORCH_TIMM_EINOPS = """
import sys

# What other rooms import. NumPy, mpmath (by SymPy) and the like come with torch and timm.
BLOCKED = (
    'mmengine', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain',
    'scipy', 'cv2', 'matplotlib', 'pycocotools',
)

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in BLOCKED:
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)

sys.meta_path.insert(0, Blocked())
"""
PLAIN = """
import vim_mm, torch
model = vim_mm.VisionMamba(
    arch=dict(embed_dims=16, num_layers=2), img_size=32, patch_size=8, out_indices=(0, 1))
outs = model(torch.randn(2, 3, 40, 32))
sum(o.square().sum() for o in outs).backward()
assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
other = vim_mm.VisionMamba(
    arch=dict(embed_dims=16, num_layers=2), img_size=32, patch_size=8, out_indices=(0, 1))
other.load_state_dict(model.state_dict())
x = torch.randn(1, 3, 32, 32)
assert torch.equal(other(x)[1], model(x)[1])
assert vim_mm.Mamba(8)(torch.randn(1, 5, 8)).shape == (1, 5, 8)
assert vim_mm.models.SimpleFPN(16)(outs[1:])[0].shape == (2, 256, 20, 16)
assert len(vim_mm.vim_tiny().layers) == 24
try:
    vim_mm.activate()
except AttributeError as error:
    print(error)
print([name for name in sys.modules if name.startswith(('mmengine', 'mmcv', 'mmdet', 'mmseg'))])
"""


@pytest.mark.slow
def test_plain_core_works_without_mmengine(tmp_path):
    program = BLOCK_ALL_BUT_TORCH_TIMM_EINOPS + PLAIN
    *_, message, loaded = run_fresh(program, tmp_path, sys.executable).splitlines()
    assert message == (
        "module 'vim_mm' has no attribute 'activate': it needs MMEngine, which is not installed"
    )
    assert loaded == '[]'
