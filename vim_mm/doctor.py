"""What this installation is, whether it computes, and what to do where it does not.

``python -m vim_mm.doctor`` prints one screen and ends with code 1 if a line is red; ``--json``
prints the same as JSON. Needs PyTorch, einops and nothing else.
"""

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        prog='python -m vim_mm.doctor', description='Examine this installation of vim_mm.'
    )
    parser.add_argument('--json', action='store_true', help='print the findings as JSON')
    parser.add_argument('--config', help='name the layers of its backbone (needs MMEngine)')
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # --help and a wrong option end here, before PyTorch is imported

import torch

import vim_mm
from vim_mm import selftest
from vim_mm.compat import DISTRIBUTIONS
from vim_mm.ops import METHODS, library, path_of, triton
from vim_mm.ops.library import built_architectures, runs_on
from vim_mm.version import commit

# Module, the distributions that hold it, and what it is for; None where vim_mm needs it.
LIBRARIES = [
    ('timm', ('timm',), None),
    ('einops', ('einops',), None),
    ('mmengine', DISTRIBUTIONS['mmengine'], 'training'),
    ('mmcv', DISTRIBUTIONS['mmcv'], 'training'),
    ('mmseg', DISTRIBUTIONS['mmseg'], 'segmentation'),
    ('mmdet', DISTRIBUTIONS['mmdet'], 'detection'),
    ('mmpretrain', DISTRIBUTIONS['mmpretrain'], 'classification'),
]
BUILD = 'pip install -e . --no-build-isolation'
_BACKEND_VARIABLES = ('VIM_MM_BACKEND', 'VIM_USE_CUDA_KERNEL')
SHM_NEEDED = 2**30  # bytes; a container without --shm-size has 64 MiB
_COLORS = {'ok': '32', 'note': '33', 'fail': '31'}


@dataclass(frozen=True)
class Line:
    """One finding: 'ok', 'note' (works, with a limit) or 'fail', and what to do about it."""

    topic: str
    state: str
    finding: str
    advice: str = ''


def examine(config: str | None = None) -> list[Line]:
    """All findings, in the order of the screen. A check that fails itself is a red line.

    Args:
        config (str, optional): Path of a config, of whose backbone the paths are told.
    """
    checks = dict(
        versions=versions,
        kernels=kernels,
        devices=devices,
        mmcv_operators=mmcv_operators,
        methods=methods,
        paths=partial(paths, config),
        host=host,
    )
    lines = []
    for name, check in checks.items():
        try:
            lines += check()
        except Exception as error:
            text = f'{type(error).__name__}: {error}'
            lines.append(Line(name, 'fail', text, _variables() or 'please report this'))
    return lines


def _variables(device: str = 'cpu', *dtypes: torch.dtype) -> str:
    """What to do about the variables that choose a backend, where they ask for what is not there.

    Empty where none is set, or they can have what they ask for, on the device with each dtype.
    """
    named = [f'{name}={os.environ[name]}' for name in _BACKEND_VARIABLES if os.environ.get(name)]
    try:
        asked = any(path_of(device, each).name == 'error' for each in dtypes or (torch.float32,))
    except ValueError:  # an unknown name, or two that contradict each other
        asked = True
    return f'unset or change {" and ".join(named)}' if named and asked else ''


def versions() -> Iterator[Line]:
    """Python, PyTorch, this package and its commit, and the libraries around it."""
    cuda = f'CUDA {torch.version.cuda}' if torch.version.cuda else 'without CUDA'
    yield Line('python', 'ok', f'{platform.python_version()}, {platform.platform()}')
    yield Line('torch', 'ok', f'{torch.__version__}, {cuda}')
    code = commit()
    found = 'no commit' if code is None else f'commit {code}'
    yield Line('vim_mm', 'ok', f'{vim_mm.__version__}, {found}, {Path(vim_mm.__file__).parent}')
    for module, distributions, purpose in LIBRARIES:
        found = next(filter(None, map(_version, distributions)), None)
        if found is not None:
            yield Line(module, 'ok', found)
        elif purpose is None:
            yield Line(module, 'fail', 'not installed', f'pip install {distributions[0]}')
        else:
            advice = f'for {purpose}: pip install {distributions[0]}'
            yield Line(module, 'note', 'not installed', advice)


def _version(distribution: str) -> str | None:
    try:
        return f'{version(distribution)} ({distribution})'
    except PackageNotFoundError:
        return None


