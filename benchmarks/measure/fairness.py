"""Seven checks of whether times of the methods may be compared, by the numbers of the first notes.

Every check gets what it looks at, calls by method or clocks, and returns what it saw. So it can be
shown a fault: ``tests/benchmarks/measure/test_fairness.py`` plants one for each check.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure.timing import WARM_UP_CALLS
from vim_mm.engine.watching.run_record import observe

TITLES = {
    1: 'same inputs and preprocessing',
    2: 'GPU synchronization',
    3: 'thread settings',
    4: 'code path',
    5: 'warm-up',
    6: 'micro-benchmark',
    7: 'whole comparison',
}
PASSED, FAILED, NOT_APPLICABLE = 'passed', 'failed', 'not applicable'
# A clock may count this part of the device's time less: the two are read at different moments.
_CLOCK_SLACK = 0.1
# A first timed call this much above the median, three times running, was cold.
_COLD = 3.0
# What a call of a function lasts while it is cold, and afterwards.
_COLD_SECONDS = 0.1
_WARM_SECONDS = 1e-3
# Two passes over the methods that differ by more than this part rank nothing.
_REPEATABLE = 0.2

Call = Callable[[], Any]
Clock = Callable[[Call], list[float]]  # seconds of calls, after its own warm-up


@dataclass(frozen=True)
class Result:
    """Of one check: ``passed``, ``failed`` or ``not applicable``, and what it saw, a line each."""

    number: int
    status: str
    evidence: list[str]

    @property
    def title(self) -> str:
        return TITLES[self.number]


def _result(number: int, faults: list[str], evidence: list[str]) -> Result:
    return Result(number, FAILED if faults else PASSED, faults + evidence)


def not_applicable(number: int, reason: str) -> Result:
    return Result(number, NOT_APPLICABLE, [reason])


def differences(facts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The facts in which methods differ, a line each with who has which value.

    Args:
        facts (Mapping): Values by the name of the method and of the fact.
    """
    lines = []
    for name in dict.fromkeys(name for found in facts.values() for name in found):
        by_value: dict[str, list[str]] = {}
        for method, found in facts.items():
            by_value.setdefault(str(found.get(name, 'absent')), []).append(method)
        if len(by_value) > 1:
            values = '; '.join(f'{value} for {", ".join(ms)}' for value, ms in by_value.items())
            lines.append(f'{name} is {values}')
    return lines


def describe(tensor: Tensor) -> str:
    """Shape, dtype, device, strides and a digest of the values."""
    values = tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()
    digest = hashlib.sha256(values).hexdigest()[:12]
    layout = f'{tuple(tensor.shape)} {tensor.dtype} {tensor.device} strides {tensor.stride()}'
    return f'{layout} sha256 {digest}'


class Witness(TorchDispatchMode):
    """Sees every operator that a call dispatches.

    Attributes:
        arguments (dict): What the first compiled scan was given, described; of the method's number
            nothing, as it is what differs.
        threads (set[int]): ``torch.get_num_threads()`` at the operators.
        operators (int): Their number.
    """

    def __init__(self):
        super().__init__()
        self.arguments: dict[str, str] = {}
        self.threads: set[int] = set()
        self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.threads.add(torch.get_num_threads())
        self.operators += 1
        if func.name() == 'vim_mm::selective_scan_fwd' and not self.arguments:
            names = [argument.name for argument in func._schema.arguments]
            for name, value in zip(names, args):
                if name != 'method':
                    tensor = isinstance(value, Tensor)
                    self.arguments[name] = describe(value) if tensor else str(value)
        return func(*args, **(kwargs or {}))


def witnessed(call: Call) -> Witness:
    """What a witness saw of a call."""
    with Witness() as witness:
        call()
    return witness


