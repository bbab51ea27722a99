"""Fixtures of the whole suite."""

from pathlib import Path

import pytest
import torch

# Files that take a minute of processor time and more, the longest first. A worker of `make test`
# that began one of them at the end would leave the others without work.
LONGEST = (
    'emulation/test_emulation.py',
    'packaging/test_distributions.py',
    # Not long, but its forks compute gradients, which PyTorch refuses after a compilation here.
    'engine/test_batch.py',
    'configs/test_shipped.py',
    'tools/test_distributed.py',
    'export/test_aoti.py',
    'tools/test_tools.py',
    'test_jax.py',
    'ops/test_triton.py',
    'models/test_compile.py',
    'segmentation/test_deterministic.py',
    'configs/test_training.py',
    'tools/test_kill_and_resume.py',
    'configs/test_run_all_methods.py',
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    place = {folder / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
