"""Training by CUDA graphs: the same bits as without, and a sentence where it cannot be done.

Without a GPU the graphs are emulated by calls (tests/graphs.py). Both kinds go through the same
tests.
"""

import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import DATASETS, MODEL_WRAPPERS
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.engine.toy import ToyModel, make_runner
from tests.graphs import assert_same_bits
from tests.own_process import ROOT
from vim_mm.engine import FlatDataParallel
from vim_mm.engine.optimization import graphed_step
from vim_mm.engine.optimization.graphed_step import (
    GraphedStep,
    GraphedStepHook,
    GraphError,
    clone_batch,
    obstacle,
    train_by_graph,
)
from vim_mm.engine.watching.nonfinite import NonFiniteLossError
from vim_mm.engine.watching.run_record import RecordHook
from vim_mm.registered import VisionMamba

HAS_GPU = torch.cuda.is_available()
STEPS = 8
GRAPHED = dict(type='GraphedStepHook')
HOST_GENERATORS = graphed_step._host_generators  # before it is emulated


class Net(BaseModel):
    """All that a step may hold: stochastic depth, dropout, batch norm, a weight without use."""

    def __init__(self):
        super().__init__()
        arch = dict(embed_dims=8, num_layers=2)
        self.backbone = VisionMamba(arch, img_size=8, patch_size=4, drop_path_rate=0.5)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Conv2d(8, 3, 1)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, inputs, mode='tensor'):
        out = self.head(self.drop(self.norm(self.backbone(inputs)[0])))
        if mode != 'loss':
            return [*out]
        losses = {'loss_square': out.square().mean(), 'loss_parts': [x.abs().mean() for x in out]}
        return {**losses, 'positive': (out > 0).sum()[None].float()}


