"""Kills a small training at random points, resumes it, and compares it bit by bit.

    python -m tests.tools.kill_and_resume --kills 20

The reference runs from start to end. The other run keeps one checkpoint and the best one, is ended
again and again, and resumed each time: in turn killed by SIGKILL from outside at a random moment,
twice; killed with half of a checkpoint written; and by a disk that has room for a part of one. No
checkpoint may be lost, and both runs must end with the same weights, averages, optimizer state and
learning rates. Runs on the CPU; each attempt is a fork of this process, so that it starts in a
second.
"""

import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from argparse import ArgumentParser
from multiprocessing import get_context
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.fileio import LocalBackend

from vim_mm.checkpoints import read_file
from vim_mm.datasets.shapes import ShapesConfig, write_dataset
from vim_mm.engine import activate, build_runner
from vim_mm.engine.cli import import_task_library
from vim_mm.engine.saving.beginning import begin
from vim_mm.engine.saving.written import last_checkpoint

FULL = 28  # exit code of a training that found no room
# Everything that draws random numbers is on: flips, order, drop path, dropout of the heads.
SMALL = """
_base_ = 'vim_mm::seg/upernet_vim_shapes.py'
model = dict(
    backbone=dict(arch=dict(_delete_=True, embed_dims=8, num_layers=4), drop_path_rate=0.3),
    neck=dict(embed_dim=8),
    decode_head=dict(in_channels=[8] * 4, channels=8, dropout_ratio=0.3),
    auxiliary_head=dict(in_channels=8, channels=8),
)
# Of two micro-batches.
train_dataloader = dict(batch_size=2)
auto_scale_lr = dict(base_batch_size=4)
train_cfg = dict(val_interval=7)
default_hooks = dict(
    logger=dict(interval=1), checkpoint=dict(interval=3, max_keep_ckpts=1, save_best='mIoU')
)
custom_hooks = [dict(type='EMAHook')]
log_level = 'ERROR'
launcher = 'none'
"""


def make_config(folder: Path, iterations: int) -> Config:
    """The config of the shipped shapes, shrunk, and its data."""
    write_dataset(folder / 'shapes', ShapesConfig(train=10, val=2, size=32))
    (folder / 'small.py').write_text(SMALL)
    activate()
    cfg = Config.fromfile(folder / 'small.py')
    cfg.train_cfg.max_iters = iterations
    for name in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        cfg[name].dataset.data_root = str(folder / 'shapes')
        cfg[name].update(num_workers=1, persistent_workers=True)
    import_task_library(cfg)
    return cfg


