"""The doctor on this machine, and with planted faults: each gives a red line and exit code 1."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.scripts import load
from vim_mm import doctor, selftest
from vim_mm.models.fused import LayerPath, summarize_paths
from vim_mm.ops import METHODS, library, path_of, triton

ROOT = Path(__file__).parents[1]


def findings() -> dict[str, doctor.Line]:
    return {line.topic: line for line in doctor.examine()}


def fails(*arguments: str) -> dict[str, dict]:
    """The red lines of a run that must end with code 1."""
    shown = []
    assert doctor.main([*arguments, '--json'], shown.append) == 1
    report = json.loads(shown[0])
    assert report['ok'] is False
    return {check['topic']: check for check in report['checks'] if check['state'] == 'fail'}


@pytest.fixture(autouse=True)
def large_shm(monkeypatch):
    monkeypatch.setattr(doctor, 'shared_memory', lambda: 8 * 2**30)
    for variable in ('VIM_USE_CUDA_KERNEL', 'VIM_MM_BACKEND'):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.skipif(library.MISSING is not None, reason='needs the compiled library')
def test_a_sound_installation():
    shown = []
    assert doctor.main([], shown.append) == 0, shown[0]
    (text,) = shown
    assert text.splitlines()[-1] == 'No check failed.'
    assert len(text.splitlines()) <= 50
    for topic in ('python', 'torch', 'vim_mm', 'timm', '/dev/shm', 'cores', *METHODS):
        assert f' {topic} ' in text
    assert findings()['scan on cpu'].finding.startswith('native for float32 bfloat16')


def test_a_missing_library(monkeypatch):
    monkeypatch.setattr(library, 'MISSING', 'vim_mm._C is not built')
    """Everything works by PyTorch's operators, more slowly."""
    lines = findings()
    assert lines['kernels'].state == 'note'
    assert lines['kernels'].finding == 'vim_mm._C is not built'
    assert 'pip install' in lines['kernels'].advice
    assert lines['scan on cpu'].finding.startswith('torch for float32')
    assert lines['zoh'].state == 'ok'


def gpu(monkeypatch, capability, architectures, kernel=True):
    """One GPU that nobody has."""
    monkeypatch.setattr(doctor, 'built_architectures', lambda: architectures)
    has = library.has_kernel
    monkeypatch.setattr(
        library, 'has_kernel', lambda device: kernel if device == 'cuda' else has(device)
    )
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_capability=lambda index: capability,
        get_device_name=lambda index: 'a GPU',
    )
    monkeypatch.setattr(doctor.torch, 'cuda', cuda)


def test_a_gpu_without_code_for_it(monkeypatch):
    gpu(monkeypatch, (9, 0), ['8.0', '8.9'])
    monkeypatch.setattr(triton, 'MISSING', None)
    (line,) = doctor.devices()
    assert line.state == 'note'
    assert line.finding == 'a GPU, needs 9.0, but compiled for 8.0 8.9: Triton is taken'
    assert 'TORCH_CUDA_ARCH_LIST=9.0' in line.advice


def test_a_gpu_with_neither_kernels_nor_triton(monkeypatch):
    gpu(monkeypatch, (9, 0), ['8.0', '8.9'])
    monkeypatch.setattr(triton, 'MISSING', 'Triton is not installed')
    (line,) = doctor.devices()
    assert line.state == 'fail'
    assert line.finding.endswith('compiled for 8.0 8.9, and Triton is not installed')
    monkeypatch.setattr(doctor, 'methods', lambda: [])
    monkeypatch.setattr(doctor, 'paths', lambda: [])
    assert 'GPU 0' in fails()


def test_a_gpu_and_a_library_of_the_cpu(monkeypatch):
    gpu(monkeypatch, (9, 0), [], kernel=False)
    monkeypatch.setattr(triton, 'MISSING', None)
    (line,) = doctor.devices()
    expected = 'a GPU, needs 9.0: no CUDA kernel, Triton is taken'
    assert (line.state, line.finding) == ('note', expected)


@pytest.mark.parametrize(
    ('capability', 'built', 'expected'),
    [
        ((9, 0), ['9.0'], True),
        ((8, 9), ['8.0'], True),
        ((8, 0), ['8.6'], False),
        ((9, 0), ['8.0'], False),
        ((9, 0), ['8.0+PTX'], True),
        ((8, 0), ['9.0+PTX'], False),
        ((12, 1), ['8.0', '12.0+PTX'], True),
        ((10, 0), ['12.0+PTX'], False),
        ((9, 0), ['9.0a'], True),
        ((9, 1), ['9.0a'], False),
        ((9, 0), [], False),
    ],
)
def test_where_code_runs(capability, built, expected):
    assert doctor.runs_on(capability, built) == expected


