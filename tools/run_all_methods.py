"""Trains a config with every method and seed, and keeps a record of what ran in each run.

    seg/run_all_methods.sh --seeds 0..11 --gpus all --jobs-per-gpu 2 --amp
    CONFIG=configs/seg/upernet_vim_shapes.py seg/run_all_methods.sh --seeds 0,1

Arguments that are not listed below go to train.py. A folder for each run lies in --work-dir and
holds its logs, its weights and run.json: config, method, seed, command with VIM_USE_CUDA_KERNEL and
VIM_MM_BACKEND, the path of the scans by the profiler's names, commit and versions. Runs go by seed,
then method.

Started again with the same arguments, finished and diverged runs are skipped and interrupted ones
resume. A folder whose run had another config, argument, commit, VIM_USE_CUDA_KERNEL or
VIM_MM_BACKEND is refused. Several starts may share a --work-dir: each run is trained by one.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections import deque
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import train
from _command_line import end, numbers, parser_of, positive

if TYPE_CHECKING:
    from vim_mm.engine.saving.lock import FolderLock

TOOLS = Path(__file__).resolve().parent
# What two starts of a run must have in common, and what each is called.
IDENTITY = {
    'config_sha256': 'the config with all that it inherits and all options',
    'arguments': 'the arguments',
    'processes': 'the number of processes',
    'commit': 'the commit of the code',
}
VARIABLES = ('VIM_USE_CUDA_KERNEL', 'VIM_MM_BACKEND')  # they choose the path of the scan
DONE = ('finished', 'diverged')
_PATIENCE = 30.0  # seconds that a run gets to end before it is killed


@dataclass
class Run:
    """One training.

    Attributes:
        folder (Path): Its working directory.
        arguments (list[str]): Of train.py.
        identity (dict): Values by the names of ``IDENTITY`` and ``VARIABLES``.
        facts (dict): Further values of the record.
        lock (FolderLock, optional): Of the folder, for this process and the training.
    """

    folder: Path
    arguments: list[str]
    identity: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    lock: 'FolderLock | None' = None

    @property
    def record(self) -> Path:
        return self.folder / 'run.json'

    def status(self) -> str | None:
        """'finished', 'diverged', 'interrupted' or 'failed'; None for one that is new."""
        from vim_mm.engine.watching.run_record import status_of

        return status_of(self.read())

    def read(self) -> dict[str, Any]:
        from vim_mm.json_lines import read_json

        return read_json(self.record) if self.record.exists() else {}

    def differences(self) -> list[str]:
        """In what an earlier start of this run differs from this one."""
        before = self.read()
        return [
            f'{words} ({shorten(before.get(name))}, now {shorten(value)})'
            for name, value in self.identity.items()
            if before and before.get(name) != value
            for words in [IDENTITY.get(name, name)]
        ]

    def check(self) -> None:
        """Refuse what the folder holds of another run."""
        if not self.record.exists() and any(self.folder.glob('*.pth')):
            raise SystemExit(f'{self.folder} holds weights and no record of what trained them')
        if different := self.differences():
            raise SystemExit(
                f'{self.folder} holds the run of other arguments: it differs in '
                f'{" and in ".join(different)}. Set WORK_DIR to another directory, or remove it.'
            )

    def acquire(self) -> bool:
        """Lock the folder for this process and the training it starts; False if it is taken."""
        from vim_mm.engine.saving.lock import FolderLock, FolderTakenError

        try:
            self.lock = FolderLock(self.folder)
        except FolderTakenError:
            return False
        return True

    def release(self) -> None:
        if self.lock is not None:
            self.lock.release()
        self.lock = None


def shorten(value: Any) -> str:
    text = ' '.join(value) if isinstance(value, list) else str(value)
    return repr(text if len(text) <= 60 else f'{text[:12]}...')


def config_of(pattern: str, method: str) -> str:
    return pattern.replace('{method}', method)


def resolve(
    config: str, method: str, seed: int | None, extra: list[str]
) -> tuple[list[str], dict[str, Any]]:
    """Arguments of train.py for a run, and what its record has of its config.

    That is the seed, the digest of all that the config says, and the digest of what it says beside
    method and seed, which runs that are compared have in common.

    Raises:
        Whatever is wrong with the config or an argument, before anything is trained.
    """
    from vim_mm.engine.cli import read_config

    options = [f'model.backbone.discretization_method={method}']
    if seed is not None:
        options.append(f'randomness.seed={seed}')
    arguments = [config, *extra, '--cfg-options', *options]
    args = train.parse_args(arguments)
    for name in ('discretization_method', 'resume', 'overwrite', 'record'):
        if getattr(args, name) not in (None, False):
            option = name.replace('_', '-')
            raise SystemExit(f'--{option} is set for each run, and cannot be an argument')
    del args.launcher  # that of this process says nothing
    said = read_config(args, import_library=False).to_dict()
    whole, backbone, randomness = digest(said), said['model']['backbone'], said.get('randomness')
    del backbone['discretization_method']
    chosen = randomness.pop('seed', None) if randomness else None
    said.pop('work_dir', None)  # named by the method
    return arguments, {'seed': chosen, 'config_sha256': whole, 'shared_sha256': digest(said)}


def digest(said: dict[str, Any]) -> str:
    """SHA-256 of what a config says."""
    text = json.dumps(said, sort_keys=True, default=repr)
    return sha256(text.encode()).hexdigest()


def make_runs(args: Namespace, extra: list[str]) -> list[Run]:
    """All runs in their order, each checked against what its folder holds."""
    from vim_mm.version import __version__, commit

    for method in args.methods:
        if not Path(config_of(args.config, method)).is_file():
            raise SystemExit(f'no config {config_of(args.config, method)} for the method {method}')
    code = commit(40) or f'version {__version__}'
    if code.endswith('-dirty'):
        print(
            'Changes of this checkout are not committed: the records cannot say what ran.',
            file=sys.stderr,
        )
    runs = []
    for seed in args.seeds or [None]:
        for method in args.methods:
            config = config_of(args.config, method)
            name = Path(config).stem
            name = name if name.endswith(f'_{method}') else f'{name}_{method}'
            folder = args.work_dir / (name if seed is None else f'{name}_seed{seed}')
            arguments, said = resolve(config, method, seed, extra)
            identity = {
                'config_sha256': said.pop('config_sha256'),
                'arguments': extra,
                'processes': args.processes,
                'commit': code,
                **{name: os.environ.get(name) for name in VARIABLES},
            }
            facts = {'config': config, 'task': task_name(args.config), 'method': method}
            runs.append(Run(folder, arguments, identity, {**facts, **said}))
    for run in runs:
        run.check()
    return runs


def task_name(pattern: str) -> str:
    """What the runs of all methods have in common: the name of the config without the method."""
    return Path(pattern).stem.replace('{method}', '').strip('_')


def command_of(run: Run, processes: int) -> list[str]:
    """The command line of a run."""
    rest = [*run.arguments, '--resume', '--work-dir', str(run.folder), '--record', str(run.record)]
    if processes == 1:
        return [sys.executable, str(TOOLS / 'train.py'), *rest]
    return ['bash', str(TOOLS / 'dist_train.sh'), rest[0], str(processes), *rest[1:]]


def places(gpus: list[str], processes: int, jobs: int) -> list[str | None]:
    """Where runs go side by side: CUDA_VISIBLE_DEVICES of each, None where it stays as it is.

    Args:
        gpus (list[str]): As CUDA_VISIBLE_DEVICES names them; none on a CPU.
        processes (int): GPUs that a run takes.
        jobs (int): Runs that share a GPU.
    """
    if not gpus:
        return [None] * jobs
    if len(gpus) % processes:
        raise SystemExit(f'{len(gpus)} GPUs cannot be shared by runs of {processes} GPUs each')
    groups = [gpus[i : i + processes] for i in range(0, len(gpus), processes)]
    return [','.join(group) for _ in range(jobs) for group in groups]


def visible_gpus(wanted: str | None, processes: int) -> list[str]:
    """The GPUs to use, as CUDA_VISIBLE_DEVICES names them: by default those that one run takes."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get('CUDA_VISIBLE_DEVICES')
    names = named.split(',')[:count] if named else [str(i) for i in range(count)]
    if wanted == 'all':
        return names
    if wanted is None:
        return names[:processes]
    chosen = numbers(wanted)
    if chosen and max(chosen) >= count:
        raise SystemExit(f'--gpus {wanted}: this machine has {count} GPUs, from 0 on')
    return [names[i] for i in chosen]


