"""The processes of a run: how they join and leave their group, their memory and threads."""

import atexit
import contextlib
import gc
import multiprocessing
import os
import subprocess
import threading
from datetime import timedelta

import torch
from torch import distributed
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from vim_mm.errors import UserRuntimeError, UserValueError


def init_process_group(launcher: str, backend: str = 'nccl', timeout: float | None = None) -> None:
    """Join the processes of a run, on GPUs by ``backend`` and without any by gloo.

    Args:
        launcher (str): 'pytorch' (torchrun set the environment) or 'slurm' (srun did; the first
            host of the job and port 29500 are the meeting point, unless MASTER_ADDR and
            MASTER_PORT are set).
        backend (str): Of torch.distributed, where CUDA is available.
        timeout (float, optional): Of collective operations, in seconds; None is torch's default.

    Raises:
        ValueError: Unknown launcher.
        RuntimeError: This host has fewer GPUs than processes.
    """
    if launcher == 'slurm':
        _translate_slurm_environment()
    elif launcher != 'pytorch':
        raise UserValueError(f"launcher must be 'none', 'pytorch' or 'slurm', got {launcher!r}")
    if torch.cuda.is_available():
        local_rank, gpus = int(os.environ['LOCAL_RANK']), torch.cuda.device_count()
        if local_rank >= gpus:
            raise UserRuntimeError(
                f'Process {local_rank + 1} of this host has no GPU: it has {gpus}.'
            )
        torch.cuda.set_device(local_rank)
    else:
        backend = 'gloo'
    # NCCL cannot register the buffers of segments that grow, see choose_allocator, for its
    # operations inside of CUDA graphs.
    os.environ.setdefault('NCCL_GRAPH_REGISTER', '0')
    distributed.init_process_group(
        backend, timeout=None if timeout is None else timedelta(seconds=timeout)
    )
    # Threads of a group that outlives the interpreter abort a process that has done its work.
    atexit.register(_leave_process_group)


def choose_allocator() -> None:
    """Let segments of a GPU's memory grow, before CUDA starts; the user's own choice stays.

    Pictures of many sizes, as in detection, leave gaps that fixed segments cannot fill.
    """
    if 'PYTORCH_ALLOC_CONF' not in os.environ and torch.cuda.is_available():
        # The older name: PyTorch 2.9 reads this option by no other.
        os.environ.setdefault('PYTORCH_CUDA_ALLOC_CONF', 'expandable_segments:True')


def end_with_parent() -> None:
    """Let this process of multiprocessing end when the one that started it does, however it does.

    An executor's worker waits for work for ever, with the memory that it has on a GPU.
    """

    def wait() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def threads_of_environment() -> int:
    """The outermost level of OMP_NUM_THREADS, such as '4' or '4,2'; 1 where it tells no number."""
    outermost = os.environ.get('OMP_NUM_THREADS', '').partition(',')[0].strip()
    return int(outermost) if outermost.isdecimal() and int(outermost) else 1


def _leave_process_group() -> None:
    _end_loaders()
    gc.collect()  # the model holds the group as well, in cycles of runner and loops
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _end_loaders() -> None:
    """End the workers of all loaders, in the way that their destructor does.

    Garbage of a cycle loses its queues first. The destructor then cannot tell the workers to end,
    and waits five seconds for each.
    """
    for iterator in gc.get_objects():
        # Not isinstance: PyTorch keeps objects that warn of their own end when they are asked.
        if issubclass(type(iterator), _MultiProcessingDataLoaderIter):
            with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread at its end
                iterator._shutdown_workers()


def _translate_slurm_environment() -> None:
    """Give srun's variables the names that torch.distributed reads."""
    env = os.environ
    for name, slurm_name in (
        ('RANK', 'SLURM_PROCID'),
        ('LOCAL_RANK', 'SLURM_LOCALID'),
        ('WORLD_SIZE', 'SLURM_NTASKS'),
    ):
        env[name] = env[slurm_name]
    if 'MASTER_ADDR' not in env:
        hosts = subprocess.check_output(['scontrol', 'show', 'hostnames', env['SLURM_NODELIST']])
        env['MASTER_ADDR'] = hosts.decode().split()[0]
    env.setdefault('MASTER_PORT', '29500')
