"""Installs a wheel in empty environments and runs the tests of the operators there, by no checkout.

Usage: ``python tools/dev/check_wheel.py [WHEEL] [--pairs 3.10:2.10 3.13:newest]``, or
``make check-wheel`` after ``make wheel``. uv makes the environments: it takes the Pythons on the
PATH (all of pyenv's with ``PYENV_VERSION=3.10.13:3.11.7``) or fetches them, and links packages from
its cache, so that one environment more costs little disk.
"""

import argparse
import re
import shutil
import tempfile
import time
from pathlib import Path

from _command_line import add_debug, end
from build_wheel import ROOT, run

# Python and torch: the oldest and the newest of both, across, and the others once.
PAIRS = ('3.10:2.10', '3.10:newest', '3.11:2.11', '3.12:2.11', '3.13:2.10', '3.13:newest')
TESTED_BY = ('pytest', 'mpmath')  # of requirements/tests.txt, what tests/ops import
# Of the environment alone: not of a checkout, and with the compiled kernels.
LOADED = """
import sys, torch, vim_mm
from vim_mm.ops import library
assert vim_mm.__file__.startswith(sys.prefix), f'{vim_mm.__file__} is not that of the wheel'
assert library.MISSING is None, library.MISSING
print(f'Python {sys.version.split()[0]}, torch {torch.__version__}, vim_mm {vim_mm.__version__}')
"""


# Of other environments and checkouts; None unsets a variable.
_OTHERS = ('PYTHONPATH', 'PYTHONHOME', 'VIRTUAL_ENV', 'VIM_MM_BACKEND', 'VIM_USE_CUDA_KERNEL')


def run_outside(*command: str | Path, cwd: Path) -> str:
    """:func:`build_wheel.run` outside of every other environment."""
    return run(*map(str, command), cwd=cwd, **dict.fromkeys(_OTHERS))


def check(wheel: Path, pair: str) -> str:
    """One line on the wheel in an environment of its own.

    Args:
        wheel (Path): The wheel.
        pair (str): Python and torch, such as '3.10:2.11' or '3.13:newest'.

    Raises:
        SystemExit: It cannot be installed or loaded, or a test failed.
    """
    python, _, torch = pair.partition(':')
    wanted = 'torch' if torch == 'newest' else f'torch=={torch}.*'
    pins = (ROOT / 'requirements/tests.txt').read_text().splitlines()
    tested_by = [pin for pin in pins if pin.partition('==')[0] in TESTED_BY]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix='check_wheel_') as temporary:
        work = Path(temporary)
        # A test reads the comments of a header, and others compare with exact values.
        for folder in ('tests', 'csrc', 'benchmarks'):
            shutil.copytree(ROOT / folder, work / folder, ignore=shutil.ignore_patterns('*cache*'))
        shutil.copy(ROOT / 'pyproject.toml', work)  # marks and warnings
        run_outside('uv', 'venv', '--quiet', '--python', python, 'env', cwd=work)
        program = work / 'env/bin/python'
        install = ('uv', 'pip', 'install', '--quiet', '--python', program)
        run_outside(*install, wanted, wheel, *tested_by, cwd=work)
        loaded = run_outside(program, '-c', LOADED, cwd=work).splitlines()[-1]
        pytest = (program, '-m', 'pytest', '-q', '-m', 'not slow', '-p', 'no:cacheprovider')
        tests = run_outside(*pytest, 'tests/ops', cwd=work).splitlines()[-1]
    return f'{loaded}: {tests} ({time.monotonic() - start:.0f} s with the installation)'


def main(args: argparse.Namespace) -> None:
    wheels = [args.wheel] if args.wheel else sorted((ROOT / 'dist').glob('*.whl'))
    if len(wheels) != 1 or not wheels[0].is_file():
        raise SystemExit(f'expected one wheel, found {[*map(str, wheels)]}: `make wheel` makes it')
    wrong = []
    for pair in args.pairs:
        try:
            print(check(wheels[0].resolve(), pair), flush=True)
        except SystemExit as error:
            print(f'{pair}: {error}', flush=True)
            wrong.append(pair)
    if wrong:
        raise SystemExit(f'{wheels[0].name} fails with {", ".join(wrong)}')


def pair(text: str) -> str:
    """An argument of --pairs."""
    if re.fullmatch(r'3\.\d+:(2\.\d+|newest)', text) is None:
        raise argparse.ArgumentTypeError(f'expected PYTHON:TORCH such as 3.10:2.11, got {text!r}')
    return text


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description='Test an installed wheel, by no checkout.')
    parser.add_argument('wheel', type=Path, nargs='?', help='default: the one in dist')
    parser.add_argument('--pairs', nargs='+', type=pair, default=PAIRS, metavar='PYTHON:TORCH')
    add_debug(parser)
    return parser.parse_args()


if __name__ == '__main__':
    end(main, parse_args())
