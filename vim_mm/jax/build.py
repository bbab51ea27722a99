"""Compiles the handlers by which XLA calls the compiled scan: ``python -m vim_mm.jax.build``.

The handlers (``handlers.cpp``) are 200 lines between XLA's memory and the operators of
``vim_mm._C``, which hold the kernels. They are compiled for the JAX and the PyTorch that are
installed, once: by this command, or at the first scan.
"""

import hashlib
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

import jax
import jaxlib
import torch

from vim_mm.errors import UserRuntimeError
from vim_mm.ops import library

SOURCE = Path(__file__).with_name('handlers.cpp')


def build() -> Path:
    """The path of the compiled handlers; compiles them where that has not been done.

    They lie in ``$XDG_CACHE_HOME/vim_mm``, by default ``~/.cache/vim_mm``, under a name that stands
    for the source, the versions of PyTorch and JAX, and the command of the compiler (``$CXX``, by
    default ``c++``).

    Raises:
        RuntimeError: ``vim_mm._C`` is missing, or the compiler is missing or fails.
    """
    if library.MISSING is not None:
        raise UserRuntimeError(f'vim_mm.jax calls the compiled scan, but {library.MISSING}')
    command = _command()
    facts = (SOURCE.read_text(), torch.__version__, jaxlib.__version__, *command)
    name = hashlib.sha256('\0'.join(facts).encode()).hexdigest()[:16]
    folder = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'vim_mm'
    path = folder / f'jax_{name}.so'
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Under the final name only when it is whole: processes may build at the same time.
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            built = Path(temporary, path.name)
            _compile([*command, '-o', str(built)])
            built.replace(path)
    return path


def _command() -> list[str]:
    """That of the compiler, without the file that it writes."""
    compiler = shlex.split(os.environ.get('CXX', 'c++'))
    torch_folder = Path(torch.__file__).parent
    flags = ['-std=c++20', '-O2', '-fPIC', '-shared', '-fvisibility=hidden']
    includes = [torch_folder / 'include', jax.ffi.include_dir()]
    libraries = ['torch', 'torch_cpu', 'c10']
    if library.has_kernel('cuda'):
        flags.append('-DUSE_CUDA')
        libraries.append('torch_cuda')
    return [
        *compiler,
        *flags,
        *(f'-isystem{folder}' for folder in includes),
        str(SOURCE),
        f'-L{torch_folder / "lib"}',
        f'-Wl,-rpath,{torch_folder / "lib"}',
        *(f'-l{name}' for name in libraries),
        # PyTorch's: of some compilers the handlers would have another copy, and mix the two.
        '-l:libstdc++.so.6',
    ]


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise UserRuntimeError(
            f'vim_mm.jax needs a C++ compiler once, to build its handlers: {error}'
        ) from None
    if done.returncode:
        raise UserRuntimeError(f'{shlex.join(command)} failed:\n{done.stdout}{done.stderr}')


if __name__ == '__main__':
    print(build())
