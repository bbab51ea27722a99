from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from vim_mm.ops.causal_conv1d import causal_conv1d


def inputs(length=9, width=4, channels=3):
    x = torch.randn(2, channels, length, dtype=torch.double)
    return x, torch.randn(channels, width, dtype=torch.double), torch.randn(channels).double()


@pytest.mark.parametrize('length', [1, 2, 9])
@pytest.mark.parametrize('width', [1, 3, 4])
def test_it_is_the_causal_sum(length, width):
    x, weight, bias = inputs(length, width)
    expected = bias[:, None].expand_as(x).clone()
    for t in range(length):
        for w in range(width):
            if t - (width - 1) + w >= 0:
                expected[..., t] += weight[:, w] * x[..., t - (width - 1) + w]
    torch.testing.assert_close(causal_conv1d(x, weight, bias), expected)


@pytest.mark.parametrize('length', [1, 2, 9])
@pytest.mark.parametrize('activation', [None, 'silu'])
def test_reverse_equals_flip_convolve_flip(length, activation):
    x, weight, bias = inputs(length)
    flipped = causal_conv1d(x.flip(-1), weight, bias, activation=activation).flip(-1)
    out = causal_conv1d(x, weight, bias, reverse=True, activation=activation)
    torch.testing.assert_close(out, flipped)


@pytest.mark.parametrize('reverse', [False, True])
def test_strided_input_and_gradients(reverse):
    x, weight, bias = inputs()
    x = x.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    assert not x.is_contiguous()
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    assert torch.autograd.gradcheck(lambda *t: causal_conv1d(*t, reverse, 'silu'), leaves)


def test_silu_is_applied_after_the_bias():
    x, weight, bias = inputs()
    torch.testing.assert_close(
        causal_conv1d(x, weight, bias, activation='silu'), F.silu(causal_conv1d(x, weight, bias))
    )


def test_autocast_dtype():
    x, weight, bias = (t.float() for t in inputs())
    with torch.autocast('cpu', torch.bfloat16):
        out = causal_conv1d(x, weight, bias, activation='silu')
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out.float(), causal_conv1d(x, weight, bias, activation='silu'), rtol=0.05, atol=0.05
    )


@pytest.mark.parametrize(
    'change, message',
    [
        pytest.param(dict(x=torch.zeros(3, 9)), r'x must be .* got shape \(3, 9\)', id='x'),
        pytest.param(dict(weight=torch.zeros(4, 4)), r'weight must be \(3, W\)', id='weight'),
        pytest.param(dict(x=torch.zeros(2, 0, 9)), 'x must be .*, D from 1', id='no-channels'),
        pytest.param(dict(weight=torch.zeros(3, 0)), r'weight .*, W from 1, got .*0', id='no-taps'),
        pytest.param(dict(x=torch.zeros(2, 3, 9).int()), 'x must be floating .*int32', id='int'),
        pytest.param(dict(weight=torch.zeros(3, 4).int()), 'weight must be .*int32', id='int-taps'),
        pytest.param(
            dict(weight=torch.zeros(3, 4).half()), 'weight must be .*float32.*float16', id='half'
        ),
        pytest.param(dict(bias=torch.zeros(3).double()), 'bias must be .*float64', id='double'),
        pytest.param(dict(bias=torch.zeros(3).cfloat()), 'bias must be .*complex64', id='complex'),
        pytest.param(dict(x=torch.zeros(2, 3, 9).to_sparse()), 'x: .*sparse_coo', id='sparse'),
        pytest.param(dict(weight=[1.0]), 'weight: expected a tensor, got list', id='list'),
        pytest.param(
            dict(weight=torch.zeros(3, 4, device='meta')), 'weight: .* got meta', id='device'
        ),
        pytest.param(dict(bias=torch.zeros(2)), r'bias must be \(3,\).* \(2,\)', id='bias'),
        pytest.param(dict(activation='relu'), "activation must be .* 'relu'", id='activation'),
    ],
)
def test_bad_arguments(change, message):
    arguments = dict(x=torch.zeros(2, 3, 9), weight=torch.zeros(3, 4), bias=torch.zeros(3))
    with pytest.raises((TypeError, ValueError), match=message):
        causal_conv1d(**(arguments | change))


