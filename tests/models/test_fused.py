"""Hooks, adapters, parametrizations and replacements take effect on every path.

On CUDA the fused operators are real; on the CPU operators in plain PyTorch stand in for them.
"""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.models.plain_operators import fast_block_on_cpu
from tests.models.small import compute_gradients, images, small_backbone
from vim_mm.models import LayerPath, fused, path_of_layers
from vim_mm.ops import block

PARTS = ['in_proj', 'conv1d', 'conv1d_b', 'x_proj', 'x_proj_b', 'dt_proj', 'dt_proj_b', 'out_proj']
MODULES = [*(f'layers.0.mixer.{part}' for part in PARTS), 'layers.0.norm', 'patch_embed.proj']


class Adapter(nn.Module):
    """What LoRA does: a frozen module and a trained update of it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.update = copy.deepcopy(base)

    def forward(self, x):
        return self.base(x) + 0.5 * self.update(x)


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Scaled(torch.Tensor):
    """A tensor with a product of its own, as quantized weights are."""


def replace(model, name, new):
    parent, _, child = name.rpartition('.')
    setattr(model.get_submodule(parent), child, new)


def add_adapter(model, name):
    replace(model, name, Adapter(model.get_submodule(name)))


def add_forward_hook(model, name):
    model.get_submodule(name).register_forward_hook(lambda module, args, out: 1.5 * out)


def add_pre_hook(model, name):
    model.get_submodule(name).register_forward_pre_hook(lambda module, args: (1.5 * args[0],))


def add_backward_hook(model, name):
    model.get_submodule(name).register_full_backward_hook(
        lambda module, grads, _: tuple(None if g is None else 1.5 * g for g in grads)
    )


def patch_forward(model, name):
    module = model.get_submodule(name)
    forward = module.forward
    module.forward = lambda x: 1.5 * forward(x)


def parametrize_weight(model, name):
    parametrize.register_parametrization(model.get_submodule(name), 'weight', Double())


def prune_weight(model, name):
    prune.l1_unstructured(model.get_submodule(name), 'weight', amount=0.5)


CHANGES = {
    'adapter': add_adapter,
    'hook': add_forward_hook,
    'pre_hook': add_pre_hook,
    'backward_hook': add_backward_hook,
    'patch': patch_forward,
    'parametrization': parametrize_weight,
    'pruning': prune_weight,
}
DEVICES = [
    'cpu',
    'operators',
    pytest.param(
        'cuda',
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device'),
        ],
    ),
]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param != 'operators':
        yield request.param
        return
    with fast_block_on_cpu(monkeypatch):
        yield 'cpu'


@pytest.fixture
def operators(monkeypatch):
    with fast_block_on_cpu(monkeypatch):
        monkeypatch.setattr(fused, '_why_not_fused', lambda *_: None)
        yield


def results(model, x):
    gradients = compute_gradients(model, x)
    with torch.no_grad():
        outputs = model(x)
    return dict(enumerate(outputs)) | gradients


def assert_close(given, expected):
    assert given.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(given[name], value, rtol=2e-4, atol=2e-4, msg=str(name))


def everything_called(model, x):
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        return results(model, x)
    finally:
        handle.remove()


@pytest.mark.parametrize('change', CHANGES)
@pytest.mark.parametrize('name', MODULES)
def test_a_change_of_any_module_takes_effect(change, name, device):
    """Against the model of which every module is called, which a change cannot pass by."""
    torch.manual_seed(0)
    model = small_backbone(arch=dict(embed_dims=16, num_layers=1)).to(device)
    x = images(16, 16, batch=1).to(device)
    before = results(model, x)
    CHANGES[change](model, name)
    given = results(model, x)
    assert_close(given, everything_called(model, x))
    same = all(torch.allclose(given[k], before[k]) for k in given.keys() & before.keys())
    assert not same, 'the change had no effect'


@pytest.mark.parametrize('bimamba_type', ['none', 'v1', 'v2'])
@pytest.mark.parametrize('bias', [False, True])
def test_called_modules_equal_read_parameters(bimamba_type, bias, device):
    ssm_cfg = dict(d_state=4, bias=bias, conv_bias=not bias)
    model = small_backbone(bimamba_type=bimamba_type, ssm_cfg=ssm_cfg).to(device)
    x = images(16, 24).to(device)
    assert_close(results(model, x), everything_called(model, x))


@pytest.mark.parametrize('part', PARTS)
def test_a_scan_beside_called_modules_finds_time_contiguous(part):
    """CUDA's fast kernels are for no other scan."""
    mixer = small_backbone().layers[0].mixer
    mixer.get_submodule(part).register_forward_hook(lambda *_: None)
    arguments = mixer.scan_arguments(torch.randn(2, 7, mixer.d_model))
    assert all(arguments[name].stride(-1) == 1 for name in ('u', 'delta', 'B', 'C', 'z'))


