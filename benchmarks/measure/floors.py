"""Measures what a GPU can do at best, for ``benchmarks/benchmark_scan.py``: what a scan costs
at least."""

from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median

import torch

from benchmarks.measure.timing import DTYPES, ScanShape, device_times

_EX2_PER_CLOCK = 16  # of one multiprocessor, compute capability 8.0 to 12.0
_CHAINS = 1024  # per block of 128 threads: eight for each, to hide the latency of one
_BLOCKS_PER_MULTIPROCESSOR = 16
_STEPS = 2048
_COPIED_BYTES = 2**31
_TRIALS = 20


@dataclass(frozen=True)
class Card:
    """Rates of a GPU.

    Attributes:
        ex2 (float): Base-2 exponentials per second.
        ex2_source (str): How that is known.
        bandwidth (float): Bytes per second between the chip and its memory, reads and writes.
    """

    ex2: float
    ex2_source: str
    bandwidth: float

    @classmethod
    def measure(cls) -> 'Card':
        """The current CUDA device. Without Triton the rate of ex2 is the one of its clock."""
        if find_spec('triton') is not None:
            return cls(_measure_ex2(), 'chained ex2, measured', _measure_bandwidth())
        card = torch.cuda.get_device_properties()
        rate = card.multi_processor_count * _EX2_PER_CLOCK * 1e3 * card.clock_rate
        return cls(rate, 'highest clock, not measured', _measure_bandwidth())

    def ex2_seconds(self, shape: ScanShape) -> float:
        """For one exponential per (b, d, l, n), which each pass needs unless it shares them."""
        return shape.size / self.ex2

    def memory_seconds(self, shape: ScanShape, backward: bool) -> float:
        """For each input to be read once and each output to be written once."""
        row, states = (size * shape.batch * shape.seqlen for size in (shape.dim, shape.dstate))
        # Forward: u, delta, z, B, C and out. Backward: those and their gradients.
        elements = 7 * row + 4 * states if backward else 4 * row + 2 * states
        return elements * DTYPES[shape.dtype].itemsize / self.bandwidth


def _measure_bandwidth() -> float:
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device='cuda')
    target = torch.empty_like(source)
    seconds = median(device_times(lambda: lambda: target.copy_(source), _TRIALS))
    return 2 * _COPIED_BYTES / seconds


def _measure_ex2() -> float:
    kernel = _chained_ex2()
    blocks = _BLOCKS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties().multi_processor_count
    out = torch.empty(blocks * _CHAINS, device='cuda')
    seconds = median(device_times(lambda: lambda: kernel[(blocks,)](out, _STEPS, _CHAINS), _TRIALS))
    return blocks * _CHAINS * _STEPS / seconds


def _chained_ex2():
    """A Triton kernel ``(out, steps, CHAINS)``; here because Triton is not everywhere."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(out, steps, CHAINS: tl.constexpr):
        lane = tl.arange(0, CHAINS)
        x = lane.to(tl.float32) / CHAINS
        for _ in range(steps // 16):
            for _ in tl.static_range(16):
                # The sign keeps x in [0, 1]; turning it is the work of another pipe.
                x = tl.inline_asm_elementwise(
                    '{ .reg .f32 t; neg.ftz.f32 t, $1; ex2.approx.ftz.f32 $0, t; }',
                    '=f,f', [x], dtype=tl.float32, is_pure=True, pack=1,
                )  # fmt: skip
        tl.store(out + tl.program_id(0) * CHAINS + lane, x)

    return kernel
