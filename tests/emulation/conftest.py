"""One build of the emulated kernels for all files of tests."""

import pytest


@pytest.fixture(scope='session')
def emulation_library(tmp_path_factory):
    from tests.emulation.test_emulation import build_emulation

    return build_emulation(tmp_path_factory.mktemp('emulation'))
