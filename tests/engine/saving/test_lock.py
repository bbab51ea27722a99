"""One training at a time writes into a folder, and the lock ends with it."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.engine.toy import Mean, make_runner
from vim_mm.engine.saving import lock
from vim_mm.engine.saving.lock import VARIABLE, FolderLock, FolderTakenError, locked, take

# The file alone: all that the package imports would take seconds.
HOLD = f"""
import runpy, sys, time, types
from pathlib import Path
sys.modules['mmengine.logging'] = types.SimpleNamespace(print_log=print)
sys.modules['vim_mm.errors'] = types.SimpleNamespace(UserError=type('E', (Exception,), {{}}))
sys.modules['vim_mm'] = types.ModuleType('vim_mm')
lock = runpy.run_path({lock.__file__!r})['FolderLock'](Path(sys.argv[1]))
print(lock.variables['VIM_MM_FOLDER_LOCK'], flush=True)
time.sleep(100)
"""


def start(code: str, *arguments, **options) -> subprocess.Popen:
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, '-c', code, *map(str, arguments)],
        env=environment | options.pop('variables', {}),
        stdout=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def test_the_second_is_refused_by_the_name_of_the_first(tmp_path):
    with locked(tmp_path), pytest.raises(FolderTakenError) as raised:
        FolderLock(tmp_path)
    since = json.loads((tmp_path / '.lock').read_text())['since']
    assert str(raised.value) == (
        f'{tmp_path} is being trained by process {os.getpid()} on {socket.gethostname()} since '
        f'{since}: wait for its end, or choose another --work-dir'
    )
    with locked(tmp_path):
        (tmp_path / '.lock').write_text('[' * 4096)
        with pytest.raises(FolderTakenError, match='by another process'):
            FolderLock(tmp_path)
    FolderLock(tmp_path).release()


def test_a_lock_that_was_taken_is_let_go_by_the_training(tmp_path):
    take(tmp_path)
    with pytest.raises(FolderTakenError):
        FolderLock(tmp_path)
    with locked(tmp_path):
        pass
    FolderLock(tmp_path).release()


@pytest.mark.parametrize('passed_on', [True, False], ids=['inherited', 'closed on the way'])
def test_a_process_that_was_started_for_the_training_has_the_lock(passed_on, tmp_path):
    lock = FolderLock(tmp_path)
    child = start(
        HOLD, tmp_path, variables=lock.variables, pass_fds=lock.numbers if passed_on else ()
    )
    try:
        number, word = child.stdout.readline().split()
        assert [number, word] == [str(lock.number) if passed_on else 'None',
                                  lock.variables[VARIABLE].split()[1]]  # fmt: skip
        os.close(lock.numbers[0])  # as by the end of this process
        if passed_on:
            with pytest.raises(FolderTakenError):
                FolderLock(tmp_path)
    finally:
        child.kill()
        child.communicate()
        lock.number = None
    FolderLock(tmp_path).release()


def test_the_word_of_an_earlier_lock_opens_nothing(tmp_path, monkeypatch):
    first = FolderLock(tmp_path)
    for name, value in first.variables.items():
        monkeypatch.setenv(name, value)
    first.release()
    second = FolderLock(tmp_path)
    with pytest.raises(FolderTakenError):
        FolderLock(tmp_path)
    second.release()


def test_the_lock_dies_with_the_process_and_not_with_its_children(tmp_path):
    """Workers of loaders are forks, and outlive a killed process for seconds."""
    # One write each: the lines of two processes do not mix.
    fork = "import os\nos.write(1, f'{os.fork()}\\n'.encode())\ntime.sleep(100)"
    child = start(HOLD.replace('time.sleep(100)', fork), tmp_path)
    child.stdout.readline()
    worker = max(int(child.stdout.readline()) for _ in range(2))  # once both have begun
    with pytest.raises(FolderTakenError, match=f'process {child.pid} on'):
        FolderLock(tmp_path)
    child.send_signal(signal.SIGKILL)
    child.wait()
    try:
        os.kill(worker, 0)  # it lives
        FolderLock(tmp_path).release()
    finally:
        os.kill(worker, signal.SIGKILL)
        child.stdout.close()


def test_a_link_is_no_lock(tmp_path):
    (tmp_path / '.lock').symlink_to(tmp_path / 'mine')
    with pytest.raises(OSError, match='symbolic links'):
        FolderLock(tmp_path)
    assert not (tmp_path / 'mine').exists()


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
    def none(number, operation):
        raise OSError(38, 'Function not implemented')

    said = []
    monkeypatch.setattr('fcntl.flock', none)
    monkeypatch.setattr(lock, 'print_log', lambda message, *_, **__: said.append(message))
    FolderLock(tmp_path).release()
    assert 'cannot be locked (Function not implemented)' in said[0]


class Watching(Mean):
    """Looks at the locks of a training while it validates."""

    folders: list = []

    def process(self, data_batch, data_samples):
        for folder in self.folders:
            with pytest.raises(FolderTakenError):
                FolderLock(folder)
        super().process(data_batch, data_samples)


def test_a_training_locks_its_folder_and_that_of_its_checkpoints(tmp_path):
    Watching.folders = [tmp_path / 'run', tmp_path / 'out' / 'run']
    hook = dict(type='CheckpointHook', by_epoch=False, interval=1, out_dir=str(tmp_path / 'out'))
    for error in (False, True):
        runner = make_runner(
            tmp_path / 'run',
            val_evaluator=[Watching()],
            default_hooks=dict(checkpoint=hook),
        )
        if error:
            runner.model.forward = None
            with pytest.raises(TypeError):
                runner.train()
        else:
            runner.train()
        for folder in Watching.folders:
            FolderLock(folder).release()
