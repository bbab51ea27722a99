"""Training on several GPUs of a machine. Its measured side is benchmarks/several_gpus.py."""

import re

import pytest
import torch

from tests.tools.conftest import configs, data_root, run_tool  # noqa: F401  fixtures
from tests.tools.test_distributed import kill_and_resume

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.slowest,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason='needs two CUDA devices'),
]
BOTH = {'CUDA_VISIBLE_DEVICES': '0,1'}


@pytest.mark.parametrize('task', ['seg', 'det'])
def test_losses_are_those_of_one_gpu(task, data_root, tmp_path):  # noqa: F811
    """`rk4`, which the prior art could not run on two GPUs, over 100 iterations."""
    if task == 'det':
        pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
    arguments = ('--tasks', task, '--methods', 'rk4', '--iters', 100, '--jobs', 3)
    folders = ('--data', data_root, '--out', tmp_path)
    table = run_tool('benchmarks/several_gpus.py', *arguments, *folders, cwd=tmp_path, **BOTH)
    assert re.search(r'\| +yes \|', table)


def test_a_killed_process_ends_the_job_which_then_resumes(configs, data_root, tmp_path):  # noqa: F811
    kill_and_resume(configs['seg'], data_root, tmp_path, **BOTH)


def test_graphs_train_as_launched_steps_do(configs, data_root, tmp_path):  # noqa: F811
    """With SyncBN, whose exchanges between processes a graph holds."""
    losses = {}
    for name, graph in (('launched', ()), ('graphs', ('--graph',))):
        options = ('--amp', *graph, '--work-dir', name, '--cfg-options', f'data_root={data_root}')
        steps = ('train_cfg.max_iters=30', 'train_cfg.val_interval=30')
        arguments = ('dist_train.sh', configs['seg'], 2, *options, *steps)
        log = run_tool(*arguments, cwd=tmp_path, **BOTH)
        losses[name] = [float(loss) for loss in re.findall(r'Iter\(train\).* loss: (\S+)', log)]
    assert 'CUDA graphs computed 29 of 30 batches.' in log
    assert losses['graphs'] == pytest.approx(losses['launched'], rel=0.02)
