"""SyncBN in compiled parts: BN of all processes' images, and one graph for each part."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from mmengine.optim import OptimWrapper
from torch import distributed, nn

from tests.engine.processes import needs_forks, run_processes
from tests.engine.toy import ToyModel
from vim_mm.engine.optimization import compiled_parts, synchronized_norm
from vim_mm.engine.optimization.compiled_parts import CompiledParts
from vim_mm.engine.optimization.synchronized_norm import trace_synchronized_norms
from vim_mm.engine.processes import init_process_group

pytest.importorskip('mmseg')
LEVELS = [8, 4, 2, 1]  # sides of the feature maps
# As the compiler divides a step into forward and backward, without its code generation.
BACKEND = 'aot_eager_decomp_partition'
# What is normalized: by a head or a layer with these options, as a dtype, so many images in each
# process.
CASES = [
    ('head', torch.float32, [1, 3]),
    ('head', torch.float32, [0, 3]),
    (dict(momentum=0.3), torch.float32, [0, 3]),
    (dict(affine=False), torch.float32, [1, 3]),
    (dict(track_running_stats=False), torch.float32, [1, 3]),
    (dict(), torch.bfloat16, [1, 3]),
    (dict(), torch.float16, [1, 3]),
    (dict(), torch.float64, [3, 0]),
]


class Segmentor(ToyModel):
    """The head of UPerNet, whose loops and lists end where a graph breaks, or a layer as one."""

    def __init__(self, norm: str, options: str | dict):
        from vim_mm.segmentation.heads import fast_head_class

        super().__init__()
        self.data_preprocessor.size = (8, 8)
        torch.manual_seed(0)
        if options != 'head':
            self.head = dict(BN=nn.BatchNorm2d, SyncBN=nn.SyncBatchNorm)[norm](4, **options)
            for param in self.head.parameters():
                nn.init.normal_(param)
            return
        self.head = fast_head_class('UPerHead')(
            in_channels=[4] * 4, in_index=[0, 1, 2, 3], pool_scales=(1, 2), channels=4,
            dropout_ratio=0, num_classes=3, norm_cfg=dict(type=norm), align_corners=False,
        )  # fmt: skip


def step(model: nn.Module, maps: list) -> dict:
    """Gradients and running statistics of a step, the gradients summed over all processes."""
    maps = [each.clone().requires_grad_() for each in maps]
    out = model.head(maps[0] if isinstance(model.head, nn.modules.batchnorm._BatchNorm) else maps)
    # The sum alone of normalized values would have no gradient. In 16 bits these are exact.
    weights = torch.arange(out[:1].shape[1:].numel()) % 17 - 5
    (out * weights.view(out.shape[1:]).to(out.dtype)).sum().backward()
    grads = {name: p.grad for name, p in model.head.named_parameters()}
    if distributed.is_initialized():
        for grad in grads.values():
            distributed.all_reduce(grad)
    return {**grads, **dict(model.head.named_buffers()), 'input': maps[0].grad, 'out': out.detach()}


def _work(rank, folder):
    init_process_group('pytorch')
    exchanged, all_reduce = [], distributed.all_reduce
    distributed.all_reduce = lambda x: (exchanged.append(tuple(x.shape)), all_reduce(x))
    compiled_parts.torch.compile = partial(torch.compile, backend=BACKEND, fullgraph=True)
    maps, results = torch.load(folder / 'maps.pth'), []
    for options, dtype, images in CASES:
        torch.compiler.reset()
        exchanged.clear()
        model = Segmentor('SyncBN', options).train()
        model.head.to(torch.promote_types(dtype, torch.float32))
        layers = [m for m in model.modules() if isinstance(m, nn.SyncBatchNorm)]
        parts = CompiledParts(model, OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1)))
        own = [each[: sum(images)].to(dtype).split(images)[rank] for each in maps]
        results.append(step(model, own))
        # Forward and backward, and nothing twice. Other shapes are the test's own.
        assert len(layers) == (10 if options == 'head' else 1)
        assert exchanged.count((2, 9)) == 2 * len(layers)
        parts.remove()
        assert not any('forward' in vars(module) for module in model.modules())
    torch.save(results, folder / f'{rank}.pth')


@pytest.mark.slow
@needs_forks
def test_two_processes_normalize_as_one(tmp_path):
    """One graph a part: a break is an error here."""
    torch.manual_seed(1)
    maps = [3 * torch.randn(4, 4, side, side) + 5 for side in LEVELS]
    torch.save(maps, tmp_path / 'maps.pth')
    run_processes(_work, 2, tmp_path)
    results = [torch.load(tmp_path / f'{rank}.pth') for rank in range(2)]
    for (options, dtype, images), *found in zip(CASES, *results, strict=True):
        used, wide = sum(images), torch.promote_types(dtype, torch.float32)
        model = Segmentor('BN', options).train()
        model.head.to(wide)
        whole = step(model, [each[:used].to(dtype).to(wide) for each in maps])
        for name, value in whole.items():
            ours = [each[name] for each in found]
            if name in ('out', 'input'):
                ours, value = [torch.cat(ours)], value.to(dtype)
            rounding = torch.finfo(dtype).eps if name in ('out', 'input') else 0
            for each in ours:
                torch.testing.assert_close(each, value, rtol=max(1e-4, rounding), atol=1e-4)


class _Own(nn.SyncBatchNorm):
    def forward(self, input):
        return super().forward(input) + 1


class _Named(nn.SyncBatchNorm):
    pass


@pytest.fixture
def two_processes(monkeypatch):
    monkeypatch.setattr(synchronized_norm, 'get_world_size', lambda: 2)


@pytest.mark.usefixtures('two_processes')
def test_what_a_layer_computes_otherwise_stays():
    given = nn.SyncBatchNorm(4)
    given.forward = lambda x: x
    plain = nn.SyncBatchNorm(4), _Named(4)
    model = nn.Sequential(*plain, given, _Own(4), nn.SyncBatchNorm(4, momentum=None))
    before = {module: dict(vars(module)) for module in model}
    undo = trace_synchronized_norms(model)
    changed = [module for module in model if vars(module) != before[module]]
    assert changed == [*plain]
    for each in undo:
        each()
    assert all(vars(module) == before[module] for module in model)


@pytest.mark.usefixtures('two_processes')
def test_a_copy_normalizes_by_its_own_weights(monkeypatch):
    monkeypatch.setattr(torch.compiler, 'is_compiling', lambda: True)
    monkeypatch.setattr(synchronized_norm, 'synchronized_batch_norm', lambda layer, x: layer)
    layer, x = nn.SyncBatchNorm(4), torch.rand(2, 4, 1, 1)
    trace_synchronized_norms(layer)
    copy = deepcopy(layer)
    assert layer(x) is layer and copy(x) is copy
    copy.eval().running_mean.fill_(1)
    assert copy(x).mean() < 0 < layer.eval()(x).mean()
