"""What train.py does with a folder that holds something."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.tools.conftest import command, environment, run_tool
from tests.tools.test_tools import iterations
from vim_mm.engine.saving.lock import FolderLock
from vim_mm.engine.saving.written import last_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture
def train(configs, data_root, tmp_path):
    """Train in the folder 'run', by arguments and options of the config."""

    def run(*arguments, options=(), fails: bool = False, **variables) -> str:
        return run_tool(
            'train.py', configs['seg'], '--work-dir', 'run', *arguments,
            '--cfg-options', f'data_root={data_root}', 'train_cfg.val_interval=100', *options,
            cwd=tmp_path, fails=fails, **variables,
        )  # fmt: skip

    return run


def last_line(log: str) -> str:
    return log.splitlines()[-1]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob('*.pth'))


def test_a_second_training_asks(train, tmp_path):
    """Of the same config, of another method or seed; the folder stays as it is."""
    run = tmp_path / 'run'
    train(options=['randomness.seed=1'])
    before = {path: path.stat().st_mtime_ns for path in run.rglob('*') if path.name != '.lock'}
    for arguments, seed, different in (
        ((), 1, 'a run: there are iter_2.pth, iter_4.pth'),
        (('--discretization-method', 'foh'), 1, 'run (discretization bilinear, now foh): there'),
        ((), 2, 'another run (seed 1, now 2): there are'),
    ):
        log = train(*arguments, options=[f'randomness.seed={seed}'], fails=True)
        assert last_line(log).startswith(f'train.py: error: {run} holds ')
        assert different in last_line(log) and '--overwrite' in last_line(log)
    assert {p: p.stat().st_mtime_ns for p in run.rglob('*') if p.name != '.lock'} == before

    log = train('--discretization-method', 'foh', '--resume', fails=True)
    assert "was trained with discretization_method 'bilinear', here 'foh'" in last_line(log)

    other = ('--discretization-method', 'foh', '--overwrite')
    log = train(*other, options=['train_cfg.max_iters=3', 'default_hooks.checkpoint.interval=3'])
    assert iterations(log) == [1, 2, 3]
    assert names(run) == ['iter_3.pth'] and last_checkpoint(run) == run / 'iter_3.pth'
    assert len([path for path in run.iterdir() if re.fullmatch(r'\d{8}_\d{6}', path.name)]) == 1
    log = train('--discretization-method', 'foh', '--resume')
    assert iterations(log) == [4]


def test_the_pointer_decides(train, tmp_path):
    """Not the highest number: that may be of a training before."""
    run = tmp_path / 'run'
    train()
    (run / 'last_checkpoint').write_text(str(run / 'iter_2.pth'))
    log = train('--resume')
    assert iterations(log) == [3, 4]
    assert f'Resuming finds {run / "iter_2.pth"}, by last_checkpoint.' in log
    assert f'{run / "iter_2.pth"} is continued at iteration 3 of 4.' in log

    (run / 'last_checkpoint').write_text(str(run / 'iter_9.pth'))
    line = last_line(train('--resume', fails=True))
    assert line == (
        f'train.py: error: {run}/last_checkpoint names {run}/iter_9.pth, which is gone: choose one '
        'by --resume FILE (there are iter_2.pth, iter_4.pth)'
    )
    outside = tmp_path / 'elsewhere.pth'
    outside.write_bytes((run / 'iter_4.pth').read_bytes())
    (run / 'last_checkpoint').write_text(str(outside))
    line = last_line(train('--resume', fails=True))
    assert f'names {outside}, which is no checkpoint of this folder' in line
    (run / 'last_checkpoint').write_text('')
    assert 'last_checkpoint is empty' in last_line(train('--resume', fails=True))
    line = last_line(train('--resume', 'run/iter_7.pth', fails=True))
    assert line == (
        'train.py: error: there is no checkpoint run/iter_7.pth; run has iter_2.pth, iter_4.pth'
    )
    run.rename(tmp_path / 'moved')
    (tmp_path / 'moved' / 'last_checkpoint').write_text(str(run / 'iter_4.pth'))
    log = train('--work-dir', 'moved', '--resume')
    assert f'finds {tmp_path / "moved" / "iter_4.pth"}' in log and 'This run is finished' in log
    assert 'Training started' not in log and 'Last checkpoint' not in log


@pytest.mark.parametrize(
    'options',
    [
        ('default_hooks.checkpoint.out_dir=out',),
        ('default_hooks.checkpoint.filename_tmpl=model_at_{}.pth',),
        ('default_hooks.checkpoint.out_dir=out', 'default_hooks.checkpoint.filename_tmpl=m{}.ckpt'),
        ('default_hooks.checkpoint.save_last=False', 'default_hooks.checkpoint.max_keep_ckpts=1'),
    ],
)
def test_it_continues_whatever_the_names(options, train, tmp_path):
    train(options=[*options, 'train_cfg.max_iters=2'])
    log = train('--resume', options=[*options, 'train_cfg.max_iters=3'])
    assert iterations(log) == [3]
    assert 'holds a run' in last_line(train(options=options, fails=True))


def test_resuming_needs_no_weights_to_begin_with(train):
    train()
    gone = 'load_from=gone.pth'
    more = 'train_cfg.max_iters=5'
    assert iterations(train('--resume', options=[gone, more])) == [5]
    assert 'there is no checkpoint gone.pth' in last_line(
        train('--overwrite', options=[gone], fails=True)
    )


def test_nothing_to_resume_is_said(train, tmp_path):
    log = train('--resume', options=['train_cfg.max_iters=1'])
    assert iterations(log) == [1]
    assert (
        f'Resuming finds no checkpoint: {tmp_path / "run"} has neither last_checkpoint nor an '
        'iter_*.pth or epoch_*.pth. The training starts from its first iteration.'
    ) in log


def test_weights_alone_are_no_training(train, tmp_path):
    import torch

    train()
    weights = torch.load(tmp_path / 'run' / 'iter_4.pth', weights_only=False)['state_dict']
    torch.save(dict(state_dict=weights), tmp_path / 'weights.pth')
    log = train('--work-dir', 'new', '--resume', 'weights.pth', fails=True)
    assert 'weights.pth cannot be resumed' in last_line(log) and 'load_from' in last_line(log)
    # A folder that holds a run is asked for here, too.
    log = train('--resume', 'weights.pth', fails=True)
    assert 'holds a run' in last_line(log)


def test_two_trainings_at_once(train, tmp_path):
    lock = FolderLock(tmp_path / 'run')
    line = last_line(train(fails=True))
    lock.release()
    assert f'run is being trained by process {os.getpid()} on ' in line


def test_a_job_that_slurm_queues_again_continues(train):
    """By the same command, without --resume or with --overwrite; another job does not."""
    job = dict(SLURM_JOB_ID='7')
    train(options=['train_cfg.max_iters=2'], **job)
    log = train(**job, SLURM_RESTART_COUNT='1')
    assert iterations(log) == [3, 4] and 'Slurm has queued job 7 again' in log
    log = train('--overwrite', options=['train_cfg.max_iters=5'], **job, SLURM_RESTART_COUNT='2')
    assert iterations(log) == [5]
    for other in (job, dict(SLURM_JOB_ID='8', SLURM_RESTART_COUNT='1')):
        assert 'holds a run' in last_line(train(fails=True, **other))


def test_ctrl_c_while_a_config_is_formatted(configs, data_root, tmp_path):
    """MMEngine says that the config has no syntax."""
    config = tmp_path / 'interrupted.py'
    config.write_text(
        f"_base_ = {str(configs['seg'])!r}\ncustom_imports = dict(imports=['interrupting'])\n"
    )
    (tmp_path / 'interrupting.py').write_text(
        'import os, signal\nfrom yapf.yapflib import yapf_api\n'
        'def interrupt(text, **style):\n    os.kill(os.getpid(), signal.SIGINT)\n'
        'yapf_api.FormatCode = interrupt\n'
    )
    done = subprocess.run(
        command('train.py', config, '--cfg-options', f'data_root={data_root}'),
        cwd=tmp_path,
        env=environment(PYTHONPATH=f'{tmp_path}:{environment()["PYTHONPATH"]}'),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == 'train.py: interrupted'