def kernels() -> Iterator[Line]:
    """The compiled library: whether it loads, and for what it was compiled."""
    if library.MISSING is not None:
        yield Line('kernels', 'note', library.MISSING, f'faster, with a compiler: {BUILD}')
        return
    yield Line('CPU kernel', 'ok', f'instructions {library.cpu_capability()}')
    if library.has_kernel('cuda'):
        architectures = ' '.join(built_architectures()) or 'unknown, built without a list'
        yield Line('CUDA kernel', 'ok', f'compiled for {architectures}')
    else:
        advice = f'for a GPU: VIM_MM_BUILD_CUDA=1 {BUILD}'
        yield Line('CUDA kernel', 'note', 'not compiled', advice)


def devices() -> Iterator[Line]:
    """Each GPU, and whether the compiled library has code for it."""
    if not torch.cuda.is_available():
        advice = ''
        if torch.version.cuda is None and Path('/dev/nvidia0').exists():
            advice = 'there is a GPU, but this PyTorch has no CUDA: install its CUDA build'
        yield Line('GPU', 'note', 'none that PyTorch can use', advice)
        return
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        needed = '.'.join(map(str, capability))
        name = f'{torch.cuda.get_device_name(index)}, needs {needed}'
        build = f'TORCH_CUDA_ARCH_LIST={needed} VIM_MM_BUILD_CUDA=1 {BUILD}'
        architectures = built_architectures()
        built = ' '.join(architectures)
        # Without kernels for it a GPU works by Triton, or by PyTorch's operators, which are slow.
        state, rest = 'note', ': Triton is taken'
        if triton.MISSING is not None:
            state, rest = 'fail', f', and {triton.MISSING}'
        if not library.has_kernel('cuda'):
            finding = f'{name}: no CUDA kernel, {rest.lstrip(":, ")}'
            yield Line(f'GPU {index}', state, finding, build)
        elif architectures and not runs_on(capability, architectures):
            yield Line(f'GPU {index}', state, f'{name}, but compiled for {built}{rest}', build)
        else:
            yield Line(f'GPU {index}', 'ok', name)


def mmcv_operators() -> Iterator[Line]:
    """Whether mmcv has the compiled operators that MMDetection needs."""
    try:
        import_module('mmcv')
    except ImportError as error:
        yield Line('mmcv operators', 'note', f'no mmcv: {error}')
        return
    try:
        import_module('mmcv.ops')
    except ImportError as error:
        reason = ' '.join(str(error).split())[:90]
        advice = 'detection needs them: an mmcv wheel for this PyTorch, or `make install-det`'
        yield Line('mmcv operators', 'note', f'missing: {reason}', advice)
    else:
        yield Line('mmcv operators', 'ok', 'there')


def methods() -> Iterator[Line]:
    """Each method's scan and gradients against exact values, on every path of this machine."""
    exact = selftest.exact_values()
    places = [('cpu', torch.float64), ('cpu', torch.float32)]
    if torch.cuda.is_available():
        places += [('cuda', torch.float32), ('cuda', torch.bfloat16)]
    for method in METHODS:
        if method not in exact:
            advice = 'python tools/dev/make_selftest.py'
            yield Line(method, 'fail', 'no exact values to compare with', advice)
            continue
        errors, wrong = [], []
        for device, dtype in places:
            try:
                error = selftest.worst_error(method, device, dtype)
            except RuntimeError as problem:
                wrong.append(f'{device} {_short(dtype)}: {str(problem).splitlines()[0][:80]}')
                continue
            text = f'{device} {_short(dtype)} {error:.0e}'
            (errors if error <= selftest.TOLERANCE[dtype] else wrong).append(text)
        if wrong:
            at_fault = filter(None, (_variables(*place) for place in places))
            advice = next(at_fault, f'the kernels do not compute this method: {BUILD}')
            yield Line(method, 'fail', f'wrong: {", ".join(wrong)}', advice)
        else:
            yield Line(method, 'ok', f'exact up to {", ".join(errors)}')


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix('torch.')


