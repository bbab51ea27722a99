"""A save is killed, interrupted or refused at each of its points: the last checkpoint is there."""

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from mmengine.hooks import CheckpointHook, EMAHook, Hook

from tests.engine.toy import Mean, make_runner
from vim_mm.checkpoints.file import NotACheckpointError
from vim_mm.engine.saving.checkpoint_hook import DurableCheckpointHook, durable
from vim_mm.engine.saving.written import LIST, Written, last_checkpoint

# What is called of the system, by the names of Python's functions, and the files that do so. Logs
# are written elsewhere, and raise nothing.
CALLS = {'open', 'write', 'fsync', 'replace', 'rename', 'unlink', 'remove', 'close', 'mkdir'}
CALLERS = ('whole_file.py', 'pathlib.py', 'local_backend.py', 'shutil.py', '<frozen os>')


@pytest.fixture
def memory(tmp_path) -> Iterator[Path]:
    """A folder in memory, where Linux has one: there thousands of synchronizations take no time."""
    place = Path('/dev/shm')
    if not os.access(place, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


class Growing(Mean):
    """A metric that is better each time."""

    value = 0.0

    def compute_metrics(self, results):
        Growing.value += 1
        return {'mean': Growing.value}


def options(out_dir: Path | None, **checkpoint) -> dict:
    """A training of three iterations that keeps one checkpoint, and the best one."""
    hook = dict(
        type='CheckpointHook', by_epoch=False, interval=1, max_keep_ckpts=1, save_best='mean',
        rule='greater', out_dir=None if out_dir is None else str(out_dir),
    )  # fmt: skip
    return dict(
        train_cfg=dict(by_epoch=False, max_iters=3, val_interval=1),
        val_evaluator=[Growing()],
        default_hooks=dict(checkpoint=hook | checkpoint),
        custom_hooks=[dict(type='EMAHook')],
    )


def fail(fault: str) -> None:
    """Come to an end, or raise, as a fault does."""
    if fault in ('kill', 'terminate'):
        os.kill(os.getpid(), signal.SIGKILL if fault == 'kill' else signal.SIGTERM)
    if fault == 'interrupt':
        raise KeyboardInterrupt
    if fault == 'full':
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def is_caller(frame) -> bool:
    return frame.f_code.co_filename.endswith(CALLERS)


def save_in_a_fork(save: Callable[[], None], fault: str, point: int) -> int | None:
    """Save in a fork that fails at a point, just before a call of the system.

    Returns:
        int: How many points there are, where there is none of this number.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        points = 0

        def watch(frame, event, function) -> None:
            nonlocal points
            known = getattr(function, '__name__', '') in CALLS
            if event == 'c_call' and known and is_caller(frame):
                points += 1
                if points == point:
                    fail(fault)

        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            sys.setprofile(watch)
            save()
            sys.setprofile(None)
            if points < point:
                os.write(writer, b'%d' % points)
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    return int(said) if said else None


def whole(path: Path) -> dict:
    checkpoint = torch.load(path, weights_only=False)
    assert {'state_dict', 'ema_state_dict', 'message_hub', 'meta'} <= checkpoint.keys()
    return checkpoint


class Attempts(Hook):
    """Tries each save after the first with a fault at each of its points, before it is made."""

    priority = 88  # just before CheckpointHook

    def __init__(self, folders: list[Path], fault: str):
        self.folders = folders
        self.fault = fault
        self.points: list[int] = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter == 1:  # the second save
            self.try_all(runner, 'after_train_iter', batch_idx=batch_idx, outputs=None)

    def after_val_epoch(self, runner, metrics=None):
        if runner.iter == 2:
            self.try_all(runner, 'after_val_epoch', metrics=metrics)

    def try_all(self, runner, name: str, **arguments) -> None:
        (hook,) = (hook for hook in runner.hooks if isinstance(hook, CheckpointHook))
        before = whole(last_checkpoint(runner.work_dir))['meta']['iter']
        for folder in self.folders:
            shutil.copytree(folder, f'{folder}.before')
        point, points = 1, None
        while points is None:
            points = save_in_a_fork(
                lambda: getattr(hook, name)(runner, **arguments), self.fault, point
            )
            self.look(Path(runner.work_dir), before)
            for folder in self.folders:
                shutil.rmtree(folder)
                shutil.copytree(f'{folder}.before', folder)
            point += 1
        for folder in self.folders:
            shutil.rmtree(f'{folder}.before')
        self.points.append(points)

    def look(self, work_dir: Path, before: int) -> None:
        """At what is left after a fault."""
        last = last_checkpoint(work_dir)
        checkpoint = whole(last)
        assert checkpoint['meta']['iter'] >= before and 'optimizer' in checkpoint
        paths = [path for folder in self.folders for path in folder.glob('*.pth')]
        assert any(path.name.startswith('best_') for path in paths)
        for path in paths:
            whole(path)
        # What it says was best is there.
        assert Path(checkpoint['message_hub']['runtime_info']['best_ckpt']) in paths


@pytest.mark.slow
@pytest.mark.parametrize(
    ('fault', 'elsewhere'),
    [
        ('kill', False),
        ('kill', True),
        ('terminate', False),
        ('interrupt', False),
        ('full', False),
        ('full', True),
    ],
)
def test_a_save_may_fail_at_any_point(fault, elsewhere, memory, monkeypatch):
    # A process of git in each save.
    monkeypatch.setattr('mmengine.runner.runner.get_git_hash', str)
    work_dir, out_dir = memory / 'run', memory / 'out' if elsewhere else None
    folders = [work_dir, *([out_dir / 'run'] if elsewhere else [])]
    attempts = Attempts(folders, fault)
    runner = make_runner(work_dir, **options(out_dir))
    runner.register_hook(attempts)
    runner.train()
    assert attempts.points == [pytest.approx(35, abs=10), pytest.approx(60, abs=15)]
    assert sorted(p.name for p in folders[-1].glob('*.pth')) == [
        'best_mean_iter_3.pth',
        'iter_3.pth',
    ]
    assert not list(memory.rglob('*.part'))


@pytest.mark.parametrize('part', [0.0, 0.001, 0.5, 0.999])
def test_files_may_have_no_more_than_a_part_of_a_checkpoint(part, tmp_path):
    runner = make_runner(tmp_path, **options(None))
    runner.train()
    before = {path.name: path.read_bytes() for path in tmp_path.glob('*.pth')}
    (hook,) = (hook for hook in runner.hooks if isinstance(hook, DurableCheckpointHook))
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = int(part * len(before['iter_3.pth']))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with pytest.raises(OSError) as raised:
            hook._save_checkpoint_with_step(runner, 4, dict(epoch=0, iter=4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file, last = tmp_path / 'iter_4.pth', tmp_path / 'iter_3.pth'
    assert str(raised.value) in (
        f'{file} cannot be written (File too large); the last checkpoint is {last}.',
        f'{tmp_path / "checkpoints.json"} cannot be written (File too large)',  # of a few bytes
    )
    assert {path.name: path.read_bytes() for path in tmp_path.glob('*.pth')} == before
    assert last_checkpoint(tmp_path) == last
    assert not list(tmp_path.glob('*.part'))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason='needs the right to mount a disk')
@pytest.mark.parametrize('room', [1.1, 1.6, 2.1, 2.6, 3.1])
def test_a_disk_has_room_for_some_checkpoints(room, tmp_path):
    """A checkpoint, the best one and the next to be written do not fit, or do."""
    make_runner(tmp_path / 'size', **options(None)).train()
    size = sum(p.stat().st_size for p in (tmp_path / 'size').glob('*.pth')) / 2
    disk = tmp_path / 'disk'
    disk.mkdir()
    # Beside the checkpoints: the log, its records and the config.
    mount = ['mount', '-t', 'tmpfs', '-o', f'size={int(room * size) + 40960}', 'none', str(disk)]
    if subprocess.run(mount).returncode:
        pytest.skip('this machine mounts nothing')
    try:
        try:
            make_runner(disk / 'run', **options(None)).train()
        except OSError as error:
            assert 'No space left on device' in str(error)  # also by MMEngine's log
        last = last_checkpoint(disk / 'run')
        assert whole(last)['meta']['iter'] >= 1
        for path in (disk / 'run').glob('*.pth'):
            whole(path)
        subprocess.run(['mount', '-o', f'remount,size={int(9 * size)}', str(disk)], check=True)
        make_runner(disk / 'run', resume=True, **options(None)).train()
        assert whole(last_checkpoint(disk / 'run'))['meta']['iter'] == 3
        assert not list((disk / 'run').glob('*.part'))
    finally:
        subprocess.run(['umount', '--lazy', str(disk)], check=True)


@pytest.mark.parametrize('kept', [1, 2])
def test_what_a_kill_left_behind_is_removed_later(kept, tmp_path):
    """The file before the last one, and a part of a file."""
    make_runner(tmp_path, **options(None, max_keep_ckpts=kept)).train()
    assert {p.name for p in tmp_path.glob('iter_*')} == {'iter_2.pth', 'iter_3.pth'} - (
        {'iter_2.pth'} if kept == 1 else set()
    )
    written = json.loads((tmp_path / 'checkpoints.json').read_text())
    written['checkpoints'] = {'iter_1.pth': 1, **written['checkpoints']}
    written['best'] = {'best_mean_iter_1.pth': 'mean', **written['best']}
    (tmp_path / 'checkpoints.json').write_text(json.dumps(written))
    stale = tmp_path / 'iter_3.pth.0123456789abcdef.part'
    foreign = tmp_path / 'mine.pth.0123456789abcdef.part'
    for path in (stale, foreign, tmp_path / 'iter_1.pth', tmp_path / 'best_mean_iter_1.pth'):
        path.touch()
    more = options(None, max_keep_ckpts=kept)
    more['train_cfg']['max_iters'] = 4
    make_runner(tmp_path, resume=True, **more).train()
    left = {p.name for p in tmp_path.glob('*.p*') if p.suffix in ('.pth', '.part')}
    last = ['iter_4.pth', 'iter_3.pth'][:kept]
    assert left == {*last, 'best_mean_iter_4.pth', foreign.name}


@pytest.mark.parametrize('crafted', ['best_ckpt', 'keep_ckpt_ids', 'last_ckpt'])
def test_a_run_removes_no_file_that_a_checkpoint_names(crafted, tmp_path):
    """Neither those of the folder from which it was resumed, nor any other, nor folders."""
    first, second = tmp_path / 'first', tmp_path / 'second'
    make_runner(first, **options(None)).train()
    second.mkdir()
    precious = second / 'precious'
    precious.mkdir()
    mine = second / 'iter_7.pth'
    mine.touch()
    checkpoint = whole(first / 'iter_3.pth')
    info = checkpoint['message_hub']['runtime_info']
    info[crafted] = [7, '../first', '../../x'] if crafted == 'keep_ckpt_ids' else str(precious)
    torch.save(checkpoint, tmp_path / 'crafted.pth')
    kept = {path: path.read_bytes() for path in first.glob('*.pth')}
    for source in (tmp_path / 'crafted.pth', first / 'iter_3.pth'):
        more = options(None)
        more['train_cfg']['max_iters'] = 5
        make_runner(second, load_from=str(source), resume=True, **more).train()
        assert {path: path.read_bytes() for path in first.glob('*.pth')} == kept
        assert precious.is_dir() and mine.exists()
    assert [p.name for p in second.glob('best_*')] == ['best_mean_iter_5.pth']


def test_every_spelling_of_mmengines_hook_is_ours():
    for kind in ('CheckpointHook', 'mmengine.CheckpointHook', CheckpointHook):
        assert durable(dict(type=kind, interval=3))['type'] is DurableCheckpointHook
    assert isinstance(durable(CheckpointHook(interval=3)), DurableCheckpointHook)
    own = type('Own', (CheckpointHook,), {})(interval=3)
    assert durable(own) is own and type(own).__name__ == 'Own'
    assert type(durable(EMAHook())) is EMAHook


def test_a_link_with_the_name_of_a_checkpoint_is_replaced(tmp_path):
    """Whatever it leads to stays as it is; the same for the pointer and the list."""
    run = tmp_path / 'run'
    run.mkdir()
    target = tmp_path / 'target'
    for name in ('iter_2.pth', 'best_mean_iter_3.pth', 'last_checkpoint', 'iter_3.pth.part'):
        (run / name).symlink_to(target)
    (run / 'iter_3.pth').symlink_to(tmp_path / 'nowhere' / 'file')
    target.write_text('mine')
    make_runner(run, **options(None)).train()
    assert target.read_text() == 'mine'
    assert not (tmp_path / 'nowhere').exists()
    assert last_checkpoint(run) == run / 'iter_3.pth' and not (run / 'iter_3.pth').is_symlink()
    whole(run / 'iter_3.pth')
    whole(run / 'best_mean_iter_3.pth')


@pytest.mark.parametrize('template', ['model.pth', 'step{:05d}.pt', 'm{}.ckpt', 'sub/it_{}.pth'])
def test_any_template_of_names(template, tmp_path):
    more = options(None, filename_tmpl=template)
    make_runner(tmp_path, **more).train()
    last = last_checkpoint(tmp_path)
    assert last == tmp_path / template.format(3) and whole(last)['meta']['iter'] == 3
    assert len(list(last.parent.glob(f'*{last.suffix}'))) == (1 if '/' in template else 2)
    more['train_cfg']['max_iters'] = 4
    runner = make_runner(tmp_path, resume=True, **more)
    runner.train()
    assert last_checkpoint(tmp_path) == tmp_path / template.format(4)
    assert len(list(last.parent.glob(f'*{last.suffix}'))) == (1 if '/' in template else 2)


def test_a_metric_that_the_validation_lacks_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"save_best='maen' is no .*has mean; did you mean 'mean'"):
        make_runner(tmp_path, **options(None, save_best='maen')).train()
    assert last_checkpoint(tmp_path).name == 'iter_1.pth'


def test_a_metric_that_no_evaluator_can_have_is_refused_at_the_start(tmp_path):
    more = options(None, save_best='mean')
    more['val_evaluator'] = [Growing(prefix='toy')]
    with pytest.raises(ValueError, match=r"'mean' is no metric .* begin with toy/"):
        make_runner(tmp_path, **more).train()
    none = dict.fromkeys(('val_dataloader', 'val_cfg', 'val_evaluator'))
    with pytest.raises(ValueError, match='needs a validation'):
        make_runner(tmp_path, **{**options(None), **none}).train()
    assert last_checkpoint(tmp_path) is None


def overwrite(folder):
    runner = make_runner(folder, **options(None))
    runner.cfg.overwrite = True
    return runner


@pytest.mark.parametrize('config', ['', '.', '..', '/', 'other', None])
def test_overwriting_removes_no_folder_that_a_list_names(tmp_path, config):
    """A run without a config file notes no name, and anybody may write a list."""
    run, beside = tmp_path / 'run', tmp_path / 'beside'
    make_runner(run, **options(None)).train()
    for folder in (beside, run / 'other'):
        folder.mkdir()
        (folder / 'data').write_text('x')
    found = json.loads((run / LIST).read_text())
    found['run']['config'] = config
    (run / LIST).write_text(json.dumps(found))
    overwrite(run).train()
    assert last_checkpoint(run).is_file()
    assert (beside / 'data').is_file() and (run / 'other' / 'data').is_file()


@pytest.mark.parametrize('replaced', [False, True], ids=['resumed', 'overwritten'])
def test_only_checkpoints_in_the_folder_are_removed_whatever_the_list_names(replaced, tmp_path):
    run, outside = tmp_path / 'run', tmp_path / 'outside'
    make_runner(run, **options(None)).train()
    kept = [
        outside / 'iter_1.pth', outside / 'sub' / 'rank0.pth', outside / 'thesis.txt',
        run / 'photos' / 'a', run / 'epoch_1.pth' / 'a', run / 'notes.txt', run / 'notes.zip',
    ]  # fmt: skip
    gone = [run / 'old' / 'm1.ckpt', run / 'shards' / 'rank0.pth', run / 'iter_0.pth']
    for path in kept + gone[:2]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    shutil.copy(run / 'iter_3.pth', gone[0])
    gone[2].symlink_to(kept[0])
    with zipfile.ZipFile(run / 'notes.zip', 'w') as archive:
        archive.writestr('a', 'x')
    (run / 'link').symlink_to(outside)
    (run / 'loop').symlink_to('loop')
    names = [
        'link/iter_1.pth', 'link/sub', 'link/thesis.txt', 'photos', 'epoch_1.pth', 'notes.txt',
        'notes.zip', 'loop/x', 'zero\0/x', 'old/m1.ckpt', 'shards', 'iter_0.pth',
    ]  # fmt: skip
    found = json.loads((run / LIST).read_text())
    found['checkpoints'] = dict.fromkeys(names, 1) | found['checkpoints']
    found['best'] |= dict.fromkeys(names, 'mean')
    (run / LIST).write_text(json.dumps(found))
    if replaced:
        overwrite(run).train()
    else:
        more = options(None)
        more['train_cfg']['max_iters'] = 4
        make_runner(run, resume=True, **more).train()
    assert [path for path in kept if not path.exists()] == []
    assert [path for path in gone if path.exists()] == []


def test_a_pipe_is_no_list(tmp_path):
    os.mkfifo(tmp_path / LIST)
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail('it is waited for'))
    signal.alarm(10)
    try:
        assert last_checkpoint(tmp_path) is None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize('found', [True, False], ids=['found', 'given'])
def test_where_the_last_checkpoint_is_cut_off_the_others_are_named(found, tmp_path):
    more = options(None, max_keep_ckpts=2)
    make_runner(tmp_path, **more).train()
    cut = tmp_path / ('iter_3.pth' if found else 'iter_2.pth')
    os.truncate(cut, 1000)
    others = 'or choose another one by --resume FILE (there are iter_2.pth, best_mean_iter_3.pth)'
    message = f'{cut} is no checkpoint: the file is cut off after 1000 bytes: copy or download it '
    message += f'again; {others}' if found else 'again'
    with pytest.raises(NotACheckpointError, match=f'^{re.escape(message)}$'):
        make_runner(tmp_path, resume=True, load_from=None if found else str(cut), **more).train()


def test_a_copied_folder_is_a_run_of_its_own(tmp_path):
    """It is resumed there, and overwriting it leaves what it was copied from."""
    first, second = tmp_path / 'first', tmp_path / 'second'
    make_runner(first, **options(None)).train()
    before = {path: path.read_bytes() for path in first.iterdir() if path.is_file()}
    shutil.copytree(first, second)
    assert last_checkpoint(second).parent == second
    overwrite(second).train()
    assert {path: path.read_bytes() for path in first.iterdir() if path.is_file()} == before


def test_a_run_that_is_replaced_has_its_folder_until_there_is_a_checkpoint(tmp_path):
    make_runner(tmp_path, **options(None)).train()
    found = json.loads((tmp_path / LIST).read_text())
    found['run']['job'] = 'old'
    (tmp_path / LIST).write_text(json.dumps(found))
    runner = overwrite(tmp_path)

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    runner.save_checkpoint = killed
    with pytest.raises(KeyboardInterrupt):
        runner.train()
    assert Written.read(tmp_path).run['job'] == 'old'
    overwrite(tmp_path).train()
    assert Written.read(tmp_path).run['job'] != 'old'
