"""CUDA graphs: what tests capture and replay."""

import math
from functools import partial
from types import SimpleNamespace

import torch
from torch.utils._pytree import tree_flatten


def assert_replays_eager_bits(run, x):
    """A graph of ``run()`` gives the tensors that ``run()`` gives, for new values of ``x`` too."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # what is made at the first call cannot be captured
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(2):
        with torch.no_grad():
            x.normal_()
        graph.replay()
        for value, truth in zip(captured, run(), strict=True):
            assert torch.equal(value, truth)


class GraphOfCalls:
    """A graph without a GPU: to replay it calls the function anew.

    As with CUDA's, inputs are read where they were, and outputs written to where they were.
    """

    replays = 0

    def __init__(self, function):
        self.function, self.outputs = function, function()

    def replay(self):
        GraphOfCalls.replays += 1
        new = tree_flatten(self.function())[0]
        for own, value in zip(tree_flatten(self.outputs)[0], new, strict=True):
            own.copy_(value)


def record_calls(function, pool=None):
    """In place of ``vim_mm.acceleration.record``."""
    graph = GraphOfCalls(function)
    return graph, graph.outputs


class Rehearsal:
    """In place of ``record`` of a training step, without a GPU; see :class:`GraphOfCalls`.

    A capture computes nothing: buffers and the generator of random numbers are put back. The graphs
    share memory: a replay spoils what others have given.
    """

    def __init__(self):
        self.model = None
        self.graphs = []

    def __call__(self, function, pool=None):
        random = torch.get_rng_state()
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        graph = GraphOfCalls(function)
        for buffer, before in buffers:
            buffer.copy_(before)
        torch.set_rng_state(random)
        self.graphs.append(graph)
        self.spoil()
        return SimpleNamespace(replay=partial(self.replay, graph)), graph.outputs

    def spoil(self):
        for graph in self.graphs:
            for output in tree_flatten(graph.outputs)[0]:
                output.fill_(math.nan)

    def replay(self, graph):
        self.spoil()
        graph.replay()


def emulate_training_graphs(monkeypatch):
    """Let ``vim_mm.engine.optimization.graphed_step`` make its graphs on the CPU."""
    # Here, because the tests of operators run where MMEngine is missing.
    from vim_mm.engine.optimization import graphed_step

    rehearsal = Rehearsal()
    begin = graphed_step.GraphedStep.__init__

    def init(self, model, compiled=False):
        begin(self, model, compiled)
        rehearsal.model = model

    monkeypatch.setattr(graphed_step.GraphedStep, '__init__', init)
    monkeypatch.setattr(graphed_step, 'record', rehearsal)
    monkeypatch.setattr(graphed_step, 'call_aside', lambda function: function())
    monkeypatch.setattr(graphed_step, '_is_on_gpu', lambda model: True)
    # Here dropout draws from the generator of the host.
    monkeypatch.setattr(graphed_step, '_host_generators', tuple)
    monkeypatch.setattr(torch.cuda, 'graph_pool_handle', lambda: (0, 0))


def assert_same_bits(found, expected):
    """Dictionaries of tensors and numbers; says which differ and by how much."""
    assert found.keys() == expected.keys()
    differing = {}
    for name, value in found.items():
        a, b = (torch.as_tensor(x).detach().cpu() for x in (value, expected[name]))
        if a.shape != b.shape or a.dtype != b.dtype:
            differing[name] = f'{a.shape} {a.dtype}, expected {b.shape} {b.dtype}'
        elif not torch.equal(a.nan_to_num(nan=1e30), b.nan_to_num(nan=1e30)):
            error = (a.double() - b.double()).abs().max().item()
            differing[name] = f'off by {error:.3g} of {b.double().abs().max().item():.3g}'
    assert not differing, f'{len(differing)} of {len(found)} differ: {differing}'