def check_inputs(
    calls: Mapping[str, Call],
    given: Mapping[str, Mapping[str, Tensor]],
    configs: Mapping[str, Mapping[str, Any]] | None = None,
    recorded: Mapping[str, Mapping[str, Mapping[str, Any]]] | None = None,
) -> Result:
    """1: every method gets the same numbers, and its config says nothing else.

    Args:
        calls: A scan by method.
        given: The tensors that each call starts from.
        configs: By method all entries of its config but the method's name.
        recorded: The same of runs, by task and run.
    """
    received = {method: witnessed(call).arguments for method, call in calls.items()}
    facts = {m: {name: describe(x) for name, x in given[m].items()} for m in given}
    faults = [f'inputs differ: {line}' for line in differences(facts)]
    faults += [f'the scan receives: {line}' for line in differences(received)]
    first = next(iter(facts))
    evidence = [f'{name}: {fact}' for name, fact in facts[first].items()]
    count = len({m for m, found in received.items() if found})
    evidence.append(f'{count} of {len(calls)} methods: arguments of the compiled scan compared')
    if configs:
        faults += [f'config: {line}' for line in differences(configs)]
        evidence.append(
            f'{len(configs)} configs compared, {len(configs[next(iter(configs))])} entries'
        )
    if recorded:
        of_runs = [line for runs in recorded.values() for line in differences(runs)]
        faults = [*(f'runs: {line}' for line in of_runs), *faults]
        evidence.append(f'{sum(map(len, recorded.values()))} runs compared')
    return _result(1, faults, evidence)


class Device(Protocol):
    """What check 2 needs of an asynchronous device."""

    def run(self) -> None:
        """Enqueue some work and return."""

    def busy_seconds(self) -> float:
        """How long the device works on it, by the device's own clock."""


def check_synchronization(clocks: Mapping[str, Clock], device: Device) -> Result:
    """2: a clock counts all the work that it started, and no work from before."""
    busy = device.busy_seconds()
    faults, evidence = [], [f'the device works {1e3 * busy:.3f} ms']
    for name, clock in clocks.items():
        alone = median(clock(device.run))
        for _ in range(3 * WARM_UP_CALLS):
            device.run()
        after = median(clock(device.run))
        evidence.append(f'{name}: {1e3 * alone:.3f} ms, behind other work {1e3 * after:.3f} ms')
        if alone < (1 - _CLOCK_SLACK) * busy:
            faults.append(f'{name} stops before the device has finished')
        if after > 2 * max(alone, busy):
            faults.append(f'{name} counts work that was started before')
    return _result(2, faults, evidence)


def check_threads(
    calls: Mapping[str, Call], recorded: Mapping[str, Mapping[str, Any]] | None = None
) -> Result:
    """3: every method computes with as many threads as the others.

    Args:
        calls: A scan by method.
        recorded: Threads by the name of a run, from its record.
    """
    found = {}
    for method, call in calls.items():
        seen = witnessed(call).threads | {torch.get_num_threads()}
        found[method] = {'threads': ', '.join(map(str, sorted(seen)))}
    faults = differences(found)
    faults += [
        f'method {m} changes the number of threads' for m in found if ',' in found[m]['threads']
    ]
    names = ('OMP_NUM_THREADS', 'MKL_NUM_THREADS')
    settings = ', '.join(f'{name}={os.environ.get(name, "unset")}' for name in names)
    evidence = [
        f'{settings}; torch: {torch.get_num_threads()} threads within an operator, '
        f'{torch.get_num_interop_threads()} between; {len(os.sched_getaffinity(0))} cores'
    ]
    if recorded:
        faults += [f'runs: {line}' for line in differences(recorded)]
        evidence.append(f'{len(recorded)} runs compared')
    return _result(3, faults, evidence)


def check_paths(
    calls: Mapping[str, Call],
    expected: str,
    scans: Mapping[str, int] | None = None,
    recorded: Mapping[str, str] | None = None,
) -> Result:
    """4: every method takes the path that it should, by what the profiler saw.

    Args:
        calls: A scan, or a model, by method.
        scans: How many scans the calls of these names hold, for those that hold more than one.
        expected: 'CUDA kernel', 'CPU kernel', 'Triton kernel' or 'PyTorch operators'.
        recorded: Paths by the name of a run, from its record.
    """
    faults, evidence = [], []
    for method, call in calls.items():
        with observe() as seen:
            call()
        path = seen.path((scans or {}).get(method, 1))
        ours = [n for n in seen.operators if n.startswith('vim_mm::')]
        others = sum(k for name, k in seen.operators.items() if name.startswith('aten::'))
        what = ', '.join(seen.our_kernels or ours) or 'no operator of vim_mm'
        evidence.append(f'{method}: {path}; {what}; {others} operators of PyTorch')
        if path != expected:
            faults.append(f'{method} takes the {path} where the {expected} was expected')
    if recorded:
        by_run = {name: {'path': path} for name, path in recorded.items()}
        faults += [f'runs: {line}' for line in differences(by_run)]
        evidence.append(f'{len(recorded)} runs compared')
    return _result(4, faults, evidence)


