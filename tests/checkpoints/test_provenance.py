"""A checkpoint says how it was trained, and is not used as something else without a word."""

import json
import re

import pytest
import torch
from mmengine.config import Config
from mmengine.model import PretrainedInit
from mmengine.runner.checkpoint import CheckpointLoader

from tests.engine.toy import ToyModel, make_backbone, make_runner
from vim_mm.checkpoints.provenance import CheckpointMismatchError

# Each of them takes the same weights, so that nothing but the note can tell.
CHANGES = [
    dict(discretization_method='bilinear'),
    dict(out_feature='residual'),
    dict(if_divide_out=True),
    dict(if_rope=True),
    dict(out_type='raw'),
]


def same(**changes):
    return ToyModel(**{'discretization_method': 'foh', 'if_divide_out': False, **changes})


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """The last checkpoint of a run."""
    work_dir = tmp_path_factory.mktemp('trained')
    make_runner(work_dir, same()).train()
    return work_dir / 'iter_2.pth'


def log_of(work_dir):
    (log,) = work_dir.glob('*/*.log')
    return log.read_text()


def test_meta_names_method_architecture_and_commit(trained):
    meta = CheckpointLoader.load_checkpoint(str(trained), 'cpu')['meta']
    assert re.fullmatch(r'[0-9a-f]{40}(-dirty)?|None', str(meta['vim_mm']['commit']))
    assert meta['vim_mm']['version']
    assert 'started_from' not in meta
    (switches,) = meta['vim_mm']['backbones'].values()
    assert switches['discretization_method'] == 'foh'
    assert switches['arch'] == dict(embed_dims=8, num_layers=1)
    assert switches['if_divide_out'] is False


@pytest.mark.parametrize('change', CHANGES, ids=lambda change: next(iter(change)))
@pytest.mark.parametrize('resume', [False, True], ids=['test', 'resume'])
def test_another_switch_is_refused_unless_insisted_on(change, resume, trained, tmp_path):
    options = dict(load_from=str(trained), resume=resume)
    go = (lambda runner: runner.train()) if resume else (lambda runner: runner.load_or_resume())

    def runner(name, **kwargs):
        made = make_runner(tmp_path / name, same(**change), **options, **kwargs)
        made._testing = not resume
        return made

    ((name, value),) = change.items()
    with pytest.raises(CheckpointMismatchError) as caught:
        go(runner('refused'))
    for part in (str(trained), name, f'here {value!r}', '--allow-mismatch'):
        assert part in str(caught.value)
    go(runner('insists', cfg=dict(allow_mismatch=True)))
    assert 'by --allow-mismatch' in log_of(tmp_path / 'insists')


def test_the_same_switches_pass(trained, tmp_path):
    runner = make_runner(tmp_path, same(), load_from=str(trained))
    runner.test()
    assert 'method unknown' not in log_of(tmp_path)


def test_training_may_start_from_another_method_and_records_it(trained, tmp_path):
    work_dir = tmp_path / 'second'
    runner = make_runner(work_dir, same(discretization_method='rk4'), load_from=str(trained))
    runner.train()
    expected = f"starts from {trained}, which was trained with discretization_method 'foh', here"
    assert log_of(work_dir).count(expected) == 1
    started_from = torch.load(work_dir / 'iter_2.pth', weights_only=False)['meta']['started_from']
    assert started_from['file'] == str(trained)
    assert started_from['discretization_method'] == 'foh'
    assert json.loads((work_dir / 'started_from.json').read_text()) == started_from
    (dump,) = work_dir.glob('*.py')
    assert 'started_from' not in Config.fromfile(dump)

    # What resumes it goes on knowing.
    options = dict(load_from=str(work_dir / 'iter_1.pth'), resume=True)
    make_runner(tmp_path / 'third', same(discretization_method='rk4'), **options).train()
    meta = torch.load(tmp_path / 'third' / 'iter_2.pth', weights_only=False)['meta']
    assert meta['started_from'] == started_from


@pytest.mark.parametrize('kind', ['Pretrained', PretrainedInit])
def test_pretrained_weights_are_recorded_too(kind, tmp_path):
    weights = tmp_path / 'backbone.pth'
    torch.save(make_backbone(discretization_method='poly').state_dict(), weights)
    init_cfg = dict(type=kind, checkpoint=str(weights))
    make_runner(tmp_path / 'run', ToyModel(init_cfg=init_cfg)).train()
    assert f'backbone starts from {weights}, which was trained with' in log_of(tmp_path / 'run')
    meta = torch.load(tmp_path / 'run' / 'iter_2.pth', weights_only=False)['meta']
    assert meta['started_from']['discretization_method'] == 'poly'


@pytest.mark.parametrize('resume', [False, True], ids=['start', 'resume'])
def test_an_older_checkpoint_is_accepted_as_unknown(resume, trained, tmp_path):
    checkpoint = torch.load(trained, weights_only=False)
    checkpoint['state_dict']._metadata['backbone'] = dict(version=1, grid=(2, 2), cls_token='none')
    del checkpoint['meta']['vim_mm']
    old = tmp_path / 'old.pth'
    torch.save(checkpoint, old)
    make_runner(tmp_path / 'run', ToyModel(), load_from=str(old), resume=resume).train()
    assert log_of(tmp_path / 'run').count('method unknown') == 1


def test_the_meta_tells_where_the_state_dict_does_not(trained, tmp_path):
    """As in checkpoints of FSDP."""
    checkpoint = torch.load(trained, weights_only=False)
    del checkpoint['state_dict']._metadata
    file = tmp_path / 'bare.pth'
    torch.save(checkpoint, file)
    with pytest.raises(CheckpointMismatchError, match="'foh', here 'zoh'"):
        make_runner(tmp_path / 'run', ToyModel(), load_from=str(file), resume=True).train()
