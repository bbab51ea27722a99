"""`vim_mm.activate()` in the hands of other people's tools; most tests in fresh processes."""

import copy
import os
import pickle
import subprocess
from importlib.metadata import PackageNotFoundError

import mmengine
import numpy as np
import pytest
import yaml
from mmengine.logging import HistoryBuffer, MessageHub

from tests.forked import forked_python
from tests.registered.fresh import ROOT, run_fresh
from vim_mm.engine import mmengine_patches

TRAIN = """
import sys
from pathlib import Path
assert Path(sys.path[0]) == Path(__file__).parent
from mmengine.config import Config
for name in sys.argv[1:]:
    cfg = Config.fromfile(name)
    print(cfg.model.type, cfg.get('default_scope'))
"""
ACTIVATED = 'import vim_mm\nvim_mm.activate()\n'
BASES = {
    'ours.py': 'vim_mm::seg/upernet_vim_t_zoh.py',
    'theirs.py': 'mmseg::fcn/fcn_r18-d8_4xb2-80k_cityscapes-512x1024.py',
}


def run_script(tmp_path, script, *prefix):
    """`python [prefix] tools/train.py CONFIG ...` with a script and configs of somebody else."""
    tools, work = tmp_path / 'tools', tmp_path / 'work'
    tools.mkdir()
    work.mkdir()
    (tools / 'train.py').write_text(script)
    for name, base in BASES.items():
        (work / name).write_text(f"_base_ = '{base}'\ncustom_imports = dict(imports=['vim_mm'])\n")
    return subprocess.run(
        [forked_python(), *prefix, str(tools / 'train.py'), *BASES],
        cwd=work,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ('script', 'prefix'),
    [
        pytest.param(ACTIVATED + TRAIN, (), id='call'),
        pytest.param(TRAIN, ('-m', 'vim_mm.activated'), id='module'),
    ],
)
def test_bases_resolve_in_the_script_of_somebody_else(script, prefix, tmp_path):
    done = run_script(tmp_path, script, *prefix)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [
        'FastEncoderDecoder mmseg',  # by vim_mm::
        'EncoderDecoder mmseg',  # by mmseg::
    ]


@pytest.mark.slow
def test_without_it_mmengine_resolves_no_bases_of_ours(tmp_path):
    """What docs/install.md quotes; if this fails, MMEngine has learned something."""
    done = run_script(tmp_path, TRAIN)
    assert 'AssertionError: mmengine does not support to load vim_mm config.' in done.stderr


EVIL = """
import os, torch
class Call:
    def __reduce__(self):
        return os.mkdir, ('victim',)
torch.save(dict(state_dict=dict(x=Call())), 'evil.pth')
"""
LOAD = """
from mmengine.config import Config
from mmengine.registry import MODELS
model = MODELS.build(Config.fromfile('mine.py').model)
model.init_weights()
"""
CONFIG = """
custom_imports = dict(imports={imports})
model = dict(
    type='VisionMamba', arch=dict(embed_dims=16, num_layers=2), img_size=32, patch_size=8,
    ssm_cfg=dict(d_state=4), init_cfg=dict(type='Pretrained', checkpoint='{checkpoint}'))
"""


