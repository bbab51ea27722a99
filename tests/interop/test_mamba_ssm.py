"""The interfaces of mamba_ssm, Vim and VMamba, against a loop over steps in float64."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import vim_mm
from vim_mm.interop import mamba_ssm
from vim_mm.models import Mamba

ROOT = Path(__file__).parents[2]

BATCH, CHANNELS, STATES, STEPS = 2, 6, 3, 11


def leaf(*shape, dtype=torch.float64, scale=1.0):
    return (scale * torch.randn(*shape, dtype=dtype)).requires_grad_()


def loop(u, dt, A, B, C, D=None):
    """y_t = C_t h_t + D u_t, h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t; B and C (B, D, N, L)."""
    h, out = torch.zeros_like(A), []
    for t in range(u.shape[2]):
        step = dt[:, :, t, None]
        h = torch.exp(step * A) * h + step * B[..., t] * u[:, :, t, None]
        y = (C[..., t] * h).sum(2)
        out.append(2 * y.real if y.is_complex() else y)
    y = torch.stack(out, 2)
    return (y if D is None else y + D[:, None] * u), h


def each_channel(M, is_complex=False):
    """(D, N), (B, N, L) or (B, G, N, L), the latter two with interleaved pairs, to (B, D, N, L)."""
    if M.dim() == 2:
        return M[None, :, :, None].expand(BATCH, -1, -1, STEPS)
    if is_complex:
        M = torch.view_as_complex(M.unflatten(-1, (-1, 2)))
    M = M if M.dim() == 4 else M[:, None]
    return M.repeat_interleave(CHANNELS // M.shape[1], 1)


def scan_inputs(groups=2, dtype=torch.float64):
    weights = dict(dtype=torch.promote_types(dtype, torch.float32))
    return dict(
        u=leaf(BATCH, CHANNELS, STEPS, dtype=dtype),
        delta=leaf(BATCH, CHANNELS, STEPS, dtype=dtype),
        A=(-torch.rand(CHANNELS, STATES, **weights)).requires_grad_(),
        B=leaf(BATCH, groups, STATES, STEPS, dtype=dtype),
        C=leaf(BATCH, groups, STATES, STEPS, dtype=dtype),
        D=leaf(CHANNELS, **weights),
        delta_bias=leaf(CHANNELS, **weights),
    )


def true_scan(u, delta, A, B, C, D, delta_bias, z=None):
    dt = F.softplus(delta + delta_bias[:, None])
    y, h = loop(u, dt, A, each_channel(B), each_channel(C), D)
    return (y if z is None else y * F.silu(z)), h, torch.exp(dt.sum(2)[..., None] * A)


def close(ours, expected, **kwargs):
    torch.testing.assert_close(ours, expected, **(kwargs or dict(rtol=1e-10, atol=1e-10)))


@pytest.fixture
def scanned(monkeypatch):
    """Of each scan whether CUDA's fast kernels take it: contiguous in time, and of one dtype."""
    found = []

    def scan(u, delta, A, B, C, D, z, *args, **kwargs):
        given = [x for x in (u, delta, B, C, z) if x is not None]
        found.append(all(x.stride(-1) == 1 and x.dtype == u.dtype for x in given))
        return scan.itself(u, delta, A, B, C, D, z, *args, **kwargs)

    scan.itself = mamba_ssm.ops.selective_scan_fn
    monkeypatch.setattr(mamba_ssm.ops, 'selective_scan_fn', scan)
    return found


