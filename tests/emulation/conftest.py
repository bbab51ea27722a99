"""One build of the emulated kernels for all files of tests, in whichever workers they run."""

import fcntl
import os

import pytest


@pytest.fixture(scope='session')
def emulation_library(tmp_path_factory):
    from tests.emulation.test_emulation import build_emulation

    folder = tmp_path_factory.getbasetemp()
    if 'PYTEST_XDIST_WORKER' in os.environ:
        folder = folder.parent  # of all workers
    folder /= 'emulation'
    folder.mkdir(exist_ok=True)
    with (folder / 'lock').open('w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        library = folder / 'library'  # a link: it is there when all of it is
        if not library.exists():
            library.symlink_to(build_emulation(folder))
    return library.resolve()