def test_removing_a_change_brings_the_fast_path_back(operators):
    model = small_backbone()
    mixer = model.layers[0].mixer
    handle = mixer.in_proj.register_forward_hook(lambda *_: None)
    assert fused.fused_arguments(mixer) is None
    handle.remove()
    assert fused.fused_arguments(mixer) is not None
    original = mixer.conv1d_b
    add_adapter(model, 'layers.0.mixer.conv1d_b')
    assert fused.fused_arguments(mixer) is None
    mixer.conv1d_b = original
    for other in (mixer, copy.deepcopy(mixer), pickle.loads(pickle.dumps(mixer))):
        assert fused.fused_arguments(other) is not None


@pytest.mark.parametrize(
    'part, make, reason',
    [
        ('x_proj', lambda old: nn.Linear(32, 9), 'x_proj has a bias'),
        ('dt_proj_b', lambda old: nn.Linear(1, 32, bias=False), 'dt_proj_b has no bias'),
        ('conv1d', lambda old: nn.Conv1d(32, 32, 4), 'conv1d has another stride'),
        (
            'in_proj',
            lambda old: nn.Sequential(old),
            'in_proj is a torch.nn.modules.container.Sequential',
        ),
    ],
)
def test_modules_of_another_form(part, make, reason, operators):
    model, x = small_backbone(), images(16, 24)
    replace(model, f'layers.1.mixer.{part}', make(model.layers[1].mixer.get_submodule(part)))
    reasons = {path.name: path.reason for path in model.paths('cuda')}
    assert reasons.pop('layers.1.mixer').startswith(reason)
    assert set(reasons.values()) == {None}
    assert_close(results(model, x), everything_called(model, x))


def test_a_tensor_with_a_product_of_its_own(operators):
    mixer = small_backbone().layers[0].mixer
    weight = mixer.out_proj.weight.detach().as_subclass(Scaled)
    mixer.out_proj.weight = nn.Parameter(weight)
    assert fused.fused_arguments(mixer) is None
    assert mixer.plain_reasons('cuda', None)[''].endswith('.Scaled')


def test_convolutions_of_another_length_are_an_error():
    model = small_backbone()
    replace(model, 'layers.0.mixer.conv1d', nn.Sequential(nn.Conv1d(32, 32, 3, groups=32)))
    with pytest.raises(ValueError, match='conv1d must turn'):
        model(images())


@pytest.mark.parametrize('kind', [nn.Identity, nn.LayerNorm])
def test_replaced_norms(kind, device):
    model, x = small_backbone(), images(16, 24)
    replace(model, 'layers.1.norm', kind(16))
    model, x = model.to(device), x.to(device)
    assert_close(results(model, x), everything_called(model, x))


def test_a_replaced_mixer_is_called(device):
    model = small_backbone()
    replace(model, 'layers.1.mixer', nn.Linear(16, 16))
    model, x = model.to(device), images(16, 24).to(device)
    assert_close(results(model, x), everything_called(model, x))
    assert {p.name for p in model.paths() if 'Linear' in (p.reason or '')} == {'layers.1.norm'}


@pytest.mark.parametrize('wrap', [parametrizations.weight_norm, nn.utils.weight_norm])
def test_weight_norm(wrap, device):
    model, x = small_backbone(), images(16, 24)
    for mixer in (layer.mixer for layer in model.layers):
        wrap(mixer.in_proj)
        wrap(mixer.x_proj_b)
    model, x = model.to(device), x.to(device)
    assert_close(results(model, x), everything_called(model, x))


def test_dynamic_quantization():
    model, x = small_backbone().eval(), images(16, 24)
    with torch.no_grad():
        expected = model(x)[0]
        quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        given = quantized(x)[0]
    error = (given - expected).abs().max() / expected.abs().max()
    assert 1e-6 < error < 0.1
    reasons = [path.reason for path in quantized.paths('cuda') if path.name.endswith('mixer')]
    assert len(reasons) == 2


