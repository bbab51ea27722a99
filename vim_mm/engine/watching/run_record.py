"""What ran, by the names that PyTorch's profiler records: operators, and on a GPU kernels.

No flag is asked: a flag says what was wished. ``RecordHook`` notes it in the record of a run.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from torch.autograd.profiler import profile

from vim_mm.checkpoints.provenance import code_version
from vim_mm.engine.optimization.graphed_step import GraphedStepHook
from vim_mm.engine.watching.nonfinite import NonFiniteLossError
from vim_mm.errors import UserError
from vim_mm.json_lines import read_json
from vim_mm.models.mamba import Mamba
from vim_mm.processor import processor_name
from vim_mm.whole_file import whole_file

# Operators that hold a whole scan in one call, forward; each is called once for a mixer.
_COMPILED = ('vim_mm::selective_scan_fwd', 'vim_mm::mixer_fwd')
_TRITON = ('vim_mm::triton_scan_fwd', 'vim_mm::triton_mixer_fwd')
PYTORCH = 'PyTorch operators'
# Facts that may differ from one iteration of a run to another.
_COUNTED = ('compiled_scans', 'operators', 'other_operators', 'kernels', 'date')
_LIBRARIES = ('torch', 'numpy', 'mmengine', 'mmcv', 'mmseg', 'mmdet', 'mmpretrain', 'timm')


class PathChangedError(UserError, RuntimeError):
    """A run was trained by one path, and would go on by another."""


@dataclass
class Observed:
    """Names and how often each ran.

    Attributes:
        operators (Counter): As PyTorch dispatches them, such as 'aten::mul'.
        kernels (Counter): Kernels, copies and fills of the GPU; empty without one.
    """

    operators: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)

    @property
    def scans(self) -> int:
        """Mixers, or scans by themselves, that an operator of ``vim_mm`` computed forwards."""
        return sum(self.operators[name] for name in (*_COMPILED, *_TRITON))

    @property
    def our_kernels(self) -> list[str]:
        """Names of the kernels of this package that the GPU ran, without their arguments."""
        ours = (name for name in self.kernels if 'vim_mm::' in name)
        return sorted({name.partition('(')[0].removeprefix('void ') for name in ours})

    def path(self, expected: int = 1) -> str:
        """Which path computed the scans.

        Args:
            expected (int): Scans that were called, by operators of ``vim_mm`` or not.

        Returns:
            str: 'CUDA kernel', 'CPU kernel', 'Triton kernel', 'mixed', or ``PYTORCH`` for the
            backends 'torch' and 'reference', which have no operator of their own.
        """
        if self.scans == 0:
            return PYTORCH
        by_triton = sum(self.operators[name] for name in _TRITON)
        if self.scans < expected or 0 < by_triton < self.scans:
            return 'mixed'
        if by_triton:
            return 'Triton kernel'
        return 'CUDA kernel' if self.our_kernels else 'CPU kernel'


@contextmanager
def observe() -> Iterator[Observed]:
    """Profile a block; the result is filled when the block ends. Slow: for a call, not for all."""
    os.environ.setdefault('KINETO_LOG_LEVEL', '5')  # else a machine without a GPU is an error
    seen = Observed()
    device = 'cuda' if torch.cuda.is_available() else None
    with profile(use_device=device, use_kineto=True) as recorded:  # without it no kernel is seen
        yield seen
    # The raw events: a reference scan has hundreds of thousands.
    for event in recorded.kineto_results.events():
        on_gpu = event.device_type() == torch.autograd.DeviceType.CUDA
        (seen.kernels if on_gpu else seen.operators)[event.name()] += 1


def versions() -> dict[str, str]:
    """Of Python, and of the libraries that this process has imported, by the name of the module."""
    loaded = {name: sys.modules[name] for name in _LIBRARIES if name in sys.modules}
    found = {name: str(getattr(module, '__version__', '')) for name, module in loaded.items()}
    return {'python': sys.version.split()[0], **found}


def card(device: str) -> str:
    """The name of what computes: of the current GPU, or for 'cpu' of the processor."""
    if device == 'cuda':
        return torch.cuda.get_device_name()
    return processor_name() or 'cpu'


def update_record(file: Path, **facts: Any) -> dict[str, Any]:
    """Merge facts into the JSON record of a run, whole or not at all; returns the whole record.

    Raises:
        OSError: It cannot be written, as on a full disk; it is what it was.
        ValueError: It holds something else than a record; names the file.
    """
    record = read_json(file) if file.exists() else {}
    record.update(facts)
    with whole_file(file) as part:
        part.write_text(json.dumps(record, indent=1) + '\n')
    return record


class RecordHook(Hook):
    """Notes in a run's record what ran in its first iteration, and insists on it when resuming.

    ``ran`` in the record gets the path of the scans by the profiler's names, those names, the card,
    the threads, ``VIM_USE_CUDA_KERNEL``, ``VIM_MM_BACKEND``, commit, versions and date. ``resumed``
    gets a dict for each time that the run went on with another of these facts: those that differ.
    ``batches`` gets the number of batches that CUDA graphs computed (``replayed``), and of those
    whose kernels were launched one by one, when the first is replayed and when the training ends;
    it is missing without graphs.

    Args:
        file (Path): The JSON record; made if it is missing.
    """

    priority = 'LOWEST'

    def __init__(self, file: str | Path):
        self.file = Path(file)
        self.seen: Observed | None = None
        self.watch: Any = None
        self.replays_are_noted = False

    def before_train_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        """Begin to observe the first iteration of this process."""
        if self.seen is None and is_main_process():
            self.watch = observe()
            self.seen = self.watch.__enter__()

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        """Write what was seen.

        Raises:
            PathChangedError: The run was begun by another path.
        """
        if self.watch is None:
            if not self.replays_are_noted and is_main_process():
                self.replays_are_noted = self._note_batches(runner)
            return
        self.watch.__exit__(None, None, None)
        self.watch = None
        mixers = sum(isinstance(module, Mamba) for module in runner.model.modules())
        ran = what_ran(self.seen, mixers)
        record = read_json(self.file) if self.file.exists() else {}
        before = record.get('ran')
        if before is None or runner.iter == 0:  # begun, or begun again
            update_record(self.file, ran=ran, resumed=[])
            return
        if before['path'] != ran['path']:
            raise PathChangedError(
                f'This run was trained by the {before["path"]} and would go on by the '
                f'{ran["path"]}.'
            )
        changed = {n: v for n, v in ran.items() if n not in _COUNTED and v != before.get(n)}
        if changed:
            resumed = [*record.get('resumed', []), changed | {'date': ran['date']}]
            update_record(self.file, resumed=resumed)

    def after_train(self, runner) -> None:
        """Write how many batches graphs computed."""
        if is_main_process():
            self._note_batches(runner)

    def _note_batches(self, runner) -> bool:
        """Whether a graph has computed any."""
        steps = (hook.step for hook in runner.hooks if isinstance(hook, GraphedStepHook))
        step = next(steps, None)
        if step is None or not step.replayed:
            return False
        update_record(self.file, batches=dict(replayed=step.replayed, launched=step.launched))
        return True


def what_ran(seen: Observed, mixers: int) -> dict[str, Any]:
    """The facts of ``RecordHook`` from an observed step of a model with so many mixers."""
    return {
        'path': seen.path(mixers) if mixers else 'no scan',
        'mixers': mixers,
        'compiled_scans': seen.scans,
        'operators': {n: k for n, k in seen.operators.items() if n.startswith('vim_mm::')},
        'other_operators': sum(k for n, k in seen.operators.items() if n.startswith('aten::')),
        'kernels': seen.our_kernels,
        'card': card('cuda' if torch.cuda.is_available() else 'cpu'),
        'threads': torch.get_num_threads(),
        'VIM_USE_CUDA_KERNEL': os.environ.get('VIM_USE_CUDA_KERNEL'),
        'VIM_MM_BACKEND': os.environ.get('VIM_MM_BACKEND'),
        **code_version(),
        'versions': versions(),
        'date': datetime.now(timezone.utc).strftime('%Y-%m-%d'),
    }


def note_divergence(file: Path, error: NonFiniteLossError) -> None:
    """Note in a run's record that its loss was not finite, and where."""
    if is_main_process():
        update_record(file, diverged=str(error))


def status_of(record: dict[str, Any]) -> str | None:
    """How a run ended, by its record: 'finished', 'diverged', 'failed', 'interrupted' or None.

    A training may have diverged after the process that would have noted it was killed.
    """
    status = record.get('status')
    return 'diverged' if status == 'interrupted' and 'diverged' in record else status
