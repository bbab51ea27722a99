"""Training on several GPUs of a machine. Its measured side is benchmarks/several_gpus.py."""

import json
import math
import re
import shutil
import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.scripts import load
from tests.tools.conftest import configs, data_root, environment, run_tool  # noqa: F401  fixtures
from tests.tools.test_distributed import kill_and_resume
from vim_mm.datasets.shapes import ShapesConfig, write_dataset

HAS_TWO = torch.cuda.device_count() > 1
BOTH = {'CUDA_VISIBLE_DEVICES': '0,1'}


def on_two_gpus(test):
    skip = pytest.mark.skipif(not HAS_TWO, reason='needs two CUDA devices')
    return pytest.mark.cuda(pytest.mark.slowest(skip(test)))


@pytest.fixture(scope='module')
def pictures(tmp_path_factory) -> Path:
    """So many that two seeds train on them in another order."""
    root = tmp_path_factory.mktemp('data') / 'shapes'
    write_dataset(root, ShapesConfig(train=64, val=4, size=64))
    return root


# Without batch statistics, which on the CPU each process has of its own.
ON_THE_CPU = """
norm = dict(norm_cfg=dict(type='GN', num_groups=2))
model = dict(neck=norm, decode_head=norm, auxiliary_head=norm)
"""
FAULTS = """
import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

@HOOKS.register_module()
class FaultyHook(Hook):
    def __init__(self, fault):
        self.fault = fault

    def before_train(self, runner):
        parameters = [*runner.model.parameters()]
        if self.fault == 'gradients are summed':
            for parameter in parameters:
                parameter.register_hook(lambda grad: 2 * grad)  # of which the mean is taken
        elif self.fault == 'gradients are not exchanged':
            self.context = runner.model.no_sync()
            self.context.__enter__()
        elif get_rank() == 1 and self.fault == 'other weights':
            with torch.no_grad():
                for parameter in parameters:
                    parameter.mul_(1.1)
        elif get_rank() == 1 and self.fault == 'the same images':
            runner.train_dataloader.sampler.sampler.rank = 0
"""


@pytest.mark.slow
def test_a_fault_of_two_processes_is_found(configs, pictures, tmp_path, monkeypatch, capsys):  # noqa: F811
    """What the tool says on the CPU: of a training that is right, and of others that are not."""
    for name, value in environment(PYTHONPATH=f'{tmp_path}:{environment()["PYTHONPATH"]}').items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, 'executable', environment()['PYTHON'])
    (tmp_path / 'faults.py').write_text(FAULTS)
    (tmp_path / 'seg.py').write_text(f'_base_ = {str(configs["seg"])!r}\n{ON_THE_CPU}')
    tool = load('benchmarks/several_gpus.py')
    own = {'seg': str(tmp_path / 'seg.py'), 'det': str(configs['det'])}
    monkeypatch.setitem(tool['main'].__globals__, 'CONFIGS', own)
    sizes = dict(gpus=2, iters=10, batch=8, jobs=2)
    args = Namespace(tasks=['seg'], methods=['zoh'], data=pictures, out=tmp_path / 'out', **sizes)
    if find_spec('mmcv._ext') is not None:
        args.tasks.append('det')
    with pytest.raises(SystemExit) as end:
        tool['main'](args)
    assert not end.value.code, capsys.readouterr().out
    config = args.out / 'seg.py'
    right = config.read_text().replace("'mean_loss'", "'mean_loss', 'faults'")
    faulty = tool['Run']('seg', 'zoh', 2, 0)
    for fault in re.findall("fault == '(.*)'", FAULTS):
        config.write_text(f'{right}custom_hooks += [dict(type="FaultyHook", fault={fault!r})]\n')
        shutil.rmtree(args.out / faulty.name)
        codes = tool['run_all']([faulty], args)
        assert codes == {faulty: 0}, (args.out / faulty.name / 'output.txt').read_text()
        row = tool['compare']('seg', 'zoh', args)
        assert row['holds'] == 'NO', (fault, row)


@pytest.mark.parametrize(
    ('several', 'other', 'holds'),
    [
        (dict(), dict(), 'yes'),
        (dict(grad_norm=math.nan), dict(), 'NO'),
        (dict(loss=math.nan), dict(loss=math.nan), 'NO'),
        (dict(later=math.inf), dict(later=math.inf), 'NO'),
        (dict(grad_norm=2.0), dict(), 'NO'),
        (dict(later=1.2), dict(), 'NO'),
    ],
)
def test_what_holds(several, other, holds, tmp_path):
    """Seed 1 differs by a tenth unless said otherwise."""
    tool = load('benchmarks/several_gpus.py')
    args = Namespace(gpus=2, iters=20, out=tmp_path)
    same = dict(loss=1.0, grad_norm=1.0, later=1.0)
    figures = {(2, 0): same | several, (1, 0): same, (1, 1): same | dict(loss=1.1) | other}
    for how, values in figures.items():
        folder = tmp_path / tool['Run']('seg', 'zoh', *how).name / 'time/vis_data'
        folder.mkdir(parents=True)
        first = dict(step=10, loss=values['loss'], grad_norm=values['grad_norm'])
        second = dict(step=20, loss=values['later'], grad_norm=1.0)
        (folder / 'scalars.json').write_text(f'{json.dumps(first)}\n{json.dumps(second)}\n')
    assert tool['compare']('seg', 'zoh', args)['holds'] == holds


@on_two_gpus
@pytest.mark.parametrize('task', ['seg', 'det'])
def test_losses_are_those_of_one_gpu(task, pictures, tmp_path):
    """`rk4`, which the prior art could not run on two GPUs, over 100 iterations."""
    if task == 'det':
        pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
    arguments = ('--tasks', task, '--methods', 'rk4', '--iters', 100, '--jobs', 3)
    folders = ('--data', pictures, '--out', tmp_path)
    table = run_tool('benchmarks/several_gpus.py', *arguments, *folders, cwd=tmp_path, **BOTH)
    assert re.search(r'\| +yes \|', table)


@on_two_gpus
def test_a_killed_process_ends_the_job_which_then_resumes(configs, data_root, tmp_path):  # noqa: F811
    kill_and_resume(configs['seg'], data_root, tmp_path, **BOTH)


@on_two_gpus
def test_graphs_train_as_launched_steps_do(configs, data_root, tmp_path):  # noqa: F811
    """With SyncBN, whose exchanges between processes a graph holds; compiled parts, too."""
    losses = {}
    for name, graph in (
        ('launched', ()),
        ('graphs', ('--graph',)),
        ('compiled', ('--graph', '--compile')),
    ):
        options = ('--amp', *graph, '--work-dir', name, '--cfg-options', f'data_root={data_root}')
        steps = ('train_cfg.max_iters=30', 'train_cfg.val_interval=30')
        arguments = ('dist_train.sh', configs['seg'], 2, *options, *steps)
        log = run_tool(*arguments, cwd=tmp_path, **BOTH)
        losses[name] = [float(loss) for loss in re.findall(r'Iter\(train\).* loss: (\S+)', log)]
        assert ('CUDA graphs computed 29 of 30 batches.' in log) == bool(graph)
    assert losses['graphs'] == pytest.approx(losses['launched'], rel=0.02)
    # Compiled kernels draw other random numbers.
    assert losses['compiled'] == pytest.approx(losses['launched'], rel=0.1)