@DATASETS.register_module()
class IndexedPictures(Dataset):
    """20 noisy pictures, each brighter than the last one."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return (torch.rand(3, 8, 8) + index / 20,)


class Reader(Hook):
    """Keeps what each step returned, without a copy, and the learning rate that it had."""

    def __init__(self):
        self.outputs, self.rates = [], []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.outputs.append({name: value.detach() for name, value in outputs.items()})
        self.rates.append(runner.optim_wrapper.param_groups[0]['lr'])


def prebatched(pictures: list) -> DataLoader:
    """A loader of whole batches, which may have any shapes."""
    return DataLoader(pictures, batch_size=1, collate_fn=lambda batches: [batches[0]])


def train(folder, graph, steps=STEPS, size=2, custom_hooks=(), model=Net, **options):
    """A training with validation on pictures of another size every third step."""
    torch.manual_seed(0)
    reader = Reader()
    loader = dict(
        dataset=dict(type='IndexedPictures'),
        sampler=dict(type='InfiniteSampler'),
        batch_size=size,
        num_workers=0,
        collate_fn=dict(type='default_collate'),
    )
    defaults = dict(
        train_dataloader=loader,
        val_dataloader=DataLoader(TensorDataset(torch.randn(2, 3, 16, 16)), batch_size=1),
        train_cfg=dict(by_epoch=False, max_iters=steps, val_interval=3),
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.01, weight_decay=0.1)),
        param_scheduler=dict(type='LinearLR', by_epoch=False, start_factor=0.1, end=6),
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=3)),
        randomness=dict(seed=1),
        custom_hooks=[reader, *custom_hooks, *([GRAPHED] if graph else [])],
    )
    runner = make_runner(folder, model(), **{**defaults, **options})
    runner.train()
    return runner, reader


def results(runner, reader) -> dict:
    """All numbers that a training leaves behind, by name."""
    found = {f'model.{name}': value for name, value in runner.model.state_dict().items()}
    for number, state in runner.optim_wrapper.state_dict()['state'].items():
        found |= {f'optimizer.{number}.{name}': value for name, value in state.items()}
    if hasattr(runner.optim_wrapper, 'loss_scaler'):
        found['scale'] = runner.optim_wrapper.loss_scaler.get_scale()
    for i, outputs in enumerate(reader.outputs):
        found |= {f'step {i}: {name}': value for name, value in outputs.items()}
        found[f'step {i}: lr'] = reader.rates[i]
    for name, history in runner.message_hub.log_scalars.items():
        if 'time' not in name and 'memory' not in name:
            found[f'log {name}'] = torch.tensor(history.data[0].tolist())
    for hook in runner.hooks:
        for name, value in getattr(hook, 'ema_model', nn.Module()).state_dict().items():
            found[f'average.{name}'] = value
    return found


def step_of(runner) -> GraphedStep:
    return next(hook.step for hook in runner.hooks if isinstance(hook, GraphedStepHook))


def counts(runner) -> tuple[int, int]:
    return step_of(runner).replayed, step_of(runner).launched


def wrapped(kind: str, **options) -> dict:
    optimizer = dict(type='AdamW', lr=0.01, weight_decay=0.1)
    return dict(optim_wrapper=dict(type=kind, optimizer=optimizer, **options))


CASES = {
    'float32': {},
    'bfloat16': wrapped('BFloat16OptimWrapper'),
    # The first scale is too large for float16: steps are skipped, until it is halved often enough.
    'float16': wrapped('AmpOptimWrapper', loss_scale=dict(init_scale=2.0**20, growth_interval=2)),
    'clipped': wrapped('OptimWrapper', clip_grad=dict(max_norm=0.05)),
    'accumulated': dict(auto_scale_lr=dict(base_batch_size=8)),
    'accumulated in float16': dict(
        auto_scale_lr=dict(base_batch_size=4),
        **wrapped('AmpOptimWrapper', loss_scale=dict(init_scale=2.0**20, growth_interval=2)),
    ),
    'averaged': dict(custom_hooks=[dict(type='EMAHook', update_buffers=True)]),
    'averaged beside': dict(custom_hooks=[dict(type='SideEMAHook')]),
}


@pytest.fixture
def scaler_of_the_device(graph_device, monkeypatch):
    """What AmpOptimWrapper needs: CUDA and float16, or here a scaler for the CPU and float32."""
    if graph_device == 'cpu':
        from mmengine.optim.optimizer import amp_optimizer_wrapper as module

        monkeypatch.setattr(module, 'is_cuda_available', lambda: True)
        monkeypatch.setattr(module, 'GradScaler', partial(torch.amp.GradScaler, 'cpu'))
        monkeypatch.setattr('mmengine.runner.amp.autocast', lambda **_: nullcontext())


# In a hurry: one that accumulates and one whose scaler skips steps have what the others have.
IN_A_HURRY = ('float16', 'accumulated')
EACH_CASE = [
    pytest.param(case, marks=() if case in IN_A_HURRY else pytest.mark.slow) for case in CASES
]


@pytest.mark.parametrize('case', EACH_CASE)
def test_a_training_ends_in_the_same_bits(case, graph_device, request, tmp_path):
    """Losses, weights, statistics, the optimizer's state, learning rates, the log, averages."""
    if 'float16' in case.split():
        request.getfixturevalue('scaler_of_the_device')
    eager = train(tmp_path / 'eager', graph=False, **CASES[case])
    graphed = train(tmp_path / 'graphed', graph=True, **CASES[case])
    micro_batches = graphed[0].batch.counts * STEPS
    assert counts(graphed[0]) == (micro_batches - 1, 1)
    assert_same_bits(results(*graphed), results(*eager))

    losses = [float(outputs['loss']) for outputs in graphed[1].outputs]
    assert len(set(losses)) == STEPS and len(set(graphed[1].rates)) > 3
    assert torch.equal(graphed[0].model.unused, torch.ones(3, device=graph_device))
    assert 'train_step' not in vars(graphed[0].model)


