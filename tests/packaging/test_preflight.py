"""tools/dev/preflight.sh says in one sentence what a machine lacks, before `make` installs."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / 'tools/dev/preflight.sh'
# Answers the questions that the script asks Python; one answer is spoilt in each case.
PYTHON = """#!/bin/sh
case "$2" in
    *version_info*) echo {version} ;;
    *ensurepip*) exit {venv_status} ;;
    *sysconfig*) echo {include} ;;
esac
"""
DF = '#!/bin/sh\necho header\necho device 1 1 {free_kib} 1% /\n'
GIB = 1024 * 1024  # in KiB
COMPILER = '#!/bin/sh\ncat > /dev/null\nexit {status}\n'


class Machine:
    """A PATH with a few programs, of which the interesting ones are fakes."""

    def __init__(self, root: Path):
        self.programs = root / 'bin'
        self.include = root / 'include'
        self.programs.mkdir()
        self.include.mkdir()
        (self.include / 'Python.h').touch()
        for name in ('sh', 'awk', 'cat'):
            (self.programs / name).symlink_to(shutil.which(name))
        self.python()
        self.add('c++', COMPILER.format(status=0))
        self.add('df', DF.format(free_kib=100 * GIB))

    def add(self, name: str, text: str) -> None:
        program = self.programs / name
        program.write_text(text)
        program.chmod(0o755)

    def python(self, version: str = '3.11', venv_status: int = 0) -> None:
        answers = {'version': version, 'venv_status': venv_status, 'include': self.include}
        self.add('python3', PYTHON.format(**answers))

    def remove(self, name: str) -> None:
        (self.programs / name).unlink()

    def preflight(self, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [SCRIPT, 'python3', 'python', 'compiler', 'disk'],
            env={'PATH': str(self.programs), **environment},
            capture_output=True,
            text=True,
        )


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize('version', ['3.10', '3.11', '3.12', '3.13'])
def test_silent_where_nothing_lacks(machine, version):
    machine.python(version)
    done = machine.preflight()
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')


def no_python(machine):
    machine.remove('python3')


def old_python(machine):
    machine.python(version='3.9')


def new_python(machine):
    machine.python(version='3.14')


def no_venv(machine):
    machine.python(venv_status=1)


def no_compiler(machine):
    machine.remove('c++')


def old_compiler(machine):
    machine.add('c++', COMPILER.format(status=1))


def no_headers(machine):
    (machine.include / 'Python.h').unlink()


def no_space(machine):
    machine.add('df', DF.format(free_kib=8 * GIB - 1))


@pytest.mark.parametrize(
    ('spoil', 'sentence'),
    [
        pytest.param(no_python, "no 'python3' on the PATH: install Python 3.10", id='no-python'),
        pytest.param(old_python, "'python3' is Python 3.9, but 3.10 to 3.13", id='old-python'),
        pytest.param(new_python, "'python3' is Python 3.14, but 3.10 to 3.13", id='new-python'),
        pytest.param(no_venv, "'python3' lacks the venv module: install it", id='no-venv'),
        pytest.param(no_compiler, "no C++ compiler 'c++': install one", id='no-compiler'),
        pytest.param(old_compiler, "'c++' does not compile C++17: install", id='old-compiler'),
        pytest.param(no_headers, 'no Python headers (', id='no-headers'),
        pytest.param(no_space, '7 GiB of disk are free here, but', id='no-space'),
    ],
)
def test_one_sentence_for_what_lacks(machine, spoil, sentence):
    spoil(machine)
    done = machine.preflight()
    assert done.returncode == 1
    assert done.stdout == ''
    (line,) = done.stderr.splitlines()
    assert line.startswith(f'preflight: {sentence}')
    assert line.endswith('.')


def test_takes_the_compiler_that_CXX_names(machine):
    machine.remove('c++')
    machine.add('clang++', COMPILER.format(status=0))
    assert machine.preflight(CXX='clang++').returncode == 0


def test_a_wheel_for_cuda_needs_the_toolkit(machine):
    command = [SCRIPT, 'python3', 'toolkit']
    paths = {'PATH': str(machine.programs)}
    done = subprocess.run(command, env=paths, capture_output=True, text=True)
    assert (done.returncode, "preflight: no 'nvcc' on the PATH" in done.stderr) == (1, True)
    machine.add('nvcc', '#!/bin/sh\n')
    assert subprocess.run(command, env=paths).returncode == 0
