"""The fast block: on CUDA against the plain one; on the CPU, with operators in plain PyTorch in the
place of the compiled ones, what Python does around them."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
from torch.nn.utils import parametrize
from torch.profiler import ProfilerActivity, profile

from tests.graphs import assert_replays_eager_bits
from tests.models.plain_operators import fast_block_on_cpu
from tests.models.small import compute_gradients, images, scramble, small_backbone, small_mixer
from tests.ops.inputs import rows_of_uneven_blocks
from vim_mm.models import Mamba, fused, mamba
from vim_mm.ops import METHODS, block

needs_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device'),
]
each_type = pytest.mark.parametrize('bimamba_type', ['none', 'v1', 'v2'])
# The scan alone knows the method, all else the directions.
each_method_and_type = pytest.mark.parametrize(
    'method, bimamba_type',
    [*((method, 'v2') for method in METHODS), ('zoh', 'none'), ('zoh', 'v1')],
)
each_bound = pytest.mark.parametrize(
    'dtype, bound',
    [
        pytest.param(torch.float16, 1e-2, id='fp16'),
        # Most for rk4, whose beta is a polynomial of z; the plain block is off by 7e-2 there.
        pytest.param(torch.bfloat16, 0.12, id='bf16'),
    ],
)
ROPE_RESIDUAL = dict(
    if_rope=True, if_rope_residual=True, out_feature='residual', out_indices=(0, 1),
    if_divide_out=False,
)  # fmt: skip


def mixer(**kwargs):
    return scramble(Mamba(**dict(d_model=24) | kwargs)).cuda()


class Double(torch.nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return 2 * weight


def plain_in_fp64(module):
    """On the CPU, by the scan that has every dtype, whichever the module demands."""
    module = copy.deepcopy(module).double().cpu()
    module.backend = None
    return module


def results(module, x, grad):
    """Output and gradients, by name."""
    x = x.detach().requires_grad_()
    out = module(x)
    names, params = zip(*module.named_parameters(), strict=True)
    grads = torch.autograd.grad(out, (x, *params), grad.to(out))
    return dict(zip(('out', 'x', *names), (out.detach(), *grads), strict=True))


def errors(given, expected):
    """Largest error over largest value."""
    worst = {}
    for name, truth in expected.items():
        value = given[name].cpu().double()
        assert torch.isfinite(value).all(), name
        error, largest = (value - truth.cpu()).abs().max().item(), truth.abs().max().item()
        worst[name] = error / largest if largest else error  # A has no gradient where L is 1
    return worst


def assert_exact(given, expected):
    for name, error in errors(given, expected).items():
        assert error <= (1e-5 if name == 'out' else 1e-4), f'{name} is off by {error:.1e}'


def assert_no_second_derivative(module, x):
    (grad,) = torch.autograd.grad(module(x.requires_grad_()).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match='once_differentiable'):
        grad.sum().backward()


def assert_compiled(model, inputs, dynamic):
    """One graph for all inputs, of the eager gradients."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend='aot_eager')
    for x in inputs:
        expected = compute_gradients(model, x)
        given = {
            name.removeprefix('_orig_mod.'): value
            for name, value in compute_gradients(compiled, x).items()
        }
        assert max(errors(given, expected).values()) <= 1e-4
    assert torch._dynamo.utils.counters['stats']['unique_graphs'] == 1


