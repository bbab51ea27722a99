"""Where a training begins: in a folder of its own, or at the checkpoint of its run."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mmengine.config import Config
from mmengine.dist import is_main_process
from mmengine.runner import Runner

from vim_mm.engine.saving import lock
from vim_mm.engine.saving.checkpoint_hook import (
    DurableCheckpointHook,
    checkpoint_folder,
    description,
)
from vim_mm.engine.saving.written import (
    POINTER,
    Written,
    checkpoints_in,
    is_within,
    last_checkpoint,
    listed,
)
from vim_mm.errors import UserError
from vim_mm.mistakes import check_checkpoint


class FolderInUseError(UserError, ValueError):
    """A folder holds another run, and nobody said what becomes of it."""


def begin(cfg: Config, resume: str | None = None, overwrite: bool = False) -> list[str]:
    """Take the work directory of a config for a training, and decide from what it starts.

    ``cfg.load_from`` and ``cfg.resume`` are set to the checkpoint that is continued, and
    ``cfg.overwrite`` where another run gives way. Process 0 of a distributed training locks the
    folder. A job that Slurm has queued again continues what it has written so far.

    Args:
        cfg (Config): As the tools read it.
        resume (str, optional): Path or URL of a checkpoint, or 'auto' for the last one of the run
            in the folder, if there is any.
        overwrite (bool): Whether another run in the folder is replaced.

    Returns:
        list[str]: What the log should say.

    Raises:
        FolderTakenError: Another training writes there.
        FolderInUseError: The folder has checkpoints, of which the arguments say nothing.
        PointerError: ``last_checkpoint`` in the folder names none of its run.
        FileNotFoundError: There is no such checkpoint.
    """
    hook = cfg.get('default_hooks', {}).get('checkpoint') or {}
    hook = hook if isinstance(hook, Mapping) else {}
    work_dir = checkpoint_folder(cfg.work_dir, None)
    folder = checkpoint_folder(work_dir, hook.get('out_dir'))
    if place_of(cfg.launcher)[0] == 0:
        lock.take(work_dir, folder)
    said = []
    run = Written.read(work_dir).run
    if _is_queued_again(run):
        said.append(f'Slurm has queued job {run["job"]} again: it continues its run.')
        resume, overwrite = 'auto', False
    elif resume is None and cfg.get('resume'):
        resume = cfg.get('load_from') or 'auto'
    checkpoint = resume
    if resume == 'auto':
        found = last_checkpoint(work_dir, folder)
        checkpoint = None if found is None else str(found)
        said.append(_told(work_dir, folder, checkpoint))
        cfg.resume = False
    elif resume is not None and cfg.get('runner_type') is None:
        check_checkpoint(resume)
    if checkpoint is not None:
        cfg.load_from, cfg.resume = checkpoint, True
    if checkpoint is None or not is_within(Path(checkpoint), work_dir, folder):
        others = checkpoints_in(work_dir, folder, template=hook.get('filename_tmpl'))
        if others and not overwrite:
            raise FolderInUseError(_in_use(work_dir, others, run, cfg))
        if others:
            cfg.overwrite = True
    return said


def place_of(launcher: str) -> tuple[int, int]:
    """Number of this process and number of all, by the launcher's environment, before they join."""
    names = {'pytorch': ('RANK', 'WORLD_SIZE'), 'slurm': ('SLURM_PROCID', 'SLURM_NTASKS')}
    rank, size = names.get(launcher, ('', ''))
    return int(os.environ.get(rank, '0')), int(os.environ.get(size, '1'))


def _is_queued_again(run: Mapping) -> bool:
    """Whether this job has written what is in the folder, before Slurm queued it again."""
    job = os.environ.get('SLURM_JOB_ID')
    restarts = os.environ.get('SLURM_RESTART_COUNT', '0')
    return job is not None and restarts not in ('', '0') and run.get('job') == job


def _told(work_dir: Path, folder: Path, checkpoint: str | None) -> str:
    """What looking for the last checkpoint came to."""
    if checkpoint is not None:
        by = POINTER if (work_dir / POINTER).is_file() else 'its name'
        return f'Resuming finds {checkpoint}, by {by}.'
    more = '' if folder == work_dir else f', and {folder} none of this run'
    return (
        f'Resuming finds no checkpoint: {work_dir} has neither {POINTER} nor an iter_*.pth or '
        f'epoch_*.pth{more}. The training starts from its first iteration.'
    )


def _in_use(work_dir: Path, others: list[Path], run: dict, cfg: Config) -> str:
    """What is wrong with a folder, and what could be done."""
    now = {**description(cfg), 'seed': cfg.get('randomness', {}).get('seed')}
    names = dict(config='config', methods='discretization', seed='seed')
    different = [
        f'{words} {_plain(run.get(name))}, now {_plain(now[name])}'
        for name, words in names.items()
        if run.get(name) and now[name] is not None and run[name] != now[name]
    ]
    of = f'another run ({"; ".join(different)})' if different else 'a run'
    return (
        f'{work_dir} holds {of}: {listed(others)}. Continue it by --resume, choose another '
        '--work-dir, or replace it by --overwrite.'
    )


def _plain(value: object) -> str:
    return ', '.join(map(str, value)) if isinstance(value, list) else str(value)


def find_last(runner: Runner) -> str | None:
    """The last checkpoint of a runner's folder, which its log then names; None if there is none.

    Raises:
        PointerError: ``last_checkpoint`` names none of the run.
    """
    work_dir, *folders = folders_of(runner)
    found = last_checkpoint(work_dir, *folders)
    checkpoint = None if found is None else str(found)
    runner.logger.info(_told(work_dir, [work_dir, *folders][-1], checkpoint))
    return checkpoint


def other_choices(runner: Runner, filename: str | Path) -> str:
    """The end of a message about the last checkpoint: which others there are.

    Empty if the file is not the last one, or the only one.
    """
    folders = folders_of(runner)
    with suppress(ValueError):  # the caller's error tells more
        others = [path for path in checkpoints_in(*folders) if path != Path(filename)]
        if others and last_checkpoint(*folders) == Path(filename):
            return f'; or choose another one by --resume FILE ({listed(others)})'
    return ''


def folders_of(runner: Runner) -> list[Path]:
    """Where a runner writes: its work directory and where its checkpoints are."""
    hooks = [hook for hook in runner.hooks if isinstance(hook, DurableCheckpointHook)]
    folders = [checkpoint_folder(runner.work_dir, hook.asked_folder) for hook in hooks]
    return [*dict.fromkeys([Path(runner.work_dir), *folders])]


def locked(runner: Runner):
    """Hold the locks of a runner's folders while it trains; in process 0 of a distributed one."""
    return lock.locked(*(folders_of(runner) if is_main_process() else ()))


def what_is_left(runner: Runner) -> str:
    """The last checkpoint, for a message about one that could not be written."""
    try:
        last = last_checkpoint(*folders_of(runner))
    except ValueError as error:  # it has no message of its own, beside that of the disk
        return str(error)
    return f'the last checkpoint is {last}' if last else 'there is no checkpoint before it'
