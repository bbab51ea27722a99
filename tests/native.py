"""Compiles native sources for a test, with other flags than setup.py and in another namespace."""

import os
import subprocess
import sysconfig
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.utils import cpp_extension

ROOT = Path(__file__).parents[1]


def ask_compiler(*arguments: str, root: Path = ROOT) -> subprocess.CompletedProcess:
    """What the C++ compiler of torch's extensions says to these arguments, in that folder."""
    command = [cpp_extension.get_cxx_compiler(), *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


def build(
    folder: Path,
    namespace: str,
    sources: Sequence[str],
    flags_of: Callable[[str], Sequence[str]],
    *,
    include: Sequence[str] = (),
    link: Sequence[str] = (),
    root: Path = ROOT,
) -> Path:
    """The library of these sources, whose operators are in ``torch.ops.NAMESPACE``.

    Args:
        folder: Where it is made.
        namespace: Another one than ``vim_mm``, whose operators vim_mm._C has.
        sources: Files of the checkout.
        flags_of: Of a source: those of its compilation, besides what every file needs.
        include: Folders of headers, besides torch's and Python's.
        link: Flags of the linker.
        root: The checkout, or a copy of what these files include.
    """
    system = [*include, *cpp_extension.include_paths(), sysconfig.get_path('include')]
    common = [
        *('-std=c++17', '-fPIC', '-DTORCH_TARGET_VERSION=0x020a000000000000'),  # as in setup.py
        f'-Dvim_mm={namespace}',
        *(word for path in system for word in ('-isystem', path)),
    ]

    def run(*command: str) -> None:
        done = ask_compiler(*command, root=root)
        assert done.returncode == 0, done.stderr

    def compile_one(source: str) -> str:
        target = str(folder / f'{Path(source).name}.o')
        run(*flags_of(source), *common, '-c', source, '-o', target)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [*pool.map(compile_one, sources)]
    library = folder / f'lib{namespace}.so'
    paths = [f'-L{path}' for path in cpp_extension.library_paths()]
    run('-shared', *link, *objects, *paths, '-ltorch_cpu', '-o', str(library))
    return library
