"""``--compile``: parts are compiled for training, and results change by rounding alone."""

import os
import subprocess
import sys
from copy import deepcopy

import pytest
import torch
from mmengine.config import Config
from mmengine.optim import OptimWrapper

from tests.engine.optimization.test_graphed_step import (
    STEPS,
    Net,
    counts,
    prebatched,
    results,
    train,
    wrapped,
)
from tests.graphs import assert_same_bits
from tests.own_process import ROOT
from vim_mm.engine.optimization import compiled_parts
from vim_mm.engine.optimization.compiled_parts import CompiledParts
from vim_mm.engine.optimization.graphed_step import train_by_graph
from vim_mm.engine.optimization.mixed_precision import BFloat16OptimWrapper
from vim_mm.engine.watching.nonfinite import NonFiniteLossError


class Quiet(Net):
    """Without random numbers, which compiled parts draw by kernels of their own."""

    def __init__(self):
        super().__init__()
        self.drop.p = 0.0
        for layer in self.backbone.layers:
            for module in layer.modules():
                if hasattr(module, 'drop_prob'):
                    module.drop_prob = 0.0


CACHE = 'TORCHINDUCTOR_CACHE_DIR'


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path / 'cache'))
    return tmp_path / 'cache'


@pytest.fixture
def compiled_calls(monkeypatch):
    """The parts that were compiled, by name of their class; they are computed as they are."""
    seen = []

    def compile(function, dynamic, options):
        assert dynamic is False

        def call(*args, **kwargs):
            seen.append(type(args[0] if function.__name__ == 'forward' else function).__name__)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(compiled_parts.torch, 'compile', compile)
    return seen


def make(wrapper=OptimWrapper):
    model = Quiet()
    wrapper = wrapper(optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))
    wrapper.initialize_count_status(model, 0, 10)
    return model, wrapper


def test_training_alone_is_compiled(compiled_calls):
    model, wrapper = make()
    parts = CompiledParts(model, wrapper)
    x = torch.rand(2, 3, 8, 8)
    model(x, mode='loss')
    assert compiled_calls == ['VisionMamba', 'BatchNorm2d', 'Dropout', 'Conv2d']
    with torch.no_grad():
        model(x)
    model.eval()(x)
    assert len(compiled_calls) == 4
    parts.remove()
    model.train()(x, mode='loss')
    assert len(compiled_calls) == 4
    assert not any('forward' in vars(module) for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize(('given', 'kept'), [(None, 'vim_mm/inductor'), ('own', 'own')])
def test_what_is_compiled_is_kept(given, kept, tmp_path):
    """Not among temporary files, which PyTorch names as soon as its compiler is imported."""
    program = (
        'import vim_mm.ops, torch._dynamo\n'
        'from vim_mm.engine.optimization.compiled_parts import _keep_what_is_compiled\n'
        'print(_keep_what_is_compiled())'
    )
    own = {name: value for name, value in os.environ.items() if name != CACHE}
    own |= {'XDG_CACHE_HOME': str(tmp_path)} | ({CACHE: str(tmp_path / given)} if given else {})
    command = [sys.executable, '-c', program]
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == [str(tmp_path / kept)], done.stderr


def test_deterministic_training_chooses_no_kernel_by_its_time(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, 'compile', lambda function, **options: seen.append(options))
    CompiledParts(*make())
    monkeypatch.setattr(torch, 'are_deterministic_algorithms_enabled', lambda: True)
    CompiledParts(*make())
    assert seen[0] == dict(dynamic=False, options=None)
    assert seen[-1] == dict(dynamic=False, options={'deterministic': True})


def test_a_forward_that_somebody_gave_is_given_back(compiled_calls):
    model, wrapper = make()
    given = model.head.forward
    model.head.forward = given
    CompiledParts(model, wrapper).remove()
    assert model.head.forward is given


@pytest.mark.parametrize(
    ('size', 'packed', 'traced'), [((8, 8), 0, True), (None, 0, False), ((8, 8), 1, False)]
)
def test_norms_are_traced_where_all_images_have_one_size(
    size, packed, traced, compiled_calls, monkeypatch
):
    """Otherwise one process may meet the compiler's limit of shapes, and others not."""
    seen = []
    monkeypatch.setattr(compiled_parts, 'trace_synchronized_norms', lambda x: seen.append(x) or [])
    model, wrapper = make()
    model.data_preprocessor.size = size
    if packed:
        model.with_fixed_shapes = lambda batch: batch
    CompiledParts(model, wrapper)
    assert seen == [model] * traced


def test_a_copy_computes_by_its_own_weights(compiled_calls):
    model, wrapper = make()
    given, x = model.drop.forward, torch.rand(2, 8, 2, 2)
    model.drop.forward = lambda x: given(x)
    parts = CompiledParts(model, wrapper)
    copy = deepcopy(model)
    torch.nn.init.zeros_(copy.head.weight)
    for mode in (True, False):
        copy.train(mode), model.train(mode)
        assert torch.equal(copy.head(x), copy.head.bias.view(3, 1, 1).expand(2, 3, 2, 2))
        assert not torch.equal(model.head(x), copy.head(x))
        assert torch.equal(model.drop(x), x)
    parts.remove()
    assert [name for name, module in model.named_modules() if 'forward' in vars(module)] == ['drop']


def test_channels_are_last_in_weights_and_in_the_optimizer(compiled_calls):
    model, wrapper = make()
    model(torch.rand(2, 3, 8, 8), mode='loss')['loss_square'].backward()
    wrapper.step()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    CompiledParts(model, wrapper)
    weight = model.backbone.patch_embed.proj.weight
    for x in (weight, *wrapper.optimizer.state[weight].values()):
        assert x.dim() == 0 or x.is_contiguous(memory_format=torch.channels_last)
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name])


