"""Fixtures of the whole suite."""

import gc
import sys
from pathlib import Path

import pytest
import torch

from tests.forked import spare_the_processor

# Files that take half a minute of processor time and more, the longest first. A worker of `make
# test` that began one of them at the end would leave the others without work.
LONGEST = (
    'emulation/test_emulation.py',
    'methods/test_contract.py',
    'packaging/test_distributions.py',
    # Not long, but its forks compute gradients, which PyTorch refuses after a compilation here.
    'engine/batches/test_batch.py',
    'tools/test_distributed.py',
    'ops/test_triton_compiles.py',
    'export/test_aoti.py',
    'tools/test_doors.py',
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
    for item in items:
        if item.get_closest_marker('slowest'):
            item.add_marker('slow')


spare_the_processor()


@pytest.fixture(scope='module', autouse=True)
def nothing_old_is_garbage():
    """What is there before a file's tests stays, and no collection of garbage looks through it."""
    gc.collect()
    gc.freeze()


def kinds(base: type) -> list[type]:
    return [base, *(kind for child in base.__subclasses__() for kind in kinds(child))]


def instances_end():
    """What a test or a file's fixture registers in the process, as tools do, ends with it.

    A scope left behind changes what names mean to the next test, and a visualizer writes into the
    folder of the test that made it.
    """

    def instances() -> list[dict]:
        loaded = [sys.modules.get(f'mmengine.{name}') for name in ('registry', 'visualization')]
        bases = [
            getattr(module, name)
            for module, name in zip(loaded, ('DefaultScope', 'Visualizer'), strict=True)
            if module
        ]
        return [kind._instance_dict for base in bases for kind in kinds(base)]

    before = {id(those): dict(those) for those in instances()}
    yield
    for those in instances():
        kept = before.get(id(those), {})
        those.clear()
        those.update(kept)


instances_of_a_test = pytest.fixture(autouse=True)(instances_end)
instances_of_a_file = pytest.fixture(scope='module', autouse=True)(instances_end)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def screen():
    """What a tool of this process shows ends with its test."""
    yield
    if 'vim_mm.engine.screen' in sys.modules:
        sys.modules['vim_mm.engine.screen'].close_screen()


NO_GPU = not torch.cuda.is_available()
KINDS_OF_GRAPHS = [
    pytest.param('cpu', marks=pytest.mark.skipif(not NO_GPU, reason='real graphs are tested')),
    pytest.param(
        'cuda', marks=[pytest.mark.cuda, pytest.mark.skipif(NO_GPU, reason='needs a CUDA device')]
    ),
]


@pytest.fixture(params=KINDS_OF_GRAPHS)
def graph_device(request, monkeypatch):
    """Where training steps become graphs: a GPU with deterministic kernels, or an emulation."""
    if request.param == 'cpu':
        from tests.graphs import emulate_training_graphs

        emulate_training_graphs(monkeypatch)
        yield 'cpu'
        return
    monkeypatch.setenv('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
    monkeypatch.setattr(torch.backends.cudnn, 'deterministic', True)
    # An operation without such a kernel is a warning: what differs by it is seen.
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield 'cuda'
    torch.use_deterministic_algorithms(False)