@pytest.mark.parametrize('gated', [False, True])
def test_the_raw_functions_of_mamba_ssm(gated):
    inputs = scan_inputs()
    z = leaf(BATCH, CHANNELS, STEPS) if gated else None
    u, delta, A, B, C, D, bias = inputs.values()
    given = (u, delta, A, B, C, D, z, bias)
    out, states, *gated_out = mamba_ssm.selective_scan_cuda.fwd(*given, True)
    y, h, decay = true_scan(**inputs)
    close(out, y)
    assert states.shape == (BATCH, CHANNELS, 1, 2 * STATES)
    close(states[:, :, -1, 1::2], h)
    close(states[:, :, -1, ::2], decay)

    expected = true_scan(**inputs, z=z)[0]
    grad = torch.randn_like(expected)
    memory = torch.empty_like(u) if gated else None
    du, ddelta, dA, dB, dC, dD, dbias, *of_gate = mamba_ssm.selective_scan_cuda.bwd(
        *given, grad, states, out, memory, True, gated
    )
    inputs = dict(inputs, z=z) if gated else inputs
    truth = torch.autograd.grad(expected, [*inputs.values()], grad)
    ours = [du, ddelta, dA, dB, dC, dD, dbias, *of_gate[:1]]
    for one, two in zip(ours, truth, strict=True):
        close(one, two)
    if gated:
        close(gated_out[0], expected)
        assert of_gate[0] is memory
        close(of_gate[1], expected)


def test_raw_gradients_under_inference_mode():
    torch.manual_seed(0)
    u, delta, B, C, z, dout = (torch.rand(2, n, 6) for n in (4, 4, 3, 3, 4, 4))
    A, D, bias = -torch.rand(4, 3), torch.rand(4), torch.rand(4)
    given = (u, delta, A, B[:, None], C[:, None], D)

    def gradients(copied):
        mine = [x.clone() if copied else x for x in (*given, z, bias, dout)]  # of that mode
        found = mamba_ssm.selective_scan_cuda.bwd(*mine, None, None, None, True, False)
        oflex = mamba_ssm.selective_scan_cuda_oflex.bwd(*mine[:6], *mine[7:], None, True, 1)
        return [*found, *oflex]

    expected = gradients(False)
    with torch.inference_mode():
        assert torch.zeros(1).is_inference()
        for copied in (False, True):
            for x, y in zip(gradients(copied), expected, strict=True):
                assert torch.equal(x, y)


def test_what_is_absent_has_no_gradient():
    u, delta, A, B, C, _, _ = scan_inputs().values()
    out, states = mamba_ssm.selective_scan_cuda.fwd(u, delta, A, B, C, None, None, None, False)
    found = mamba_ssm.selective_scan_cuda.bwd(
        u, delta, A, B, C, None, None, None, torch.ones_like(out), states, out, None, False, False
    )
    assert len(found) == 7 and found[5] is None and found[6] is None


