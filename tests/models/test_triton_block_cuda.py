"""The fast block of Triton on a GPU, against the plain one in fp64: the compiled one's bounds."""

import pytest
import torch

from tests.graphs import assert_replays_eager_bits
from tests.models.small import images, small_backbone
from tests.models.test_fast_block import (
    assert_compiled,
    assert_exact,
    errors,
    mixer,
    needs_cuda,
    plain_in_fp64,
    results,
)

pytestmark = needs_cuda


@pytest.mark.parametrize(
    'options',
    [
        pytest.param(dict(), id='default'),
        pytest.param(dict(bimamba_type='none', conv_bias=False, d_conv=3), id='none'),
        pytest.param(dict(bimamba_type='v1', bias=True, if_divide_out=False), id='v1'),
    ],
)
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=['fp32', 'bf16'])
def test_equals_the_plain_mixer(options, dtype):
    module = mixer(backend='triton', **options)
    for length in (1, 197, 272):
        x, grad = (torch.randn(2, length, 24, device='cuda').to(dtype) for _ in range(2))
        truth = results(plain_in_fp64(module), x.cpu().double(), grad.cpu())
        with torch.autocast('cuda', dtype, enabled=dtype != torch.float32):
            given = results(module, x.float(), grad)
            again = results(module, x.float(), grad)
        if dtype == torch.float32:
            assert_exact(given, truth)
        else:
            assert max(errors(given, truth).values()) <= 0.12
        for name, value in again.items():
            assert torch.equal(value, given[name]), f'{name} differs from run to run'


def test_backbone_in_a_graph_and_compiled():
    model = small_backbone(out_feature='norm', ssm_cfg=dict(d_state=4, backend='triton')).cuda()
    x = images(40, 24).cuda()
    assert all(path.reason is None for path in model.paths())
    assert_compiled(model, [x], dynamic=False)

    def run():
        (out,) = model(x)
        return [out.detach(), *torch.autograd.grad(out.sum(), list(model.parameters()))]

    assert_replays_eager_bits(run, x)
