"""A Python that starts in a hundredth of the time, for tests that run tools in many processes.

An interpreter takes seconds to import PyTorch and MMEngine. One server imports them once, and forks
a child for each script that it is asked to run. Nothing of vim_mm, MMSegmentation or MMDetection is
imported beforehand: what a tool forgets to import is missing in a child as well.

:func:`forked_python` returns the path of an executable that stands in for ``sys.executable``. It
passes arguments, environment, working directory, standard streams and signals on, and ends as the
script does. What is not a script (``-c``, ``-m``) it hands to the real interpreter.

However the process ends that asked for the server, the server and all scripts end with it.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import random
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

PRELOADED = (
    *('torch', 'torch.distributed.run', 'torch.distributed.fsdp', 'torch._dynamo', 'torchvision'),
    *('timm', 'mmengine.runner', 'mmcv', 'matplotlib.pyplot', 'scipy.optimize', 'pycocotools.coco'),
)
# Without site-packages it starts in 20 ms.
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys

arguments = sys.argv[2:] if sys.argv[1:2] == ['-u'] else sys.argv[1:]
if not arguments or not arguments[0].endswith('.py'):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: server.send(bytes([number])))
request = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(request).to_bytes(4, 'big')], [0, 1, 2])
server.sendall(request)
status = int.from_bytes(server.recv(4), 'big')
if os.WIFSIGNALED(status):
    if os.WTERMSIG(status) != signal.SIGKILL:
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.waitstatus_to_exitcode(status))
"""


@functools.cache
def forked_python() -> str:
    """The path of the stand-in."""
    return start_server(PRELOADED)


def start_server(preloaded: Sequence[str]) -> str:
    """Start a server that has imported these modules; returns the path of its stand-in."""
    folder = Path(tempfile.mkdtemp(prefix='forked-python-'))
    client, address = folder / 'python', str(folder / 'socket')
    client.write_text(CLIENT.format(python=sys.executable, address=address))
    client.chmod(0o755)
    ours = (str(os.getpid()), address, str(client), *preloaded)
    server = subprocess.Popen(
        [sys.executable, '-W', 'ignore', __file__, *ours],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        # A process that has asked CUDA how many devices there are cannot fork users of it; NVML is
        # asked instead.
        env={
            **os.environ,
            'OMP_NUM_THREADS': '1',
            'CUDA_VISIBLE_DEVICES': '',
            'PYTORCH_NVML_BASED_CUDA_CHECK': '1',
        },
    )

    def stop() -> None:
        server.kill()
        server.wait()
        shutil.rmtree(folder)

    atexit.register(stop)
    assert server.stdout.readline() == b'ready\n'
    return str(client)


def spare_the_processor() -> None:
    """Leave out what MMEngine does at every turn and takes most of a training of seconds.

    It logs and dumps its configs without yapf, as the same Python in long lines, and its data sets
    do not collect garbage among all that a suite has imported.
    """
    try:
        from mmengine.dataset import base_dataset
        from yapf.yapflib import yapf_api
    except ImportError:  # there is no MMEngine
        return
    yapf_api.FormatCode = lambda text, **style: (text, False)
    base_dataset.gc = SimpleNamespace(collect=lambda: None)


def serve(address: str, tests: int) -> tuple[list[str], dict[str, str]] | None:
    """Fork for every request, until the process ``tests`` (a pidfd) ends.

    Returns the request's arguments and environment in the child.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps supervisors
    # A terminal sends it to all; the script is to get it from its client, as others do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print('ready', flush=True)
        while tests not in select.select([listener, tests], [], [])[0]:
            client, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                return supervise(client, tests)
            client.close()
    return None


def supervise(client: socket.socket, tests: int) -> tuple[list[str], dict[str, str]]:
    """Fork the script; pass signals to it and its end to the client. Returns in the script only."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, _, _ = socket.recv_fds(client, 4, 3)
    request = client.recv(int.from_bytes(size, 'big'), socket.MSG_WAITALL)
    arguments, folder, environment = json.loads(request)
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        client.close()
        os.close(tests)
        os.chdir(folder)
        return arguments, environment
    ended = os.pidfd_open(pid)
    while ended not in (ready := select.select([ended, client, tests], [], [])[0]):
        number = client.recv(1) if client in ready else b''
        if number:
            os.kill(pid, number[0])
            continue
        # A client that was killed takes its script along, and so do the tests; loaders' workers,
        # too.
        with contextlib.suppress(ProcessLookupError):  # it has no group yet
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        break
    status = os.waitpid(pid, 0)[1]
    with contextlib.suppress(BrokenPipeError):
        client.sendall(status.to_bytes(4, 'big'))
    os._exit(0)


def become(arguments: list[str], environment: dict[str, str], python: str) -> None:
    """What a fresh interpreter sets up for a script."""
    inherited = os.environ.get('PYTHONPATH', '').split(os.pathsep)
    installed = [p for p in sys.path if p not in inherited]
    os.environ.clear()
    os.environ.update(environment)
    given = filter(None, environment.get('PYTHONPATH', '').split(os.pathsep))
    sys.path[:] = [str(Path(arguments[0]).absolute().parent), *given, *installed]
    sys.argv[:] = arguments
    sys.executable = python
    # A shell's background jobs, of which the tests may be one, ignore SIGINT and hand that on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout.reconfigure(line_buffering=True)
    # MMEngine looks for a GPU once, when it is imported; the server sees none.
    device = sys.modules.get('mmengine.device.utils')
    if device and sys.modules['torch'].cuda.is_available():
        device.DEVICE = 'cuda'
    random.seed()
    sys.modules['numpy'].random.seed()


if __name__ == '__main__':
    del sys.path[0]  # this folder, where tests/packaging would stand for a library
    pid, address, python, *preloaded = sys.argv[1:]
    tests = os.pidfd_open(int(pid))
    for module in preloaded:
        importlib.import_module(module)
    spare_the_processor()
    gc.freeze()  # a collection in a child would copy the pages of all that is shared
    if (request := serve(address, tests)) is not None:
        become(*request, python)
        runpy.run_path(sys.argv[0], run_name='__main__')
