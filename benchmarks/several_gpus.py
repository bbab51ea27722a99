"""Trains the drawn shapes on several GPUs and on one, and compares the losses.

    python -m vim_mm.datasets.shapes --out data/shapes
    python benchmarks/several_gpus.py --gpus 2 --out work_dirs/several_gpus

For each task and method: on all GPUs by tools/dist_train.sh, on one GPU with the same total batch,
and on one GPU with another seed. One GPU draws the same images and the same random numbers as
several do: of a detector it accumulates their micro-batches; a segmentor, whose SyncBN takes the
statistics of the whole batch, trains without dropout. So the first iterations are equal but for
rounding, which training then amplifies. Figures are means over processes and ten iterations.

Prints how far several GPUs are from one in the first ten iterations (loss or norm of the gradients,
whichever is further), and the mean gap of all losses, of several GPUs and of the other seed. Ends
with 1 if a run failed, if the first gap is more than rounding, or if several GPUs are further off
than the other seed is.
"""

import itertools
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from queue import Queue
from statistics import fmean

from _command_line import add_debug, add_methods, end, positive

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = {'seg': 'seg/upernet_vim_shapes.py', 'det': 'det/mask_rcnn_vim_shapes.py'}
CONFIG = """
_base_ = {base!r}
custom_imports = dict(imports=['vim_mm', 'mean_loss'], allow_failed_imports=False)
custom_hooks = [dict(type='MeanLossHook')]
"""
# What makes losses and gradients means over pictures, whichever of them a process has at once.
MEANS = ('dropout_ratio=0', 'loss_decode.avg_non_ignore=False')
SAME = {
    'seg': [f'model.{head}.{mean}' for head in ('decode_head', 'auxiliary_head') for mean in MEANS],
    'det': [],
}
INTERVAL = 10  # iterations that a logged loss is the mean of
# Relative. On a CPU noise of 1e-4 in each layer's outputs and gradients makes 3e-3 (detection), and
# a process with the weights, images or gradients of its own 3e-2 or more.
ROUNDING = 5e-3


@dataclass(frozen=True)
class Run:
    """One training."""

    task: str
    method: str
    processes: int
    seed: int

    @property
    def name(self) -> str:
        return f'{self.task}_{self.method}_{self.processes}gpu_seed{self.seed}'


def start(run: Run, device: str, args: Namespace) -> int:
    """Train, with the log in a file; returns the exit code."""
    folder = args.out / run.name
    folder.mkdir(parents=True, exist_ok=True)
    at_once = run.processes if run.task == 'seg' else args.gpus
    command = [
        'bash', str(ROOT / 'tools/dist_train.sh'), str(args.out / f'{run.task}.py'),
        str(run.processes), '--work-dir', str(folder), '--discretization-method', run.method,
        '--cfg-options', f'data_root={args.data}', f'randomness.seed={run.seed}',
        f'train_dataloader.batch_size={args.batch // at_once}',
        f'auto_scale_lr.base_batch_size={args.batch}', *SAME[run.task],
        f'train_cfg.max_iters={args.iters}', f'default_hooks.logger.interval={INTERVAL}',
        f'log_processor.window_size={INTERVAL}',
        'val_cfg=None', 'val_dataloader=None', 'val_evaluator=None',
        'default_hooks.checkpoint.interval=1000000',
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, [str(ROOT / 'benchmarks'), os.environ.get('PYTHONPATH')]))
    environment = {**os.environ, 'PYTHON': sys.executable, 'CUDA_VISIBLE_DEVICES': device}
    environment['PYTHONPATH'] = path
    # Rounds to 11 bits, and otherwise for another batch size: read by cuBLAS and cuDNN.
    environment['NVIDIA_TF32_OVERRIDE'] = '0'
    with (folder / 'output.txt').open('w') as output:
        return subprocess.run(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT
        ).returncode


