"""The compiled scan under what PyTorch does to an operator: opcheck, compile, autocast, DDP."""

import functools

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.ops.inputs import make_inputs, results_and_gradients
from vim_mm.ops import selective_scan_fn
from vim_mm.ops.discretization import METHODS, method_id

# To PyTorch a method is a number among an operator's arguments. In a hurry two speak for all.
# How a method is traced is the same for all; of one that needs the next step it is `poly`.
one_causal_one_not = pytest.mark.parametrize(
    'method',
    [
        pytest.param('zoh'),
        pytest.param('poly', marks=pytest.mark.slow),
        *(pytest.param(m, marks=pytest.mark.slowest) for m in METHODS if m not in ('zoh', 'poly')),
    ],
)
# What deterministic mode (tests/ops/conftest.py) makes of empty tensors is not the same eagerly
# and compiled.
pytestmark = pytest.mark.usefixtures('nondeterministic')


def native_arguments(method, requires_grad=True, states=False, **sizes):
    """Positional arguments of the native forward op: two groups, one per direction.

    ``states``: with resets and, of a causal method, a state to begin with.
    """
    x = {name: t.detach() for name, t in make_inputs(form='grouped', **sizes).items()}
    split = {
        name: t.unflatten(1, (2, -1)) if name in ('u', 'delta', 'z') else t.unflatten(0, (2, -1))
        for name, t in x.items()
        if name not in ('B', 'C')
    }
    x |= split
    tensors = [x[name].requires_grad_(requires_grad) for name in make_inputs()]
    initial_state = reset = None
    if states:
        batch, groups, channels, length = x['u'].shape
        reset = torch.rand(batch, length) < 0.4
        if METHODS[method].causal:
            initial_state = torch.randn(batch, groups, channels, x['A'].shape[-1]).to(x['B'])
            initial_state.requires_grad_(requires_grad)
    return (*tensors, initial_state, reset, True, method_id(method), [0, 1])


without_and_with_states = pytest.mark.parametrize('states', [False, True], ids=['', 'states'])


@one_causal_one_not
@without_and_with_states
@pytest.mark.parametrize('is_complex', [False, True], ids=['real', 'complex'])
def test_opcheck_forward(method, is_complex, states):
    arguments = native_arguments(method, is_complex=is_complex, states=states)
    torch.library.opcheck(torch.ops.vim_mm.selective_scan_fwd.default, arguments)


def test_opcheck_forward_without_optional_inputs():
    arguments = list(native_arguments('zoh', dtype=torch.float32))
    arguments[5:8] = None, None, None
    torch.library.opcheck(torch.ops.vim_mm.selective_scan_fwd.default, tuple(arguments))


@one_causal_one_not
@without_and_with_states
def test_opcheck_backward(method, states):
    arguments = native_arguments(method, requires_grad=False, states=states)
    *results, edges = torch.ops.vim_mm.selective_scan_fwd(*arguments)
    grads = [torch.randn_like(x) for x in results]
    op = torch.ops.vim_mm.selective_scan_bwd.default
    torch.library.opcheck(op, (*grads, edges, *arguments))
    torch.library.opcheck(op, (None, grads[1], edges, *arguments))


@pytest.mark.parametrize('device', ['cpu', 'cuda'])
def test_strides_of_the_gradient_of_a_state(device):
    """As compiled code expects them: on CUDA kernels write it contiguously."""
    with FakeTensorMode():
        u = torch.empty(2, 1, 3, 8, device=device)
        A, B = torch.empty(1, 3, 4, device=device), torch.empty(2, 1, 4, 8, device=device)
        state = torch.empty(2, 1, 4, 3, device=device).mT
        given = (u, u, A, B, B, None, None, None, state, None, True, method_id('zoh'), [0])
        *results, edges = torch.ops.vim_mm.selective_scan_fwd(*given)
        grads = torch.ops.vim_mm.selective_scan_bwd(*results, edges, *given)
    assert grads[8].shape == state.shape
    assert grads[8].is_contiguous() == (device == 'cuda')