class TestOnCpu:
    """Autograd, checkpointing and torch.compile see the same functions here as on CUDA."""

    @pytest.fixture(autouse=True)
    def fast_block(self, monkeypatch):
        with fast_block_on_cpu(monkeypatch):
            yield

    @pytest.fixture
    def take_plain(self, monkeypatch):
        return lambda: monkeypatch.setattr(fused, 'fused_path', lambda mixer, x: None)

    @each_type
    @pytest.mark.parametrize(
        'options',
        [
            pytest.param(dict(), id='default'),
            pytest.param(dict(bias=True, conv_bias=False, d_conv=3), id='bias'),
        ],
    )
    def test_every_parameter_gets_its_gradient(self, bimamba_type, options, take_plain):
        module = scramble(Mamba(8, d_state=4, bimamba_type=bimamba_type, **options))
        x, grad = torch.randn(2, 11, 8), torch.randn(2, 11, 8)
        given = results(module, x, grad)
        take_plain()
        assert_exact(given, results(module, x, grad))

    @pytest.mark.parametrize(
        'options',
        [
            pytest.param(dict(), id='mixer'),
            pytest.param(dict(out_feature='residual', with_cp=True), id='residual'),
            pytest.param(dict(out_feature='norm', out_indices=(0, 1)), id='norm'),
            pytest.param(dict(frozen_stages=1, with_cp=True), id='frozen'),
            pytest.param(ROPE_RESIDUAL | dict(with_cp=True), id='rope_residual'),
        ],
    )
    def test_backbone(self, options, take_plain):
        model, x = small_backbone(**options), images(40, 24)
        given = compute_gradients(model, x)
        take_plain()
        assert max(errors(given, compute_gradients(model, x)).values()) <= 1e-4

    @pytest.mark.parametrize(
        'bimamba_type', [*(pytest.param(t, marks=pytest.mark.slow) for t in ('none', 'v1')), 'v2']
    )
    @pytest.mark.parametrize(
        'with_cp',
        [
            pytest.param(False, id='kept'),
            pytest.param(True, id='recomputed', marks=pytest.mark.slow),
        ],
    )
    def test_compile_in_one_graph(self, bimamba_type, with_cp):
        model = small_backbone(bimamba_type=bimamba_type, with_cp=with_cp, if_rope=True)
        assert_compiled(model, [images(40, 24)], dynamic=False)

    @pytest.mark.slow
    def test_compile_sizes_that_share_a_graph(self):
        sizes = [(40, 24), (56, 48), (72, 88)]
        inputs = [images(*size) for size in sizes]
        assert_compiled(small_backbone(out_feature='norm'), inputs, dynamic=True)

    @pytest.mark.parametrize(
        'register',
        [
            lambda mixer, seen: mixer.register_forward_hook(lambda *_: seen.append('call')),
            lambda mixer, seen: mixer.register_forward_pre_hook(lambda *_: seen.append('call')),
            lambda mixer, seen: mixer.register_full_backward_hook(lambda *_: seen.append('call')),
            lambda mixer, seen: mixer.register_full_backward_pre_hook(
                lambda *_: seen.append('call')
            ),
            lambda mixer, seen: torch.nn.modules.module.register_module_forward_hook(
                lambda module, *_: seen.append('call') if module is mixer else None
            ),
            lambda mixer, seen: setattr(
                mixer, 'forward', lambda x: seen.append('call') or Mamba.forward(mixer, x)
            ),
        ],
        ids=['forward', 'pre', 'backward', 'backward_pre', 'global', 'patch'],
    )
    def test_layers_are_one_operator_but_hooks_of_a_mixer_are_called(
        self, register, monkeypatch, request
    ):
        """With them a layer is a norm and a mixer: the same in other launches."""
        forward, normed = block._ops.mixer_fwd, []

        class Spy:
            def __getattr__(self, name):
                return getattr(torch.ops.vim_mm, name)

            def mixer_fwd(self, *arguments):
                normed.append(arguments[2] is not None)
                return forward(*arguments)

        monkeypatch.setattr(block, '_ops', Spy())
        model, x = small_backbone(), images(40, 24)
        expected = compute_gradients(model, x)
        assert normed == [True, True]
        seen = []
        handle = register(model.layers[1].mixer, seen)
        try:
            given = compute_gradients(model, x)
        finally:
            if handle is not None:
                handle.remove()
        # A hook on all modules has all of them called.
        separate = [] if request.node.callspec.id == 'global' else [False]
        assert seen == ['call'] and normed[2 + len(separate) :] == separate
        assert max(errors(given, expected).values()) <= 1e-5

    def test_parametrized_weights(self, take_plain):
        module = small_mixer()
        parametrize.register_parametrization(module.in_proj, 'weight', Double())
        x, grad = torch.randn(2, 11, 8), torch.randn(2, 11, 8)
        given = results(module, x, grad)
        take_plain()
        assert_exact(given, results(module, x, grad))

    @pytest.mark.slow
    def test_the_last_norm_is_plain_in_compiled_code(self):
        """Inductor prints the operands of an operator that is new to it, which doubles by layer."""
        codes = []

        def backend(graph, _):
            codes.append(graph.code)
            return graph

        torch.compiler.reset()
        model, x = small_backbone(out_feature='norm'), images(40, 24)
        with torch.no_grad():
            (given,) = torch.compile(model, fullgraph=True, backend=backend)(x)
            (expected,) = model(x)
        assert 'mixer_fwd' in codes[0] and 'add_rms_norm' not in codes[0]
        assert errors({'out': given}, {'out': expected})['out'] <= 1e-5

    def test_no_second_derivative(self):
        assert_no_second_derivative(Mamba(8), torch.randn(1, 9, 8))


