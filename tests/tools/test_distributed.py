"""The shell scripts: several processes on a machine without a GPU, on one node and on two."""

import re
import signal
import subprocess
import time

import pytest
import torch

from tests.engine.processes import free_port
from tests.tools.conftest import command, environment, run_tool
from tests.tools.test_tools import iterations, metrics

# Trainings in processes of their own.
pytestmark = pytest.mark.slow


@pytest.fixture
def options(configs, data_root):
    """Arguments after the config for two iterations in ``run``."""
    return (
        '--work-dir', 'run',
        '--cfg-options', f'data_root={data_root}',
        'train_cfg.max_iters=2', 'train_cfg.val_interval=2',
    )  # fmt: skip


@pytest.mark.parametrize('task', ['seg', 'det'])
def test_one_node(task, configs, data_root, options, tmp_path):
    if task == 'det':
        pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
    config = configs[task]
    # A port that is set for something else must not matter, nor must one in use.
    log = run_tool('dist_train.sh', config, 2, *options, cwd=tmp_path, MASTER_PORT='1')
    assert re.search(r'^Device: .*, 2 processes$', log, re.MULTILINE)
    assert iterations(log) == [1, 2]
    assert 'Iter(val) [2/2]' in log, 'each process should have had two of the four images'

    # Only if both processes have validated with the weights and statistics that were saved:
    tested = run_tool('dist_test.sh', config, 'run/iter_2.pth', 2, *options, cwd=tmp_path)
    assert metrics(tested, 'test') == metrics(log, 'val')


def test_any_number_of_processes_makes_the_batch_of_the_recipe(configs, options, tmp_path):
    """And a run goes on from another number of processes; the learning rate stays."""
    rates = {}
    for processes, line in (
        (1, 'Batch: 4 images a step = 2 x 2 micro-batches, whose gradients are accumulated'),
        (2, 'Batch: 4 images a step = 2 processes x 2; the batch and the learning rate are those'),
    ):
        log = run_tool(
            'dist_train.sh', configs['seg'], processes, '--batch-per-gpu', 2, '--resume', *options,
            f'train_cfg.max_iters={2 * processes}', cwd=tmp_path,
        )  # fmt: skip
        assert line in log
        first = 2 * processes - 1
        assert iterations(log) == [first, first + 1]
        rates[processes] = re.findall(r'Iter\(train\).*? lr: (\S+)', log)
    whole = run_tool(
        'train.py', configs['seg'], '--batch-per-gpu', 2, '--work-dir', 'whole', *options[2:],
        'train_cfg.max_iters=4', cwd=tmp_path,
    )  # fmt: skip
    assert re.findall(r'Iter\(train\).*? lr: (\S+)', whole)[2:] == rates[2]
    scaled = run_tool(
        'dist_train.sh', configs['seg'], 2, '--batch-per-gpu', 3, '--scale-lr', *options,
        '--work-dir', 'scaled', cwd=tmp_path,
    )  # fmt: skip
    assert (
        'Batch: 6 images a step = 2 processes x 3; the learning rate is multiplied by 6 / 4'
        in scaled
    )
    failed = run_tool('dist_train.sh', configs['seg'], 3, *options, cwd=tmp_path, fails=True)
    assert '3 processes cannot share the 4 images of a step evenly' in failed.splitlines()[-1]