def test_a_resumed_training_ends_in_the_same_bits(graph_device, tmp_path):
    whole = train(tmp_path / 'whole', graph=True)
    checkpoint = tmp_path / 'whole' / 'iter_3.pth'
    options = dict(load_from=str(checkpoint), resume=True)
    resumed = train(tmp_path / 'resumed', graph=True, **options)
    assert counts(resumed[0]) == (STEPS - 4, 1)
    assert_same_bits(
        {name: x for name, x in results(*resumed).items() if name.startswith(('model', 'optim'))},
        {name: x for name, x in results(*whole).items() if name.startswith(('model', 'optim'))},
    )
    assert torch.load(checkpoint, weights_only=False).keys() == {
        'meta', 'state_dict', 'message_hub', 'optimizer', 'param_schedulers'
    }  # fmt: skip


def test_each_shape_has_a_graph_up_to_a_limit(graph_device, tmp_path, monkeypatch):
    monkeypatch.setattr(graphed_step, 'MAX_GRAPHS', 2)
    sides = [8, 16, 8, 12, 16, 12, 8, 12, 16, 8]
    torch.manual_seed(0)
    pictures = [torch.rand(2, 3, side, side) for side in sides]
    options = dict(steps=len(sides), train_dataloader=prebatched(pictures))
    eager = train(tmp_path / 'eager', graph=False, **options)
    graphed = train(tmp_path / 'graphed', graph=True, **options)
    assert counts(graphed[0]) == (5, 2 + 3)
    assert_same_bits(results(*graphed), results(*eager))
    (log,) = (tmp_path / 'graphed').rglob('*.log')
    lines = log.read_text().splitlines()
    assert sum('in more than 2 shapes' in line for line in lines) == 1
    assert sum('trains on batches of 2 x 3 x 8 x 8 from here on' in line for line in lines) == 1
    assert any('computed 5 of 10 batches' in line for line in lines)


def test_strides_of_single_entries_make_no_shapes(graph_device):
    """As those of label maps (1, H, W), which come from slices of arrays."""
    model = ToyModel().to(graph_device).train()
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    step, picture = GraphedStep(model), torch.rand(1, 3, 8, 8)
    for first in (192, 1, 7):
        step([torch.as_strided(picture, picture.shape, (first, 64, 8, 1))], wrapper)
    assert (step.replayed, step.launched) == (2, 1)