def test_the_plain_block_is_taken_where_the_fast_one_cannot_be():
    on_cpu = torch.empty(1, 4, 8)
    assert fused.fused_path(Mamba(8), on_cpu) is None
    assert fused.fused_path(Mamba(8), on_cpu.to('meta')) is None


def test_choice_of_block_and_choice_of_scan_are_two_switches(monkeypatch):
    """On CUDA, told by a stand-in: without the fast block the compiled scan is still taken."""
    asked = []
    on_cuda = SimpleNamespace(is_cuda=True)

    def choose(backend, wish, *_):
        asked.append(wish)
        return 'native' if wish is None else 'reference'

    monkeypatch.setattr(fused, 'chosen_backend', choose)
    assert fused.fused_path(Mamba(8), on_cuda) == (torch.float32, 'native')
    assert fused.fused_path(Mamba(8, use_cuda_kernel=False), on_cuda) is None
    assert asked == [None, False]
    assert fused.fused_path(Mamba(8, fused=False), on_cuda) is None
    assert asked == [None, False]

    layers = small_backbone(ssm_cfg=dict(d_state=4, fused=False)).layers
    assert [fused.fused_path(layer.mixer, on_cuda) for layer in layers] == [None, None]
    seen = []
    scan = mamba.selective_scan_grouped_fn
    monkeypatch.setattr(
        mamba,
        'selective_scan_grouped_fn',
        lambda *args, **kw: seen.append(kw['use_cuda_kernel']) or scan(*args, **kw),
    )
    Mamba(8, fused=False)(torch.randn(1, 4, 8))
    assert seen == [None]


