"""torch.compile of the backbone: one graph, no break. Compiling is slow, so few cases."""

import pytest
import torch
import torch._dynamo

from tests.models.small import small_backbone


def graphs_and_outputs(model, sizes, dynamic):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend='aot_eager')
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
    return torch._dynamo.utils.counters['stats']['unique_graphs']


@pytest.mark.parametrize('bimamba_type', [pytest.param('v1', marks=pytest.mark.slow), 'v2'])
def test_static_size(bimamba_type):
    model = small_backbone(bimamba_type=bimamba_type, cls_token='middle', if_rope=True)
    assert graphs_and_outputs(model, [(40, 24)], dynamic=False) == 1


@pytest.mark.slow
def test_dynamic_sizes_share_a_graph():
    """One for images that patches cover, one for those to be padded."""
    model = small_backbone(arch=dict(embed_dims=16, num_layers=1), out_feature='norm')
    sizes = [(40, 24), (56, 48), (72, 88)]
    assert graphs_and_outputs(model, sizes, dynamic=True) == 1
    assert graphs_and_outputs(model, [*sizes, (35, 21), (50, 43)], dynamic=True) == 2