class Freeze(Hook):
    """Freezes the head after the fourth step."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if batch_idx == 3:
            runner.model.head.requires_grad_(False)


def test_a_layer_that_is_frozen_later(graph_device, tmp_path):
    eager = train(tmp_path / 'eager', graph=False, custom_hooks=[Freeze()])
    graphed = train(tmp_path / 'graphed', graph=True, custom_hooks=[Freeze()])
    assert counts(graphed[0]) == (STEPS - 2, 2)
    assert_same_bits(results(*graphed), results(*eager))


def test_a_loss_that_is_not_finite_is_found(graph_device, tmp_path):
    pictures = [torch.rand(2, 3, 8, 8) for _ in range(6)]
    pictures[3][0] = float('nan')
    messages = []
    for graph in (False, True):
        with pytest.raises(NonFiniteLossError) as error:
            train(tmp_path / str(graph), graph, train_dataloader=prebatched(pictures))
        messages.append(str(error.value))
    assert 'loss of iteration 4 is nan' in messages[0] and 'already not finite' in messages[0]
    assert messages[1] == messages[0]


def test_the_runner_of_mmengine(graph_device, tmp_path):
    """Its own accumulation, whose last step has fewer batches and so another factor."""
    found = []
    for graph in (False, True):
        torch.manual_seed(0)
        reader = Reader()
        optimizer = dict(type='AdamW', lr=0.01)
        runner = Runner(
            Net(),
            str(tmp_path / str(graph)),
            train_dataloader=DataLoader(TensorDataset(torch.rand(16, 3, 8, 8)), batch_size=2),
            train_cfg=dict(by_epoch=False, max_iters=STEPS),
            optim_wrapper=dict(optimizer=optimizer, accumulative_counts=3),
            custom_hooks=[reader, *([GRAPHED] if graph else [])],
            randomness=dict(seed=0),
            experiment_name=f'{tmp_path} {graph}',
        )
        runner.train()
        found.append(results(runner, reader))
    # Two batches have the factor of the last step.
    assert counts(runner) == (STEPS - 2, 2)
    assert_same_bits(found[1], found[0])


def test_steps_draw_different_numbers_and_the_generator_seeds_them(graph_device):
    model = Net().to(graph_device).train()
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.0))
    step, batch = GraphedStep(model), [torch.rand(2, 3, 8, 8)]
    kept = [step(batch, wrapper)['loss'] for _ in range(6)]
    assert len({float(loss) for loss in kept}) == 6, 'a replay overwrites what the last one gave'
    for seed in (3, 4):
        torch.manual_seed(seed)
        kept.append(step(batch, wrapper)['loss'])
        torch.manual_seed(seed)
        eager = model.train_step(batch, wrapper)['loss']
        assert_same_bits({'loss': kept[-1]}, {'loss': eager})
    assert step.replayed == 7


def recorded(device):
    """A model, its step after one batch launched and one replayed, the batch and the wrapper."""
    model = Net().to(device).train()
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.0))
    step, batch = GraphedStep(model), [torch.rand(2, 3, 8, 8)]
    for _ in range(2):
        step(batch, wrapper)
    return model, step, batch, wrapper


def test_moved_weights_are_recorded_anew(graph_device):
    model, step, batch, wrapper = recorded(graph_device)
    model.head.bias.data = model.head.bias.data + 1
    for _ in range(2):
        torch.manual_seed(5)
        found = step(batch, wrapper)
        torch.manual_seed(5)
        assert_same_bits(found, model.train_step(batch, wrapper))
    assert (step.replayed, step.launched) == (2, 2)


def test_a_module_that_changes_its_mode_is_recorded_anew(graph_device):
    """As a norm whose statistics are frozen later."""
    model, step, batch, wrapper = recorded(graph_device)
    model.norm.eval()
    before = model.norm.running_mean.clone()
    for _ in range(2):
        step(batch, wrapper)
    assert torch.equal(model.norm.running_mean, before)
    assert (step.replayed, step.launched) == (2, 2)


def test_the_record_says_what_graphs_computed(graph_device, tmp_path):
    file = tmp_path / 'run.json'
    train(tmp_path / 'run', graph=True, steps=4, custom_hooks=[RecordHook(file)])
    record = Config.fromfile(file)
    assert record.batches == dict(replayed=3, launched=1)
    assert record.ran.mixers == 2
    options = dict(auto_scale_lr=dict(base_batch_size=6), custom_hooks=[RecordHook(file)])
    runner, _ = train(tmp_path / 'accumulated', graph=True, steps=2, **options)
    assert counts(runner) == (3, 3), 'the step that is observed is launched'
    train(tmp_path / 'eager', graph=False, steps=2, custom_hooks=[RecordHook(tmp_path / 'e.json')])
    assert 'batches' not in Config.fromfile(tmp_path / 'e.json')


class OwnStep(ToyModel):
    def train_step(self, data, optim_wrapper):
        return super().train_step(data, optim_wrapper)


class OwnWrapper(OptimWrapper):
    pass


def _set(part: str, **values):
    def change(runner, monkeypatch):
        for name, value in values.items():
            setattr(getattr(runner, part), name, value)

    return change


def _own_step(runner, monkeypatch):
    runner.model = OwnStep()


def _own_wrapper(runner, monkeypatch):
    runner.optim_wrapper = OwnWrapper(runner.optim_wrapper.optimizer)


def _several_optimizers(runner, monkeypatch):
    runner.optim_wrapper = OptimWrapperDict(one=runner.optim_wrapper)


@MODEL_WRAPPERS.register_module()
class OtherWrapper(nn.Module):
    """Stands for DistributedDataParallel, which needs a process group."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def _other_wrapper(runner, monkeypatch):
    runner.model = OtherWrapper(runner.model)


