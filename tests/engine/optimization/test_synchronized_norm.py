"""SyncBN in compiled parts: BN of all processes' images, and one graph for each part."""

from functools import partial

import pytest
import torch
from mmengine.optim import OptimWrapper
from torch import distributed, nn

from tests.engine.processes import needs_forks, run_processes
from tests.engine.toy import ToyModel
from vim_mm.engine.optimization import compiled_parts
from vim_mm.engine.optimization.compiled_parts import CompiledParts
from vim_mm.engine.processes import init_process_group

pytest.importorskip('mmseg')
LEVELS = [8, 4, 2, 1]  # sides of the feature maps
IMAGES = [1, 3]  # of each process
# As the compiler divides a step into forward and backward, without its code generation.
BACKEND = 'aot_eager_decomp_partition'


class Segmentor(ToyModel):
    """The head of UPerNet, whose loops and lists end where a graph breaks."""

    def __init__(self, norm: str):
        from vim_mm.segmentation.heads import fast_head_class

        super().__init__()
        torch.manual_seed(0)
        self.head = fast_head_class('UPerHead')(
            in_channels=[4] * 4, in_index=[0, 1, 2, 3], pool_scales=(1, 2), channels=4,
            dropout_ratio=0, num_classes=3, norm_cfg=dict(type=norm), align_corners=False,
        )  # fmt: skip


def step(model: nn.Module, maps: list) -> dict:
    """Gradients and running statistics of a step, the gradients summed over all processes."""
    maps = [each.clone().requires_grad_() for each in maps]
    out = model.head(maps)
    # The sum alone of normalized values would have no gradient.
    (out * torch.linspace(-1, 1, out[0].numel()).view(out[0].shape)).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if distributed.is_initialized():
        for grad in grads.values():
            distributed.all_reduce(grad)
    stats = {name: x for name, x in model.named_buffers() if x.is_floating_point()}
    return grads | stats | {'input': maps[0].grad, 'out': out.detach()}


def _work(rank, folder):
    init_process_group('pytorch')
    exchanged, all_reduce = [], distributed.all_reduce
    distributed.all_reduce = lambda x: (exchanged.append(tuple(x.shape)), all_reduce(x))
    compiled_parts.torch.compile = partial(torch.compile, backend=BACKEND, fullgraph=True)
    model = Segmentor('SyncBN').train()
    layers = [m for m in model.modules() if isinstance(m, nn.SyncBatchNorm)]
    parts = CompiledParts(model, OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1)))
    own = [each.split(IMAGES)[rank] for each in torch.load(folder / 'maps.pth')]
    torch.save(step(model, own), folder / f'{rank}.pth')
    # Forward and backward, and nothing twice. Other shapes are the test's own.
    assert exchanged.count((2, 9)) == 2 * len(layers) > 10
    parts.remove()
    assert not any('forward' in vars(module) for module in model.modules())


@pytest.mark.slow
@needs_forks
def test_two_processes_normalize_as_one(tmp_path):
    """One graph a part: a break is an error here."""
    torch.manual_seed(1)
    maps = [3 * torch.randn(sum(IMAGES), 4, side, side) + 5 for side in LEVELS]
    torch.save(maps, tmp_path / 'maps.pth')
    whole = step(Segmentor('BN').train(), maps)
    run_processes(_work, 2, tmp_path)
    found = [torch.load(tmp_path / f'{rank}.pth') for rank in range(2)]
    for name, value in whole.items():
        ours = [each[name] for each in found]
        ours = [torch.cat(ours)] if name in ('out', 'input') else ours
        for each in ours:
            torch.testing.assert_close(each, value, rtol=1e-4, atol=1e-4)
