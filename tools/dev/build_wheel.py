"""Builds the wheel with the compiled kernels from an sdist, and audits wheels.

Usage: ``python tools/dev/build_wheel.py build [--cuda] [--out dist]`` and
``python tools/dev/build_wheel.py audit [--cuda] WHEEL``.

The wheel of the CPU and that of CUDA have one name, so the latter belongs in a folder of its own.
"""

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from _command_line import add_debug, end

ROOT = Path(__file__).resolve().parents[2]
TAG = ('cp310', 'abi3')
# What comes with torch stays out of the wheel; the rest is on every Linux of the platform tag.
TORCH_LIBRARIES = ('libc10.so', 'libtorch_cpu.so', 'libtorch.so')
CUDA_LIBRARIES = ('libc10_cuda.so', 'libtorch_cuda.so', 'libcudart.so.*')
SYSTEM = (
    r'lib(stdc\+\+|m|gcc_s|c|pthread|dl|rt)\.so\.\d+|ld-linux-x86-64\.so\.2|ld-linux-aarch64\.so\.1'
)
# C++ names of torch have no stable ABI. Only aoti_torch_* and torch_*, which are C, have one.
UNSTABLE = re.compile(r'_ZN?K?(T[VIS]N?K?)?(2at|3c10|5torch|6caffe2)')


def scripts_first() -> str:
    """PATH with the programs of this Python in front."""
    return f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'


def run(*command: str, cwd: Path = ROOT, **environment: str | None) -> str:
    """Runs a command; its standard output. A variable that is None is unset.

    Raises:
        SystemExit: The command failed; the end of what it printed is in the message.
    """
    merged = {**os.environ, 'PATH': scripts_first(), **environment}
    variables = {name: value for name, value in merged.items() if value is not None}
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f'{" ".join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}')
    return done.stdout


def build(source: Path, out: Path, cuda: bool) -> tuple[Path, Path]:
    """The sdist of a source tree, and the wheel that is built from that sdist alone.

    Args:
        source (Path): A checkout.
        out (Path): The folder for both.
        cuda (bool): Whether to compile the CUDA sources, for every architecture of setup.py.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        code = f'from setuptools import build_meta; build_meta.build_sdist({str(work)!r})'
        run(sys.executable, '-c', code, cwd=source)
        (archive,) = work.glob('*.tar.gz')
        shutil.unpack_archive(archive, work)
        pip = (sys.executable, '-m', 'pip', 'wheel', '--no-deps', '--no-build-isolation')
        run(
            *(*pip, '--wheel-dir', str(work / 'raw'), '.'),
            cwd=work / archive.name.removesuffix('.tar.gz'),
            VIM_MM_BUILD='1',
            VIM_MM_BUILD_CUDA='1' if cuda else '0',
            TORCH_CUDA_ARCH_LIST=None,
        )
        (raw,) = (work / 'raw').glob('*.whl')
        sdist = Path(shutil.move(archive, out / archive.name))
        return sdist, tag(raw, out)


def tag(raw: Path, out: Path) -> Path:
    """The wheel with the oldest manylinux tag that its symbols allow, without torch's libraries."""
    excluded = [f'--exclude={name}' for name in TORCH_LIBRARIES + CUDA_LIBRARIES]
    with tempfile.TemporaryDirectory(dir=out) as work:
        run('auditwheel', 'repair', *excluded, '--wheel-dir', work, str(raw))
        (repaired,) = Path(work).glob('*.whl')
        return repaired.replace(out / repaired.name)


def audit(wheel: Path, cuda: bool = False) -> list[str]:
    """What is wrong with a wheel; nothing if it is right.

    Args:
        wheel (Path): The wheel.
        cuda (bool): Whether it must hold kernels for CUDA.
    """
    *_, python, abi, platform = wheel.stem.split('-')
    problems = []
    if (python, abi) != TAG:
        problems.append(f'the tag is {python}-{abi}, expected {"-".join(TAG)}')
    if not platform.startswith('manylinux_'):
        problems.append(f'the platform is {platform}, expected manylinux_*: indexes refuse others')
    with zipfile.ZipFile(wheel) as file:
        libraries = [name for name in file.namelist() if '.so' in Path(name).name]
        if libraries != ['vim_mm/_C.abi3.so']:
            return [*problems, f'the libraries are {libraries}, expected vim_mm/_C.abi3.so alone']
        content = file.read(libraries[0])
    return problems + audit_library(content, cuda) + audit_abi3(wheel)


def audit_library(content: bytes, cuda: bool) -> list[str]:
    """What is wrong with the libraries, the symbols and the architectures of an ELF file."""
    from elftools.elf.elffile import ELFFile

    elf = ELFFile(io.BytesIO(content))
    dynamic = elf.get_section_by_name('.dynamic')
    needed = [entry.needed for entry in dynamic.iter_tags('DT_NEEDED')]
    allowed = TORCH_LIBRARIES + (CUDA_LIBRARIES if cuda else ())
    pattern = '|'.join([SYSTEM, *(re.escape(name).replace(r'\*', r'\d+') for name in allowed)])
    problems = [f'it needs {name}' for name in needed if not re.fullmatch(pattern, name)]
    symbols = elf.get_section_by_name('.dynsym').iter_symbols()
    missing = (s.name for s in symbols if s['st_shndx'] == 'SHN_UNDEF')
    problems += [f'{name} is no stable symbol of torch' for name in missing if UNSTABLE.match(name)]
    found = re.search(rb'cuda=([\w.;+]*)\0', content)
    architectures = '' if found is None else found[1].decode()
    if cuda != bool(architectures):
        problems.append(f'its CUDA architectures are {architectures or "none"}')
    return problems


def audit_abi3(wheel: Path) -> list[str]:
    """What abi3audit finds: names of Python outside the limited API of the tag's version."""
    command = ['abi3audit', '--strict', '--report', str(wheel)]
    environment = {**os.environ, 'PATH': scripts_first()}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if not done.stdout.strip():
        return [f'abi3audit gave no report: {done.stderr.strip()}']
    (report,) = json.loads(done.stdout)['specs'].values()
    results = [member['result'] for member in report['wheel']]
    good = all(r['is_abi3'] and r['is_abi3_baseline_compatible'] for r in results)
    if results and good and done.returncode == 0:
        return []
    return [f'abi3audit: {results or "no extension found"}']


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description='Build the wheel, or audit one.')
    commands = parser.add_subparsers(dest='command', required=True)
    builder = commands.add_parser('build', help='sdist and wheel of this checkout')
    builder.add_argument('--out', type=Path, default=ROOT / 'dist', help='folder (default: dist)')
    auditor = commands.add_parser('audit', help='tags, symbols, libraries and architectures')
    auditor.add_argument('wheel', type=Path)
    for command in (builder, auditor):
        command.add_argument('--cuda', action='store_true', help='with the CUDA kernels')
        add_debug(command)
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    wheel = build(ROOT, args.out, args.cuda)[1] if args.command == 'build' else args.wheel
    problems = audit(wheel, args.cuda)
    if problems:
        raise SystemExit('\n'.join([f'{wheel}:', *problems]))
    print(f'{wheel}: tags, symbols, libraries and architectures are right')


if __name__ == '__main__':
    end(main, parse_args())