@pytest.mark.parametrize('sharing', [1, 3])
def test_the_raw_functions_of_vmamba(sharing):
    inputs = scan_inputs()
    kinds = [mamba_ssm.selective_scan_cuda_oflex]
    if sharing == 1:
        kinds.append(mamba_ssm.selective_scan_cuda_core)
    inputs['delta'] = leaf(BATCH, CHANNELS // sharing, STEPS)
    inputs['delta_bias'] = leaf(CHANNELS // sharing)
    wide = dict(
        inputs,
        delta=inputs['delta'].repeat_interleave(sharing, 1),
        delta_bias=inputs['delta_bias'].repeat_interleave(sharing),
    )
    expected, h, _ = true_scan(**wide)
    grad = torch.randn_like(expected)
    truth = torch.autograd.grad(expected, [*inputs.values()], grad)
    for kind in kinds:
        more = [True] if kind is mamba_ssm.selective_scan_cuda_oflex else []
        out, states = kind.fwd(*inputs.values(), True, 1, *more)
        close(out, expected)
        close(states[:, :, -1, 1::2], h)
        for one, two in zip(kind.bwd(*inputs.values(), grad, states, True, 1), truth, strict=True):
            close(one, two)


def test_oflex_of_16_bits_gives_float32(scanned):
    inputs = scan_inputs(dtype=torch.bfloat16)
    expected = true_scan(*(x.double() for x in inputs.values()))[0]
    kind = mamba_ssm.selective_scan_cuda_oflex
    out, states = kind.fwd(*inputs.values(), True, 1, True)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert kind.fwd(*inputs.values(), True, 1, False)[0].dtype == torch.bfloat16
    grads = kind.bwd(*inputs.values(), torch.randn_like(out), states, True, 1)
    assert [x.dtype for x in grads] == [x.dtype for x in inputs.values()]
    assert scanned == [True] * 3


def inner_inputs(is_complex=False, constant_B=False, constant_C=False, rank=2):
    dtype = torch.complex128 if is_complex else torch.float64
    states = STATES * (2 if is_complex else 1)
    rows = rank + states * (2 - constant_B - constant_C)
    return dict(
        xz=leaf(BATCH, 2 * CHANNELS, STEPS),
        conv1d_weight=leaf(CHANNELS, 1, 4),
        conv1d_bias=leaf(CHANNELS),
        x_proj_weight=leaf(rows, CHANNELS, scale=0.3),
        delta_proj_weight=leaf(CHANNELS, rank, scale=0.3),
        out_proj_weight=leaf(5, CHANNELS),
        out_proj_bias=leaf(5),
        A=(-torch.rand(CHANNELS, STATES, dtype=dtype)).requires_grad_(),
        B=leaf(CHANNELS, STATES, dtype=dtype) if constant_B else None,
        C=leaf(CHANNELS, STATES, dtype=dtype) if constant_C else None,
        D=leaf(CHANNELS),
        delta_bias=leaf(CHANNELS),
    )


def true_inner(
    xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight,
    out_proj_bias, A, B, C, D, delta_bias, B_proj_bias=None, C_proj_bias=None,
    b_rms_weight=None, c_rms_weight=None, dt_rms_weight=None, reverse=False, project=True,
):  # fmt: skip
    def norm(x, weight):
        return (
            x
            if weight is None
            else x * (x.square().mean(1) + 1e-6).rsqrt()[:, None] * weight[:, None]
        )

    x, z = xz.chunk(2, 1)
    padded = F.pad(x, (3, 0))
    u = sum(conv1d_weight[:, 0, k, None] * padded[:, :, k : k + STEPS] for k in range(4))
    u = F.silu(u + conv1d_bias[:, None])
    rank, is_complex = delta_proj_weight.shape[1], A.is_complex()
    states = STATES * (2 if is_complex else 1)
    projected = torch.einsum('rd,bdl->brl', x_proj_weight, u)
    delta = norm(torch.einsum('dr,brl->bdl', delta_proj_weight, projected[:, :rank]), dt_rms_weight)
    given = []
    for M, rows, bias, weight in (
        (B, projected[:, rank : rank + states], B_proj_bias, b_rms_weight),
        (C, projected[:, -states:], C_proj_bias, c_rms_weight),
    ):
        if M is None:
            M = rows if bias is None else rows + bias[:, None]
            M = norm(M, weight)
            if is_complex:
                M = torch.complex(M[:, ::2], M[:, 1::2])
        given.append(each_channel(M))
    dt = F.softplus(delta + delta_bias[:, None])
    if reverse:  # the convolution stays as it is
        y = loop(u.flip(2), dt.flip(2), A, *(M.flip(3) for M in given), D)[0].flip(2)
    else:
        y = loop(u, dt, A, *given, D)[0]
    y = y * F.silu(z)
    return F.linear(y.transpose(1, 2), out_proj_weight, out_proj_bias) if project else y


def compare_gradients(ours, expected, inputs):
    close(ours, expected)
    grad = torch.randn_like(expected)
    given = [x for x in inputs.values() if x is not None]
    for name, one, two in zip(
        [k for k, v in inputs.items() if v is not None],
        torch.autograd.grad(ours, given, grad),
        torch.autograd.grad(expected, given, grad),
    ):
        torch.testing.assert_close(
            one, two, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f'{n}: {m}'
        )


@pytest.mark.parametrize('is_complex', [False, True])
@pytest.mark.parametrize('constant_B', [False, True])
@pytest.mark.parametrize('constant_C', [False, True])
def test_a_whole_layer(is_complex, constant_B, constant_C):
    inputs = inner_inputs(is_complex, constant_B, constant_C)
    compare_gradients(mamba_ssm.mamba_inner_fn(**inputs), true_inner(**inputs), inputs)


def test_biases_and_norms_of_projected_matrices():
    inputs = inner_inputs()
    inputs |= dict(
        B_proj_bias=leaf(STATES), C_proj_bias=leaf(STATES), b_rms_weight=leaf(STATES),
        c_rms_weight=leaf(STATES), dt_rms_weight=leaf(CHANNELS),
    )  # fmt: skip
    compare_gradients(mamba_ssm.mamba_inner_fn(**inputs), true_inner(**inputs), inputs)
    with pytest.raises(ValueError, match='checkpoint_lvl'):
        mamba_ssm.mamba_inner_fn(**inputs, checkpoint_lvl=2)


def test_vims_layers():
    inputs = inner_inputs()
    without = {k: v for k, v in inputs.items() if not k.startswith('out_proj')}
    ours = mamba_ssm.mamba_inner_fn_no_out_proj(**without)
    compare_gradients(ours, true_inner(**inputs, project=False), without)

    A_b = (-torch.rand(CHANNELS, STATES, dtype=torch.float64)).requires_grad_()
    ours = mamba_ssm.bimamba_inner_fn(**inputs, A_b=A_b)
    both = [
        true_inner(**dict(inputs, A=A), reverse=reverse, project=False)
        for A, reverse in ((inputs['A'], False), (A_b, True))
    ]
    expected = F.linear(
        sum(both).transpose(1, 2), inputs['out_proj_weight'], inputs['out_proj_bias']
    )
    compare_gradients(ours, expected, dict(inputs, A_b=A_b))


def channels_last(x):
    return x.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_()


@pytest.mark.parametrize('normed', [False, True])
@pytest.mark.parametrize('transposed', [False, True])
def test_a_layers_scan_gets_what_fast_kernels_take(scanned, transposed, normed):
    """All others take CUDA's general path, which is slower and rounds otherwise."""
    inputs = inner_inputs()
    if normed:
        inputs |= dict(
            b_rms_weight=leaf(STATES), c_rms_weight=leaf(STATES), dt_rms_weight=leaf(CHANNELS)
        )
    expected = mamba_ssm.mamba_inner_fn(**inputs)
    if transposed:
        inputs['xz'] = channels_last(inputs['xz'])
        assert torch.equal(mamba_ssm.mamba_inner_fn(**inputs), expected)
    assert scanned == [True] * (1 + transposed)


def test_a_scan_of_other_strides_gets_copies(scanned):
    """MambaVision's delta has channels contiguous."""
    inputs = scan_inputs()
    inputs['z'] = leaf(BATCH, CHANNELS, STEPS)
    expected = mamba_ssm.selective_scan_fn(**inputs)
    others = {name: channels_last(x) if x.dim() > 1 else x for name, x in inputs.items()}
    assert not any(x.stride(-1) == 1 for x in others.values() if x.dim() > 2)
    ours = mamba_ssm.selective_scan_fn(**others)
    assert scanned == [True, True]
    assert torch.equal(ours, expected)
    grad = torch.randn_like(expected)
    for one, two in zip(
        torch.autograd.grad(ours, [*others.values()], grad),
        torch.autograd.grad(expected, [*inputs.values()], grad),
        strict=True,
    ):
        assert torch.equal(one, two)


def test_flags_count_by_their_truth():
    u, delta, A, B, C, D, bias = scan_inputs().values()
    plain = mamba_ssm.selective_scan_fn(u, delta, A, B, C, D, None, bias)
    none = mamba_ssm.selective_scan_fn(
        u, delta, A, B, C, D, z=None, delta_bias=bias, delta_softplus=None, return_last_state=None
    )  # as MambaVision calls it
    assert torch.equal(none, plain)
    out, state = mamba_ssm.selective_scan_fn(u, delta, A, B, C, D, None, bias, 1, 1)
    y, h, _ = true_scan(u, delta, A, B, C, D, bias)
    close(out, y)
    close(state, h)
    raw = mamba_ssm.selective_scan_cuda
    grad = torch.randn_like(out)
    found = [
        (raw.fwd(*given, flag), raw.bwd(*given, grad, None, None, None, flag, None))
        for given in [(u, delta, A, B, C, D, None, bias)]
        for flag in (True, 1)
    ]
    for one, two in zip(*(forward + backward for forward, backward in found), strict=True):
        assert torch.equal(one, two)
    inputs = inner_inputs()
    outs = [mamba_ssm.mamba_inner_fn(**inputs, delta_softplus=flag) for flag in (True, 1)]
    assert torch.equal(*outs)


# As mamba_ssm's and VMamba's own tests have them; gradients get five and ten times as much there.
TOLERANCES = {
    torch.float32: dict(rtol=6e-4, atol=2e-3),
    torch.float16: dict(rtol=3e-3, atol=5e-3),
    torch.bfloat16: dict(rtol=3e-2, atol=5e-2),
}
ON_A_GPU = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device'),
]


@pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=ON_A_GPU)])
@pytest.mark.parametrize('dtype', TOLERANCES)
@pytest.mark.parametrize('groups', [1, 2])
@pytest.mark.parametrize('which', ['selective_scan_fn', 'mamba_ssm', 'core', 'oflex'])
def test_in_the_tolerances_of_the_peers(which, groups, dtype, device):
    torch.manual_seed(0)
    inputs = scan_inputs(groups, dtype)
    gated = which in ('selective_scan_fn', 'mamba_ssm')
    if gated:
        inputs['z'] = leaf(BATCH, CHANNELS, STEPS, dtype=dtype)
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    expected, h, _ = true_scan(**exact)
    grad = torch.randn_like(expected).to(dtype)
    truth = dict(zip(exact, torch.autograd.grad(expected, [*exact.values()], grad.double())))

    x = {name: tensor.detach().to(device).requires_grad_() for name, tensor in inputs.items()}
    grad = grad.to(device)
    u, delta, A, B, C, D, bias, *z = x.values()
    if which == 'selective_scan_fn':
        out, state = mamba_ssm.selective_scan_fn(
            u, delta, A, B, C, D, *z, bias, delta_softplus=True, return_last_state=True
        )
        found = torch.autograd.grad(out, [*x.values()], grad)
    elif which == 'mamba_ssm':
        given = (u, delta, A, B, C, D, *z, bias)
        ungated, states, out = mamba_ssm.selective_scan_cuda.fwd(*given, True)
        found = mamba_ssm.selective_scan_cuda.bwd(*given, grad, states, ungated, None, True, False)
        state = states[:, :, -1, 1::2]
    else:
        kind = getattr(mamba_ssm, f'selective_scan_cuda_{which}')
        more = [True] if which == 'oflex' else []
        out, states = kind.fwd(*x.values(), True, 1, *more)
        found = kind.bwd(*x.values(), grad.to(out.dtype), states, True, 1)
        state = states[:, :, -1, 1::2]

    tolerance = TOLERANCES[dtype]
    of_gradients = dict(rtol=5 * tolerance['rtol'], atol=10 * tolerance['atol'])
    close(out.detach().double().cpu(), expected.detach(), **tolerance)
    close(state.detach().double().cpu(), h.detach(), **tolerance)
    for (name, exact_gradient), gradient in zip(truth.items(), found, strict=True):
        assert gradient.dtype == inputs[name].dtype and gradient.device.type == device
        torch.testing.assert_close(
            gradient.double().cpu(),
            exact_gradient,
            msg=lambda m, n=name: f'{n}: {m}',
            **of_gradients,
        )


