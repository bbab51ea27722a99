from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.models import vim_equations
from tests.models.small import small_mixer
from vim_mm.models import Mamba
from vim_mm.models.fused import fused_path
from vim_mm.ops import METHODS, selective_scan_ref

TYPES = ('none', 'v1', 'v2')


def tokens(length=11, dtype=torch.float32):
    return torch.randn(2, length, 8, dtype=dtype)


def double(weights):
    return {k: v.double() for k, v in weights.items()}


def reference_scan(method):
    """selective_scan_ref with the time axis where the transcription has it."""

    def scan(u, delta, A, B, C):
        u, delta, B, C = (t.transpose(1, 2) for t in (u, delta, B, C))
        y = selective_scan_ref(u, delta, A, B, C, discretization_method=method)
        return y.transpose(1, 2)

    return scan


@pytest.mark.parametrize('bimamba_type', TYPES)
def test_zoh_equals_vims_equations(bimamba_type):
    mixer = small_mixer(bimamba_type=bimamba_type)
    x = tokens()
    expected = vim_equations.mixer(x.double(), double(mixer.state_dict()), bimamba_type)
    torch.testing.assert_close(mixer(x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('bimamba_type', TYPES)
def test_backward_direction_equals_flip_scan_flip(bimamba_type, method):
    mixer = small_mixer(bimamba_type=bimamba_type, discretization_method=method).double()
    x = tokens(dtype=torch.double).requires_grad_()
    weights = dict(mixer.named_parameters())
    expected = vim_equations.mixer(x, weights, bimamba_type, reference_scan(method))
    out = mixer(x)
    torch.testing.assert_close(out, expected)

    leaves = [x, *weights.values()]
    seed = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, leaves, seed), torch.autograd.grad(expected, leaves, seed)
    )


@pytest.mark.parametrize('method', METHODS)
def test_flipping_the_sequence_and_swapping_the_directions_flips_the_output(method):
    mixer = small_mixer(discretization_method=method).double()
    swapped = small_mixer(discretization_method=method).double()
    partner = {'A_log': 'A_b_log', 'A_b_log': 'A_log', 'D': 'D_b', 'D_b': 'D'}
    for module in ('conv1d', 'x_proj', 'dt_proj'):
        for name in ('weight', 'bias'):
            partner[f'{module}.{name}'] = f'{module}_b.{name}'
            partner[f'{module}_b.{name}'] = f'{module}.{name}'
    weights = mixer.state_dict()
    swapped.load_state_dict({k: weights[partner.get(k, k)] for k in weights})
    x = tokens(dtype=torch.double)
    torch.testing.assert_close(swapped(x.flip(1)), mixer(x).flip(1))
    assert not torch.allclose(mixer(x.flip(1)), mixer(x).flip(1))


def test_parameter_names_and_shapes_are_vims():
    forward = {
        'in_proj.weight': (32, 8),
        'conv1d.weight': (16, 1, 4),
        'conv1d.bias': (16,),
        'x_proj.weight': (9, 16),
        'dt_proj.weight': (16, 1),
        'dt_proj.bias': (16,),
        'A_log': (16, 4),
        'D': (16,),
        'out_proj.weight': (8, 16),
    }
    backward = {
        'conv1d_b.weight': (16, 1, 4),
        'conv1d_b.bias': (16,),
        'x_proj_b.weight': (9, 16),
        'dt_proj_b.weight': (16, 1),
        'dt_proj_b.bias': (16,),
        'D_b': (16,),
    }
    A_b = {'A_b_log': (16, 4)}
    for bimamba_type, names in zip(
        TYPES, (forward, forward | A_b, forward | A_b | backward), strict=True
    ):
        mixer = Mamba(8, d_state=4, bimamba_type=bimamba_type)
        assert {k: tuple(v.shape) for k, v in mixer.state_dict().items()} == names


@pytest.mark.parametrize('bimamba_type', TYPES)
def test_initialization(bimamba_type):
    mixer = Mamba(64, bimamba_type=bimamba_type, dt_min=0.01, dt_max=0.05)
    for name, param in mixer.named_parameters():
        if name.startswith('A_'):
            torch.testing.assert_close(param.exp(), torch.arange(1.0, 17).expand(128, 16))
        if name in ('D', 'D_b'):
            assert (param == 1).all()
        if name in ('dt_proj.bias', 'dt_proj_b.bias'):
            dt = F.softplus(param)
            assert dt.min() >= 0.01 - 1e-6 and dt.max() <= 0.05 + 1e-6
            # Log-uniform: half of the draws lie below the geometric mean.
            assert 0.3 < (dt < (0.01 * 0.05) ** 0.5).float().mean() < 0.7
        if name in ('dt_proj.weight', 'dt_proj_b.weight'):
            assert 0.45 < param.abs().max() <= 0.5  # dt_rank 4: uniform in +-4^-0.5


def test_constant_dt_weight_and_floor():
    mixer = Mamba(64, dt_init='constant', dt_scale=3.0, dt_init_floor=0.05)
    assert (mixer.dt_proj.weight == 1.5).all() and (mixer.dt_proj_b.weight == 1.5).all()
    assert F.softplus(mixer.dt_proj.bias).min() >= 0.05 - 1e-6


def test_dt_init_b_vim_leaves_the_backward_direction_to_pytorch():
    mixer = Mamba(64, dt_init='constant', dt_init_b='vim')
    assert (mixer.dt_proj.weight == 0.5).all() and (mixer.dt_proj.bias < 0).all()
    assert (mixer.dt_proj_b.bias == 0).all()
    weight = mixer.dt_proj_b.weight
    assert weight.std() > 0.1 and weight.abs().max() <= 0.5  # Linear: uniform in +-rank^-0.5


