"""What ran is told by names that the profiler saw, and noted in the record of a run."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch

from vim_mm import processor
from vim_mm.engine.watching import run_record
from vim_mm.engine.watching.nonfinite import NonFiniteLossError
from vim_mm.engine.watching.run_record import (
    Observed,
    PathChangedError,
    RecordHook,
    note_divergence,
    observe,
    status_of,
    update_record,
)
from vim_mm.models import VisionMamba
from vim_mm.ops.library import has_kernel


@pytest.fixture(scope='module')
def model():
    return VisionMamba(dict(embed_dims=8, num_layers=2), img_size=32, out_indices=(1,))


def step(hook, model, iteration=0):
    """An iteration of a runner, as a hook sees it."""
    runner = SimpleNamespace(model=model, hooks=[], iter=iteration)
    hook.before_train_iter(runner, 0)
    model(torch.randn(1, 3, 32, 32))[0].sum().backward()
    hook.after_train_iter(runner, 0)


def test_the_record_has_what_ran(model, tmp_path):
    file = tmp_path / 'run.json'
    update_record(file, command='train', status='interrupted')
    step(RecordHook(file), model)
    record = json.loads(file.read_text())
    assert (record['command'], record['status']) == ('train', 'interrupted')
    ran = record['ran']
    assert ran['mixers'] == 2
    if has_kernel('cpu'):
        assert (ran['path'], ran['compiled_scans']) == ('CPU kernel', 2)
        assert ran['operators'] == {
            'vim_mm::selective_scan_fwd': 2,
            'vim_mm::selective_scan_bwd': 2,
        }
    assert ran['versions']['torch'] == torch.__version__
    assert {'commit', 'version', 'card', 'threads', 'date', 'VIM_USE_CUDA_KERNEL'} <= ran.keys()


def test_processors_have_their_names(model, tmp_path, monkeypatch):
    """So that runs of unlike ones are not taken for those of one machine."""
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(processor, '_CPUINFO', tmp_path / 'cpuinfo')
    monkeypatch.setattr(processor.platform, 'processor', lambda: '')
    assert run_record.what_ran(run_record.Observed(), 0)['card'] == 'cpu'
    line = 'model name\t: A Processor @ 2.0 GHz\n'
    (tmp_path / 'cpuinfo').write_text(f'processor\t: 0\n{line}processor\t: 1\n{line}')
    assert run_record.what_ran(run_record.Observed(), 0)['card'] == 'A Processor @ 2.0 GHz'


def test_only_the_first_iteration_is_observed(model, tmp_path):
    file = tmp_path / 'run.json'
    hook = RecordHook(file)
    step(hook, model)
    file.unlink()
    step(hook, model)
    assert not file.exists()


@pytest.mark.skipif(not has_kernel('cpu'), reason='vim_mm._C is not built')
def test_a_run_does_not_go_on_by_another_path(model, tmp_path, monkeypatch):
    file = tmp_path / 'run.json'
    step(RecordHook(file), model)
    monkeypatch.setenv('VIM_USE_CUDA_KERNEL', '0')
    message = 'trained by the CPU kernel and would go on by the PyTorch operators'
    with pytest.raises(PathChangedError, match=message):
        step(RecordHook(file), model, iteration=2)
    assert json.loads(file.read_text())['ran']['path'] == 'CPU kernel'
    step(RecordHook(file), model)  # begun again
    assert json.loads(file.read_text())['ran']['path'] == 'PyTorch operators'


def test_what_a_resumed_run_went_on_by_is_added(model, tmp_path):
    """The first iteration stays; a comparison sees both."""
    file = tmp_path / 'run.json'
    step(RecordHook(file), model)
    step(RecordHook(file), model, iteration=2)
    first = json.loads(file.read_text())
    assert first['resumed'] == []
    counted = {'other_operators': 1, 'operators': {}, 'compiled_scans': 0, 'kernels': ['a']}
    ran = first['ran'] | {'card': 'another', 'date': '2026-01-01', **counted}
    update_record(file, ran=ran)
    step(RecordHook(file), model, iteration=2)
    record = json.loads(file.read_text())
    assert record['ran'] == ran
    (resumed,) = record['resumed']
    assert resumed == {name: first['ran'][name] for name in ('card', 'date')}
    # Begun again: what ran before has left nothing.
    step(RecordHook(file), model)
    record = json.loads(file.read_text())
    assert record['ran']['card'] == first['ran']['card'] and record['resumed'] == []


@pytest.mark.parametrize(
    ('operators', 'kernels', 'path'),
    [
        ({'aten::mul': 9}, {}, 'PyTorch operators'),
        ({'vim_mm::selective_scan_fwd': 2}, {}, 'CPU kernel'),
        ({'vim_mm::mixer_fwd': 2}, {'void vim_mm::forward_kernel<Zoh>(int)': 2}, 'CUDA kernel'),
        ({'vim_mm::triton_mixer_fwd': 2}, {'_scan_fwd': 2}, 'Triton kernel'),
        ({'vim_mm::mixer_fwd': 1}, {}, 'mixed'),
        ({'vim_mm::mixer_fwd': 1, 'vim_mm::triton_mixer_fwd': 1}, {}, 'mixed'),
    ],
)  # fmt: skip
def test_paths_of_two_mixers(operators, kernels, path):
    seen = Observed()
    seen.operators.update(operators)
    seen.kernels.update(kernels)
    assert seen.path(2) == path
    assert all(name.startswith('vim_mm::') and '(' not in name for name in seen.our_kernels)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize(
    ('backend', 'path'),
    [('native', 'CUDA kernel'), ('torch', 'PyTorch operators'), ('triton', 'Triton kernel')],
)
def test_path_on_a_gpu(model, backend, path, monkeypatch):
    monkeypatch.setenv('VIM_MM_BACKEND', backend)
    model = copy.deepcopy(model).cuda()
    with observe() as seen:
        model(torch.randn(1, 3, 32, 32, device='cuda'))
    assert seen.path(2) == path
    assert (backend == 'native') == bool(seen.our_kernels)


def test_operators_are_counted():
    with observe() as seen:
        torch.ones(2).mul(torch.ones(2)).mul(3)
    assert seen.operators['aten::mul'] == 2 and seen.scans == 0


def test_a_divergence_is_noted(tmp_path):
    note_divergence(tmp_path / 'run.json', NonFiniteLossError('The loss of iteration 3 is nan.'))
    record = json.loads((tmp_path / 'run.json').read_text())
    assert record == {'diverged': 'The loss of iteration 3 is nan.'}
    assert status_of(record) is None and status_of({}) is None
    for status in ('finished', 'diverged', 'failed'):
        assert status_of({'status': status}) == status_of(record | {'status': status}) == status
    assert status_of({'status': 'interrupted'}) == 'interrupted'
    assert status_of(record | {'status': 'interrupted'}) == 'diverged'