def test_our_mixer_is_the_same_layer():
    mixer = Mamba(8, d_state=STATES, bimamba_type='none').double()
    x = torch.randn(BATCH, STEPS, 8, dtype=torch.float64)
    ours = mamba_ssm.mamba_inner_fn(
        mixer.in_proj(x).transpose(1, 2), mixer.conv1d.weight, mixer.conv1d.bias,
        mixer.x_proj.weight, mixer.dt_proj.weight, mixer.out_proj.weight, None,
        -torch.exp(mixer.A_log), D=mixer.D, delta_bias=mixer.dt_proj.bias,
    )  # fmt: skip
    close(ours, mixer(x))


def test_lines_of_the_page_put_our_functions_in_place():
    """Copied as they stand, after the import that the page names."""
    page = (ROOT / 'docs/other_libraries.md').read_text()
    ours = r'vim_mm\.interop\.mamba_ssm'
    lines = re.findall(rf'^\|.*`((\S+) = ({ours}\.\w+))` \|$', page, re.M)
    assert len(lines) == 4 and re.search(rf'after `import {ours}`', page)
    of = SimpleNamespace
    simple, vision = of(), of()
    for line, target, value in lines:
        names = dict(
            vim_mm=vim_mm,
            sys=of(modules={}),
            mamba_ssm=of(modules=of(mamba_simple=simple)),
            mambavision=of(models=of(mamba_vision=vision)),
        )
        exec(line, names)
        assert eval(target, names) is eval(value, names)
    assert {*vars(simple), *vars(vision)} <= {*mamba_ssm.__all__}