def test_a_resumed_optimizer_steps_in_the_form_of_this_run(compiled_calls):
    """A checkpoint of a run without --compile says fused=None for each group."""
    model, wrapper = make()
    model(torch.rand(2, 3, 8, 8), mode='loss')['loss_square'].backward()
    wrapper.step()
    fused = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    fused.load_state_dict(wrapper.optimizer.state_dict())
    assert not fused.param_groups[0]['fused'], 'it is what PyTorch does'
    CompiledParts(model, OptimWrapper(optimizer=fused))
    assert all(group['fused'] and not group['foreach'] for group in fused.param_groups)
    before = model.head.weight.clone()
    fused.step()
    assert not torch.equal(model.head.weight, before)
    assert all(float(state['step']) == 2 for state in fused.state.values())


def test_bfloat16_is_handed_over(compiled_calls):
    model, wrapper = make(BFloat16OptimWrapper)
    dtypes = []
    model.head.register_forward_pre_hook(lambda module, inputs: dtypes.append(inputs[0].dtype))
    x = torch.rand(2, 3, 8, 8)
    for _ in range(2):
        with wrapper.optim_context(model):
            model(x, mode='loss')
        CompiledParts(model, wrapper)
    assert dtypes == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ('optimizer', 'fused'),
    [
        (dict(type='AdamW', lr=1e-3), True),
        (dict(type=torch.optim.SGD, lr=1e-3), True),
        (dict(type='AdamW', lr=1e-3, foreach=False), None),
        (dict(type='AdamW', lr=1e-3, fused=False), False),
        (dict(type='Lion', lr=1e-3), None),
    ],
)
def test_the_optimizer_is_fused(optimizer, fused):
    cfg = Config(dict(optim_wrapper=dict(type='OptimWrapper', optimizer=optimizer)))
    train_by_graph(cfg, compile=True)
    assert cfg.optim_wrapper.optimizer.get('fused') is fused
    assert cfg.custom_hooks == [dict(type='GraphedStepHook', compile=True)]


def test_several_optimizers_are_left_to_the_hook_to_refuse():
    wrappers = dict(constructor='Own', one=dict(optimizer=dict(type='AdamW')))
    cfg = Config(dict(optim_wrapper=wrappers))
    train_by_graph(cfg, compile=True)
    assert cfg.optim_wrapper == wrappers


def test_a_hook_of_the_config_compiles_too():
    hooks = [dict(type='GraphedStepHook')]
    cfg = Config(dict(optim_wrapper=dict(optimizer=dict(type='SGD')), custom_hooks=hooks))
    train_by_graph(cfg, compile=True)
    assert cfg.custom_hooks == [dict(type='GraphedStepHook', compile=True)]


def test_compile_without_graph_is_refused():
    command = [sys.executable, 'tools/train.py', 'configs/seg/upernet_vim_shapes.py', '--compile']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert '--graph' in done.stderr.splitlines()[-1]


COMPILED = dict(type='GraphedStepHook', compile=True)


@pytest.mark.usefixtures('graph_device')
def test_a_resumed_training_ends_in_the_same_bits(compiled_calls, tmp_path):
    whole = train(tmp_path / 'whole', False, custom_hooks=[COMPILED])
    (log,) = (tmp_path / 'whole').rglob('*.log')
    assert log.read_text().count('The first step of this shape, with compilation: ') == 1
    options = dict(load_from=str(tmp_path / 'whole' / 'iter_3.pth'), resume=True)
    resumed = train(tmp_path / 'resumed', False, custom_hooks=[COMPILED], **options)
    assert counts(resumed[0]) == (STEPS - 4, 1)
    assert_same_bits(
        *(
            {name: x for name, x in results(*run).items() if name.startswith(('model', 'optim'))}
            for run in (resumed, whole)
        )
    )


@pytest.mark.usefixtures('graph_device')
def test_a_loss_that_is_not_finite_is_found(compiled_calls, tmp_path):
    pictures = [torch.rand(2, 3, 8, 8) for _ in range(6)]
    pictures[3][0] = float('nan')
    with pytest.raises(NonFiniteLossError, match='loss of iteration 4 is nan'):
        train(tmp_path, False, custom_hooks=[COMPILED], train_dataloader=prebatched(pictures))
    assert compiled_calls


@pytest.mark.slow
@pytest.mark.usefixtures('graph_device')
def test_a_training_changes_by_rounding(tmp_path, cache, monkeypatch):
    """With accumulation, clipping, averages and validations."""
    # TF32 keeps 10 bits: a convolution of another layout in memory rounds otherwise.
    monkeypatch.setattr(torch.backends.cudnn, 'allow_tf32', False)
    options = dict(
        model=Quiet,
        auto_scale_lr=dict(base_batch_size=4),
        **wrapped('OptimWrapper', clip_grad=dict(max_norm=0.05)),
    )
    hooks = dict(custom_hooks=[dict(type='EMAHook', update_buffers=True)])
    plain = results(*train(tmp_path / 'plain', False, **options, **hooks))
    hooks['custom_hooks'] += [COMPILED]
    runner, reader = train(tmp_path / 'compiled', False, **options, **hooks)
    compiled = results(runner, reader)
    assert counts(runner)[0] > 0
    assert [*compiled] == [*plain]
    for name, value in plain.items():
        if not name.startswith('optimizer'):
            torch.testing.assert_close(
                torch.as_tensor(compiled[name]), torch.as_tensor(value), rtol=1e-3, atol=1e-4
            )
    assert any(cache.iterdir())
    assert all('forward' not in vars(module) for module in runner.model.modules())
