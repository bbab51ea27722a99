"""torch.compile of the backbone: one graph, no break. Compiling is slow, so few cases."""

import pytest
import torch
import torch._dynamo

from tests.models.small import small_backbone

pytestmark = pytest.mark.slow


def graphs_after_each(model, sizes, dynamic):
    """How many graphs there are after each size, of which each gives what the model gives."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend='aot_eager')
    graphs = []
    for size in sizes:
        x = torch.randn(2, 3, *size)
        for module in (model, compiled):
            module.zero_grad()
        expected = model(x)
        sum(o.square().sum() for o in expected).backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        model.zero_grad()
        out = compiled(x)
        sum(o.square().sum() for o in out).backward()
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            {n: p.grad for n, p in model.named_parameters()}, gradients, rtol=1e-3, atol=1e-3
        )
        graphs.append(torch._dynamo.utils.counters['stats']['unique_graphs'])
    return graphs


@pytest.mark.parametrize('bimamba_type', ['v1', 'v2'])
def test_static_size(bimamba_type):
    model = small_backbone(bimamba_type=bimamba_type, cls_token='middle', if_rope=True)
    assert graphs_after_each(model, [(40, 24)], dynamic=False) == [1]


def test_dynamic_sizes_share_a_graph():
    """One for images that patches cover, one for those to be padded."""
    model = small_backbone(arch=dict(embed_dims=16, num_layers=1), out_feature='norm')
    sizes = [(40, 24), (56, 48), (72, 88), (35, 21), (50, 43)]
    assert graphs_after_each(model, sizes, dynamic=True) == [1, 1, 1, 2, 2]