@pytest.mark.slow
@one_causal_one_not
def test_compile_in_one_graph(method):
    """Static lengths, and one graph for every length when they are dynamic."""
    torch.compiler.reset()
    scan = functools.partial(
        selective_scan_fn,
        delta_softplus=True,
        discretization_method=method,
        return_last_state=True,
    )
    compiled = torch.compile(scan, fullgraph=True, backend='aot_eager')
    counter = torch._dynamo.testing.CompileCounterWithBackend('aot_eager')
    dynamic = torch.compile(scan, fullgraph=True, dynamic=True, backend=counter)
    for length in (9, 17, 33):
        inputs = make_inputs(length=length)
        expected = run(scan, inputs)
        for form in (compiled, dynamic):
            for value, truth in zip(run(form, inputs), expected, strict=True):
                torch.testing.assert_close(value, truth, rtol=0, atol=0)
    assert counter.frame_count == 1


def run(scan, inputs):
    out, last_state = scan(**inputs)
    grads = torch.autograd.grad(out.sum() + last_state.sum(), list(inputs.values()))
    return (out, last_state, *grads)


@pytest.mark.slow
def test_compile_with_inductor():
    """The default backend once, with code around the op that it fuses."""
    torch.compiler.reset()

    def block(u, **rest):
        return torch.tanh(selective_scan_fn(2 * u, **rest) + 1)

    inputs = make_inputs(dtype=torch.float32, length=33)
    u = inputs.pop('u')
    compiled = torch.compile(block, fullgraph=True)
    torch.testing.assert_close(compiled(u, **inputs), block(u, **inputs))


def test_autocast():
    """Autocast leaves the op's inputs alone: it takes any mix, and computes in fp32."""
    inputs = make_inputs(dtype=torch.float32)
    inputs['u'] = inputs['u'].detach().bfloat16().requires_grad_()
    with torch.autocast('cpu', dtype=torch.bfloat16):
        inside = selective_scan_fn(**inputs, return_last_state=True)
    outside = selective_scan_fn(**inputs, return_last_state=True)
    assert inside[0].dtype == torch.bfloat16
    assert inside[1].dtype == torch.float32
    for value, truth in zip(inside, outside, strict=True):
        assert torch.equal(value, truth)


def test_activation_checkpointing():
    inputs = make_inputs()

    def checkpointed(**kwargs):
        return checkpoint(selective_scan_fn, use_reentrant=False, **kwargs)

    results = results_and_gradients(checkpointed, inputs)
    for name, expected in results_and_gradients(selective_scan_fn, inputs).items():
        assert torch.equal(results[name], expected), name


class _Scan(nn.Module):
    def __init__(self, channels: int, states: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(channels, states))
        self.D = nn.Parameter(torch.ones(channels))
        self.delta_bias = nn.Parameter(torch.zeros(channels))

    def forward(self, u, delta, B, C):
        return selective_scan_fn(
            u, delta, -self.A_log.exp(), B, C, self.D, delta_bias=self.delta_bias,
            delta_softplus=True, discretization_method='bilinear',
        )  # fmt: skip


def _ddp_worker(rank, folder, batch):
    torch.distributed.init_process_group(
        'gloo', init_method=f'file://{folder}/rendezvous', rank=rank, world_size=2
    )
    model = DistributedDataParallel(_Scan(4, 3))
    loss = model(*(x[rank::2] for x in batch)).square().mean()
    loss.backward()
    if rank == 0:
        torch.save([p.grad for p in model.parameters()], f'{folder}/grads.pt')
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_distributed_data_parallel(tmp_path):
    """Two gloo processes with half of the batch each have the gradients of one with all of it."""
    inputs = make_inputs(dtype=torch.float32)
    batch = tuple(inputs[name].detach() for name in ('u', 'delta', 'B', 'C'))
    mp.spawn(_ddp_worker, args=(str(tmp_path), batch), nprocs=2)
    model = _Scan(4, 3)
    model(*batch).square().mean().backward()
    grads = torch.load(tmp_path / 'grads.pt', weights_only=True)
    for grad, parameter in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad)
