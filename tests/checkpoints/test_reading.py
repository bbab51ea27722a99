"""Checkpoint files are data: no path by which one is loaded may run what it holds."""

import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer
from mmengine.runner.checkpoint import CheckpointLoader
from torch.serialization import MAGIC_NUMBER

from tests.engine.toy import ToyModel, make_backbone, make_runner
from vim_mm.checkpoints import reading
from vim_mm.checkpoints.reading import NonFiniteWeightsError
from vim_mm.engine import UnsafeCheckpointError, activate

activate()


class Call:
    """Pickles as a call of ``function``, which a careless loader makes."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def load_from(path: Path, work_dir: Path) -> None:
    make_runner(work_dir, load_from=str(path)).train()


def resume(path: Path, work_dir: Path) -> None:
    make_runner(work_dir, load_from=str(path), resume=True).train()


def test(path: Path, work_dir: Path) -> None:
    make_runner(work_dir, load_from=str(path)).test()


test.__test__ = False


@pytest.mark.parametrize('function', [os.mkdir, exec], ids=lambda function: function.__name__)
def test_a_refusal_names_the_file_and_what_it_calls(function, tmp_path):
    """That nothing runs is asked at every door, see test_doors.py."""
    file = tmp_path / 'evil.pth'
    torch.save(dict(x=Call(function, 'pass')), file)
    with pytest.raises(
        UnsafeCheckpointError, match=rf'evil\.pth was not loaded.*{function.__name__}'
    ):
        CheckpointLoader.load_checkpoint(str(file))


def torchscript(file: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), str(file))


def tar(file: Path, name: str = 'pickle') -> None:
    with tarfile.open(file, 'w', format=tarfile.USTAR_FORMAT, encoding='latin-1') as archive:
        archive.addfile(tarfile.TarInfo(name))


def tar_that_begins_as_a_pickle(file: Path) -> None:
    tar(file, pickle.dumps(MAGIC_NUMBER, protocol=2).decode('latin-1'))


@pytest.mark.parametrize(
    ('write', 'reason'),
    [
        (torchscript, 'a TorchScript archive'),
        (tar, 'a tar archive'),
        (tar_that_begins_as_a_pickle, 'a tar archive'),
    ],
)
def test_archives_that_older_torch_reads_past_weights_only_are_refused(
    write, reason, tmp_path, monkeypatch
):
    file = tmp_path / 'archive.pth'
    write(file)
    # By us, in every release: torch before 2.6 would load the first and unpack the others.
    monkeypatch.delattr(torch, 'load')
    with pytest.raises(UnsafeCheckpointError, match=rf'archive\.pth was not loaded.*{reason}'):
        CheckpointLoader.load_checkpoint(str(file))


@pytest.mark.parametrize('name', ['update', '__init__', '__globals__'])
def test_getattr_reaches_nothing_but_statistics(name, tmp_path):
    file = tmp_path / 'buffer.pth'
    torch.save(Call(getattr, HistoryBuffer, name), file)
    with pytest.raises(UnsafeCheckpointError, match=name):
        CheckpointLoader.load_checkpoint(str(file))
    torch.save(dict(buffer=HistoryBuffer([1, 2], [1, 1])), file)
    assert CheckpointLoader.load_checkpoint(str(file))['buffer'].values.tolist() == [1, 2]


def test_no_reader_of_mmengine_is_left():
    modules = {loader.__module__ for loader in CheckpointLoader._schemes.values()}
    assert modules == {'vim_mm.checkpoints.reading'}


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        pytest.param('s3://bucket/a.pth', 'download the file', id='unsupported'),
        pytest.param('mmcls://vgg11', 'download the file', id='converted'),
        pytest.param('torchvision://nothing', 'not among', id='unknown name'),
    ],
)
def test_other_schemes_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        CheckpointLoader.load_checkpoint(name)


def test_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r'there is no checkpoint nothing\.pth; '):
        CheckpointLoader.load_checkpoint('nothing.pth')


def test_what_the_runner_writes_can_be_read(tmp_path):
    runner = make_runner(tmp_path)
    runner.train()
    checkpoint = CheckpointLoader.load_checkpoint(str(tmp_path / 'iter_2.pth'), 'cpu')
    assert set(checkpoint) == {
        'meta',
        'state_dict',
        'message_hub',
        'optimizer',
        'param_schedulers',
    }
    scalars = checkpoint['message_hub']['log_scalars']
    assert isinstance(checkpoint['message_hub']['runtime_info']['best_score'], np.floating)
    assert scalars['train/loss'].data[0].shape == (2,)
    expected = runner.message_hub.get_scalar('train/loss').mean()
    assert scalars['train/loss'].statistics('mean') == expected


@pytest.mark.parametrize('module', ['numpy.core', 'numpy._core'])
def test_files_of_either_numpy_can_be_read(module, tmp_path):
    file = tmp_path / 'array.pth'
    # Torch's older format is plain pickles, in which names can be replaced.
    content = dict(array=np.arange(3), scalar=np.float64(2))
    torch.save(content, file, _use_new_zipfile_serialization=False)
    own = np.empty(0).__reduce__()[0].__module__
    file.write_bytes(file.read_bytes().replace(own.encode(), f'{module}.multiarray'.encode()))
    array, scalar = CheckpointLoader.load_checkpoint(str(file)).values()
    assert array.tolist() == [0, 1, 2]
    assert scalar == 2


@pytest.mark.parametrize('load', [resume, test], ids=lambda load: load.__name__)
def test_resuming_and_testing_need_every_weight(load, tmp_path):
    make_runner(tmp_path / 'first').train()
    file = tmp_path / 'first' / 'iter_1.pth'
    checkpoint = torch.load(file, weights_only=False)
    del checkpoint['state_dict']['head.bias']
    torch.save(checkpoint, file)
    with pytest.raises(RuntimeError, match=r'missing keys.*head\.bias'):
        load(file, tmp_path / 'second')


def test_training_may_start_from_another_head_but_not_from_half_a_backbone(tmp_path):
    state = ToyModel(classes=5).state_dict()
    file = tmp_path / 'weights.pth'
    torch.save(state, file)
    runner = make_runner(tmp_path / 'first', load_from=str(file))
    runner.load_or_resume()
    name = 'backbone.layers.0.mixer.A_log'
    assert torch.equal(runner.model.state_dict()[name].cpu(), state[name])

    del state[name]
    torch.save(state, file)
    with pytest.raises(RuntimeError, match='A_log'):
        load_from(file, tmp_path / 'second')


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
@pytest.mark.parametrize('averaged', [False, True])
@pytest.mark.parametrize('load', [resume, test, load_from], ids=lambda load: load.__name__)
def test_weights_that_are_no_numbers_are_named(load, averaged, value, tmp_path):
    make_runner(tmp_path / 'first').train()
    file = tmp_path / 'first' / 'iter_1.pth'
    checkpoint = torch.load(file, weights_only=False)
    if averaged:
        checkpoint['ema_state_dict'] = {k: v.clone() for k, v in checkpoint['state_dict'].items()}
    part = checkpoint['ema_state_dict' if averaged else 'state_dict']
    part['head.weight'].view(-1)[-1] = value
    torch.save(checkpoint, file)
    with pytest.raises(NonFiniteWeightsError, match=r'iter_1\.pth .*head\.weight is not finite'):
        load(file, tmp_path / 'second')


def test_a_backbone_does_not_start_from_weights_that_are_no_numbers(tmp_path):
    weights, file = make_backbone().state_dict(), tmp_path / 'weights.pth'
    weights['layers.0.mixer.A_log'][0] = float('nan')
    torch.save(weights, file)
    backbone = make_backbone(init_cfg=dict(type='Pretrained', checkpoint=str(file)))
    with pytest.raises(NonFiniteWeightsError, match=r'layers\.0\.mixer\.A_log is not finite'):
        backbone.init_weights()


def test_weights_that_cannot_be_looked_at_or_are_masks_are_sound():
    mask = torch.full((2, 2), -torch.inf).triu(1)
    weights = dict(mask=mask, meta=torch.empty(2, device='meta'), number=3)
    weights['small'] = torch.ones(2).to(torch.float8_e4m3fn)
    weights['sparse'] = torch.eye(2).to_sparse()
    for checkpoint in (weights, dict(state_dict=weights)):
        reading._check_finite('file.pth', checkpoint)