@pytest.mark.slow  # peft imports transformers
def test_adapters_of_peft_train(device):
    peft = pytest.importorskip('peft', reason='needs peft')
    model, x = small_backbone(), images(16, 24)
    config = peft.LoraConfig(
        r=32, init_lora_weights=False, target_modules=[*PARTS, 'proj'], lora_alpha=8
    )
    adapted = peft.get_peft_model(model, config).to(device)
    x = x.to(device)
    given = results(adapted, x)
    assert_close(given, everything_called(adapted, x))
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * (2 * len(PARTS) + 1)
    assert all(given[name].abs().max() > 0 for name in trained)
    with adapted.disable_adapter(), torch.no_grad():
        assert not torch.allclose(adapted(x)[0], given[0], atol=1e-3)


@pytest.mark.slow
def test_one_adapted_layer_is_compiled_in_one_graph(operators):
    torch.compiler.reset()
    model, x = small_backbone(), images(16, 24)
    add_adapter(model, 'layers.0.mixer.in_proj')
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


class TestPaths:
    def test_on_the_cpu_only_patches_are_fused(self):
        paths = small_backbone(out_feature='norm').paths()
        names = ['layers.0.norm', 'layers.0.mixer', 'layers.1.norm', 'layers.1.mixer', 'norm_f']
        assert {path.name for path in paths} == {'patch_embed', *names}
        assert [path.name for path in paths if path.reason is None] == ['patch_embed']
        assert str(paths[0]).startswith('norm_f: plain, there is none for cpu')

    def test_overlapping_patches_are_a_convolution(self):
        paths = path_of_layers(small_backbone(stride=4))
        assert 'another stride' in next(p.reason for p in paths if p.name == 'patch_embed')

    def test_names_the_hook_and_the_rest_stays_fused(self, operators):
        model = nn.ModuleDict(dict(backbone=small_backbone(out_feature='norm')))
        add_forward_hook(model, 'backbone.layers.1.mixer.dt_proj')
        expected = LayerPath('backbone.layers.1.mixer', 'dt_proj has hooks')
        assert [p for p in path_of_layers(model, 'cuda') if p.reason is not None] == [expected]

    @pytest.mark.parametrize('fused_operators', [False, True])
    def test_a_module_is_asked_once_in_a_call(self, fused_operators, monkeypatch):
        asked, why_call = [], fused.why_call
        model = small_backbone(arch=dict(embed_dims=16, num_layers=1))
        record = lambda module, kind: asked.append(module) or why_call(module, kind)  # noqa: E731
        monkeypatch.setattr(fused, 'why_call', record)
        context = fast_block_on_cpu if fused_operators else contextlib.nullcontext
        with context(monkeypatch):
            model(images())
        # The patch embedding, the mixer, and its modules; of the norm only what can be fused.
        (layer,) = model.layers
        parts = [m for name, m in layer.mixer.named_children() if name != 'out_proj']
        expected = [model.patch_embed.proj, layer.mixer, *parts]
        if fused_operators:
            expected += [layer.norm, layer.mixer.out_proj]
        assert sorted(map(id, asked)) == sorted(map(id, expected))

    def test_the_other_layers_run_fused(self, operators, monkeypatch):
        calls = []

        class Spy:
            def __getattr__(self, name):
                calls.append(name)
                return getattr(torch.ops.vim_mm, name)

        monkeypatch.setattr(block, '_ops', Spy())
        model = small_backbone()
        add_adapter(model, 'layers.0.mixer.in_proj')
        with torch.no_grad():
            model(images())
        # The norm of the adapted layer, the norm and mixer of the other one.
        assert calls == ['add_rms_norm_fwd', 'mixer_fwd']

    @pytest.mark.cuda
    @pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
    def test_on_cuda(self):
        model = small_backbone(out_feature='norm').cuda()
        assert {path.reason for path in model.paths()} == {None}
        add_forward_hook(model, 'layers.1.mixer.dt_proj')
        assert [p.reason for p in model.paths() if p.reason] == ['dt_proj has hooks']
        assert 'float64' in model.paths(dtype=torch.float64)[-1].reason