@pytest.mark.parametrize('bimamba_type', ['none', 'v1', 'v2'])
def test_no_weight_decay(bimamba_type):
    forward, backward = {'A_log', 'D', 'dt_proj.bias'}, {'A_b_log', 'D_b', 'dt_proj_b.bias'}
    expected = {'none': forward, 'v1': forward | {'A_b_log'}, 'v2': forward | backward}
    assert Mamba(8, bimamba_type=bimamba_type).no_weight_decay() == expected[bimamba_type]


def test_if_divide_out_halves_v2_only():
    x = tokens()
    for bimamba_type, factor in (('none', 1), ('v1', 1), ('v2', 2)):
        halved = small_mixer(bimamba_type=bimamba_type)
        summed = Mamba(8, d_state=4, bimamba_type=bimamba_type, if_divide_out=False)
        summed.load_state_dict(halved.state_dict())
        torch.testing.assert_close(summed(x), factor * halved(x))


def test_biases_of_the_outer_projections_act():
    mixer = small_mixer(bias=True, conv_bias=False, expand=1.5)
    x = tokens()
    plain = small_mixer(bias=False, conv_bias=False, expand=1.5)
    plain.load_state_dict({k: v for k, v in mixer.state_dict().items() if k in plain.state_dict()})
    with torch.no_grad():
        mixer.in_proj.bias.zero_()
    torch.testing.assert_close(mixer(x), plain(x) + mixer.out_proj.bias)
    with torch.no_grad():
        mixer.in_proj.bias.fill_(0.3)
    # A bias of the input projection is the same as one more input channel that is always 1.
    extended = torch.cat([mixer.in_proj.weight, mixer.in_proj.bias[:, None]], dim=1)
    ones = torch.cat([x, torch.ones(2, 11, 1)], dim=2)
    plain.d_model, plain.in_proj.weight = 9, torch.nn.Parameter(extended.detach())
    torch.testing.assert_close(mixer(x), plain(ones) + mixer.out_proj.bias)


def test_a_contradiction_is_told_before_the_first_call():
    with pytest.raises(ValueError, match='backend=torch and use_cuda_kernel=True contradict'):
        Mamba(8, backend='torch', use_cuda_kernel=True)
    assert Mamba(8, backend='native', use_cuda_kernel=True).backend == 'native'


@pytest.mark.parametrize('bimamba_type', TYPES)
def test_reference_and_default_backend_agree(bimamba_type):
    default = small_mixer(bimamba_type=bimamba_type)
    reference = Mamba(8, d_state=4, bimamba_type=bimamba_type, use_cuda_kernel=False)
    reference.load_state_dict(default.state_dict())
    x = tokens()
    torch.testing.assert_close(default(x), reference(x), rtol=1e-5, atol=1e-5)


def test_autocast_keeps_parameters_of_the_scan_in_fp32(monkeypatch):
    seen = {}

    def spy(u, delta, A, B, C, D, z, delta_bias, **kwargs):
        seen.update(u=u, delta=delta, A=A, B=B, C=C, D=D, z=z, delta_bias=delta_bias)
        return torch.zeros_like(u)

    monkeypatch.setattr('vim_mm.models.mamba.selective_scan_grouped_fn', spy)
    with torch.autocast('cpu', torch.bfloat16):
        small_mixer()(tokens())
    dtypes = {name: tensor.dtype for name, tensor in seen.items()}
    assert dtypes == dict.fromkeys(seen, torch.bfloat16) | dict.fromkeys(
        ('A', 'D', 'delta_bias'), torch.float32
    )


def test_autocast_is_close_to_fp32():
    mixer = small_mixer()
    x = tokens()
    with torch.autocast('cpu', torch.bfloat16):
        out = mixer(x)
    assert out.dtype == torch.bfloat16
    error = (out.float() - mixer(x)).norm() / mixer(x).norm()
    assert error < 0.03


@pytest.mark.parametrize(
    'arguments, message',
    [
        pytest.param(dict(bimamba_type='v3'), "bimamba_type.*'v3'", id='bimamba_type'),
        pytest.param(dict(dt_init='ones'), "dt_init.*'ones'", id='dt_init'),
        pytest.param(dict(dt_init_b='no'), "dt_init_b.*'no'", id='dt_init_b'),
        pytest.param(dict(discretization_method='euler'), "'euler'.*zoh.*rk4", id='method'),
    ],
)
def test_unknown_words(arguments, message):
    with pytest.raises(ValueError, match=message):
        Mamba(8, **arguments)


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        (dict(fused='False'), TypeError, "fused.*'False'"),
        (dict(dt_init_floor='a'), TypeError, "dt_init_floor.*'a'"),
        (dict(dt_init_floor=float('nan')), ValueError, 'dt_init_floor.*nan'),
    ],
)
def test_arguments_of_another_kind(arguments, error, message):
    with pytest.raises(error, match=message):
        Mamba(8, **arguments)


def test_autocast_leaves_float64_alone(monkeypatch):
    """The fast block has the plain one's dtypes."""
    monkeypatch.setattr('vim_mm.models.fused.chosen_backend', lambda *_: 'native')
    on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.float64)
    mixer = small_mixer().double()
    with torch.autocast('cpu', torch.bfloat16):
        assert mixer(tokens().double()).dtype == torch.float64
    monkeypatch.setattr(torch, 'is_autocast_enabled', lambda device: True)
    assert fused_path(mixer, on_gpu) == (torch.float64, 'native')