def run_all(runs: list[Run], args: Namespace) -> dict[Run, int]:
    """Train side by side; runs on one GPU take turns at the GPUs. Returns the exit codes."""
    every = [str(gpu) for gpu in range(args.gpus)]
    turns: Queue[str] = Queue()
    for gpu in itertools.islice(itertools.cycle(every), args.jobs):
        turns.put(gpu)

    def train(run: Run) -> int:
        gpu = turns.get()
        try:
            return start(run, ','.join(every) if run.processes > 1 else gpu, args)
        finally:
            turns.put(gpu)

    with ThreadPoolExecutor(args.jobs) as pool:
        return dict(zip(runs, pool.map(train, runs), strict=True))


def logged(run: Run, args: Namespace) -> tuple[list[float], float]:
    """Losses of a run, and the norm of its first gradients; without what is logged early."""
    # After the arguments: --help takes no PyTorch.
    from benchmarks.runs.work_dir import read_records

    found = {r['step']: r for r in read_records(args.out / run.name) if 'loss' in r}
    records = [found[step] for step in sorted(found) if step % INTERVAL == 0]
    if len(records) != args.iters // INTERVAL:
        sys.exit(f'{run.name} has logged {len(records)} times, not {args.iters // INTERVAL}')
    return [record['loss'] for record in records], records[0]['grad_norm']


def gap(one: list[float], other: list[float]) -> float:
    """Mean relative distance of two curves."""
    return fmean(abs(a - b) / a for a, b in zip(one, other, strict=True))


def compare(task: str, method: str, args: Namespace) -> dict[str, str]:
    """The row of a method."""
    (several, norm), (one, norm_of_one), (other, _) = (
        logged(Run(task, method, *how), args) for how in ((args.gpus, 0), (1, 0), (1, 1))
    )
    firsts = gap(one[:1], several[:1]), gap([norm_of_one], [norm])
    gaps = gap(one, several), gap(one, other)
    # What is not finite is near to nothing, though another seed may be as far.
    holds = all(first <= ROUNDING for first in firsts) and gaps[0] <= gaps[1] and isfinite(gaps[0])
    return {
        'task': task,
        'method': method,
        f'last loss, {args.gpus} GPUs': f'{several[-1]:.3f}',
        'one GPU': f'{one[-1]:.3f}',
        'another seed': f'{other[-1]:.3f}',
        f'first gap, {args.gpus} GPUs': f'{max(firsts):.0e}',
        f'gap, {args.gpus} GPUs': f'{100 * gaps[0]:.1f} %',
        'gap, another seed': f'{100 * gaps[1]:.1f} %',
        'holds': 'yes' if holds else 'NO',
    }


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--gpus', type=positive, default=2)
    parser.add_argument('--tasks', nargs='+', choices=CONFIGS, default=[*CONFIGS])
    add_methods(parser)
    parser.add_argument('--iters', type=positive, default=200)
    parser.add_argument('--batch', type=positive, default=8, help='of all GPUs together')
    parser.add_argument('--jobs', type=positive, default=1, help='trainings side by side')
    parser.add_argument('--data', type=Path, default=Path('data/shapes'))
    parser.add_argument('--out', type=Path, default=Path('work_dirs/several_gpus'))
    add_debug(parser)
    args = parser.parse_args()
    if args.iters < INTERVAL:
        parser.error(f'--iters must be at least {INTERVAL}')
    return args


def main(args: Namespace) -> None:
    args.data, args.out = args.data.resolve(), args.out.resolve()
    pairs = [*itertools.product(args.tasks, args.methods)]
    hows = ((args.gpus, 0), (1, 0), (1, 1))
    args.out.mkdir(parents=True, exist_ok=True)
    for task in args.tasks:
        (args.out / f'{task}.py').write_text(
            CONFIG.format(base=str(ROOT / 'configs' / CONFIGS[task]))
        )
    codes = run_all([Run(*pair, *how) for pair in pairs for how in hows], args)
    failed = [run.name for run, code in codes.items() if code]
    if failed:
        sys.exit(f'failed: {", ".join(failed)}; the logs are in {args.out}')

    from benchmarks.measure.tables import markdown_table

    rows = [compare(*pair, args) for pair in pairs]
    print(markdown_table(rows))
    sys.exit(any(row['holds'] == 'NO' for row in rows))


if __name__ == '__main__':
    end(main, parse_args())
