"""CUDA graphs: what tests capture and replay."""

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