@pytest.mark.parametrize('autocast', [False, True])
@pytest.mark.parametrize('width', [1, 4])
@pytest.mark.parametrize('shape', [(2, 3, 0), (0, 3, 9), (0, 3, 0)])
def test_convolutions_of_nothing(shape, width, autocast):
    leaves = [torch.randn(size, requires_grad=True) for size in (shape, (3, width), (3,))]
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        out = causal_conv1d(*leaves, reverse=True, activation='silu')
    assert out.shape == shape and out.dtype == (torch.bfloat16 if autocast else torch.float32)
    for leaf, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert grad.shape == leaf.shape and not grad.any()


def reset_at(length, *steps, batch=2):
    """Sequences that begin at these steps of the first row, and one step later in the others."""
    reset = torch.zeros(batch, length, dtype=torch.bool)
    for b in range(batch):
        for step in steps:
            if step + b < length:
                reset[b, step + b] = True
    return reset


def alone(x, reset, convolve):
    """Each sequence of each row by a call of its own, put together again."""
    rows = []
    for b, starts in enumerate(reset):
        edges = [0, *(t for t in starts.nonzero().flatten().tolist() if t > 0), x.shape[2]]
        pieces = [convolve(x[b : b + 1, :, s:e]) for s, e in pairwise(edges)]
        rows.append(torch.cat(pieces, dim=2))
    return torch.cat(rows)


@pytest.mark.parametrize('width', [1, 2, 4, 6])
@pytest.mark.parametrize('starts', [(), (0,), (1, 2, 3), (0, 4, 9, 11)])
@pytest.mark.parametrize('reverse', [False, True])
def test_packed_sequences_equal_each_alone(reverse, starts, width):
    x, weight, bias = (t.requires_grad_() for t in inputs(13, width))
    reset = reset_at(13, *starts)
    out = causal_conv1d(x, weight, bias, reverse, 'silu', reset=reset)
    expected = alone(x, reset, lambda piece: causal_conv1d(piece, weight, bias, reverse, 'silu'))
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    seed = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, [x, weight, bias], seed),
        torch.autograd.grad(expected, [x, weight, bias], seed),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize('reverse', [False, True])
@pytest.mark.parametrize('bad', [float('inf'), float('nan')])
def test_what_is_not_finite_stays_in_its_sequence(bad, reverse):
    x, weight, bias = inputs()
    x[:, :, :4] = bad
    reset = torch.zeros(2, 9, dtype=torch.bool)
    reset[:, 4] = True
    out = causal_conv1d(x.requires_grad_(), weight, bias, reverse, reset=reset)
    assert out[:, :, 4:].isfinite().all() and not out[:, :, :4].isfinite().any()
    (grad,) = torch.autograd.grad(out[:, :, 4:].sum(), x)
    assert grad.isfinite().all() and not grad[:, :, :4].any()