def train(
    cfg: Config, work_dir: Path, kill_in_save: int | None = None, room: int | None = None
) -> None:
    """Start a training or resume it.

    Args:
        cfg (Config): Of the training.
        work_dir (Path): Its folder.
        kill_in_save (int, optional): It dies in the save of this number, from 0.
        room (int, optional): Bytes of a checkpoint for which there is room; it ends with ``FULL``.
    """
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    cfg.work_dir = str(work_dir)
    begin(cfg, resume='auto')
    saves = 0

    def put(self, data, path):
        nonlocal saves
        if '.pth.' in Path(path).name:
            if saves == kill_in_save:
                Path(path).write_bytes(bytes(data)[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            saves += 1
            if room is not None:  # not for the shared memory of workers
                resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        return original(self, data, path)

    original, LocalBackend.put = LocalBackend.put, put
    try:
        build_runner(cfg).train()
    except OSError as error:
        if room is None:
            raise
        print(error, file=sys.stderr)
        sys.exit(FULL)


def attempt(cfg: Config, work_dir: Path, timeout: float | None = None, **kwargs) -> int:
    """Train in a process of its own, which is killed after ``timeout`` seconds; its exit code."""
    process = get_context('fork').Process(target=train, args=(cfg, work_dir), kwargs=kwargs)
    process.start()
    process.join(timeout)
    process.kill()
    process.join()
    return process.exitcode


def first_difference(a, b, path: str = '') -> str | None:
    """Where two nested structures of tensors and plain data differ."""
    if isinstance(a, torch.Tensor):
        same = isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
        return None if same else path
    if isinstance(a, dict):
        if not isinstance(b, dict) or a.keys() != b.keys():
            return path
        items = ((key, a[key], b[key]) for key in a)
    elif isinstance(a, list | tuple):
        if len(a) != len(b):
            return path
        items = ((i, x, y) for i, (x, y) in enumerate(zip(a, b)))
    else:
        return None if a == b else path
    return next(filter(None, (first_difference(x, y, f'{path}/{k}') for k, x, y in items)), None)


def run(folder: Path, kills: int, iterations: int, seed: int) -> None:
    """Both trainings, which must end in the same bits.

    Raises:
        SystemExit: They differ, or one of them fails by itself.
    """
    rng = random.Random(seed)
    cfg = make_config(folder, iterations)
    start = time.monotonic()
    if attempt(cfg, folder / 'whole'):
        raise SystemExit('The uninterrupted training failed.')
    duration = time.monotonic() - start
    print(f'{iterations} iterations without interruption: {duration:.1f} s')

    killed = attempts = 0
    while killed < kills:
        before = last_checkpoint(folder / 'killed')
        if attempts % 4 == 3 and before is not None:
            room = int(rng.random() * before.stat().st_size)
            how, code = f'with room for {room} bytes', attempt(cfg, folder / 'killed', room=room)
        elif attempts % 4 == 2:
            how, code = 'in a save', attempt(cfg, folder / 'killed', kill_in_save=rng.randrange(2))
        else:
            moment = rng.uniform(0.3, 0.9) * duration
            how, code = f'after {moment:.2f} s', attempt(cfg, folder / 'killed', moment)
        after = last_checkpoint(folder / 'killed')
        names = [path and path.stem for path in (before, after)]
        attempts += 1
        killed += code in (-signal.SIGKILL, FULL)  # else it was done before
        counted = f'kill {killed}' if code else 'no kill'
        print(f'{counted}: {how}; resumed {names[0]}, left {names[1]}; exit code {code}')
        if code not in (0, -signal.SIGKILL, FULL):
            raise SystemExit('An attempt failed by itself.')
        check_kept(folder / 'killed', before)
        if after is not None and step_of(after) >= iterations - 3:
            # Start again, so that every kill hits a training that is under way.
            compare(cfg, folder)
    compare(cfg, folder)


def check_kept(work_dir: Path, before: Path | None) -> None:
    """Insist that every checkpoint is whole, and that the last is none before the one it was.

    Raises:
        SystemExit: One was lost.
    """
    for path in work_dir.glob('*.pth'):
        read_file(path)
    after = last_checkpoint(work_dir)
    if before is not None and (after is None or step_of(after) < step_of(before)):
        raise SystemExit(f'{before} is lost, the last checkpoint is {after}.')


def step_of(checkpoint: Path) -> int:
    """The iteration in the name of a checkpoint."""
    return int(checkpoint.stem.rpartition('_')[2])


def compare(cfg: Config, folder: Path) -> None:
    """Finish the killed training, compare it with the other, and remove it.

    Raises:
        SystemExit: They differ, or the killed one fails by itself.
    """
    if attempt(cfg, folder / 'killed'):
        raise SystemExit('The last attempt failed.')
    last = [last_checkpoint(folder / name) for name in ('whole', 'killed')]
    whole, killed = (read_file(path) for path in last)
    parts = ('state_dict', 'ema_state_dict', 'optimizer', 'param_schedulers')
    where = first_difference(*({k: x[k] for k in parts} for x in (whole, killed)))
    if last[0].name != last[1].name or where is not None:
        raise SystemExit(f'The trainings differ in {where}.')
    shutil.rmtree(folder / 'killed')
    print(f'{last[1].name}: the same bits')


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--kills', type=int, default=20, help='of trainings that had not ended')
    parser.add_argument('--iterations', type=int, default=30)
    parser.add_argument('--seed', type=int, default=0, help='of the moments')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run(Path(folder), args.kills, args.iterations, args.seed)


if __name__ == '__main__':
    main()
