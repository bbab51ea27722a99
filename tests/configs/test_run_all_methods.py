"""run_all_methods.sh on a small segmentor: all methods alike, skipping, resuming, refusing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mmengine.config import Config

from tests.configs.data_on_disk import write_ade20k
from vim_mm.ops import METHODS

ROOT = Path(__file__).parents[2]
SMALL = """
_base_ = 'vim_mm::seg/upernet_vim_t_zoh.py'

model = dict(
    data_preprocessor=dict(size=(64, 64)),
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=16, num_layers=4), img_size=64, out_indices=(0, 1, 2, 3)
    ),
    neck=dict(embed_dim=16),
    decode_head=dict(in_channels=[16] * 4, channels=8),
    auxiliary_head=dict(in_channels=16, channels=8),
    test_cfg=dict(crop_size=(64, 64), stride=(42, 42)),
)
loading = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', reduce_zero_label=True)]
cropping = [dict(type='RandomCrop', crop_size=(48, 48))]
train_dataloader = dict(
    num_workers=0, dataset=dict(pipeline=[*loading, *cropping, dict(type='PackSegInputs')])
)
val_dataloader = dict(num_workers=0, dataset=dict(pipeline=[*loading, dict(type='PackSegInputs')]))
train_cfg = dict(max_iters=4, val_interval=4)
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=2))
"""


def run_all_methods(cwd: Path, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ['bash', ROOT / 'seg' / 'run_all_methods.sh', '--cfg-options', 'data_root=data', *options],
        cwd=cwd,
        env={
            **os.environ,
            'CONFIG': 'small.py',
            'METHODS': 'zoh rk4',
            'PYTHON': sys.executable,
            'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path]),
            'CUDA_VISIBLE_DEVICES': '',
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


COMPARED = [name for name, method in METHODS.items() if not method.control]
VIM_T = {'seg': 'upernet_vim_t_{}', 'det': 'cascade_mask_rcnn_vim_t_{}'}


def dry_run(task: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess:
    """The script with a Python that runs ``-c`` and prints the arguments of anything else."""
    echo = cwd / 'echo.sh'
    echo.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\necho "$@"\n')
    echo.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name not in ('METHODS', 'CONFIG')}
    path = os.pathsep.join([str(ROOT), *sys.path])
    return subprocess.run(
        ['bash', ROOT / task / 'run_all_methods.sh', '--amp'],
        cwd=cwd,
        env={**env, 'PYTHON': str(echo), 'PYTHONPATH': path, **variables},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ('variables', 'methods'),
    [
        pytest.param({}, COMPARED, id='default'),
        pytest.param({'METHODS': ' '.join(METHODS), 'GPUS': '2'}, [*METHODS], id='all'),
    ],
)
@pytest.mark.parametrize('task', ['seg', 'det'])
def test_trains_the_shipped_config_of_each_method(task, variables, methods, tmp_path):
    done = dry_run(task, tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    *commands, compare = done.stdout.splitlines()
    for command, method in zip(commands, methods, strict=True):
        config = re.search(r'train\.py (\S+)', command)[1]
        assert Path(config).stem == VIM_T[task].format(method)
        assert Config.fromfile(config).model.backbone.discretization_method == method
        assert f'--amp --resume --work-dir work_dirs/{Path(config).stem} ' in command
        assert f'backbone.discretization_method={method}' in command
        assert ('--nproc-per-node 2' in command) == ('GPUS' in variables)
        assert f'work_dirs/{Path(config).stem}' in compare.split()


def test_a_missing_config_is_found_before_anything_is_trained(tmp_path):
    for method in COMPARED[:-1]:
        (tmp_path / f'{method}.py').touch()
    done = dry_run('seg', tmp_path, CONFIG='{method}.py')
    assert done.returncode == 1
    assert done.stderr == f'no config {COMPARED[-1]}.py for the method {COMPARED[-1]}\n'
    assert done.stdout == ''
    assert not (tmp_path / 'work_dirs').exists()


def logged(work_dir: Path, key: str) -> list:
    """Values of a scalar over all the times that a run was started."""
    logs = sorted(work_dir.glob('*/vis_data/scalars.json'))
    records = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    return [(record['step'], record[key]) for record in records if key in record]


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> Path:
    """Where run_all_methods.sh has trained both methods."""
    folder = tmp_path_factory.mktemp('all')
    write_ade20k(folder / 'data')
    (folder / 'small.py').write_text(SMALL)
    done = run_all_methods(folder)
    assert done.returncode == 0, done.stdout
    (folder / 'stdout.txt').write_text(done.stdout)
    return folder


@pytest.mark.slow
def test_prints_the_last_metric_of_each_method(folder):
    table = [
        [cell.strip() for cell in line.strip('|').split('|')]
        for line in (folder / 'stdout.txt').read_text().splitlines()[-4:]
    ]
    assert table[0] == ['run', 'iterations', 'loss', 'mIoU']
    for row, method in zip(table[2:], ('zoh', 'rk4'), strict=True):
        ((step, mean_iou),) = logged(folder / 'work_dirs' / f'small_{method}', 'mIoU')
        loss = logged(folder / 'work_dirs' / f'small_{method}', 'loss')[-1][1]
        assert row == [f'small_{method}', str(step), f'{loss:.3g}', f'{mean_iou:.2f}']


@pytest.mark.slow
def test_runs_differ_in_the_method_only(folder):
    configs = [
        Config.fromfile(folder / 'work_dirs' / f'small_{method}' / 'small.py').to_dict()
        for method in ('zoh', 'rk4')
    ]
    methods = [cfg['model']['backbone'].pop('discretization_method') for cfg in configs]
    assert methods == ['zoh', 'rk4']
    for cfg, method in zip(configs, methods, strict=True):
        assert Path(cfg.pop('work_dir')).name == f'small_{method}'
    assert configs[0] == configs[1]
    first = [logged(folder / 'work_dirs' / f'small_{method}', 'loss')[0] for method in methods]
    assert first[0][0] == first[1][0] == 1
    assert first[0] != first[1]


@pytest.mark.slow
def test_skips_the_finished_and_resumes_the_interrupted(folder):
    zoh, rk4 = (folder / 'work_dirs' / f'small_{method}' for method in ('zoh', 'rk4'))
    assert [step for step, _ in logged(zoh, 'mIoU')] == [4]
    # What a run leaves that was killed in its fourth iteration.
    (zoh / 'finished').unlink()
    (zoh / 'iter_4.pth').unlink()
    (zoh / 'last_checkpoint').write_text(str(zoh / 'iter_2.pth'))

    done = run_all_methods(folder)
    assert done.returncode == 0, done.stdout
    assert f'{rk4.relative_to(folder)} is finished.' in done.stdout
    assert len([*rk4.glob('*/vis_data')]) == 1
    assert [step for step, _ in logged(zoh, 'loss')] == [1, 2, 3, 4, 3, 4]
    assert [step for step, _ in logged(zoh, 'mIoU')] == [4, 4]
    assert (zoh / 'finished').exists()


@pytest.mark.slow
def test_refuses_to_mix_runs_of_other_arguments(folder):
    done = run_all_methods(folder, 'optim_wrapper.optimizer.lr=1')
    assert done.returncode == 1
    assert 'work_dirs/small_zoh holds the run of other arguments' in done.stdout
