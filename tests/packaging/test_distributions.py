"""The sdist and the wheel hold what they must, and what is installed from them works on its own."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from mmengine.config import Config

import vim_mm
from tests.scripts import load

# Builds the sdist and the wheel, with its kernels.
pytestmark = pytest.mark.slowest

ROOT = Path(__file__).parents[2]
NOT_SOURCES = (
    *('.*cache', '.git', '.venv', '.nox', '__pycache__', '*.egg-info', '*.so'),
    *('build', 'dist', 'data', 'work_dirs'),
)
CONFIGS = {
    path.relative_to(ROOT).as_posix()
    for pattern in ('configs/**/*.py', 'configs/*/metafile.yml', 'model-index.yml')
    for path in ROOT.glob(pattern)
}


def run(*command: str, cwd: Path, **environment: str) -> str:
    """Runs a command; its standard output. Its messages are in the failure, if it fails."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope='module')
def sdist(tmp_path_factory):
    """The unpacked sdist, made from a copy so that nothing built here before can help."""
    folder = tmp_path_factory.mktemp('sdist')
    ignore = shutil.ignore_patterns(*NOT_SOURCES)
    source = shutil.copytree(ROOT, folder / 'source', symlinks=True, ignore=ignore)
    code = f'from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})'
    run(sys.executable, '-c', code, cwd=source)
    (archive,) = folder.glob('*.tar.gz')
    shutil.unpack_archive(archive, folder)
    return folder / archive.name.removesuffix('.tar.gz')


@pytest.fixture(scope='module')
def wheel(sdist, tmp_path_factory):
    """The wheel that pip builds from the sdist, C++ only."""
    folder = tmp_path_factory.mktemp('wheel')
    pip = (sys.executable, '-m', 'pip', 'wheel', '--no-deps', '--no-build-isolation')
    path = f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'  # finds ninja
    run(*pip, '--wheel-dir', str(folder), '.', cwd=sdist, PATH=path, VIM_MM_BUILD_CUDA='0')
    (built,) = folder.glob('*.whl')
    return built


@pytest.fixture(scope='module')
def in_fresh_process(wheel, tmp_path_factory):
    """Runs code in a process that sees the installed wheel, from a directory with nothing in it."""
    target = tmp_path_factory.mktemp('target')
    pip = (sys.executable, '-m', 'pip', 'install', '--no-deps', '--target', str(target))
    run(*pip, str(wheel), cwd=target)

    def run_code(code: str, hide: tuple[str, ...] = ()) -> str:
        hidden = f'import sys; sys.modules.update(dict.fromkeys({hide!r}))\n'
        where = f'import vim_mm; assert vim_mm.__file__.startswith({str(target)!r})\n'
        empty = tmp_path_factory.mktemp('elsewhere')
        return run(sys.executable, '-c', hidden + where + code, cwd=empty, PYTHONPATH=str(target))

    return run_code


def test_sdist_holds_all_that_a_build_needs(sdist):
    for file in ROOT.glob('csrc/**/*.*'):
        assert (sdist / file.relative_to(ROOT)).is_file(), file
    for name in ('setup.py', 'pyproject.toml', 'README.md', 'LICENSE', 'Makefile', *CONFIGS):
        assert (sdist / name).is_file(), name


def test_wheel_holds_the_package_and_its_configs_only(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if '.dist-info/' not in name}
    modules = {path.relative_to(ROOT).as_posix() for path in ROOT.glob('vim_mm/**/*.py')}
    modules = {name for name in modules if '/.mim/' not in name}
    data = {f'vim_mm/.mim/{name}' for name in CONFIGS}
    data |= {f'vim_mm/{name}' for name in ('jax/handlers.cpp', 'py.typed', 'selftest/exact.json')}
    assert names == modules | data | {'vim_mm/_C.abi3.so'}


def test_wheel_serves_every_supported_python(wheel):
    *_, python, abi, platform = wheel.stem.split('-')
    assert (python, abi) == ('cp310', 'abi3')
    assert platform.startswith('linux')


def test_wheel_has_the_version_of_the_package(wheel):
    assert wheel.name.startswith(f'vim_mm-{vim_mm.__version__}-')


def test_they_could_be_published(sdist, wheel, tmp_path):
    """By the checks of `make release-check`, without a build of their own."""
    builder, release = (
        SimpleNamespace(**load(f'dev/{name}.py')) for name in ('build_wheel', 'check_release')
    )
    tagged = builder.tag(wheel, tmp_path)
    assert builder.audit(tagged) == release.audit_platform(tagged) == []
    pytest.importorskip('twine', reason='needs twine, which `make lint` installs')
    (archive,) = sdist.parent.glob('*.tar.gz')
    for made in (archive, tagged):
        assert release.audit_metadata(made, vim_mm.__version__) == []


SCAN = """
import torch
from vim_mm.ops import selective_scan_fn, selective_scan_ref
tensors = [torch.rand(2, 4, 5), torch.rand(2, 4, 5), -torch.rand(4, 3), *torch.rand(2, 2, 3, 5)]
torch.testing.assert_close(selective_scan_fn(*tensors), selective_scan_ref(*tensors))
"""
BACKBONE = """
from mmengine.registry import MODELS
model = MODELS.build(dict(
    type='VisionMamba', arch=dict(embed_dims=8, num_layers=2), img_size=32, out_indices=(1,)))
print([tuple(out.shape) for out in model(torch.zeros(1, 3, 32, 32))])
"""


def test_installed_package_scans_with_its_kernel_and_leaves_cuda_alone(in_fresh_process):
    printed = in_fresh_process(
        SCAN + 'print(hasattr(torch.ops.vim_mm, "selective_scan_fwd"), torch.cuda.is_initialized())'
    )
    assert printed.split() == ['True', 'False']


@pytest.mark.parametrize(
    'hide',
    [
        pytest.param(('vim_mm._C',), id='_C'),
        pytest.param(('mmdet', 'mmseg', 'mmcv'), id='mmdet-mmseg-mmcv'),
        pytest.param(('vim_mm._C', 'mmdet', 'mmseg', 'mmcv'), id='all-of-them'),
    ],
)
def test_backbone_runs_without(in_fresh_process, hide):
    assert in_fresh_process(SCAN + BACKBONE, hide).split() == ['[(1,', '8,', '2,', '2)]']


def test_op_works_without_mmengine(in_fresh_process):
    in_fresh_process(SCAN, hide=('mmengine',))


def test_installed_package_has_exact_values_for_its_doctor(in_fresh_process):
    code = 'from vim_mm import doctor; print({line.state for line in doctor.methods()})'
    assert in_fresh_process(code).strip() == "{'ok'}"


def test_configs_resolve_from_elsewhere(in_fresh_process):
    code = (
        'from mmengine.config import Config; from pathlib import Path; vim_mm.activate()\n'
        'Path("mine.py").write_text("_base_ = \'vim_mm::seg/upernet_vim_t_bilinear.py\'")\n'
        'print(Config.fromfile("mine.py").model.backbone.discretization_method)'
    )
    assert in_fresh_process(code).strip() == 'bilinear'
    shipped = Config.fromfile(ROOT / 'configs/seg/upernet_vim_t_bilinear.py')
    assert shipped.model.backbone.discretization_method == 'bilinear'
