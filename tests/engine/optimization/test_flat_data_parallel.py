"""One exchange of gradients a step: the same bits as DistributedDataParallel, and graphs of it."""

import os

import pytest
import torch
from mmengine.optim import OptimWrapper

from tests.engine.optimization.test_graphed_step import CASES, STEPS, Net, counts, results, train
from tests.engine.processes import needs_forks, run_processes
from tests.engine.toy import ToyModel
from tests.graphs import assert_same_bits, emulate_training_graphs
from vim_mm.engine import FlatDataParallel

FLAT = dict(type='FlatDataParallel')


class Trained(Net):
    """Every parameter takes part in the loss. Processes begin with other ones."""

    def __init__(self):
        torch.manual_seed(int(os.environ['RANK']))
        super().__init__()
        del self.unused


def _work(rank, folder, case):
    kinds = {'hooks': (None, False), 'flat': (FLAT, False), 'graphs': (FLAT, True)}
    for name, (wrapper, graph) in kinds.items():
        options = dict(model=Trained, launcher='pytorch', cfg=dict(model_wrapper_cfg=wrapper))
        trained = train(folder / name, graph, **options, **CASES[case])
        runner = trained[0]
        assert isinstance(runner.model, FlatDataParallel) == (wrapper is not None)
        if graph:
            assert counts(runner) == (runner.batch.counts * STEPS - 1, 1)
        torch.save(results(*trained), folder / f'{name}{rank}.pth')


@needs_forks
@pytest.mark.parametrize('case', ['float32', 'clipped', 'accumulated', 'averaged'])
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