def test_bad_inputs_are_named():
    inputs = scan_inputs()
    u, delta, A, B, C, D, bias = inputs.values()
    z, dout = torch.randn_like(u), torch.randn_like(u)
    raw, core, oflex = (
        mamba_ssm.selective_scan_cuda,
        mamba_ssm.selective_scan_cuda_core,
        mamba_ssm.selective_scan_cuda_oflex,
    )

    def fwd(u=u, A=A, z=None):
        return raw.fwd(u, delta, A, B, C, D, z, bias, True)

    def bwd(dout=dout, out=None, dz=None, recompute=False, B=B):
        return raw.bwd(u, delta, A, B, C, D, z, bias, dout, None, out, dz, True, recompute)

    def oflex_fwd(u=u, delta=delta, bias=bias):
        return oflex.fwd(u, delta, A, B, C, D, bias, True, 1, True)

    for call, error, message in (
        (lambda: fwd(A=A[:-1]), ValueError, 'A: '),
        (lambda: fwd(z=z[:, :4]), ValueError, 'z: expected shape'),
        (lambda: fwd(u=None), TypeError, 'u: expected a tensor'),
        (lambda: bwd(dout=None), TypeError, 'dout: expected a tensor'),
        (lambda: bwd(dout=dout[..., :1]), ValueError, 'dout: expected shape'),
        (lambda: bwd(dout=dout.int()), TypeError, 'dout: expected a floating'),
        (lambda: bwd(dz=torch.empty(3, *u.shape)), ValueError, 'dz: expected shape'),
        (lambda: bwd(recompute=True), TypeError, 'out: expected a tensor'),
        (lambda: bwd(B=B.detach().long()), TypeError, 'B: expected'),
        (lambda: core.fwd(u, delta, A, B.long(), C, D, bias, True, 1), TypeError, 'B: '),
        (lambda: core.fwd(u, delta[:, :2], A, B, C, D, bias, True, 1), ValueError, 'delta: '),
        (lambda: core.bwd(*inputs.values(), None, None, True, 1), TypeError, 'dout: expected'),
        (lambda: oflex_fwd(delta=delta[:, :4]), ValueError, 'delta: .* divides D = 6, got 4'),
        (lambda: oflex_fwd(delta=delta[:, :0]), ValueError, 'delta: .* divides D = 6, got 0'),
        (lambda: oflex_fwd(delta=None), TypeError, 'delta: expected a tensor'),
        (lambda: oflex_fwd(delta=delta[:, :2]), ValueError, r'delta_bias: .*\(2,\).*got \(6,\)'),
        (lambda: oflex_fwd(u=u.detach().int()), TypeError, 'u: expected'),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize(
    ('name', 'change', 'error', 'message'),
    [
        # One row too many or too few would be read as another matrix.
        ('x_proj_weight', lambda x: torch.cat([x, x[:1]]), ValueError, r'\(8, 6\), got \(9, 6'),
        ('x_proj_weight', lambda x: x[:-1], ValueError, r'expected shape \(8, 6\), got \(7, 6'),
        ('xz', lambda x: x[:, :-1], ValueError, r'expected shape \(B, 12, L\)'),
        ('xz', lambda x: x[0], ValueError, r'expected shape \(B, 12, L\)'),
        ('xz', lambda x: x.detach().numpy(), TypeError, 'expected a tensor, got ndarray'),
        ('conv1d_weight', lambda x: x[:, 0], ValueError, r'expected shape \(6, 1, W\)'),
        ('conv1d_weight', lambda x: None, TypeError, 'expected a tensor, got NoneType'),
        ('delta_proj_weight', lambda x: x.T, ValueError, r'expected shape \(6, R\)'),
        ('out_proj_weight', lambda x: x.T, ValueError, r'expected shape \(E, 6\)'),
        ('A', lambda x: x[0], ValueError, r'expected shape \(D, N\)'),
        ('A', lambda x: None, TypeError, 'expected a tensor, got NoneType'),
        ('conv1d_bias', lambda x: x[1:], ValueError, r'expected shape \(6,\), got \(5,\)'),
        ('out_proj_bias', lambda x: x[:1], ValueError, r'expected shape \(5,\), got \(1,\)'),
        ('B_proj_bias', lambda x: torch.ones(STEPS, STATES), ValueError, r'\(3,\), got \(11, 3\)'),
        ('C_proj_bias', lambda x: torch.ones(1), ValueError, r'\(3,\), got \(1,\)'),
        ('xz', lambda x: x.detach().int(), TypeError, 'expected a floating point dtype'),
        ('conv1d_weight', lambda x: x.float(), TypeError, 'expected torch.float64, as xz has it'),
        ('x_proj_weight', lambda x: x.float(), TypeError, 'expected torch.float64, as xz has it'),
        ('out_proj_weight', lambda x: x.float(), TypeError, 'expected torch.float64, as xz has it'),
    ],
)
def test_bad_weights_of_a_layer_are_named(name, change, error, message):
    inputs = inner_inputs()
    inputs[name] = change(inputs.get(name))
    with pytest.raises(error, match=f'{name}: .*{message}'):
        mamba_ssm.mamba_inner_fn(**inputs)
    inputs['A_b'] = inputs['A']
    with pytest.raises(error, match=f'{name}: .*{message}'):
        mamba_ssm.bimamba_inner_fn(**inputs)


@pytest.mark.parametrize('which', ['B', 'C'])
def test_norms_that_do_not_fit_are_refused(which):
    inputs = inner_inputs(constant_B=which == 'B', constant_C=which == 'C')
    name = f'{which.lower()}_rms_weight'
    with pytest.raises(ValueError, match=f'{name}: expected None, as {which} is given'):
        mamba_ssm.mamba_inner_fn(**inputs, **{name: leaf(STATES)})
    for norm, size in ((name, STATES), ('dt_rms_weight', CHANNELS)):
        with pytest.raises(ValueError, match=rf'{norm}: expected shape \({size},\), got \(1,\)'):
            mamba_ssm.mamba_inner_fn(**inner_inputs(), **{norm: leaf(1)})


def test_a_layer_under_autocast():
    """Weights in float32 and xz as in_proj gives it there: Vim's training."""
    inputs = {k: x if x is None else x.detach().float() for k, x in inner_inputs().items()}
    inputs = {k: x if x is None else x.requires_grad_() for k, x in inputs.items()}
    expected = mamba_ssm.mamba_inner_fn(**inputs)
    with torch.autocast('cpu', torch.bfloat16):
        ours = mamba_ssm.mamba_inner_fn(**{**inputs, 'xz': inputs['xz'].bfloat16()})
    assert ours.dtype == torch.bfloat16
    assert (ours - expected).abs().max() < 0.05 * expected.abs().max()
    given = [x for x in inputs.values() if x is not None]
    for x, gradient in zip(given, torch.autograd.grad(ours.float().sum(), given), strict=True):
        assert gradient.dtype == x.dtype and gradient.isfinite().all()


def test_a_given_matrix_may_have_its_rows():
    """mamba_ssm reads the first and the last ones, whatever is between."""
    inputs = inner_inputs(constant_B=True)
    weight = inputs['x_proj_weight']
    expected = mamba_ssm.mamba_inner_fn(**inputs)
    inputs['x_proj_weight'] = torch.cat([weight[:2], torch.randn_like(weight[2:]), weight[2:]])
    close(mamba_ssm.mamba_inner_fn(**inputs), expected)
