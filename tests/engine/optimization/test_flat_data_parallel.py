"""One exchange of gradients a step: the same bits as DistributedDataParallel, and graphs of it."""

import pytest
import torch
from mmengine.optim import OptimWrapper

from tests.engine.optimization.test_graphed_step import (
    CASES,
    STEPS,
    Net,
    counts,
    prebatched,
    results,
    train,
)
from tests.engine.processes import needs_forks, run_processes
from tests.engine.toy import ToyModel
from tests.graphs import assert_same_bits, emulate_training_graphs
from vim_mm.engine import FlatDataParallel
from vim_mm.engine.processes import init_process_group
from vim_mm.engine.watching.run_record import RecordHook

FLAT = dict(type='FlatDataParallel')
slow = pytest.mark.slow


class Trained(Net):
    """Every parameter takes part in the loss."""

    def __init__(self):
        super().__init__()
        del self.unused


def options(wrapper: dict | None = FLAT) -> dict:
    """Of ``train`` in each of several processes."""
    return dict(model=Trained, launcher='pytorch', cfg=dict(model_wrapper_cfg=wrapper))


def _work(rank, folder, case):
    kinds = {'hooks': (None, False), 'flat': (FLAT, False), 'graphs': (FLAT, True)}
    for name, (wrapper, graph) in kinds.items():
        trained = train(folder / name, graph, **options(wrapper), **CASES[case])
        runner = trained[0]
        assert isinstance(runner.model, FlatDataParallel) == (wrapper is not None)
        if graph:
            assert counts(runner) == (runner.batch.counts * STEPS - 1, 1)
        torch.save(results(*trained), folder / f'{name}{rank}.pth')


@needs_forks
@pytest.mark.parametrize(
    'case',
    ['float32', *(pytest.param(c, marks=slow) for c in ('accumulated', 'clipped', 'averaged'))],
)
def test_two_processes_end_in_the_same_bits(case, tmp_path, monkeypatch):
    """As with hooks in the backward pass; sums of two numbers have no order."""
    emulate_training_graphs(monkeypatch)
    run_processes(_work, 2, tmp_path, case)
    found = {path.stem: torch.load(path, weights_only=False) for path in tmp_path.glob('*.pth')}
    for rank in range(2):
        assert_same_bits(found[f'flat{rank}'], found[f'hooks{rank}'])
        assert_same_bits(found[f'graphs{rank}'], found[f'hooks{rank}'])
    name = 'model.module.head.weight'
    assert torch.equal(found['graphs0'][name], found['graphs1'][name])
    losses = [found[f'graphs{rank}'][f'step {STEPS - 1}: loss'] for rank in range(2)]
    assert losses[0] != losses[1], 'each process should have had pictures of its own'


def _observe(rank, folder, case):
    """Process 0 looks at its first step by a profiler."""
    hooks = [RecordHook(folder / 'record.json')]
    runner, _ = train(folder / 'run', True, custom_hooks=hooks, **options(), **CASES[case])
    torch.save(counts(runner), folder / f'counts{rank}.pth')


@needs_forks
def test_processes_take_a_step_by_graphs_together(tmp_path, monkeypatch):
    """A graph may hold exchanges of its own, such as SyncBN's. A step has two batches here."""
    emulate_training_graphs(monkeypatch)
    run_processes(_observe, 2, tmp_path, 'accumulated')
    assert {torch.load(path) for path in tmp_path.glob('*.pth')} == {(2 * STEPS - 2, 2)}


def _mix(rank, folder, sides):
    pictures = [torch.rand(2, 3, side, side) for side in sides[rank]]
    loader = prebatched(pictures)
    runner, _ = train(folder / 'run', True, len(pictures), train_dataloader=loader, **options())
    torch.save(counts(runner), folder / f'counts{rank}.pth')


@pytest.mark.slow
@needs_forks
def test_a_shape_that_one_process_has_not_seen_is_launched_by_all(tmp_path, monkeypatch):
    """The fourth batches are the first that both have seen before."""
    emulate_training_graphs(monkeypatch)
    run_processes(_mix, 2, tmp_path, ([8, 8, 8, 8, 8], [8, 12, 16, 12, 16]))
    assert {torch.load(path) for path in tmp_path.glob('*.pth')} == {(2, 3)}


def _begin(rank, folder):
    torch.manual_seed(rank)
    init_process_group('pytorch')
    module = ToyModel()
    weight = module.head.weight.detach()
    module.head.weight = torch.nn.Parameter(weight.transpose(0, 1).contiguous().transpose(0, 1))
    assert not module.head.weight.is_contiguous()  # as of a model that is channels last
    before = module.head.weight.clone()
    model = FlatDataParallel(module)
    assert torch.equal(module.head.weight, before) == (rank == 0)
    assert model.all_agree(True) and not model.all_agree(rank == 0)
    torch.save(module.state_dict(), folder / f'{rank}.pth')


def _compiled(rank, folder):
    found = {}
    for name, hooks in (('flat', []), ('compiled', [dict(type='GraphedStepHook', compile=True)])):
        trained = train(folder / name, False, custom_hooks=hooks, **options(), **CASES['clipped'])
        found[name] = results(*trained)
    assert counts(trained[0]) == (STEPS - 1, 1)
    torch.save(found, folder / f'{rank}.pth')


@needs_forks
def test_compiled_parts_train_in_two_processes(tmp_path, monkeypatch):
    """Of the compilation its place alone; weights have their channels last, which rounds."""
    emulate_training_graphs(monkeypatch)
    monkeypatch.setattr(torch, 'compile', lambda function, **_: function)
    run_processes(_compiled, 2, tmp_path)
    first, second = (torch.load(tmp_path / f'{i}.pth', weights_only=False) for i in range(2))
    for name, value in first['compiled'].items():
        if name.startswith('model') and 'running' not in name:
            assert torch.equal(value, second['compiled'][name]), name
        if not name.startswith('optimizer'):
            torch.testing.assert_close(
                *(torch.as_tensor(x) for x in (value, first['flat'][name])), rtol=1e-3, atol=1e-4
            )


@needs_forks
def test_processes_begin_with_the_weights_of_the_first(tmp_path):
    run_processes(_begin, 2, tmp_path)
    assert_same_bits(*(torch.load(path) for path in tmp_path.glob('*.pth')))


def test_a_parameter_without_a_gradient_is_named():
    """Of the others, each process would add another part."""
    model = FlatDataParallel(Net().train())
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match='1 parameters got no gradient, the first of them unuse'):
        model.train_step([torch.rand(2, 3, 8, 8)], wrapper)
    model.module.unused.requires_grad_(False)
    model.train_step([torch.rand(2, 3, 8, 8)], wrapper)


def test_it_predicts_as_its_module():
    module = ToyModel().eval()
    model, x = FlatDataParallel(module), torch.rand(1, 3, 8, 8)
    for found in (model.val_step([x]), model.test_step([x]), model(x)):
        assert torch.equal(found[0], module(x)[0])
