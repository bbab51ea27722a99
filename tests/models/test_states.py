"""Several sequences in one row, and one sequence in pieces, through the mixer and the block."""

import copy

import pytest
import torch
from torch import nn

from tests.models.plain_operators import fast_block_on_cpu
from tests.models.small import small_mixer
from vim_mm.models import MambaState, fused
from vim_mm.models.block import Block
from vim_mm.ops import METHODS

CAUSAL = [name for name, method in METHODS.items() if method.causal]
LENGTHS = ((5, 1, 9, 2), (17,), (1, 1, 14, 1))
# Of results near 1 in size.
BOUNDS = {torch.float32: dict(rtol=1e-5, atol=2e-6), torch.float64: dict(rtol=1e-12, atol=1e-12)}


def begins(lengths):
    reset = torch.zeros(sum(lengths), dtype=torch.bool)
    reset[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = True
    return reset


def results(module, out, inputs, seed):
    """Outputs, and the gradients of the inputs and of all parameters."""
    named = dict(module.named_parameters())
    grads = torch.autograd.grad(out, [*inputs, *named.values()], seed)
    return dict(zip(['out', 'x', *named], [out, *grads], strict=True))


def packed_and_alone(module, call, dtype):
    """Both of rows of different sequences, of which each is also called by itself."""
    x = torch.randn(len(LENGTHS), 17, 8, dtype=dtype, requires_grad=True)
    reset = torch.stack([begins(lengths) for lengths in LENGTHS])
    seed = torch.randn_like(x)
    packed = results(module, call(x, reset=reset), [x], seed)
    rows = [
        torch.cat([call(piece) for piece in row.split(lengths, dim=1)], dim=1)
        for row, lengths in zip(x.split(1), LENGTHS, strict=True)
    ]
    return packed, results(module, torch.cat(rows), [x], seed)


@pytest.mark.parametrize('dtype', BOUNDS)
@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('bimamba_type', ['none', 'v1', 'v2'])
def test_packed_sequences_equal_each_alone(bimamba_type, method, dtype):
    mixer = small_mixer(bimamba_type=bimamba_type, discretization_method=method).to(dtype)
    packed, alone = packed_and_alone(mixer, mixer, dtype)
    torch.testing.assert_close(packed, alone, **BOUNDS[dtype])


@pytest.mark.parametrize('backend', ['torch', 'reference'])
@pytest.mark.parametrize('called', [(), ('conv1d', 'x_proj_b'), ('in_proj', 'conv1d_b', 'dt_proj')])
def test_packed_with_modules_that_are_called(called, backend):
    """A hook has the module called; the convolution with the taps of each token."""
    mixer = small_mixer(backend=backend).double()
    for name in called:
        getattr(mixer, name).register_forward_hook(lambda *_: None)
    packed, alone = packed_and_alone(mixer, mixer, torch.float64)
    torch.testing.assert_close(packed, alone, **BOUNDS[torch.float64])


@pytest.mark.parametrize('bad', [float('inf'), float('nan')])
@pytest.mark.parametrize('method', METHODS)
def test_what_is_not_finite_stays_in_its_sequence(method, bad):
    mixer = small_mixer(discretization_method=method).double()
    x = torch.randn(1, 17, 8, dtype=torch.double)
    spoiled = torch.cat([torch.full_like(x[:, :5], bad), x[:, 5:]], dim=1)
    out = mixer(spoiled, reset=begins((5, 12))[None])
    torch.testing.assert_close(out[:, 5:], mixer(x[:, 5:]))


def test_packed_through_a_block():
    block = Block(8, 0.0, dict(d_state=4)).double()
    packed, alone = packed_and_alone(
        block, lambda x, reset=None: sum(block(x, x * 0.5, reset)), torch.float64
    )
    torch.testing.assert_close(packed, alone, **BOUNDS[torch.float64])


def test_a_block_hands_reset_to_a_mixer_that_must_be_called():
    block = Block(8, 0.0, dict(d_state=4)).double()
    block.mixer.register_forward_hook(lambda *_: None)
    packed, alone = packed_and_alone(
        block, lambda x, reset=None: sum(block(x, None, reset)), torch.float64
    )
    torch.testing.assert_close(packed, alone, **BOUNDS[torch.float64])


@pytest.mark.parametrize('dtype', BOUNDS)
@pytest.mark.parametrize('method', CAUSAL)
def test_pieces_equal_the_whole(method, dtype):
    """Pieces shorter than the convolution too; gradients go back through the states."""
    mixer = small_mixer(bimamba_type='none', discretization_method=method).to(dtype)
    x = torch.randn(2, 12, 8, dtype=dtype, requires_grad=True)
    whole, last = mixer(x, return_last_state=True)
    pieces, state = [], None
    for piece in x.split([5, 1, 2, 4], dim=1):
        out, state = mixer(piece, initial_state=state, return_last_state=True)
        pieces.append(out)
    joined = torch.cat(pieces, dim=1)
    torch.testing.assert_close((joined, *state), (whole, *last), **BOUNDS[dtype])
    seed = torch.randn_like(x)
    torch.testing.assert_close(
        results(mixer, joined, [x], seed), results(mixer, whole, [x], seed), **BOUNDS[dtype]
    )
    torch.testing.assert_close(mixer(x), whole, **BOUNDS[dtype])


@pytest.mark.parametrize('called', [(), ('conv1d',)])
def test_pieces_of_packed_sequences(called):
    """A boundary in a piece, and one at its first token, where the state before is dropped."""
    mixer = small_mixer(bimamba_type='none').double()
    for name in called:
        getattr(mixer, name).register_forward_hook(lambda *_: None)
    x = torch.randn(1, 12, 8, dtype=torch.double)
    reset = begins((5, 2, 5))[None]
    whole, last = mixer(x, reset=reset, return_last_state=True)
    pieces, state = [], None
    for span in (slice(0, 5), slice(5, 8), slice(8, 12)):
        out, state = mixer(
            x[:, span], reset=reset[:, span], initial_state=state, return_last_state=True
        )
        pieces.append(out)
    torch.testing.assert_close((torch.cat(pieces, 1), *state), (whole, *last))


def test_the_state_of_a_sequence_is_its_own():
    """What is returned belongs to the last sequence of the row."""
    mixer = small_mixer(bimamba_type='none').double()
    x = torch.randn(1, 12, 8, dtype=torch.double)
    _, last = mixer(x, reset=begins((10, 2))[None], return_last_state=True)
    _, expected = mixer(x[:, 10:], return_last_state=True)
    torch.testing.assert_close(last, expected)
    assert not last.conv[..., 0].any()  # three taps, of a sequence of two tokens


def test_states_in_autocast():
    mixer = small_mixer(bimamba_type='none')
    x = torch.randn(2, 12, 8)
    with torch.autocast('cpu', torch.bfloat16):
        whole = mixer(x)
        first, state = mixer(x[:, :7], return_last_state=True)
        second = mixer(x[:, 7:], initial_state=state)
    assert state.scan.dtype == torch.float32
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=0.05, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize('bimamba_type', ['none', 'v2'])
def test_compiled(bimamba_type):
    mixer = small_mixer(bimamba_type=bimamba_type)
    compiled = torch.compile(mixer, fullgraph=True, backend='aot_eager')
    x, reset = torch.randn(1, 17, 8, requires_grad=True), begins(LENGTHS[0])[None]
    states = dict(reset=reset)
    if bimamba_type == 'none':
        with torch.no_grad():
            states['initial_state'] = mixer(x, return_last_state=True)[1]
    seed = torch.randn(1, 17, 8)
    torch.testing.assert_close(
        results(mixer, compiled(x, **states), [x], seed),
        results(mixer, mixer(x, **states), [x], seed),
        rtol=1e-4,
        atol=1e-4,
    )


STATE = MambaState(torch.zeros(2, 16, 3), torch.zeros(2, 16, 4))


@pytest.mark.parametrize(
    'mixer, states, message',
    [
        pytest.param({}, dict(initial_state=STATE), "'none'.*'v2'.*not continued", id='v2'),
        pytest.param(
            dict(bimamba_type='v1'), dict(return_last_state=True), "'v1'.*not continued", id='v1'
        ),
        pytest.param(
            dict(bimamba_type='none', discretization_method='poly'),
            dict(return_last_state=True),
            "'poly'.*not continued",
            id='poly',
        ),
        pytest.param({}, dict(reset=torch.zeros(2, 6)), 'reset: expected torch.bool', id='dtype'),
        pytest.param({}, dict(reset=torch.zeros(6).bool()), r'reset: .*\(2, 6\)', id='shape'),
        pytest.param({}, dict(reset=[True]), 'reset: expected a tensor', id='list'),
        pytest.param(
            dict(bimamba_type='none'), dict(initial_state=STATE.scan), 'MambaState', id='tensor'
        ),
        pytest.param(
            dict(bimamba_type='none'),
            dict(initial_state=STATE._replace(conv=torch.zeros(1, 16, 3))),
            r'initial_state.conv: expected shape \(2, 16, 3\)',
            id='conv',
        ),
        pytest.param(
            dict(bimamba_type='none'),
            dict(initial_state=STATE._replace(scan=torch.zeros(2, 16, 4).double())),
            'initial_state.scan: expected torch.float32, got torch.float64',
            id='scan',
        ),
        pytest.param(
            dict(bimamba_type='none'),
            dict(initial_state=STATE._replace(conv=torch.zeros(2, 16, 3).double())),
            'initial_state.conv: expected torch.float32, got torch.float64',
            id='conv_dtype',
        ),
        pytest.param(
            dict(bimamba_type='none'),
            dict(initial_state=STATE._replace(conv=torch.zeros(2, 16, 3, dtype=torch.int32))),
            'initial_state.conv: expected torch.float32, got torch.int32',
            id='conv_int',
        ),
        pytest.param(
            dict(bimamba_type='none'),
            dict(initial_state=STATE._replace(scan=STATE.scan.to('meta'))),
            'initial_state.scan: expected on cpu, where hidden_states is, got meta',
            id='device',
        ),
        pytest.param(
            dict(bimamba_type='none'), dict(return_last_state=1), 'return_last_state', id='int'
        ),
        pytest.param({}, dict(return_last_state=0), 'return_last_state', id='zero'),
    ],
)
def test_bad_states(mixer, states, message):
    with pytest.raises((TypeError, ValueError), match=message):
        small_mixer(**mixer)(torch.randn(2, 6, 8), **states)


def test_a_convolution_of_another_length_is_refused():
    mixer = small_mixer(bimamba_type='none')
    mixer.conv1d = nn.Sequential(nn.Conv1d(16, 16, 3, groups=16))
    with pytest.raises(ValueError, match='conv1d must turn'):
        mixer(torch.randn(1, 6, 8), reset=begins((2, 4))[None])


@pytest.mark.parametrize('bimamba_type', ['none', 'v2'])
def test_packed_through_the_fast_block(bimamba_type, monkeypatch):
    """What Python does around the operator, whose place plain PyTorch takes."""
    block = Block(8, 0.0, dict(d_state=4, bimamba_type=bimamba_type))
    for call in (block.mixer, lambda x, reset=None: sum(block(x, x * 0.5, reset))):
        module = block.mixer if call is block.mixer else block
        with fast_block_on_cpu(monkeypatch), torch.profiler.profile() as profile:
            packed, alone = packed_and_alone(module, call, torch.float32)
        assert any(event.key == 'vim_mm::mixer_fwd' for event in profile.key_averages())
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
        monkeypatch.undo()


@pytest.mark.slow
def test_the_fast_block_compiles_with_resets(monkeypatch):
    mixer = small_mixer()
    x, reset = torch.randn(1, 17, 8, requires_grad=True), begins(LENGTHS[0])[None]
    seed = torch.randn(1, 17, 8)
    expected = results(mixer, mixer(x, reset=reset), [x], seed)
    with fast_block_on_cpu(monkeypatch):
        compiled = torch.compile(mixer, fullgraph=True, backend='aot_eager')
        with torch.profiler.profile() as profile:
            out = compiled(x, reset=reset)
        found = results(mixer, out, [x], seed)
    assert any(event.key == 'vim_mm::mixer_fwd' for event in profile.key_averages())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_state_and_triton_take_the_plain_path(monkeypatch):
    monkeypatch.setattr(fused, 'fused_path', lambda mixer, x: (torch.float32, mixer.backend))
    x = torch.zeros(1, 4, 8)
    for backend, with_reset in (('native', True), ('triton', False)):
        mixer = small_mixer(backend=backend)
        assert fused.path_of_mixer(mixer, x, with_reset=with_reset).fused is not None
        assert fused.path_of_mixer(mixer, x, with_states=True).fused is None
    assert fused.path_of_mixer(mixer, x, with_reset=True).fused is None
    block = Block(8, 0.0, dict(d_state=4, backend='triton'))
    path = fused.path_of_block(block.norm, block.mixer, type(block.mixer), x, True)
    assert path.norm == (torch.float32, 'triton') and path.mixer.fused is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('bimamba_type', ['none', 'v1', 'v2'])
def test_packed_through_the_fast_block_on_cuda(bimamba_type, method, dtype):
    """Against the plain mixer in float64; sequences end in chunks, at their edges and beyond."""
    lengths = ((64, 1, 70, 2, 128, 3, 300), (568,), (63, 65, 128, 312))
    mixer = small_mixer(d_model=24, bimamba_type=bimamba_type, discretization_method=method)
    mixer = mixer.cuda()
    truth = copy.deepcopy(mixer).double()
    x = torch.randn(len(lengths), 568, 24, device='cuda', requires_grad=True)
    reset = torch.stack([begins(row) for row in lengths]).cuda()
    seed = torch.randn_like(x)
    assert fused.path_of_mixer(mixer, x, with_reset=True).fused is not None
    with torch.autocast('cuda', dtype, enabled=dtype != torch.float32):
        out = mixer(x, reset=reset)
    found = results(mixer, out, [x], seed.to(out.dtype))
    # Each sequence alone, with the gradients that it adds to those of the parameters. These may
    # cancel, and 16 bits round each: an error is measured by their sizes, not by that of the sum.
    alone = []
    for row, seeds, pieces in zip(x.double(), seed.to(out.dtype).double(), lengths, strict=True):
        for piece, grad in zip(row.split(pieces), seeds.split(pieces), strict=True):
            piece = piece.detach()[None].requires_grad_()
            alone.append(results(truth, truth(piece), [piece], grad[None]))
    for name, value in found.items():
        parts = [sequence[name] for sequence in alone]
        if name in ('out', 'x'):
            expected = torch.cat(parts, dim=1).view_as(value)
            size = expected.abs().max()
        else:
            expected = sum(parts)
            size = sum(part.abs().max() for part in parts)
        error = (value - expected).abs().max()
        if dtype == torch.float32:
            assert error <= 1e-5 * expected.abs().max(), name
        else:
            assert error <= 0.06 * size, name