@pytest.mark.parametrize('width', [1, 4])
@pytest.mark.parametrize('cuts', [(4,), (1, 2), (0, 3), (5, 5, 9)])
@pytest.mark.parametrize('reverse', [False, True])
@pytest.mark.parametrize('starts', [None, (3, 4), (2, 7)])
def test_pieces_equal_the_whole(starts, reverse, cuts, width):
    """Pieces shorter than the filter, and of no steps, hand on what they were given."""
    x, weight, bias = (t.requires_grad_() for t in inputs(9, width))
    before = torch.randn(2, 3, width - 1, dtype=torch.double, requires_grad=True)
    reset = None if starts is None else reset_at(9, *starts)
    if reverse and starts is not None:
        # What begins at a piece's first step is told by that piece, which comes after the cut.
        cuts = tuple(cut for cut in cuts if not reset[:, cut : cut + 1].any())
    whole, last = causal_conv1d(
        x, weight, bias, reverse, 'silu', return_last_state=True, initial_state=before, reset=reset
    )
    edges = [0, *cuts, 9]
    spans = [*pairwise(edges)]
    state, pieces = before, []
    for s, e in reversed(spans) if reverse else spans:
        piece, state = causal_conv1d(
            x[:, :, s:e],
            weight,
            bias,
            reverse,
            'silu',
            return_last_state=True,
            initial_state=state,
            reset=None if reset is None else reset[:, s:e],
        )
        pieces.append(piece)
    joined = torch.cat(pieces[::-1] if reverse else pieces, dim=2)
    torch.testing.assert_close((joined, state), (whole, last), rtol=1e-12, atol=1e-12)
    leaves = [x, weight, bias, before]
    seeds = [torch.randn_like(whole), torch.randn_like(last)]
    torch.testing.assert_close(
        torch.autograd.grad([joined, state], leaves, seeds, materialize_grads=True),
        torch.autograd.grad([whole, last], leaves, seeds, materialize_grads=True),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize('with_reset', [False, True])
@pytest.mark.parametrize('reverse', [False, True])
def test_a_state_is_the_steps_before(reverse, with_reset):
    """Those of a longer x; gradients of the state by finite differences."""
    x, weight, bias = inputs()
    state = torch.randn(2, 3, 3, dtype=torch.double)
    reset = torch.zeros(2, 9, dtype=torch.bool) if with_reset else None
    longer = torch.cat([x, state] if reverse else [state, x], dim=2)
    expected = causal_conv1d(longer, weight, bias, reverse)
    out = causal_conv1d(x, weight, bias, reverse, initial_state=state, reset=reset)
    torch.testing.assert_close(out, expected[:, :, :9] if reverse else expected[:, :, 3:])
    leaves = [t.requires_grad_() for t in (x, weight, bias, state)]
    assert torch.autograd.gradcheck(
        lambda *t: causal_conv1d(
            *t[:3], reverse, initial_state=t[3], reset=reset, return_last_state=True
        ),
        leaves,
    )


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
def test_states_in_autocast(dtype):
    x, weight, bias = (t.to(dtype) for t in inputs())
    reset = reset_at(9, 4)
    with torch.autocast('cpu', torch.bfloat16):
        out, state = causal_conv1d(x, weight, bias, reset=reset, return_last_state=True)
        again = causal_conv1d(x, weight, bias, initial_state=state)
        of_autocast = causal_conv1d(x.bfloat16(), weight, bias, initial_state=state)
    assert out.dtype == again.dtype == torch.bfloat16 and state.dtype == dtype
    torch.testing.assert_close(again, of_autocast, rtol=0.02, atol=0.02)
    expected = causal_conv1d(x.float(), weight.float(), bias.float(), reset=reset)
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    'change, message',
    [
        pytest.param(dict(reset=torch.zeros(2, 9)), 'reset: expected torch.bool', id='float'),
        pytest.param(dict(reset=torch.zeros(2, 8).bool()), r'reset: .*2, 9', id='length'),
        pytest.param(dict(reset=[True]), 'reset: expected a tensor', id='list'),
        pytest.param(
            dict(reset=torch.zeros(2, 9, device='meta').bool()), 'reset: .* got meta', id='device'
        ),
        pytest.param(
            dict(initial_state=torch.zeros(2, 3, 4)), r'initial_state must be .*3\)', id='width'
        ),
        pytest.param(
            dict(initial_state=torch.zeros(2, 3, 3).double()), 'initial_state .*float64', id='dtype'
        ),
        pytest.param(
            dict(return_last_state='no'), "return_last_state: .* bool, got 'no'", id='text'
        ),
        pytest.param(dict(reverse=1), 'reverse: expected a bool, got 1', id='number'),
    ],
)
def test_bad_states(change, message):
    arguments = dict(x=torch.zeros(2, 3, 9), weight=torch.zeros(3, 4), bias=torch.zeros(3))
    with pytest.raises((TypeError, ValueError), match=message):
        causal_conv1d(**(arguments | change))