def paths(config: str | None = None) -> Iterator[Line]:
    """What would compute a scan, by device and dtype, and the layers of a backbone."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for device in ('cpu', 'cuda') if torch.cuda.is_available() else ('cpu',):
        groups: dict[tuple[str, str], list[torch.dtype]] = {}
        for dtype in dtypes:
            groups.setdefault(tuple(path_of(device, dtype)), []).append(dtype)
        for (name, reason), members in groups.items():
            state, advice = _STATE_OF_BACKEND[name]
            advice = advice or _variables(device, *members)
            names = map(_short, members)
            yield Line(
                f'scan on {device}', state, f'{name} for {" ".join(names)}: {reason}', advice
            )
        yield from _block_paths(device, config)


_STATE_OF_BACKEND = {
    'native': ('ok', ''),
    'triton': ('ok', ''),
    'torch': ('note', 'exact, and slower than a compiled kernel: see docs/backends.md'),
    'reference': ('note', 'the reference is exact and slow'),
    'error': ('fail', ''),  # see _variables
}


def _block_paths(device: str, config: str | None) -> Iterator[Line]:
    """Which layers of a backbone would take the fused path on a device, and why others do not."""
    topic = f'block on {device}'
    try:
        from vim_mm.models.fused import path_of_layers, summarize_paths

        backbone = _backbone(config)
    except ImportError as error:
        yield Line(topic, 'note', f'none: the models need {error.name}')
        return
    if path_of(device).name == 'error':
        yield Line(topic, 'fail', 'none: see the scan')
        return
    for path in summarize_paths(path_of_layers(backbone, device)):
        fine = path.reason is None or device == 'cpu'
        yield Line(topic, 'ok' if fine else 'note', str(path))


@cache
def _backbone(config: str | None) -> torch.nn.Module:
    """That of a config; else one with as many layers as Vim-T has, and fewer channels."""
    if config is None:
        from vim_mm.models import VisionMamba

        with torch.device('meta'):  # its modules and dtypes are looked at, not its weights
            return VisionMamba(arch=dict(embed_dims=16, num_layers=24), out_feature='norm')
    from mmengine.registry import MODELS

    from vim_mm.engine.cli import read_config

    args = argparse.Namespace(config=config, cfg_options={}, verbose=False)
    cfg = read_config(args)
    with torch.device('meta'):
        return MODELS.build(cfg.model.backbone)


def host() -> Iterator[Line]:
    """Shared memory and cores, which loader workers and CPU kernels use."""
    size = shared_memory()
    if size is None:
        yield Line('/dev/shm', 'note', 'none on this system')
    elif size < SHM_NEEDED:
        yield Line(
            '/dev/shm',
            'note',
            f'{size / 2**20:.0f} MiB',
            'the tools start as many loader workers as fit into it, few or none; other programs '
            'die of bus errors: docker run --shm-size=8g',
        )
    else:
        yield Line('/dev/shm', 'ok', f'{size / 2**30:.1f} GiB')
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    threads = torch.get_num_threads()
    finding = f'{cores}, {threads} threads'
    if 'OMP_NUM_THREADS' in os.environ:
        finding += f' (OMP_NUM_THREADS={os.environ["OMP_NUM_THREADS"]})'
    if threads > cores:
        advice = f'more threads than cores: export OMP_NUM_THREADS={cores}'
        yield Line('cores', 'note', finding, advice)
    else:
        yield Line('cores', 'ok', finding)


def shared_memory() -> int | None:
    """Size of /dev/shm in bytes, None where there is none."""
    try:
        return shutil.disk_usage('/dev/shm').total
    except OSError:
        return None


def screen(lines: list[Line], color: bool) -> str:
    """The findings as text, a line each, advice under those that have one."""
    text = []
    for line in lines:
        state = line.state
        mark = f'\033[{_COLORS[state]}m{state:4}\033[0m' if color else f'{state:4}'
        text.append(f'{mark} {line.topic:15} {line.finding}')
        if line.advice:
            text.append(f'{"":21}-> {line.advice}')
    failed = sum(line.state == 'fail' for line in lines)
    text.append(f'{failed} of {len(lines)} checks failed.' if failed else 'No check failed.')
    return '\n'.join(text)


def main(argv: list[str] | None = None, show: Callable[[str], None] = print) -> int:
    """Print the findings; the exit code is 1 if one is 'fail'."""
    args = parse_args(argv)
    with redirect_stdout(sys.stderr):  # what libraries print when they are imported
        lines = examine(args.config)
    failed = any(line.state == 'fail' for line in lines)
    if args.json:
        show(json.dumps(dict(ok=not failed, checks=[asdict(line) for line in lines]), indent=1))
    else:
        show(screen(lines, sys.stdout.isatty()))
    return int(failed)


def _run() -> int:
    """:func:`main` of a command, which ends quietly when its reader, such as head, has enough."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141  # as a shell reports SIGPIPE
    return code


if __name__ == '__main__':
    sys.exit(_run())
