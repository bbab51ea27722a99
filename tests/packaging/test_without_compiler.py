"""Without a compiler an installation succeeds, says what it left out, and computes everything."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.packaging.test_distributions import SCAN, in_fresh_process, sdist  # noqa: F401

ROOT = Path(__file__).parents[2]


@pytest.fixture
def backend(monkeypatch):
    """tools/dev/build_backend.py, as on a machine with a compiler, and without a wish."""
    path = ROOT / 'tools/dev/build_backend.py'
    spec = importlib.util.spec_from_file_location('build_backend', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for variable in ('VIM_MM_BUILD', 'VIM_MM_BUILD_CUDA'):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(module, '_obstacle', lambda: None)
    monkeypatch.setattr(module, 'version', lambda name: '2.10.0')
    return module


def test_with_a_compiler_the_extension_is_built(backend, monkeypatch):
    assert backend.left_out() is None
    assert backend.get_requires_for_build_wheel() == ['torch>=2.10', 'ninja']
    assert backend.get_requires_for_build_sdist() == []
    monkeypatch.setenv('VIM_MM_BUILD', '0')
    assert backend.left_out() == 'VIM_MM_BUILD is 0'
    assert backend.get_requires_for_build_wheel() == []


def test_without_one_it_is_left_out(backend, monkeypatch):
    monkeypatch.setattr(backend, '_obstacle', lambda: "there is no C++ compiler 'c++'")
    assert backend.left_out() == "there is no C++ compiler 'c++'"
    assert backend.get_requires_for_build_wheel() == []
    monkeypatch.setenv('VIM_MM_BUILD', '1')
    with pytest.raises(SystemExit, match='VIM_MM_BUILD=1, but there is no C'):
        backend.left_out()


def test_kernels_for_cuda_demand_the_extension(backend, monkeypatch):
    monkeypatch.setenv('VIM_MM_BUILD_CUDA', '1')
    assert backend.left_out() is None
    monkeypatch.setenv('VIM_MM_BUILD', '0')
    with pytest.raises(SystemExit, match='VIM_MM_BUILD_CUDA=1, but VIM_MM_BUILD is 0'):
        backend.left_out()
    monkeypatch.delenv('VIM_MM_BUILD')
    monkeypatch.setattr(backend, '_obstacle', lambda: 'there is no C++ compiler')
    with pytest.raises(SystemExit, match='VIM_MM_BUILD_CUDA=1, but there is no C'):
        backend.get_requires_for_build_wheel()


def test_an_older_torch_has_no_extension(backend, monkeypatch):
    monkeypatch.setattr(backend, 'version', lambda name: '2.9.1+cu128')
    assert backend.left_out() == 'PyTorch is 2.9.1+cu128, older than 2.10'
    assert backend.left_out(torch_is_there=False) is None


@pytest.mark.parametrize('variable', ['VIM_MM_BUILD', 'VIM_MM_BUILD_CUDA'])
def test_another_word_is_an_error(backend, monkeypatch, variable):
    monkeypatch.setenv(variable, 'yes')
    with pytest.raises(SystemExit, match=f"{variable} is 'yes', expected 0, 1 or nothing"):
        backend.left_out()


def build(sdist, folder, **environment):  # noqa: F811
    """Has pip build a wheel on a machine whose PATH has nothing."""
    command = [sys.executable, '-m', 'pip', 'wheel', '-v', '--no-deps', '--no-build-isolation']
    # Without the wishes that `make` exports.
    inherited = {k: v for k, v in os.environ.items() if k != 'CXX' and 'VIM_MM_BUILD' not in k}
    environment = {**inherited, 'PATH': str(folder), **environment}
    return subprocess.run(
        [*command, '--wheel-dir', str(folder), '.'],
        cwd=sdist, env=environment, capture_output=True, text=True,
    )  # fmt: skip


@pytest.fixture(scope='module')
def wheel(sdist, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp('wheel')
    done = build(sdist, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the compiled kernels are left out, because there is no C++ compiler 'c++'" in (
        done.stdout + done.stderr
    )
    (built,) = folder.glob('*.whl')
    return built


@pytest.mark.slowest
def test_the_wheel_is_python_alone_and_scans(wheel, in_fresh_process):  # noqa: F811
    assert wheel.name.endswith('-py3-none-any.whl')
    with zipfile.ZipFile(wheel) as file:
        assert not any(name.endswith('.so') for name in file.namelist())
    # Hidden: an editable installation would lend the one that was built there.
    code = SCAN + 'from vim_mm.ops import path_of; print(path_of().name)'
    printed = in_fresh_process(code, hide=('vim_mm._C',))
    assert printed.split() == ['torch']


@pytest.mark.slowest
@pytest.mark.parametrize('variable', ['VIM_MM_BUILD', 'VIM_MM_BUILD_CUDA'])
def test_a_build_that_is_demanded_fails(sdist, tmp_path, variable):  # noqa: F811
    done = build(sdist, tmp_path, **{variable: '1'})
    assert done.returncode != 0
    assert f'{variable}=1, but there is no C++ compiler' in done.stdout + done.stderr
