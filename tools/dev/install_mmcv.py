"""Step of `make`: installs the pinned mmcv into the environment of the Python that runs this.

mmcv compiles its operators if and only if torch can be imported while mmcv is built, and both kinds
of build have one name and version. pip's own cache cannot tell them apart, so it stays out of this,
and wheels with operators (15 minutes on 2 cores) are kept in a cache of ours, keyed by what they
were built for: the second clone on a machine installs them in seconds.

Usage: ``python tools/dev/install_mmcv.py [--with-ops]``. Segmentation needs no operators, detection
does. An mmcv with operators is never replaced by one without. The environment variable VIM_MM_MMCV
names another requirement than the pinned one: noxfile.py builds the original mmcv so.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path

from _command_line import add_debug, end

PINNED = Path(__file__).parents[2] / 'requirements/mmcv.txt'
REQUIREMENT = os.environ.get('VIM_MM_MMCV') or PINNED.read_text().strip()
NAME, VERSION = REQUIREMENT.split('==')
STANDARD = "['-std=c++17']"  # as mmcv's setup.py asks for it


def pip(command: str, *arguments: str, **environment: str) -> None:
    """Runs pip without its cache, for the reason that the module's docstring gives."""
    done = subprocess.run(
        [sys.executable, '-m', 'pip', command, '--no-deps', '--no-cache-dir', *arguments],
        env={**os.environ, **environment},
    )
    if done.returncode:
        raise SystemExit(f'pip {command} failed; what it printed stands above.')


def device() -> str:
    """What the operators are compiled for: 'cpu', or 'cuda' and the architectures."""
    import torch

    if not torch.cuda.is_available():
        return 'cpu'

    from torch.utils.cpp_extension import CUDA_HOME  # warns where there is no GPU

    if CUDA_HOME is None:
        return 'cpu'
    return 'cuda' + os.environ.get('TORCH_CUDA_ARCH_LIST', '').replace(';', '_')


def cache_folder() -> Path:
    """The folder of the one wheel with operators that fits this environment."""
    root = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache')
    tag = f'cp{sysconfig.get_config_var("py_version_nodot")}'
    key = f'{NAME}-{VERSION}-torch{version("torch")}-{tag}-{platform.machine()}-{device()}'
    return root / 'vim_mm' / key


def installed() -> Distribution | None:
    """The installed mmcv, if it has the pinned version."""
    try:
        found = distribution(NAME)
    except PackageNotFoundError:
        return None
    return found if found.version == VERSION else None


def is_wheel(found: Distribution | None, wheel: Path | None) -> bool:
    """Whether the installed mmcv came from this wheel; pip notes the origin of local files."""
    if found is None or wheel is None:
        return False
    return wheel.as_uri() in (found.read_text('direct_url.json') or '')


def fetch_source(folder: Path) -> Path:
    """Downloads mmcv's source, which then compiles in the C++ that the installed torch asks for.

    mmcv asks for C++17, which the headers of torch 2.14 refuse; where no standard is given, torch
    gives its own.

    Raises:
        SystemExit: mmcv asks for an older standard in other words, and torch refuses it.
    """
    pip('download', '--no-build-isolation', f'--no-binary={NAME}', f'--dest={folder}', REQUIREMENT)
    (archive,) = folder.glob('*.tar.gz')
    shutil.unpack_archive(archive, folder)  # Python 3.11.2, of Debian 12, has no filter=
    (setup,) = folder.glob('*/setup.py')
    text = setup.read_text()
    torch = version('torch')
    if (
        STANDARD not in text
        and '-std=c++1' in text
        and tuple(map(int, torch.split('.')[:2])) >= (2, 14)
    ):
        raise SystemExit(
            f'setup.py of {REQUIREMENT} does not hold {STANDARD}, which tools/dev/install_mmcv.py '
            f'takes out of it for torch {torch}: adapt STANDARD there to what that setup.py has.'
        )
    setup.write_text(text.replace(STANDARD, '[]'))
    return setup.parent


def build_with_ops(folder: Path) -> Path:
    """Builds the wheel with operators; it enters the cache only when it is complete."""
    print(f'Building {REQUIREMENT} with operators: 15 minutes on 2 cores, once', flush=True)
    flags = f'{sysconfig.get_config_var("CFLAGS")} -g0'
    environment = {
        'MAX_JOBS': os.environ.get('MAX_JOBS') or str(len(os.sched_getaffinity(0))),
        # CFLAGS replace Python's own flags, such as -O3. So they are repeated, without debug
        # information, which takes a third of the time and most of the size.
        **{name: os.environ.get(name) or flags for name in ('CFLAGS', 'CXXFLAGS')},
        # torch starts ninja by its name.
        'PATH': f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}',
    }
    if device() == 'cpu':
        # mmcv compiles CUDA code wherever torch sees a GPU, even if there is no toolkit.
        environment['CUDA_VISIBLE_DEVICES'] = ''
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        source = fetch_source(Path(work))
        pip('wheel', '--no-build-isolation', f'--wheel-dir={work}', str(source), **environment)
        (built,) = Path(work).glob('*.whl')
        return built.replace(folder / built.name)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description='Install the pinned mmcv.')
    parser.add_argument('--with-ops', action='store_true', help='with compiled operators')
    add_debug(parser)
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    with_ops = args.with_ops
    folder = cache_folder()
    wheel = next(iter(folder.glob('*.whl')), None)
    found = installed()
    if is_wheel(found, wheel) or (found is not None and not with_ops):
        return
    if with_ops and wheel is None:
        wheel = build_with_ops(folder)
    if wheel is not None:
        pip('install', '--force-reinstall', str(wheel))
    else:
        pip('install', f'--no-binary={NAME}', REQUIREMENT)


if __name__ == '__main__':
    end(main, parse_args())