def start(run: Run, place: str | None, args: Namespace, count: int) -> subprocess.Popen:
    """Begin a run, or go on with it, in a process group of its own."""
    from vim_mm.engine.watching.run_record import update_record

    environment = dict(os.environ, PYTHON=sys.executable, **run.lock.variables)
    if place is not None:
        environment['CUDA_VISIBLE_DEVICES'] = place
    # The same for every method and seed.
    cores = len(os.sched_getaffinity(0)) // (count * args.processes)
    environment.setdefault('OMP_NUM_THREADS', '1' if place is not None else str(max(1, cores)))
    command = command_of(run, args.processes)
    wishes = {name: run.identity[name] for name in VARIABLES}
    shown = ''.join(f'{name}={wish} ' for name, wish in wishes.items() if wish is not None)
    update_record(
        run.record,
        **run.facts,
        **run.identity,
        command=shown + shlex.join(command),
        OMP_NUM_THREADS=environment['OMP_NUM_THREADS'],
        jobs=count,
        status='interrupted',  # until it ends otherwise
    )
    # With one run at a time its log is what the user watches.
    output = None if count == 1 else (run.folder / 'output.txt').open('a')
    try:
        return subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT if output else None,
            start_new_session=True, pass_fds=run.lock.numbers,
        )  # fmt: skip
    finally:
        if output:
            output.close()