def test_small_shared_memory(monkeypatch):
    """Training is meant to work there, with fewer workers."""
    monkeypatch.setattr(doctor, 'shared_memory', lambda: 64 * 2**20)
    line = next(doctor.host())
    assert (line.topic, line.state, line.finding) == ('/dev/shm', 'note', '64 MiB')
    assert '--shm-size' in line.advice


@pytest.mark.slow  # imports PyTorch anew
def test_a_reader_that_has_enough_ends_it_quietly():
    script = (
        'import os, sys\n'
        'from vim_mm import doctor\n'
        "doctor.examine = lambda config: [doctor.Line('topic', 'ok', 'x' * 100)] * 2000\n"
        "sys.argv = ['doctor', '--json']\n"
        'read, write = os.pipe()\n'
        'os.close(read)\n'
        'os.dup2(write, 1)\n'
        'sys.exit(doctor._run())\n'
    )
    done = subprocess.run(
        [sys.executable, '-c', script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (141, '')


@pytest.mark.parametrize('method', METHODS)
def test_a_method_that_computes_something_else(method, monkeypatch):
    values = selftest.exact_values()
    values[method]['grad_A'][0] += 1e-3 * max(map(abs, values[method]['grad_A']))
    monkeypatch.setattr(selftest, 'exact_values', lambda: values)
    red = [line for line in doctor.methods() if line.state == 'fail']
    assert [line.topic for line in red] == [method]
    assert 'wrong: cpu float64 1e-03' in red[0].finding


def test_a_method_without_exact_values(monkeypatch):
    monkeypatch.setattr(selftest, 'exact_values', dict)
    assert {line.state for line in doctor.methods()} == {'fail'}


def test_a_kernel_that_is_demanded_and_missing(monkeypatch):
    monkeypatch.setenv('VIM_USE_CUDA_KERNEL', '1')
    red = fails()
    assert red['scan on cpu']['advice'] == 'unset or change VIM_USE_CUDA_KERNEL=1'
    assert red['zoh']['advice'] == 'unset or change VIM_USE_CUDA_KERNEL=1'


@pytest.mark.parametrize(
    ('variables', 'advice'),
    [
        (dict(VIM_MM_BACKEND='foo'), 'unset or change VIM_MM_BACKEND=foo'),
        (dict(VIM_USE_CUDA_KERNEL='yes'), 'unset or change VIM_USE_CUDA_KERNEL=yes'),
        (
            dict(VIM_MM_BACKEND='torch', VIM_USE_CUDA_KERNEL='0'),
            'unset or change VIM_MM_BACKEND=torch and VIM_USE_CUDA_KERNEL=0',
        ),
        pytest.param(
            dict(VIM_MM_BACKEND='triton'),
            'unset or change VIM_MM_BACKEND=triton',
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason='on a CPU'),
        ),
    ],
)
def test_a_variable_at_fault_is_named(variables, advice, monkeypatch):
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    red = fails()
    assert red.keys() & {'zoh', 'methods'} and red.keys() & {'scan on cpu', 'paths'}
    told = {line['advice'] for line in red.values() if 'block' not in line['topic']}
    assert told == {advice}


def test_a_variable_at_fault_for_one_dtype_is_named(monkeypatch):
    gpu(monkeypatch, (9, 0), ['9.0'])
    monkeypatch.setattr(library, 'why_not_on_card', lambda: None)
    monkeypatch.setattr(library, 'MISSING', None)
    monkeypatch.setenv('VIM_MM_BACKEND', 'native')
    monkeypatch.setattr(doctor, '_block_paths', lambda *_: [])
    (red,) = (line for line in doctor.paths() if line.state == 'fail')
    assert red.finding == 'error for float64: the CUDA scan has no float64'
    assert red.advice == 'unset or change VIM_MM_BACKEND=native'


def test_a_variable_that_is_met_is_not_blamed(monkeypatch):
    monkeypatch.setenv('VIM_MM_BACKEND', 'torch')
    monkeypatch.setattr(selftest, 'worst_error', lambda *_: 1.0)
    (red, *_) = (line for line in doctor.methods() if line.state == 'fail')
    assert 'unset' not in red.advice


def test_a_check_that_fails_itself(monkeypatch):
    def host():
        raise OSError('no such thing')

    monkeypatch.setattr(doctor, 'host', host)
    assert fails()['host']['finding'] == 'OSError: no such thing'


@pytest.mark.slow
def test_exact_values_are_those_of_mpmath():
    compute = load('dev/make_selftest.py')['compute']
    shipped = selftest.exact_values()
    assert set(shipped) == set(METHODS)
    for method in METHODS:
        assert compute(method) == shipped[method]


ABSENT = """
import sys

class Absent:
    def find_spec(name, path=None, target=None):
        if name.partition('.')[0] in ('mmengine', 'mmcv', 'mmseg', 'mmdet'):
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)

sys.meta_path.insert(0, Absent)
"""


@pytest.mark.slow
@pytest.mark.skipif(library.MISSING is not None, reason='needs the compiled library')
def test_without_mmengine(tmp_path):
    """The operators work without it, and so does the doctor, from any directory."""
    script = ABSENT + (
        'import importlib.util, runpy\n'
        'find = importlib.util.find_spec\n'
        "importlib.util.find_spec = lambda n, p=None: None if n == 'mmengine' else find(n, p)\n"
        "sys.argv = ['doctor', '--json']\n"
        "runpy.run_module('vim_mm.doctor', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, '-c', script],
        cwd=tmp_path,
        env={**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'},
        capture_output=True,
        text=True,
        timeout=120,
    )
    report = {check['topic']: check for check in json.loads(done.stdout)['checks']}
    assert report['mmcv operators']['state'] == 'note'
    assert report['scan on cpu']['finding'].startswith('native for')
    assert report['block on cpu']['state'] != 'fail'
    assert done.returncode == 0, done.stdout


def test_the_layers_of_a_backbone_and_why(tmp_path):
    there = [line for line in doctor.paths() if line.topic == 'block on cpu']
    assert {(line.state, line.finding) for line in there} == {
        ('ok', 'patch_embed: fused'),
        ('ok', 'layers.0-23.norm: plain, there is none for cpu'),
        ('ok', 'layers.0-23.mixer: plain, there is none for cpu'),
        ('ok', 'norm_f: plain, there is none for cpu'),
    }
    pytest.importorskip('mmseg', reason='the config is of mmseg')
    config = tmp_path / 'config.py'
    config.write_text(
        "_base_ = 'vim_mm::seg/upernet_vim_shapes.py'\n"
        'model = dict(backbone=dict(stride=2, ssm_cfg=dict(fused=False)))\n'
    )
    there = [*doctor._block_paths('cuda', str(config))]
    assert {line.state for line in there} == {'note'}
    assert any(line.finding.endswith('.mixer: plain, fused is False') for line in there)
    assert any('patch_embed: plain, has another stride' in line.finding for line in there)


def test_layers_that_differ_are_told_apart():
    names = ['patch_embed', *(f'backbone.layers.{i}.mixer' for i in (0, 1, 2, 4)), 'norm_f']
    told = [LayerPath(name, 'dt_proj has hooks' if '.2.' in name else None) for name in names]
    assert [*map(str, summarize_paths(told))] == [
        'patch_embed: fused',
        'backbone.layers.0-1,4.mixer: fused',
        'backbone.layers.2.mixer: plain, dt_proj has hooks',
        'norm_f: fused',
    ]


def test_path_of(monkeypatch):
    assert path_of('cpu', use_cuda_kernel=False).name == 'reference'
    assert path_of('cpu', use_cuda_kernel=True) == ('error', 'the tensors are on cpu')
    assert path_of('mps').name == 'torch'
    monkeypatch.setattr(library, 'has_kernel', lambda device: True)
    monkeypatch.setattr(library, 'MISSING', None)
    assert path_of(torch.device('cuda', 1)).name == 'native'
    assert path_of('cuda', torch.float64) == ('torch', 'the CUDA scan has no float64')
    assert path_of('cuda', torch.float64, use_cuda_kernel=True).name == 'error'
    monkeypatch.setenv('VIM_USE_CUDA_KERNEL', '0')
    assert path_of('cuda').name == 'reference'
    monkeypatch.setattr(library, 'MISSING', 'it is not built')
    assert path_of('cpu', use_cuda_kernel=None).name == 'reference'