def _unused_parameters(runner, monkeypatch):
    runner.model = FlatDataParallel(runner.model)
    runner.cfg.find_unused_parameters = True


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        (_unused_parameters, 'remove find_unused_parameters'),
        (_other_wrapper, "take model_wrapper_cfg=dict(type='FlatDataParallel')"),
        (_set('model', roi_head=nn.Identity()), 'ToyModel is a detector'),
        (_set('model', bbox_head=nn.Identity()), 'depend on the boxes'),
        (_set('cfg', compile=True), 'remove compile'),
        (_own_step, 'OwnStep has a train_step of its own'),
        (_own_wrapper, 'OwnWrapper is not known'),
        (_several_optimizers, 'OptimWrapperDict is not known'),
    ],
)
def test_obstacles(change, words, tmp_path, monkeypatch):
    monkeypatch.setattr(graphed_step, '_is_on_gpu', lambda model: True)
    runner = make_runner(tmp_path)
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    assert obstacle(runner) is None
    runner.model = FlatDataParallel(runner.model)
    assert obstacle(runner) is None
    runner.model = runner.model.module
    change(runner, monkeypatch)
    assert words in obstacle(runner)


def test_a_strategy_is_an_obstacle():
    runner = SimpleNamespace(model=ToyModel(), optim_wrapper=None)
    assert 'SimpleNamespace shards the model' in obstacle(runner)


@pytest.mark.skipif(HAS_GPU, reason='there is a CUDA device')
def test_a_training_without_a_gpu_is_refused_and_a_test_is_not(tmp_path):
    runner = make_runner(tmp_path, custom_hooks=[GRAPHED])
    with pytest.raises(GraphError, match='--graph: it needs a CUDA device'):
        runner.train()
    runner.test()


class Drawing(ToyModel):
    def forward(self, inputs, mode='tensor'):
        return super().forward(inputs + torch.rand(1).to(inputs.device), mode)


class Scaled(ToyModel):
    """Reads the metainfo of its samples in one of these ways."""

    ways = {
        'attribute': lambda x, sample: x * sample.scale,
        'item': lambda x, sample: x / sample.metainfo['scale'],
        'default': lambda x, sample: x * sample.get('scale', 1.0),
        'condition': lambda x, sample: x if 'scale' in sample and sample.scale > 1 else 2 * x,
        'argument': lambda x, sample: torch.mul(x, sample.scale),
    }

    def __init__(self, way):
        super().__init__()
        self.scaled = self.ways[way]

    def forward(self, inputs, samples, mode='tensor'):
        return super().forward(self.scaled(inputs, samples[0]), mode)


def test_random_numbers_of_the_host_are_refused(graph_device, monkeypatch):
    monkeypatch.setattr(graphed_step, '_host_generators', HOST_GENERATORS)
    model = Drawing().to(graph_device).train()
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.0))
    with pytest.raises(GraphError, match='Drawing draws random numbers on the host'):
        GraphedStep(model)([torch.rand(2, 3, 8, 8)], wrapper)


def test_batches_are_tensors(graph_device):
    model = ToyModel().to(graph_device).train()
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.0))
    with pytest.raises(GraphError, match=r'tensors only, got str as \.samples\[0\]\.name'):
        sample = BaseDataElement(name='a')
        GraphedStep(model)(dict(inputs=torch.rand(2, 3, 8, 8), samples=[sample]), wrapper)