def load(tmp_path, imports, checkpoint):
    (tmp_path / 'mine.py').write_text(CONFIG.format(imports=imports, checkpoint=checkpoint))
    (tmp_path / 'load.py').write_text(LOAD)
    return subprocess.run(
        [forked_python(), 'load.py'],
        cwd=tmp_path,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize('imports', [['vim_mm'], ['vim_mm', 'vim_mm.activated']])
def test_a_backbone_reads_its_checkpoint_as_data(imports, tmp_path):
    run_fresh(EVIL, tmp_path)
    done = load(tmp_path, imports, 'evil.pth')
    assert done.returncode != 0
    assert not (tmp_path / 'victim').exists()
    assert 'UnsafeCheckpointError: evil.pth was not loaded' in done.stderr


def test_yaml_is_read_as_data(tmp_path):
    mmengine_patches.activate()
    file = tmp_path / 'annotations.yaml'
    mmengine.dump(dict(sizes=(3, [(4, 'x')])), file)
    assert mmengine.load(file) == dict(sizes=(3, [(4, 'x')]))
    file.write_text(f'x: !!python/object/apply:os.mkdir ["{tmp_path / "victim"}"]')
    with pytest.raises(yaml.YAMLError, match=r'os\.mkdir'):
        mmengine.load(file)
    assert not (tmp_path / 'victim').exists()


@pytest.mark.parametrize(('found', 'kept'), [('4.57.3', True), ('5.0.0', False), (None, True)])
def test_multimodal_models_are_left_out_beside_transformers_5(found, kept, monkeypatch):
    dependency = pytest.importorskip('mmpretrain.utils.dependency')
    monkeypatch.setattr(dependency, 'WITH_MULTIMODAL', True)

    def version(name: str) -> str:
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(mmengine_patches, 'version', version)
    mmengine_patches._leave_out_multimodal_models()
    assert dependency.WITH_MULTIMODAL is kept


@pytest.fixture
def histories(monkeypatch):
    """Makes pairs of histories, of which the second grows in place."""
    theirs = type('Theirs', (HistoryBuffer,), {'update': vars(HistoryBuffer)['update']})
    monkeypatch.setattr(HistoryBuffer, 'update', theirs.update)
    mmengine_patches._grow_histories_in_place()
    return lambda *args, **kwargs: (theirs(*args, **kwargs), HistoryBuffer(*args, **kwargs))


def assert_same_data(theirs: HistoryBuffer, ours: HistoryBuffer) -> None:
    for expected, found in zip(theirs.data, ours.data, strict=True):
        assert found.dtype == expected.dtype and np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize('begin', [(), ([1, 2, 3], [1, 1, 1]), (np.ones(9), np.ones(9))])
@pytest.mark.parametrize('max_length', [4, 40, 1000000])
def test_histories_hold_the_same(begin, max_length, histories, monkeypatch):
    monkeypatch.setattr('warnings.warn', lambda *args: None)  # of what begins too long
    theirs, ours = histories(*begin, max_length=max_length)
    for value in (*range(50), float('nan'), *range(9), 0.1, np.float64(3), True):
        for history in (theirs, ours):
            history.update(value, count=2)
        assert_same_data(theirs, ours)
    assert ours.mean(9) == theirs.mean(9) and ours.current() == theirs.current()
    for copy_of in (copy.copy, copy.deepcopy, lambda history: pickle.loads(pickle.dumps(history))):
        copied = copy_of(ours)
        assert_same_data(theirs, copied)
        copied.update(-1)
        assert copied.current() == -1
        ours.update(5)
        assert copied.current() == -1, 'a copy grows by itself'
        theirs.update(5)
        assert_same_data(theirs, ours)
    assert len(pickle.dumps(ours)) < 16 * len(theirs.data[0]) + 1000, 'without the room'
    for wrong in ((np.ones(1),), ('1',), (1, '1')):
        with pytest.raises(TypeError, match='but got'):
            ours.update(*wrong)
    assert_same_data(theirs, ours)


@pytest.mark.parametrize('length', [1000, 10])
def test_a_long_history_is_not_copied(length, histories):
    """As a training logs: values of float, counts of int, and the oldest dropped in the end."""
    hub = MessageHub(f'of {length}')
    hub.update_scalar('train/loss', 0.0)
    history = hub.get_scalar('train/loss')
    history.max_length = length
    for step in range(1, 1001):
        hub.update_scalar('train/loss', step / 4)
    assert [array.dtype.kind for array in history.data] == ['f', 'i']
    copied = copy.deepcopy(hub.state_dict()['log_scalars']['train/loss'])
    memories = set()
    for resumed in (history, copied):
        for step in range(1001, 1001 + length // 2):
            resumed.update(step / 4)
            memories.add(resumed.data[0].base.__array_interface__['data'])
    assert len(memories) <= 4, 'one or two of each'
    assert all(array.base is not None for array in (*history.data, *copied.data))
    steps = np.arange(1001 + length // 2)[-length:]
    for resumed in (history, copied):
        assert np.array_equal(resumed.data[0], steps / 4) and len(resumed.data[1]) == length