class TestOnCuda:
    pytestmark = needs_cuda

    def test_without_the_fast_block_the_compiled_scan_runs(self):
        module = mixer(fused=False)
        x = torch.randn(2, 36, 24, device='cuda')
        with profile(activities=[ProfilerActivity.CPU]) as run:
            out = module(x)
        called = {event.name for event in run.events()}
        assert 'vim_mm::selective_scan_fwd' in called
        assert not any('mixer_fwd' in name for name in called)
        assert_exact({'out': out}, {'out': plain_in_fp64(module)(x.cpu().double()).detach()})

    def test_choice(self, monkeypatch):
        x = torch.empty(1, 4, 8, device='cuda')
        assert fused.fused_path(Mamba(8), x) == (torch.float32, 'native')
        assert fused.fused_path(Mamba(8).half(), x) == (torch.float16, 'native')
        with torch.autocast('cuda', torch.bfloat16):
            assert fused.fused_path(Mamba(8), x) == (torch.bfloat16, 'native')
        assert fused.fused_path(Mamba(8).double(), x) is None
        assert fused.fused_path(Mamba(8, d_conv=8), x) == (torch.float32, 'native')
        assert fused.fused_path(Mamba(8, d_conv=9), x) is None
        assert fused.fused_path(Mamba(8, use_cuda_kernel=False), x) is None
        assert fused.fused_path(Mamba(8, fused=False), x) is None
        monkeypatch.setenv('VIM_USE_CUDA_KERNEL', '0')
        assert fused.fused_path(Mamba(8), x) is None
        assert fused.fused_path(Mamba(8, use_cuda_kernel=True), x) == (torch.float32, 'native')

    @each_method_and_type
    @pytest.mark.parametrize('length', [1, 5, 8, 36, 197, 1000])
    def test_fp32_equals_the_plain_mixer(self, bimamba_type, method, length):
        module = mixer(bimamba_type=bimamba_type, discretization_method=method)
        x, grad = (torch.randn(2, length, 24, device='cuda') for _ in range(2))
        given = results(module, x, grad)
        truth = results(plain_in_fp64(module), x.cpu().double(), grad.cpu())
        assert_exact(given, truth)
        for name, again in results(module, x, grad).items():
            assert torch.equal(again, given[name]), f'{name} differs from run to run'

    @pytest.mark.parametrize(
        'options',
        [
            *(pytest.param(dict(d_conv=width), id=f'd_conv{width}') for width in range(1, 9)),
            pytest.param(dict(conv_bias=False, dt_rank=8), id='no_conv_bias'),
            pytest.param(dict(bias=True, d_state=5, if_divide_out=False), id='bias'),
            pytest.param(dict(bias=True, bimamba_type='v1', expand=1.5), id='v1'),
        ],
    )
    @pytest.mark.parametrize('length', [2, 12, 13, 2060])
    def test_every_option(self, length, options):
        module = mixer(**options)
        x, grad = (torch.randn(3, length, 24, device='cuda') for _ in range(2))
        truth = results(plain_in_fp64(module), x.cpu().double(), grad.cpu())
        assert_exact(results(module, x, grad), truth)

    def test_many_channels(self):
        """Several spans for threads of the convolution, and a rank that fills no pack."""
        module = mixer(d_model=8, expand=96, d_state=4, dt_rank=12)
        x, grad = (torch.randn(3, 1000, 8, device='cuda') for _ in range(2))
        truth = results(plain_in_fp64(module), x.cpu().double(), grad.cpu())
        assert_exact(results(module, x, grad), truth)

    @each_method_and_type
    @each_bound
    @pytest.mark.parametrize('length', [1, 196, 197, 200])  # by one, four and eight at once
    def test_half_precision(self, bimamba_type, method, dtype, bound, length):
        """By autocast and as a model of 16 bits."""
        module = mixer(bimamba_type=bimamba_type, discretization_method=method)
        x, grad = (torch.randn(2, length, 24, device='cuda').to(dtype) for _ in range(2))
        truth = results(plain_in_fp64(module), x.cpu().double(), grad.cpu())
        with torch.autocast('cuda', dtype):
            given = results(module, x.float(), grad)
        assert given['out'].dtype == dtype and given['x'].dtype == torch.float32
        assert max(errors(given, truth).values()) <= bound

        narrow = module.to(dtype)
        truth = results(plain_in_fp64(narrow), x.cpu().double(), grad.cpu())
        given = results(narrow, x, grad)
        assert {value.dtype for value in given.values()} == {dtype}
        assert max(errors(given, truth).values()) <= bound

    @pytest.mark.parametrize('method', ['zoh', 'poly'])
    @pytest.mark.parametrize('dtype, bound', [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
    def test_uneven_blocks(self, method, dtype, bound):
        """Some multiprocessors have two blocks, others one; eager and replayed."""
        batch, directions = 2, 2
        channels = rows_of_uneven_blocks() // (8 * batch * directions) * 8
        module = mixer(d_model=channels, expand=1, discretization_method=method).to(dtype)
        x = torch.randn(batch, 2060, channels, device='cuda', dtype=dtype)
        with torch.no_grad():
            for _ in range(3):
                given, truth = module(x.normal_()), plain_in_fp64(module)(x.cpu().double())
                assert errors({'out': given}, {'out': truth})['out'] <= bound
            assert_replays_eager_bits(lambda: [module(x)], x)

    @each_bound
    @each_type
    @pytest.mark.parametrize(
        'd_model, batch, length',
        [
            (192, 8, 520),
            (80, 3, 200),
            # Rows that are not aligned, and an odd number of tokens.
            (90, 3, 200),
            (96, 3, 199),
        ],
    )
    def test_gate_and_output_projection(self, bimamba_type, dtype, bound, d_model, batch, length):
        module = mixer(
            d_model=d_model, expand=0.5, d_state=4, bias=True, bimamba_type=bimamba_type
        ).to(dtype)
        # Small, or the gradients of the parameters, which are sums over all tokens, exceed float16.
        x, grad = (
            (torch.randn(batch, length, d_model, device='cuda') / 16).to(dtype) for _ in range(2)
        )
        given = results(module, x, grad)
        truth = results(plain_in_fp64(module), x.cpu().double(), grad.cpu())
        assert max(errors(given, truth).values()) <= bound
        with torch.no_grad():  # which keeps nothing for backward
            assert torch.equal(module(x), given['out'])

    def test_no_second_derivative(self):
        assert_no_second_derivative(mixer(), torch.randn(1, 9, 24, device='cuda'))

    @pytest.mark.parametrize(
        'options',
        [
            pytest.param(dict(), id='mixer'),
            pytest.param(dict(out_feature='residual', bimamba_type='v1'), id='residual'),
            pytest.param(dict(out_feature='norm', out_indices=(0, 1)), id='norm'),
            pytest.param(dict(if_rope=True, cls_token='middle'), id='rope'),
            pytest.param(ROPE_RESIDUAL, id='rope_residual'),
            pytest.param(dict(drop_path_rate=0.5, if_abs_pos_embed=False), id='drop_path'),
            pytest.param(
                dict(residual_in_fp32=False, if_abs_pos_embed=False, bimamba_type='none'),
                id='stream',
            ),
            pytest.param(dict(frozen_stages=1), id='frozen'),
        ],
    )
    @pytest.mark.parametrize('with_cp', [False, True], ids=['kept', 'recomputed'])
    @pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=['fp32', 'bf16'])
    def test_backbone(self, options, with_cp, dtype, monkeypatch):
        """In bf16 the fast block is no further from fp32 than the plain one is."""
        model = small_backbone(**options, with_cp=with_cp).cuda()
        x = images(40, 24).cuda()

        def run(dtype):
            torch.manual_seed(1)  # of drop_path
            with torch.autocast('cuda', torch.bfloat16, enabled=dtype == torch.bfloat16):
                gradients = compute_gradients(model, x)
                torch.manual_seed(1)
                with torch.no_grad():
                    outputs = model(x)
            return dict(enumerate(outputs)) | gradients

        fast = run(dtype)
        monkeypatch.setattr(fused, 'fused_path', lambda mixer, x: None)
        plain, truth = run(dtype), run(torch.float32)
        assert {name: t.dtype for name, t in fast.items()} == {
            name: t.dtype for name, t in plain.items()
        }
        worst = errors(fast, truth)
        if dtype == torch.float32:
            assert worst[0] <= 1e-5 and max(worst.values()) <= 1e-4
        else:
            # Both are the worst of some hundred roundings; seen on an H200: 1.7 times.
            assert max(worst.values()) <= 2 * max(errors(plain, truth).values())

    @each_type
    @pytest.mark.parametrize('with_cp', [False, True], ids=['kept', 'recomputed'])
    def test_compile_in_one_graph(self, bimamba_type, with_cp):
        model = small_backbone(bimamba_type=bimamba_type, with_cp=with_cp, if_rope=True).cuda()
        assert_compiled(model, [images(40, 24).cuda()], dynamic=False)

    @pytest.mark.slow
    def test_compile_sizes_that_share_a_graph(self):
        inputs = [images(*size).cuda() for size in [(40, 24), (56, 48), (72, 88)]]
        assert_compiled(small_backbone(out_feature='norm').cuda(), inputs, dynamic=True)

    @pytest.mark.parametrize('training', [True, False], ids=['training', 'inference'])
    @pytest.mark.parametrize('rope', [False, True], ids=['plain', 'rope'])
    def test_graph_capture_and_replay(self, training, rope):
        """The eager bits, for new images too."""
        model = small_backbone(if_rope=rope, if_rope_residual=rope).cuda().train(training)
        x = images(40, 24).cuda()

        def run():
            with torch.set_grad_enabled(training), torch.autocast('cuda', torch.bfloat16):
                (out,) = model(x)
            if not training:
                return [out]
            return [out.detach(), *torch.autograd.grad(out.float().sum(), list(model.parameters()))]

        assert_replays_eager_bits(run, x)

    def test_graph_of_the_documentation(self):
        """docs/block.md to the letter: nothing that the graph reads is freed behind it."""
        model, image = small_backbone().cuda().eval(), images(40, 24).cuda()

        def autocast():
            return torch.autocast('cuda', torch.bfloat16, cache_enabled=False)

        with torch.no_grad(), autocast():
            for _ in range(3):
                model(image)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                (captured,) = model(image)
        for _ in range(2):
            image.normal_()
            with torch.no_grad(), autocast():
                (truth,) = model(image)  # also takes the memory that was freed
            graph.replay()
            assert torch.equal(captured, truth)
