"""Time and memory for ``tools/analysis``: a scan's inputs, clocks, and the machine."""

import gc
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from vim_mm.ops import library
from vim_mm.processor import cpuinfo, processor_name
from vim_mm.version import commit

DTYPES = {
    'fp64': torch.float64,
    'fp32': torch.float32,
    'bf16': torch.bfloat16,
    'fp16': torch.float16,
}
# A graph of calls lasts so long that starting it does not show, and so short that many fit.
_GRAPH_SECONDS = 5e-3
_MAX_GRAPH_CALLS = 100
_MIN_TRIALS = 3
# Calls before the first that is timed: allocators, lazily loaded kernels, clocks of the processor.
WARM_UP_CALLS = 5


@dataclass(frozen=True)
class ScanShape:
    """Sizes of a scan, and the word (see ``DTYPES``) for the dtype of u, delta, z, B and C."""

    batch: int
    dim: int
    seqlen: int
    dstate: int = 16
    dtype: str = 'fp32'

    @property
    def size(self) -> int:
        """Pairs of a step and a state: B D L N."""
        return self.batch * self.dim * self.seqlen * self.dstate

    def __str__(self) -> str:
        return f'({self.batch}, {self.dim}, {self.seqlen})'


@dataclass(frozen=True)
class Scan:
    """A scan ready to run.

    Attributes:
        forward (Callable): Returns a tuple whose first item is the output.
        backward (Callable): Takes that tuple, any number of times, and computes every gradient.
    """

    forward: Callable[[], tuple]
    backward: Callable[[tuple], Any]

    def both(self) -> Any:
        """A forward and a backward pass."""
        return self.backward(self.forward())


def make_inputs(
    shape: ScanShape, device: str, dt_bias: float = -4.0, seed: int = 0
) -> dict[str, Tensor]:
    """Keyword arguments of ``selective_scan_fn`` as a Mamba layer gives them, requiring grad.

    u, gate, B, C normal; delta 0.5 normal, its bias 0.5 normal + ``dt_bias``; A = -1 .. -N; D = 1.
    Meant for ``delta_softplus``: dt is about 0.02 with the default bias, about 0.7 with 0.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[shape.dtype]
    parameters = torch.promote_types(dtype, torch.float32)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    rows = (shape.batch, shape.dim, shape.seqlen)
    states = (shape.batch, 1, shape.dstate, shape.seqlen)
    inputs = {
        'u': normal(*rows).to(dtype),
        'delta': (0.5 * normal(*rows)).to(dtype),
        'A': -torch.arange(1.0, shape.dstate + 1).repeat(shape.dim, 1).to(parameters),
        'B': normal(*states).to(dtype),
        'C': normal(*states).to(dtype),
        'D': torch.ones(shape.dim, dtype=parameters),
        'z': normal(*rows).to(dtype),
        'delta_bias': (0.5 * normal(shape.dim) + dt_bias).to(parameters),
    }
    return {name: x.to(device).requires_grad_() for name, x in inputs.items()}


def differentiable_scan(
    scan: Callable[[], Tensor], inputs: Iterable[Tensor], grad_out: Tensor
) -> Scan:
    """A scan whose backward pass is autograd's."""
    inputs = list(inputs)
    return Scan(
        lambda: (scan(),),
        lambda result: torch.autograd.grad(result[0], inputs, grad_out, retain_graph=True),
    )


def synchronize() -> None:
    """Wait for the GPU, where this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def warm_up(function: Callable[[], object], calls: int = WARM_UP_CALLS) -> None:
    """Call a function some times that do not count, and wait for the GPU."""
    for _ in range(calls):
        function()
    synchronize()


def wall_times(function: Callable[[], object], trials: int, seconds: float = 60.0) -> list[float]:
    """Seconds of each call as its caller waits for it, after ``WARM_UP_CALLS``; GPUs waited for.

    Args:
        function: What to call.
        trials: Number of calls at most.
        seconds: No call starts later than this, but at least three are made.
    """

    def call() -> float:
        start = perf_counter()
        function()
        synchronize()
        return perf_counter() - start

    warm_up(function)
    times: list[float] = []
    begin = perf_counter()
    while len(times) < trials and (len(times) < _MIN_TRIALS or perf_counter() - begin < seconds):
        times.append(call())
    return times


def steady_times(function: Callable[[], object], calls: int, rounds: int = 3) -> list[float]:
    """Seconds of a call among calls that follow one another, by round, after ``WARM_UP_CALLS``.

    The GPU is waited for after each round, not after each call: what a loop of such calls takes.
    """

    def one_round() -> float:
        start = perf_counter()
        for _ in range(calls):
            function()
        synchronize()
        return (perf_counter() - start) / calls

    warm_up(function)
    return [one_round() for _ in range(rounds)]


def device_times(prepare: Callable[[], Callable[[], object]], trials: int) -> list[float]:
    """Seconds of a call on the GPU, without the host's share: several inside a CUDA graph.

    One follows the other, as fast as they let each other begin. ``do_bench_cudagraph`` of
    ``triton.testing`` does the same for forward passes alone, because it captures on a stream of
    its own; ``torch.utils.benchmark`` times the host as well.

    Args:
        prepare: Returns what to call. It runs on the stream that is captured, because autograd
            runs a backward pass on the stream of its forward pass.
        trials: Number of times that the graph is replayed.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function = prepare()
        warm_up(function)

    def replay_times(calls: int, trials: int) -> list[float]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                function()
        warm_up(graph.replay)
        return [_event_time(graph.replay) for _ in range(trials)]

    # So many that what the graph itself takes, some microseconds, does not count.
    (single,) = replay_times(1, 1)
    calls = max(1, min(_MAX_GRAPH_CALLS, round(_GRAPH_SECONDS / single)))
    return [seconds / calls for seconds in replay_times(calls, trials)]