def finish(run: Run, code: int) -> str:
    """Write how a run ended into its record; returns that."""
    from vim_mm.engine.watching.run_record import update_record

    status = 'finished' if code == 0 else 'diverged' if 'diverged' in run.read() else 'failed'
    update_record(run.record, status=status, exit_code=code)
    run.release()
    return status


def train_all(runs: list[Run], slots: list[str | None], args: Namespace) -> None:
    """Train all runs, as many side by side as there are slots."""
    waiting, free = deque(runs), list(slots)
    running: dict[subprocess.Popen, tuple[Run, str | None]] = {}
    try:
        while waiting or running:
            while waiting and free:
                run = waiting.popleft()
                if not run.acquire():
                    print(f'{run.folder} is being trained by another process.', flush=True)
                    continue
                # Another process may have trained it since this one began.
                status = run.status()
                if different := run.differences():
                    print(f'{run.folder} is left alone: {" and ".join(different)}.', flush=True)
                elif status in DONE:
                    print(f'{run.folder} {describe(run, status, len(slots))}', flush=True)
                if different or status in DONE:
                    run.release()
                    continue
                place = free.pop(0)
                verb = 'begins' if status is None else 'goes on'
                print(f'{run.folder} {verb}.', flush=True)
                running[start(run, place, args, len(slots))] = run, place
            for process in [p for p in running if p.poll() is not None]:
                run, place = running.pop(process)
                free.append(place)
                print(
                    f'{run.folder} {describe(run, finish(run, process.returncode), len(slots))}',
                    flush=True,
                )
            time.sleep(0.1)
    except BaseException:
        stop([*running])
        raise


