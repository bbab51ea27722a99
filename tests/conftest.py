"""Fixtures of the whole suite."""

from pathlib import Path

import pytest
import torch

from tests.forked import leave_configs_as_they_are

# Files that take half a minute of processor time and more, the longest first. A worker of `make
# test` that began one of them at the end would leave the others without work.
LONGEST = (
    'emulation/test_emulation.py',
    'packaging/test_distributions.py',
    # Not long, but its forks compute gradients, which PyTorch refuses after a compilation here.
    'engine/test_batch.py',
    'tools/test_distributed.py',
    'ops/test_triton_compiles.py',
    'export/test_aoti.py',
    'tools/test_tools.py',
    'configs/test_shipped.py',
    'ops/test_triton.py',
    'export/test_onnx.py',
    'ops/test_selective_scan_torch.py',
    'ops/test_selective_scan.py',
    'tools/test_kill_and_resume.py',
    'configs/test_training.py',
    'mistakes/test_endings.py',
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    place = {folder / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


leave_configs_as_they_are()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