def check_warm_up(
    clocks: Mapping[str, Clock],
    calls: Mapping[str, Call],
    work: Callable[[float], Any] = time.sleep,
) -> Result:
    """5: a clock calls some times before it counts, and no method's first timed call is cold.

    Args:
        clocks: Each is shown a function that is slow in its first calls.
        calls: By method; timed with the first of the clocks.
        work: Takes so many seconds, of what the clocks see: on a GPU they need not see the host.
    """
    faults, evidence = [], []
    for name, clock in clocks.items():
        count, times = _warm_up_calls(clock, work)
        evidence.append(f'{name}: {count} calls before the first that counts')
        if count < WARM_UP_CALLS:
            faults.append(
                f'{name} makes {count} calls before it counts, fewer than {WARM_UP_CALLS}'
            )
        if max(times) > _COLD_SECONDS / 2:
            faults.append(f'{name} counts a cold call: {1e3 * max(times):.1f} ms')
    clock = next(iter(clocks.values()))
    for method, call in calls.items():
        runs = [clock(call) for _ in range(3)]
        ratios = [times[0] / median(times) for times in runs]
        evidence.append(f'{method}: {_ms(runs[0])}, the first {min(ratios):.2f} of the median')
        if min(ratios) > _COLD:
            faults.append(f'{method} is still cold in its first timed call, three times running')
    return _result(5, faults, evidence)


def _ms(times: Iterable[float]) -> str:
    return f'{1e3 * median(times):.3f} ms'


def _warm_up_calls(clock: Clock, work: Callable[[float], Any]) -> tuple[int, list[float]]:
    """How often a clock calls before it counts, and what it counts of a cold function."""
    captured: list[bool] = []  # of each call, whether it becomes a part of a CUDA graph

    def function() -> None:
        # PyTorch cannot be asked where there is no GPU.
        initialized = torch.cuda.is_initialized()
        captured.append(initialized and torch.cuda.is_current_stream_capturing())
        work(_COLD_SECONDS if len(captured) <= WARM_UP_CALLS else _WARM_SECONDS)

    times = clock(function)
    # A clock that replays graphs counts the calls that it captured, any other one call a time.
    return len(captured) - (sum(captured) or len(times)), times


def check_operations(
    calls: Mapping[str, Callable[[int], Call]],
    lengths: tuple[int, int],
    clock: Clock,
    reference: Mapping[str, Callable[[int], Call]],
) -> Result:
    """6: a scan dispatches as many operators for more steps, and is not slower than in Python.

    Args:
        calls: By method, from a length to a scan of that length.
        lengths: Two numbers of steps; the first is timed.
        clock: Times a call.
        reference: The same scans by the Python reference.
    """
    faults, evidence = [], []
    for method, of_length in calls.items():
        counts = [witnessed(of_length(length)).operators for length in lengths]
        mine, python = (median(clock(f(lengths[0]))) for f in (of_length, reference[method]))
        evidence.append(
            f'{method}: {1e3 * mine:.3f} ms, Python {1e3 * python:.3f} ms; {counts[0]} operators '
            f'for {lengths[0]} steps, {counts[1]} for {lengths[1]}'
        )
        if counts[0] != counts[1]:
            faults.append(
                f'{method} dispatches more operators for more steps: it is not vectorized'
            )
        if mine > python:
            faults.append(f'{method} is slower than its Python reference')
    return _result(6, faults, evidence)


def check_comparison(calls: Mapping[str, Call], clock: Clock) -> Result:
    """7: two passes over the methods, the second backwards, give each the same time.

    Args:
        calls: A training step of the same model by method.
        clock: Times a call.
    """
    first = {method: median(clock(call)) for method, call in calls.items()}
    second = {method: median(clock(calls[method])) for method in reversed([*calls])}
    best = min(min(first[m], second[m]) for m in calls)
    faults, evidence = [], []
    for method in calls:
        pair = first[method], second[method]
        apart = max(pair) / min(pair) - 1
        evidence.append(
            f'{method}: {1e3 * pair[0]:.3f} and {1e3 * pair[1]:.3f} ms, {100 * apart:.1f} % apart, '
            f'{min(pair) / best:.2f} of the fastest'
        )
        if apart > _REPEATABLE:
            faults.append(
                f'{method} took {100 * apart:.0f} % longer in one pass than in the other: this '
                'machine is not quiet enough to rank methods'
            )
    return _result(7, faults, evidence)
