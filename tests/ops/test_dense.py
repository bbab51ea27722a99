"""The scan with matrices: the diagonal one where they are diagonal, and the trapezoidal rule."""

import pytest
import torch
from torch.autograd import gradcheck

from tests.ops.inputs import make_inputs
from vim_mm.ops import selective_scan_dense_ref, selective_scan_fn

DEVICES = ['cpu', pytest.param('cuda', marks=pytest.mark.cuda)]


def dense_inputs(diagonal=False, **sizes):
    """Of ``make_inputs``, with A (D, N, N): diagonal, or with eigenvalues left of 0."""
    inputs = {name: x.detach() for name, x in make_inputs(**sizes).items()}
    inputs['A'] = torch.diag_embed(inputs['A'])
    if not diagonal:
        inputs['A'] = inputs['A'] + 0.1 * torch.randn_like(inputs['A'])
    return {name: x.requires_grad_() for name, x in inputs.items()}


def results_and_gradients(scan, inputs, **options):
    results = scan(**inputs, delta_softplus=True, return_last_state=True, **options)
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(x.shape, generator=generator).to(x) for x in results]
    return results, dict(zip(inputs, torch.autograd.grad(results, [*inputs.values()], weights)))


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('reverse', [False, True])
@pytest.mark.parametrize('is_complex', [False, True])
@pytest.mark.parametrize('form', ['constant', 'shared', 'grouped'])
def test_diagonal_matrices_give_the_diagonal_scan(form, is_complex, reverse, device):
    if device == 'cuda' and not torch.cuda.is_available():
        pytest.skip('needs a CUDA device')
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        given = make_inputs(form=form, is_complex=is_complex, dtype=dtype, length=9)
        given = {k: x.detach().to(device).requires_grad_() for k, x in given.items()}
        expected, expected_grads = results_and_gradients(
            selective_scan_fn,
            given,
            discretization_method='bilinear',
            use_cuda_kernel=False,
            reverse=reverse,
        )
        matrices = given | {'A': torch.diag_embed(given['A'].detach()).requires_grad_()}
        results, grads = results_and_gradients(selective_scan_dense_ref, matrices, reverse=reverse)
        grads['A'] = grads['A'].diagonal(dim1=1, dim2=2)
        torch.testing.assert_close(results, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(grads, expected_grads, rtol=tolerance, atol=tolerance)


def test_the_steps_are_the_trapezoidal_rule():
    """x_t - x_{t-1} = dt (A (x_t + x_{t-1}) / 2 + B_t u_t), by a transcription with inverses."""
    inputs = dense_inputs(form='constant', length=5)
    y, x = selective_scan_dense_ref(
        **{k: v for k, v in inputs.items() if k not in ('D', 'z')},
        delta_softplus=True,
        return_last_state=True,
    )
    steps = torch.log1p(torch.exp(inputs['delta'] + inputs['delta_bias'][:, None]))
    for b, d in ((0, 0), (1, 3)):
        A, state = inputs['A'][d], torch.zeros(3, dtype=torch.float64)
        for t in range(5):
            dt, eye = steps[b, d, t], torch.eye(3, dtype=torch.float64)
            drive = dt * inputs['B'][d] * inputs['u'][b, d, t]
            state = torch.inverse(eye - dt * A / 2) @ ((eye + dt * A / 2) @ state + drive)
            torch.testing.assert_close(y[b, d, t], inputs['C'][d] @ state)
        torch.testing.assert_close(x[b, d], state)


@pytest.mark.parametrize('is_complex', [False, True])
def test_gradients_are_derivatives(is_complex):
    inputs = dense_inputs(batch=1, channels=2, length=3, states=2, is_complex=is_complex)

    def scan(*tensors):
        return selective_scan_dense_ref(**dict(zip(inputs, tensors)), delta_softplus=True)

    assert gradcheck(scan, [*inputs.values()])


def test_a_change_of_basis_changes_nothing():
    """A dense system that is similar to a diagonal one has its output: B S, C S^-T, S A S^-1."""
    inputs = make_inputs(form='constant', length=7)
    expected = selective_scan_fn(**inputs, delta_softplus=True, discretization_method='bilinear')
    S = torch.eye(3, dtype=torch.float64) + 0.2 * torch.randn(4, 3, 3, dtype=torch.float64)
    moved = dict(
        A=S @ torch.diag_embed(inputs['A']) @ S.inverse(),
        B=(S @ inputs['B'][..., None])[..., 0],
        C=(S.inverse().mT @ inputs['C'][..., None])[..., 0],
    )
    out = selective_scan_dense_ref(**(inputs | moved), delta_softplus=True)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_no_steps():
    inputs = dense_inputs(length=0)
    out, x = selective_scan_dense_ref(**inputs, return_last_state=True)
    assert out.shape == (2, 4, 0) and x.shape == (2, 4, 3) and not x.any()


@pytest.mark.parametrize(
    'change, error, message',
    [
        (dict(A=torch.zeros(4, 3)), ValueError, r'A: .*\(D, N, N\), got \(4, 3\)'),
        (dict(A=torch.zeros(4, 3, 2)), ValueError, r'A: .*\(D, N, N\), got \(4, 3, 2\)'),
        (dict(A=torch.zeros(5, 3, 3)), ValueError, r'A: expected shape .*got \(5, 3\)'),
        (dict(A=None), TypeError, 'A: expected a tensor'),
        (dict(B=torch.zeros(4, 2)), ValueError, r'B: expected shape \(D, N\)'),
        (dict(A=2 * torch.eye(3).expand(4, 3, 3)), torch.linalg.LinAlgError, 'singular'),
    ],
)
def test_bad_arguments(change, error, message):
    inputs = {k: x.detach() for k, x in dense_inputs(dtype=torch.float32).items()}
    inputs |= dict(delta=torch.ones(2, 4, 6), delta_bias=None)
    with pytest.raises(error, match=message):
        selective_scan_dense_ref(**(inputs | change))


@pytest.mark.parametrize('name', ['reverse', 'delta_softplus', 'return_last_state'])
def test_a_text_is_no_bool(name):
    inputs = make_inputs(batch=1, channels=2, length=3, states=2)
    inputs['A'] = torch.diag_embed(inputs['A'])
    with pytest.raises(TypeError, match=f"{name}: expected a bool, got 'no'"):
        selective_scan_dense_ref(**inputs, **{name: 'no'})
