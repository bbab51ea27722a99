"""Predictions in bfloat16, compiled and as CUDA graphs, against the plain ones."""

import copy
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import vim_mm
from tests.graphs import GraphOfCalls, record_calls
from tests.models.small import small_backbone
from vim_mm import acceleration
from vim_mm.acceleration import GraphedCall, accelerate, parts_of


def needs_cuda(test):
    """Marks of a test that makes graphs."""
    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
    return pytest.mark.cuda(missing(test))


class Segmentor(nn.Module):
    """As MMEngine's kin: parts that are called one after the other."""

    def __init__(self):
        super().__init__()
        self.data_preprocessor = nn.Identity()
        self.backbone = small_backbone(out_indices=(0, 1))
        width = self.backbone.embed_dims
        self.decode_head = nn.Sequential(nn.Conv2d(width, 8, 3, padding=1), nn.ReLU())
        self.roi_head = nn.Module()
        self.roi_head.bbox_head = nn.ModuleList([nn.Conv2d(8, 5, 1)])

    def forward(self, x):
        maps = self.backbone(x)
        self.dtypes = [map.dtype for map in maps]
        return self.roi_head.bbox_head[0](self.decode_head(maps[-1]))


def models():
    plain = Segmentor().eval()
    return plain, copy.deepcopy(plain)


def test_parts():
    model = Segmentor()
    assert [*parts_of(model)] == [model.backbone, model.decode_head, model.roi_head.bbox_head[0]]
    assert [*parts_of(model, of_pictures=True)] == [model.backbone, model.decode_head]
    assert [*parts_of(model.backbone)] == [model.backbone]


@torch.no_grad()
def test_amp_computes_in_bfloat16_and_hands_over_float32():
    plain, fast = models()
    assert vim_mm.accelerate(fast, amp=True) is fast
    x = torch.randn(2, 3, 40, 24)
    expected, result = plain(x), fast(x)
    assert fast.dtypes == [torch.float32] * 2 and result.dtype == torch.float32
    assert not torch.equal(result, expected)
    torch.testing.assert_close(result, expected, rtol=0.05, atol=0.05)
    assert fast.state_dict().keys() == plain.state_dict().keys()


@torch.no_grad()
def test_without_options_nothing_changes():
    plain, fast = models()
    accelerate(fast)
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(fast(x), plain(x))


@pytest.mark.slow
@torch.no_grad()
def test_compile_takes_the_same_parts_and_differs_by_rounding(monkeypatch):
    compiled = []

    def compile_quickly(function):
        compiled.append(function)
        # Inductor takes minutes; what it is given is traced in the same way.
        return original(function, backend='aot_eager')

    original = torch.compile
    monkeypatch.setattr(torch, 'compile', compile_quickly)
    plain, fast = models()
    accelerate(fast, compile=True, amp=True)
    accelerate(plain, amp=True)
    assert [call.__wrapped__.__self__ for call in compiled] == [fast.backbone, fast.decode_head]
    x = torch.randn(1, 3, 40, 24)
    torch.testing.assert_close(fast(x), plain(x), rtol=0.02, atol=0.02)


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a CUDA device')
def test_a_graph_needs_a_gpu():
    with pytest.raises(RuntimeError, match='need a CUDA device'):
        accelerate(nn.Linear(2, 2), graph=True)


def test_gradients_and_tensors_elsewhere_make_no_graph():
    call = GraphedCall(lambda x: 2 * x, 'double')
    with torch.no_grad():
        assert torch.equal(call(torch.ones(3)), torch.full((3,), 2.0))
    assert call(torch.ones(3, requires_grad=True)).requires_grad
    assert not call.graphs


@pytest.fixture
def graphs_of_calls(monkeypatch):
    """Graphs on the CPU."""
    monkeypatch.setattr(acceleration, 'record', record_calls)
    monkeypatch.setattr(GraphedCall, '_can_be_recorded', lambda self, leaves: True)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'graph_pool_handle', lambda: (0, 0))
    monkeypatch.setattr(GraphOfCalls, 'replays', 0)


def check_sizes_reuse_their_graphs(plain, fast, device):
    accelerate(fast, graph=True)
    kept = []
    for size in [(32, 32), (48, 40), (32, 32), (48, 40), (32, 32), (48, 40)]:
        x = torch.randn(2, 3, *size, device=device)
        kept.append((fast(x), plain(x)))
    for result, expected in kept:  # a replay leaves what earlier ones returned
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    calls = [part.forward for part in parts_of(fast, of_pictures=True)]
    assert all(len(call.graphs) == 2 and None not in call.graphs.values() for call in calls)
    return len(calls)


@pytest.mark.usefixtures('graphs_of_calls')
@torch.no_grad()
def test_a_graph_is_made_when_a_size_comes_again():
    calls = check_sizes_reuse_their_graphs(*models(), 'cpu')
    assert GraphOfCalls.replays == 4 * calls


