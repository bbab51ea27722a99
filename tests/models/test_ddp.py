"""DistributedDataParallel on gloo: it fails on any parameter without a gradient."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from tests.models.small import small_backbone

CONFIGS = (
    dict(out_feature='mixer', out_indices=(0, 1)),
    dict(out_feature='residual', bimamba_type='v1', out_indices=0),
    dict(out_feature='norm', cls_token='double', out_type='cls_token'),
    dict(out_feature='mixer', cls_token='middle', with_cp=True),
)


def loss_of(model, x):
    return sum(o.square().mean() for o in model(x))


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def worker(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'file://{store}', rank=rank, world_size=2)
    for config in CONFIGS:
        torch.manual_seed(0)
        model = small_backbone(**config)
        batch = torch.randn(2, 3, 32, 32)
        loss_of(model, batch).backward()
        expected = gradients(model)
        ddp = DistributedDataParallel(model)
        # DDP complains of an unused parameter in the iteration after.
        for _ in range(2):
            ddp.zero_grad()
            loss_of(ddp, batch[rank : rank + 1]).backward()
            torch.testing.assert_close(gradients(model), expected, rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_the_whole_batch(tmp_path):
    mp.spawn(worker, args=(tmp_path / 'store',), nprocs=2)