def test_two_nodes(configs, options, tmp_path):
    variables = dict(NNODES='2', MASTER_ADDR='127.0.0.1', PORT=free_port())
    processes = [
        subprocess.Popen(
            command('dist_train.sh', configs['seg'], 1, *options),
            cwd=tmp_path,
            env=environment(NODE_RANK=str(rank), **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        logs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], logs
    assert re.search(r'^Device: .*, 2 processes$', logs[0], re.MULTILINE)
    assert iterations(logs[0]) == [1, 2]
    assert iterations(logs[1]) == [], 'only the first process should report'


SHARDED = """
_base_ = [{config!r}, 'vim_mm::_base_/fsdp.py']
strategy = dict(
    model_wrapper=dict(device_id='cpu'),
    # PyTorch crashes where it is to move to the CPU what is there.
    state_dict_cfg=dict(
        _delete_=True,
        state_dict_type='FULL_STATE_DICT',
        state_dict_config=dict(type='FullStateDictConfig'),
        optim_state_dict_config=dict(type='FullOptimStateDictConfig'),
    ),
)
"""
# SyncBN needs CUDA; the learning rate is high enough for four steps to show.
PLAIN_NORMS = """
_base_ = [{config!r}]
norm = dict(norm_cfg=dict(type='BN'))
model = dict(decode_head=norm, auxiliary_head=norm)
optim_wrapper = dict(clip_grad=None)
param_scheduler = []
"""


def test_fully_sharded(configs, data_root, tmp_path):
    """By FSDP a model trains as by DDP, and leaves a checkpoint of the whole model."""
    (tmp_path / 'whole.py').write_text(PLAIN_NORMS.format(config=str(configs['seg'])))
    (tmp_path / 'sharded.py').write_text(SHARDED.format(config=str(tmp_path / 'whole.py')))
    options = ('--cfg-options', f'data_root={data_root}', 'randomness.seed=1')
    also = ('--verbose', '--work-dir')
    logs = {
        name: run_tool('dist_train.sh', f'{name}.py', 2, *also, name, *options, cwd=tmp_path)
        for name in ('whole', 'sharded')
    }
    losses = {name: re.findall(r'Iter\(train\).* loss: (\S+)', log) for name, log in logs.items()}
    assert len(losses['whole']) == 4 and len(set(losses['whole'])) == 4
    assert list(map(float, losses['sharded'])) == pytest.approx(
        list(map(float, losses['whole'])), rel=1e-3
    )
    not_decayed = {
        name: {
            line.replace('_fsdp_wrapped_module.', '')
            for line in re.findall(r'paramwise_options -- (.*weight_decay=0.0)', log)
        }
        for name, log in logs.items()
    }
    assert not_decayed['sharded'] == not_decayed['whole'] != set()
    weights = [
        torch.load(tmp_path / name / 'iter_4.pth', weights_only=False)['state_dict']
        for name in ('whole', 'sharded')
    ]
    assert weights[0].keys() == weights[1].keys()
    tested = run_tool('test.py', 'whole.py', 'sharded/iter_4.pth', *options[:2], cwd=tmp_path)
    assert metrics(tested, 'test').startswith('aAcc: ')


FAULTY = """
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

@HOOKS.register_module()
class FaultyHook(Hook):
    def before_train(self, runner):
        def spoil(module, args, output):
            if module.training and runner.iter == 1 and get_rank() == 1:
                return output * float('nan')

        named = runner.model.named_modules()
        (module,) = (m for name, m in named if name.endswith("decode_head.conv_seg"))
        module.register_forward_hook(spoil)
"""


def test_a_loss_of_one_process_ends_a_sharded_training(configs, data_root, tmp_path):
    """The replay gathers weights, so all processes take part, and all say whose fault it is."""
    (tmp_path / 'faulty.py').write_text(FAULTY)
    (tmp_path / 'whole.py').write_text(PLAIN_NORMS.format(config=str(configs['seg'])))
    (tmp_path / 'sharded.py').write_text(
        SHARDED.format(config=str(tmp_path / 'whole.py'))
        + "custom_imports = dict(imports=['vim_mm', 'faulty'])\n"
        + "custom_hooks = [dict(type='FaultyHook')]\n"
    )
    log = run_tool(
        'dist_train.sh', 'sharded.py', 2, '--cfg-options', f'data_root={data_root}',
        cwd=tmp_path, fails=True, PYTHONPATH=f'{tmp_path}:{environment()["PYTHONPATH"]}',
    )  # fmt: skip
    assert log.splitlines()[-1] == (
        'train.py: error: The loss of iteration 2 is nan. The first value that is not finite is '
        'the output of decode_head.conv_seg (Conv2d), whose input is finite.'
    )
    assert iterations(log) == [1]


def test_clipping_by_a_shard_is_refused(configs, data_root, tmp_path):
    (tmp_path / 'sharded.py').write_text(SHARDED.format(config=str(configs['seg'])))
    options = ('--cfg-options', f'data_root={data_root}')
    log = run_tool('train.py', 'sharded.py', *options, cwd=tmp_path, fails=True)
    assert 'train.py: error: MMEngine clips gradients by the norm of a shard under FSDP' in log


def test_resuming_by_a_strategy_is_refused(configs, data_root, tmp_path):
    (tmp_path / 'whole.py').write_text(PLAIN_NORMS.format(config=str(configs['seg'])))
    (tmp_path / 'sharded.py').write_text(SHARDED.format(config=str(tmp_path / 'whole.py')))
    options = ('--resume', 'any.pth', '--cfg-options', f'data_root={data_root}')
    log = run_tool('train.py', 'sharded.py', *options, cwd=tmp_path, fails=True)
    assert "error: MMEngine's strategies resume from checkpoints that lack weights" in log


SRUN = """#!/bin/bash
# Stands in for srun: prints its options, and runs the command as two tasks on this host.
while [[ $1 == --* ]]; do echo "srun $1"; shift; done
export SLURM_NTASKS=2 SLURM_NODELIST=host
for task in 1 0; do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || exit 1; done
"""


def test_slurm(configs, options, tmp_path):
    for name, script in {'srun': SRUN, 'scontrol': '#!/bin/bash\necho 127.0.0.1\n'}.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    variables = dict(PATH=f'{tmp_path}:{environment()["PATH"]}', GPUS='2', SRUN_ARGS='--exclusive')
    log = run_tool(
        'slurm_train.sh', 'gpu', 'job', configs['seg'], *options, cwd=tmp_path, **variables
    )
    asked = re.findall(r'^srun (.*)', log, re.MULTILINE)
    assert {'--partition=gpu', '--job-name=job', '--ntasks=2', '--exclusive'} <= set(asked)
    assert re.search(r'^Device: .*, 2 processes$', log, re.MULTILINE)
    whole = next((tmp_path / 'run').glob('*/*.log')).read_text()
    assert 'Distributed launcher: slurm' in whole
    assert iterations(log) == [1, 2]


SBATCH = """#!/bin/bash
# Stands in for sbatch: prints its options, and runs the command at once as job 7.
for option in "$@"; do echo "sbatch $option"; done
SLURM_JOB_ID=7 exec bash -c "${@: -1}"
"""


def test_a_queued_job_queues_itself_again_before_its_limit(tmp_path):
    scripts = {
        'sbatch': SBATCH,
        'srun': '#!/bin/bash\nfor option in "$@"; do echo "srun $option"; done\nexec sleep 100\n',
        'scontrol': '#!/bin/bash\necho "scontrol $*"\n',
    }
    for name, script in scripts.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    variables = dict(PATH=f'{tmp_path}:{environment()["PATH"]}', GPUS='2', TIME='1:00:00')
    with subprocess.Popen(
        command('slurm_train.sh', 'gpu', 'job', 'a config.py', '--amp'),
        cwd=tmp_path,
        env=environment(ACCOUNT='us', **variables),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        lines = []
        while 'srun slurm' not in lines:  # the last argument: the job is under way
            lines.append(process.stdout.readline().rstrip('\n'))
            assert lines[-1], lines
        process.send_signal(signal.SIGUSR1)
        lines += process.communicate(timeout=20)[0].splitlines()
    assert process.returncode == 0
    assert {'--account=us', '--partition=gpu', '--time=1:00:00', '--requeue'} <= {
        line.removeprefix('sbatch ') for line in lines
    }
    assert 'sbatch --signal=B:USR1@120' in lines
    assert {'srun a config.py', 'srun --amp', 'srun --resume'} <= set(lines)
    assert lines[-2:] == [
        'The time limit is near: job 7 is queued again and will resume.',
        'scontrol requeue 7',
    ]


# A file: what two processes print may be mixed within a line.
DYING = """
import os, signal, time
from pathlib import Path
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

@HOOKS.register_module()
class DyingHook(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == 3 and get_rank() == 1 and not Path('died').exists():
            Path('died').write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
"""


def kill_and_resume(config, data_root, folder, **variables):
    """Two processes, of which one dies before the last of four iterations."""
    (folder / 'dying.py').write_text(DYING)
    (folder / 'config.py').write_text(
        f'_base_ = {str(config)!r}\n'
        "custom_imports = dict(imports=['vim_mm', 'dying'])\n"
        "custom_hooks = [dict(type='DyingHook')]\n"
    )
    variables |= dict(cwd=folder, PYTHONPATH=f'{folder}:{environment()["PYTHONPATH"]}')
    options = ('--work-dir', 'run', '--cfg-options', f'data_root={data_root}')
    arguments = ('dist_train.sh', 'config.py', 2, *options)
    run_tool(*arguments, fails=True, **variables)
    assert time.time() - float((folder / 'died').read_text()) < 60
    assert iterations(run_tool(*arguments, '--resume', **variables)) == [3, 4]


def test_a_job_ends_when_one_of_its_processes_dies_and_then_resumes(configs, data_root, tmp_path):
    kill_and_resume(configs['seg'], data_root, tmp_path)


@pytest.mark.parametrize(
    ('script', 'arguments', 'variables', 'message'),
    [
        ('dist_train.sh', ['config.py'], {}, 'usage: .*CONFIG GPUS'),
        ('dist_test.sh', ['config.py', '2'], {}, 'usage: .*CONFIG CHECKPOINT GPUS'),
        ('slurm_train.sh', ['gpu', 'job'], {}, 'usage: .*PARTITION JOB_NAME CONFIG'),
        ('dist_train.sh', ['config.py', '2'], {'NNODES': '2'}, 'NODE_RANK: the number'),
        (
            'slurm_train.sh',
            ['gpu', 'job', 'config.py'],
            {'PYTHON': '/nothing/python'},
            'slurm_train.sh: error: there is no /nothing/python; activate the environment',
        ),
    ],
)
def test_a_wrong_command_line_is_explained(script, arguments, variables, message, tmp_path):
    log = run_tool(script, *arguments, cwd=tmp_path, fails=True, **variables)
    assert re.search(message, log)
