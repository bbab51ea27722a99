"""tools/dev/build_wheel.py gives the library its tag, and finds what would not load elsewhere."""

import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.scripts import load

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / 'vim_mm/_C.abi3.so'
tool = SimpleNamespace(**load('dev/build_wheel.py'))
GOOD = 'vim_mm-0-cp310-abi3-manylinux_2_34_x86_64.whl'


def wheel(folder, name=GOOD, content=None):
    """A wheel of the library alone, by default of the one that is built here."""
    with zipfile.ZipFile(folder / name, 'w') as file:
        file.writestr('vim_mm/_C.abi3.so', LIBRARY.read_bytes() if content is None else content)
    return folder / name


def compiled(folder, code, *flags):
    """A small shared library."""
    command = ['c++', '-shared', '-fPIC', '-x', 'c++', '-', *flags, '-o', str(folder / 'x.so')]
    subprocess.run(command, input=code, text=True, check=True)
    return (folder / 'x.so').read_bytes()


def test_the_library_is_stable(tmp_path):
    cuda = b'.nv_fatbin' in LIBRARY.read_bytes()
    assert tool.audit(wheel(tmp_path), cuda) == []


@pytest.mark.slowest
@pytest.mark.parametrize(
    ('name', 'problem'),
    [
        ('vim_mm-0-cp311-cp311-manylinux_2_34_x86_64.whl', 'the tag is cp311-cp311'),
        ('vim_mm-0-cp310-abi3-linux_x86_64.whl', 'the platform is linux_x86_64'),
    ],
)
def test_a_wrong_tag_is_found(tmp_path, name, problem):
    assert any(problem in line for line in tool.audit(wheel(tmp_path, name)))


def test_what_is_not_stable_is_found(tmp_path):
    code = 'namespace at { void f(); }\nvoid g() { at::f(); }'
    assert tool.audit_library(compiled(tmp_path, code), cuda=False) == [
        '_ZN2at1fEv is no stable symbol of torch'
    ]


@pytest.mark.slowest
def test_a_symbol_outside_the_limited_api_is_found(tmp_path):
    code = 'extern "C" int _PyObject_GetDictPtr();\nint g() { return _PyObject_GetDictPtr(); }'
    (problem,) = tool.audit_abi3(wheel(tmp_path, content=compiled(tmp_path, code)))
    assert '_PyObject_GetDictPtr' in problem


def test_a_missing_architecture_is_found(tmp_path):
    content = compiled(tmp_path, 'int g() { return 0; }')
    assert tool.audit_library(content, cuda=True) == ['its CUDA architectures are none']


def test_wheels_for_cuda_need_their_own_library(tmp_path):
    code = 'extern const char* const t; const char* const t = "cuda=8.0;9.0+PTX";'
    content = compiled(tmp_path, code)
    assert tool.audit_library(content, cuda=True) == []
    assert tool.audit_library(content, cuda=False) == ['its CUDA architectures are 8.0;9.0+PTX']
