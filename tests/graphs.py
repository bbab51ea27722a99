"""CUDA graphs: what tests capture and replay."""

import torch


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