@pytest.mark.skipif(HAS_GPU, reason='a capture that fails needs a process of its own')
@pytest.mark.parametrize('way', Scaled.ways)
def test_metainfo_is_refused(way, graph_device):
    """The second batch would be scaled like the first."""
    model = Scaled(way).train()
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.0))
    sample = BaseDataElement(metainfo=dict(scale=2.0))
    step, batch = GraphedStep(model), dict(inputs=torch.rand(2, 3, 8, 8), samples=[sample])
    step(batch, wrapper)
    with pytest.raises(
        GraphError, match=r"the model reads 'scale' of its samples|_RefusedMetainfo"
    ):
        step(batch, wrapper)


class Replacing(ToyModel):
    """Puts another tensor in the place of one of its samples, as heads may do with labels."""

    def forward(self, inputs, samples, mode='tensor'):
        samples[0].scale = 2 * samples[0].scale
        self.put = [*getattr(self, 'put', []), samples[0].scale]
        return super().forward(inputs * samples[0].scale, mode)


def test_a_model_may_replace_tensors_of_its_samples(graph_device):
    """The graph reads those that were given."""
    model = Replacing().to(graph_device).train()
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    step = GraphedStep(model)
    for number in (1.0, 3.0):
        sample = BaseDataElement(scale=torch.tensor([number]))
        step(dict(inputs=torch.ones(2, 3, 8, 8), samples=[sample]), wrapper)
    (recorded,) = step.recorded.values()
    assert [*recorded.inputs] == ['.inputs', '.samples[0].scale']
    assert not any(x is put for x in recorded.inputs.values() for put in model.put)


def test_samples_may_be_converted(graph_device):
    """A conversion copies metainfo and reads none of it."""
    own = clone_batch([BaseDataElement(metainfo=dict(img_shape=(8, 8)), label=torch.ones(1))])
    assert own[0].to(torch.float64).label.dtype == torch.float64
    with pytest.raises(GraphError, match="the model reads 'img_shape' of its samples"):
        own[0].to(torch.float64).img_shape[0]


def test_a_clone_of_a_batch():
    sample = BaseDataElement(metainfo=dict(path='a.jpg'), label=torch.ones(1))
    batch = dict(inputs=torch.rand(1, 3, 2, 2), samples=[sample], none=None, pair=(torch.ones(2),))
    own = clone_batch(batch)
    assert own.keys() == batch.keys() and own['none'] is None and isinstance(own['pair'], tuple)
    assert torch.equal(own['inputs'], batch['inputs']) and own['inputs'] is not batch['inputs']
    assert own['samples'][0].label is not sample.label
    assert own['samples'][0].metainfo_keys() == ['path']


def test_the_hook_is_in_the_config_once():
    cfg = Config(dict(custom_hooks=[dict(type='EMAHook')]))
    for _ in range(2):
        train_by_graph(cfg)
    assert [hook['type'] for hook in cfg.custom_hooks] == ['EMAHook', 'GraphedStepHook']
    assert cfg.model_wrapper_cfg == dict(type='FlatDataParallel')
    wrapper = dict(type='MMDistributedDataParallel')
    cfg = Config(dict(custom_hooks=None, model_wrapper_cfg=wrapper))
    train_by_graph(cfg)
    assert [dict(hook) for hook in cfg.custom_hooks] == [GRAPHED]
    assert cfg.model_wrapper_cfg == wrapper


WAITING = """
import torch
from mmengine.optim import OptimWrapper
from tests.engine.toy import ToyModel
from vim_mm.engine.optimization.graphed_step import GraphedStep

class Waiting(ToyModel):
    def forward(self, inputs, mode='tensor'):
        return super().forward(inputs * inputs.max().item(), mode)

model = Waiting().cuda().train()
step = GraphedStep(model)
for _ in range(2):
    step([torch.rand(2, 3, 8, 8)], OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1)))
"""


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_GPU, reason='needs a CUDA device')
def test_a_model_that_waits_for_the_device_is_named():
    # In a process of its own: a failed capture leaves the generator of random numbers unusable.
    command = [sys.executable, '-c', WAITING]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert 'the step of Waiting cannot be recorded as a CUDA graph: ' in done.stderr, done.stderr
