"""The build backend: setuptools, asked for PyTorch only where the extension is going to be built.

``pip install .`` takes it from pyproject.toml; setup.py asks it whether to build. Without compiler
there is nothing to build, and a package in Python alone, whose scans Triton and PyTorch compute.
"""

import os
import shlex
import shutil
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from setuptools.build_meta import *  # noqa: F403

# The extension uses LibTorch's stable ABI, so the torch that builds it need not be the one that
# runs it; this is the first that has all of it.
OLDEST_TORCH = (2, 10)
_NEEDED = ['torch>=' + '.'.join(map(str, OLDEST_TORCH)), 'ninja']


def wish(variable: str) -> str:
    """What VIM_MM_BUILD or VIM_MM_BUILD_CUDA says: '0', '1' or nothing.

    Raises:
        SystemExit: It is another word.
    """
    value = os.environ.get(variable, '')
    if value not in ('', '0', '1'):
        raise SystemExit(f'{variable} is {value!r}, expected 0, 1 or nothing')
    return value


def left_out(torch_is_there: bool = True) -> str | None:
    """Why the extension is not built, None where it is; VIM_MM_BUILD=0/1 forces.

    VIM_MM_BUILD_CUDA=1 demands the extension too, which holds the CUDA kernels.

    Args:
        torch_is_there: False before the requirements of the build are installed.

    Raises:
        SystemExit: It is demanded and cannot be built, or a variable is another word.
    """
    demands = [name for name in ('VIM_MM_BUILD', 'VIM_MM_BUILD_CUDA') if wish(name) == '1']
    if wish('VIM_MM_BUILD') == '0':
        obstacle = 'VIM_MM_BUILD is 0'
    else:
        obstacle = _obstacle() or (_torch_obstacle() if torch_is_there else None)
    if demands and obstacle is not None:
        raise SystemExit(f'{demands[0]}=1, but {obstacle}')
    return obstacle


def _obstacle() -> str | None:
    compiler = os.environ.get('CXX') or 'c++'
    if shutil.which(shlex.split(compiler)[0]) is None:
        return f'there is no C++ compiler {compiler!r}'
    header = Path(sysconfig.get_path('include')) / 'Python.h'
    return None if header.exists() else f'there are no Python headers ({header})'


def _torch_obstacle() -> str | None:
    try:
        found = version('torch')
    except PackageNotFoundError:
        return 'there is no PyTorch in the environment of the build'
    if tuple(map(int, found.split('.')[:2])) < OLDEST_TORCH:
        return f'PyTorch is {found}, older than {".".join(map(str, OLDEST_TORCH))}'
    return None


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    """What an isolated build needs beside setuptools."""
    return [] if left_out(torch_is_there=False) is not None else _NEEDED


get_requires_for_build_editable = get_requires_for_build_wheel


def get_requires_for_build_sdist(config_settings: dict | None = None) -> list[str]:
    """Sources are not compiled."""
    return []