def describe(run: Run, status: str, count: int) -> str:
    """How a run ended, of so many side by side."""
    if status == 'failed':
        # A run alone has told the terminal.
        output = run.folder / 'output.txt'
        # A process that is killed may end within a character.
        lines = output.read_text(errors='replace').strip().splitlines() if count > 1 else []
        return 'failed' + (f': {lines[-1]}' if lines else '.')
    return f'{status}.' if status == 'diverged' else 'is finished.'


def stop(processes: list[subprocess.Popen]) -> None:
    """End what still runs, with its workers."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, number)
        deadline = time.monotonic() + _PATIENCE
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
            time.sleep(0.05)


def parse_args() -> tuple[Namespace, list[str]]:
    parser = parser_of(__doc__, allow_abbrev=False)
    env = os.environ.get
    parser.add_argument(
        '--config', default=env('CONFIG'), help='{method} stands for its name; variable CONFIG'
    )
    parser.add_argument(
        '--methods', nargs='+', default=(env('METHODS') or '').split(),
        help='default: the six that are compared, with --seeds also the control; variable METHODS',
    )  # fmt: skip
    parser.add_argument('--seeds', type=numbers, help="'0..11' or '0,3' (default: the config's)")
    parser.add_argument(
        '--gpus', help="numbers of the GPUs to use, '0..3' or 'all' (default: what one run takes)"
    )
    parser.add_argument(
        '--jobs-per-gpu',
        type=positive,
        default=1,
        help='runs side by side on each GPU, or on the CPU where there is none (default: 1)',
    )
    parser.add_argument(
        '--processes', type=positive, default=env('GPUS') or '1',
        help='of one run, with a GPU each; several are started by dist_train.sh (default: the '
        'variable GPUS, else 1)',
    )  # fmt: skip
    parser.add_argument('--work-dir', type=Path, default=Path(env('WORK_DIR') or 'work_dirs'))
    parser.add_argument('--dry-run', action='store_true', help='print the commands and end')
    args, extra = parser.parse_known_args()
    if not args.config:
        parser.error('--config or the variable CONFIG is required')
    return args, extra


def known_methods(args: Namespace) -> list[str]:
    """Those that are asked for, else those that are compared, and the control of a comparison."""
    from vim_mm.errors import did_you_mean
    from vim_mm.ops import METHODS

    if unknown := {*args.methods} - {*METHODS}:
        hint = did_you_mean(sorted(unknown)[0], METHODS)
        raise SystemExit(f'unknown methods {sorted(unknown)}, there are {[*METHODS]}{hint}')
    with_control = args.seeds is not None
    asked = [*dict.fromkeys(args.methods)]
    return asked or [m for m in METHODS if with_control or not METHODS[m].control]


def main(args: Namespace, extra: list[str]) -> int:
    args.methods = known_methods(args)
    runs = make_runs(args, extra)
    if args.dry_run:
        for run in runs:
            print(shlex.join(command_of(run, args.processes)))
        return 0
    slots = places(visible_gpus(args.gpus, args.processes), args.processes, args.jobs_per_gpu)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    done = [run for run in runs if run.status() in DONE]
    for run in done:
        print(f'{run.folder} {describe(run, run.status(), len(slots))}', flush=True)
    train_all([run for run in runs if run not in done], slots, args)
    ended = [run for run in runs if run.status() in DONE and not run.differences()]
    code = report(ended, seeds=args.seeds is not None)
    if missing := [str(run.folder) for run in runs if run not in ended]:
        raise SystemExit(f'not finished: {", ".join(missing)}')
    return code


def report(runs: list[Run], seeds: bool) -> int:
    """The table of the last metrics, and with seeds the comparison of the methods; its exit code.

    A tool that fails has said why.
    """
    tool = 'analysis/compare_methods.py' if seeds else 'compare_runs.py'
    folders = [str(run.folder) for run in runs if seeds or run.status() == 'finished']
    if not folders:
        return 0
    return subprocess.run([sys.executable, str(TOOLS / tool), *folders]).returncode


if __name__ == '__main__':
    arguments, rest = parse_args()
    end(lambda args: main(args, rest), arguments)
