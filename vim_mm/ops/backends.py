"""Which backend computes a scan: the one place where it is chosen."""

import logging
import os
from functools import cache
from typing import NamedTuple

import torch

from vim_mm.errors import UserRuntimeError, UserTypeError, UserValueError
from vim_mm.ops import library, triton

# From the best to the slowest. native: the compiled kernels; triton; torch: PyTorch operators,
# chunk by chunk; reference: the sequential loop that all others are held to.
BACKENDS = ('native', 'triton', 'torch', 'reference')
OPERATORS = ('native', 'triton')  # those whose scan is one operator, which torch does not look into
_logger = logging.getLogger(__name__)


class ScanPath(NamedTuple):
    """What computes a scan: a name in BACKENDS, or 'error' where a demand cannot be met."""

    name: str
    reason: str


def path_of(
    device: torch.device | str = 'cpu',
    dtype: torch.dtype = torch.float32,
    use_cuda_kernel: bool | None = None,
    *,
    backend: str | None = None,
    is_complex: bool = False,
) -> ScanPath:
    """Which path :func:`selective_scan_fn` would take for tensors of a device and dtype, and why.

    Args:
        device: Need not exist.
        dtype: That of u.
        use_cuda_kernel, backend: As in :func:`selective_scan_fn`, and so are the errors.
        is_complex: Whether A is.
    """
    device_type = torch.device(device).type
    name, obstacle = _choose(backend, use_cuda_kernel, device_type, dtype, is_complex)
    if obstacle is not None:
        return ScanPath(name, obstacle)
    wish = _requested(backend, use_cuda_kernel)
    if wish is not None:
        return ScanPath(name, f'{wish.source} asks for it')
    return ScanPath(name, f'vim_mm._C has a scan for {device_type}')


@torch.compiler.assume_constant_result
def chosen_backend(
    backend: str | None,
    use_cuda_kernel: bool | None,
    device_type: str,
    dtype: torch.dtype,
    is_complex: bool = False,
) -> str:
    """The name of the backend to call; RuntimeError if the one demanded is not there.

    That another one than the compiled kernel is taken unasked is said once in the log.
    """
    name, obstacle = _choose(backend, use_cuda_kernel, device_type, dtype, is_complex)
    if name == 'error':
        wish = _requested(backend, use_cuda_kernel)
        raise UserRuntimeError(f'{wish.source}: {wish.subject} was demanded, but {obstacle}')
    if obstacle:
        _say_once(f'selective scan on {device_type}: {_WORDS[name]}, because {obstacle}')
    return name


_WORDS = {'triton': 'Triton', 'torch': 'PyTorch operators', 'reference': 'PyTorch reference'}


class _Wish(NamedTuple):
    """A backend that is asked for, and what asks."""

    name: str
    source: str
    # use_cuda_kernel demands a kernel of CUDA, where backend='native' takes the CPU's too.
    on_cuda: bool = False

    @property
    def subject(self) -> str:
        return 'the compiled CUDA scan' if self.on_cuda else f'the backend {self.name!r}'


def _requested(backend: str | None, use_cuda_kernel: bool | None) -> _Wish | None:
    """What the arguments ask for, or where both are None what the environment does."""
    wish = wish_of_arguments(backend, use_cuda_kernel)
    if wish is not None:
        return wish
    variable = os.environ.get('VIM_USE_CUDA_KERNEL', '')
    if variable not in ('', '0', '1'):
        raise UserValueError(f'VIM_USE_CUDA_KERNEL: expected 1, 0 or empty, got {variable!r}')
    flag = None if variable == '' else variable == '1'
    return _agreed(
        _by_name(os.environ.get('VIM_MM_BACKEND') or None, 'VIM_MM_BACKEND'),
        _by_flag(flag, 'VIM_USE_CUDA_KERNEL'),
    )


def wish_of_arguments(backend: str | None, use_cuda_kernel: bool | None) -> _Wish | None:
    """What the arguments ask for; who keeps them for later calls has them checked by it.

    Raises:
        TypeError: ``use_cuda_kernel`` is no bool.
        ValueError: There is no such backend, or the two contradict each other.
    """
    if use_cuda_kernel is not None and not isinstance(use_cuda_kernel, bool):
        raise UserTypeError(f'use_cuda_kernel: expected a bool, got {use_cuda_kernel!r}')
    return _agreed(_by_name(backend, 'backend'), _by_flag(use_cuda_kernel, 'use_cuda_kernel'))


def _agreed(by_name: _Wish | None, by_flag: _Wish | None) -> _Wish | None:
    if by_name is not None and by_flag is not None and by_name.name != by_flag.name:
        raise UserValueError(f'{by_name.source} and {by_flag.source} contradict each other')
    return by_flag or by_name


def _by_name(backend: str | None, source: str) -> _Wish | None:
    if backend is None:
        return None
    if backend not in BACKENDS:
        raise UserValueError(f'{source}: expected one of {[*BACKENDS]}, got {backend!r}')
    return _Wish(backend, f'{source}={backend}')


def _by_flag(flag: bool | None, source: str) -> _Wish | None:
    if flag is None:
        return None
    value = str(int(flag)) if source.isupper() else flag
    return _Wish('native' if flag else 'reference', f'{source}={value}', on_cuda=flag)


def _choose(
    backend: str | None,
    use_cuda_kernel: bool | None,
    device_type: str,
    dtype: torch.dtype,
    is_complex: bool,
) -> tuple[str, str | None]:
    """A :class:`ScanPath`, its reason if it is an obstacle."""
    wish = _requested(backend, use_cuda_kernel)
    if wish is not None:
        obstacle = _obstacle(wish.name, device_type, dtype, is_complex)
        if wish.on_cuda and device_type != 'cuda':
            obstacle = f'the tensors are on {device_type}'
        return (wish.name, None) if obstacle is None else ('error', obstacle)
    first = None
    for name in BACKENDS:
        obstacle = _obstacle(name, device_type, dtype, is_complex)
        if name == 'triton' and device_type == 'cpu':
            continue  # its interpreter is for tests, which ask for it
        if obstacle is None:
            return name, first
        first = first or obstacle
    raise AssertionError('the reference takes everything')


def _obstacle(backend: str, device_type: str, dtype: torch.dtype, is_complex: bool) -> str | None:
    """Why a backend cannot take tensors of that device and dtype, or None."""
    if backend == 'native':
        if library.MISSING is not None:
            return library.MISSING
        if not library.has_kernel(device_type):
            return f'vim_mm._C has no scan for {device_type}'
        if device_type == 'cuda':
            if dtype == torch.float64:
                return 'the CUDA scan has no float64'
            return library.why_not_on_card()
    if backend == 'triton':
        return triton.obstacle(device_type, dtype, is_complex)
    return None


@cache
def _say_once(message: str) -> None:
    _logger.warning(message)