def _event_time(function: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end)


def pass_times(scan: Scan, device: str, trials: int) -> dict[str, float]:
    """Median seconds of the forward and of the backward pass alone, by names of the two.

    On a GPU those of :func:`device_times`, elsewhere those of :func:`wall_times`.
    """

    def forward() -> Callable[[], object]:
        return scan.forward

    def backward() -> Callable[[], object]:
        result = scan.forward()
        return lambda: scan.backward(result)

    if device == 'cuda':
        times = {f.__name__: device_times(f, trials) for f in (forward, backward)}
    else:
        times = {f.__name__: wall_times(f(), trials) for f in (forward, backward)}
    return {name: median(values) for name, values in times.items()}


def enqueue_times(function: Callable[[], object], trials: int) -> list[float]:
    """Seconds until each call returns, its work on the GPU still under way."""

    def call() -> float:
        torch.cuda.synchronize()
        start = perf_counter()
        function()
        return perf_counter() - start

    warm_up(function)
    return [call() for _ in range(trials)]


def count_launches(function: Callable[[], object]) -> int:
    """Kernels, copies and fills that one call starts on the GPU."""
    function()
    return len(_on_the_gpu(function))


def kernel_seconds(function: Callable[[], object], calls: int = 1) -> float:
    """Seconds of all kernels, copies and fills of a call, the mean of so many calls."""
    return sum(seconds for _, seconds in _on_the_gpu(function, calls)) / calls


def _on_the_gpu(function: Callable[[], object], calls: int = 1) -> list[tuple[str, float]]:
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(calls):
            function()
        synchronize()
    return [*gpu_events(recorded)]


def gpu_events(recorded: torch.profiler.profile) -> Iterator[tuple[str, float]]:
    """Name and seconds of each kernel, copy and fill that a profile saw."""
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            yield event.name, 1e-6 * event.time_range.elapsed_us()


def begin_peak() -> None:
    """Free what nobody holds, and let the peak of the GPU's memory begin from here."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_memory(function: Callable[[], object], device: str) -> int:
    """Bytes that one call allocates at most at a time, beyond what is allocated before it.

    On CUDA ``max_memory_allocated``. On the CPU the largest running sum of PyTorch's allocations
    and releases as its profiler records them, which leaves out what a kernel keeps on its stack.
    """
    function()  # libraries allocate their workspaces at the first call
    if device == 'cuda':
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault('KINETO_LOG_LEVEL', '5')  # else a machine without a GPU is an error
    with profile(profile_memory=True) as recorded:
        function()
    events = [e for e in recorded.kineto_results.events() if e.name() == '[memory]']
    allocated = largest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        allocated += event.nbytes()
        largest = max(largest, allocated)
    return largest


def clock_rates(device: str) -> dict[str, str]:
    """Frequencies as the system gives them now, in MHz: of the GPU with their limits, or the CPU's.

    Empty where the system does not say.
    """
    if device == 'cuda':
        names = ('clocks.sm', 'clocks.max.sm', 'clocks.mem', 'clocks.max.mem', 'power.limit')
        # By its identity: nvidia-smi does not know CUDA_VISIBLE_DEVICES.
        card = f'GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}'
        query = ['nvidia-smi', f'--id={card}', f'--query-gpu={",".join(names)}']
        query.append('--format=csv,noheader,nounits')
        try:
            done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
        except (OSError, subprocess.SubprocessError):
            return {}
        values = (value.strip() for value in done.stdout.split(','))
        return dict(zip(names, values, strict=True))
    rates = [float(rate) for rate in cpuinfo('cpu MHz')]
    return {'cpu MHz': f'{min(rates):.0f} to {max(rates):.0f}'} if rates else {}


def describe(facts: Mapping[str, Any]) -> str:
    """Facts such as those of :func:`environment` in a line, those that are known."""
    return ', '.join(f'{name} {value}' for name, value in facts.items() if value is not None)


def environment(device: str) -> dict[str, str | int | None]:
    """What figures depend on: code, date, PyTorch and processors."""
    facts = {'commit': commit(7), 'date': date.today().isoformat(), 'torch': torch.__version__}
    if device == 'cuda':
        card = torch.cuda.get_device_name()
        facts |= {'device': card, 'CUDA': torch.version.cuda}
    facts |= {'processor': processor_name(), 'threads': torch.get_num_threads()}
    if library.MISSING is None:
        facts['capability'] = torch.ops.vim_mm.cpu_capability()
    return facts