@pytest.mark.usefixtures('graphs_of_calls')
@torch.no_grad()
def test_the_sizes_seen_last_are_kept(monkeypatch):
    monkeypatch.setattr(acceleration, 'MAX_GRAPHS', 2)
    call = GraphedCall(lambda x: x + 1, 'add')
    for length in (1, 1, 2, 2, 1, 3):
        x = torch.randn(length)
        assert torch.equal(call(x), x + 1)
    assert [graph is not None for graph in call.graphs.values()] == [True, False]


@pytest.mark.usefixtures('graphs_of_calls')
def test_dtypes_strides_and_structures_have_graphs_of_their_own():
    call = GraphedCall(lambda x: {'twice': [2 * y for y in x]}, 'double')
    inputs = [torch.randn(3, 4), torch.randn(4, 3).T, torch.randn(3, 4).double()]
    for x in ([inputs[0]], [inputs[1]], [inputs[2]], (inputs[0],), [inputs[0]]):
        for _ in range(3):
            with torch.no_grad():
                assert torch.equal(call(x)['twice'][0], 2 * x[0])
    assert len(call.graphs) == 4


@torch.no_grad()
def test_a_graph_casts_weights_itself_and_leaves_no_cast_behind(monkeypatch):
    """Autocast of the caller keeps casts until it ends: a graph would read them for ever."""
    monkeypatch.setattr(torch.cuda, 'CUDAGraph', object)
    monkeypatch.setattr(torch.cuda, 'graph', lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 0)
    monkeypatch.setattr(acceleration, '_capture_stream', lambda device: None)
    layer, x = nn.Linear(3, 4), torch.randn(2, 3)

    def truth():
        with torch.autocast('cpu', torch.bfloat16, cache_enabled=False):
            return layer(x)

    with torch.autocast('cpu', torch.bfloat16):
        layer(x)
        layer.weight.neg_()
        assert not torch.equal(layer(x), truth())  # so autocast keeps it
        assert torch.equal(acceleration.record(lambda: layer(x))[1], truth())
        layer.weight.neg_()
        assert torch.equal(layer(x), truth())


@needs_cuda
@torch.no_grad()
def test_a_graph_under_autocast_of_the_caller():
    plain = small_backbone().eval().cuda()
    fast = accelerate(copy.deepcopy(plain), graph=True)
    images = [torch.randn(2, 3, 32, 32, device='cuda') for _ in range(4)]
    with torch.autocast('cuda', torch.bfloat16):
        for x in images[:2]:
            fast(x)
    for x in images[2:]:  # in a context each, as of test_step
        with torch.autocast('cuda', torch.bfloat16):
            assert torch.equal(fast(x)[0], plain(x)[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason='needs two CUDA devices')
@needs_cuda
@torch.no_grad()
def test_graphs_of_two_gpus_the_current_one_and_another():
    plain = small_backbone().eval()
    for device in ('cuda:0', 'cuda:1'):
        model = copy.deepcopy(plain).to(device)
        check_sizes_reuse_their_graphs(model, copy.deepcopy(model), device)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize('amp', [False, True])
@pytest.mark.parametrize('kind', ['whole', 'parts'])
@needs_cuda
@torch.no_grad()
def test_graphs_give_the_same_bits(kind, amp):
    plain = (Segmentor() if kind == 'parts' else small_backbone()).eval().cuda()
    fast = copy.deepcopy(plain)
    for model in (plain, fast):
        accelerate(model, amp=amp)
    check_sizes_reuse_their_graphs(plain, fast, 'cuda')


WAITING = """
import torch
from vim_mm.acceleration import GraphedCall
call = GraphedCall(lambda x: x * x.sum().item(), 'Waiting')
x = torch.ones(3, device='cuda')
with torch.no_grad():
    call(x)
    call(x)
"""


@needs_cuda
def test_a_part_that_waits_for_the_device_is_named():
    # In a process of its own: a failed capture leaves the generator of random numbers unusable.
    done = subprocess.run([sys.executable, '-c', WAITING], capture_output=True, text=True)
    assert 'RuntimeError: Waiting cannot be recorded as a CUDA graph: ' in done.stderr


GARBAGE = """
import torch
from vim_mm.acceleration import GraphedCall

class Waiting:
    def __init__(self):
        self.itself = self
    def __del__(self):
        torch.cuda.synchronize()

def double(x):
    Waiting()
    many = [[i] for i in range(100_000)]  # after some of them garbage is collected
    return 2 * x

call = GraphedCall(double, 'Double')
x = torch.ones(3, device='cuda')
with torch.no_grad():
    call(x)
    print(call(x).tolist(), len(call.graphs))
"""


@needs_cuda
def test_garbage_that_waits_for_the_device_does_not_end_a_recording():
    done = subprocess.run([sys.executable, '-c', GARBAGE], capture_output=True, text=True)
    assert done.stdout == '[2.0, 2.0, 2.0] 1\n', done.stderr
