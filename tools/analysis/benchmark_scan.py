"""Times the selective scan, forward and backward, for every method and backend.

    python tools/analysis/benchmark_scan.py --batch 2 --dim 384 --seqlen 1024 --dstate 16 \
        --out work_dirs/benchmark_scan.json
    python tools/analysis/benchmark_scan.py --device cuda --dtype bf16 --shapes all

Inputs are those of a Mamba layer: u, gate, B, C normal; delta 0.5 normal, bias 0.5 normal - 4, so
that dt is about 0.02 (``--dt-bias 0`` makes it about 0.7); A = -1 .. -N; with D, gate and softplus.
Prints a table (milliseconds, median over the trials) and writes the same as JSON.

On CUDA a time is that of the device alone: several calls inside a CUDA graph, divided by their
number. Above the table stands the floor of the forward pass: one ex2 per (b, d, l, n) at 16 per
clock and multiprocessor, at the card's highest clock.
"""

import argparse
import json
import platform
import subprocess
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

from vim_mm.ops import METHODS, selective_scan_fn

# Vim's, by size and image side (b: batch), and the shape of the seed notes.
SHAPES = {
    't512': (8, 384, 1024),
    't512b32': (32, 384, 1024),
    't1024': (2, 384, 4096),
    's512': (8, 768, 1024),
    't224': (128, 384, 197),
    't1248': (4, 384, 6084),
    'seed': (8, 512, 1024),
}
GRAPH_CALLS = 5
EX2_PER_CLOCK = 16  # of one multiprocessor
BACKENDS = ('kernel', 'reference')
DTYPES = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}


def make_inputs(args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Keyword arguments of selective_scan_fn, requiring grad."""
    generator = torch.Generator().manual_seed(0)
    dtype = DTYPES[args.dtype]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    rows = (args.batch, args.dim, args.seqlen)
    states = (args.batch, 1, args.dstate, args.seqlen)
    inputs = {
        'u': normal(*rows).to(dtype),
        'delta': (0.5 * normal(*rows)).to(dtype),
        'A': -torch.arange(1.0, args.dstate + 1).repeat(args.dim, 1),
        'B': normal(*states).to(dtype),
        'C': normal(*states).to(dtype),
        'D': torch.ones(args.dim),
        'z': normal(*rows).to(dtype),
        'delta_bias': 0.5 * normal(args.dim) + args.dt_bias,
    }
    return {name: x.to(args.device).requires_grad_() for name, x in inputs.items()}


def measure(method: str, backend: str, args: argparse.Namespace) -> dict[str, str | float]:
    """One row of the table: medians in milliseconds."""
    inputs = make_inputs(args)
    grad = torch.randn_like(inputs['u'])
    # On CUDA True, so that a missing kernel is an error and not a reference called kernel.
    use_cuda_kernel = False if backend == 'reference' else (True if args.device == 'cuda' else None)

    def forward() -> torch.Tensor:
        return selective_scan_fn(
            **inputs,
            delta_softplus=True,
            discretization_method=method,
            use_cuda_kernel=use_cuda_kernel,
        )

    def forward_backward() -> None:
        torch.autograd.grad(forward(), list(inputs.values()), grad)

    row: dict[str, str | float] = {'method': method, 'backend': backend}
    for name, function in (('forward', forward), ('forward_backward', forward_backward)):
        times = (
            device_times(function, args) if args.device == 'cuda' else host_times(function, args)
        )
        row[f'{name}_ms'] = 1e3 * times[len(times) // 2]
        row[f'{name}_min_ms'] = 1e3 * times[0]
    return row


def host_times(function: Callable[[], object], args: argparse.Namespace) -> list[float]:
    """Seconds per call, ascending."""
    timer = Timer('f()', globals={'f': function}, num_threads=args.threads)
    timer.timeit(1)
    return sorted(timer.timeit(1).median for _ in range(args.n_trials))


def device_times(function: Callable[[], object], args: argparse.Namespace) -> list[float]:
    """Seconds per call on the GPU, without the host's share, ascending."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            function()
    graph.replay()
    times = []
    for _ in range(args.n_trials):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e-3 * start.elapsed_time(end) / GRAPH_CALLS)
    return sorted(times)


def ex2_floor_ms(args: argparse.Namespace) -> float:
    """Milliseconds for one ex2 per (b, d, l, n) on this GPU."""
    card = torch.cuda.get_device_properties()
    rate = card.multi_processor_count * EX2_PER_CLOCK * 1e3 * card.clock_rate
    return 1e3 * args.batch * args.dim * args.seqlen * args.dstate / rate


def git_commit() -> str | None:
    """The commit of this checkout, None outside of one."""
    command = ['git', '-C', str(Path(__file__).parent), 'describe', '--always', '--dirty']
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None


def processor() -> str:
    """The processor's name as the system gives it."""
    cpuinfo = Path('/proc/cpuinfo')
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(':')[1].strip() for line in lines if line.startswith('model name')]
    return names[0] if names else platform.processor()


def environment(args: argparse.Namespace) -> dict[str, str | int | None]:
    """What the figures depend on."""
    facts = {'commit': git_commit(), 'date': date.today().isoformat(), 'torch': torch.__version__}
    if args.device == 'cuda':
        return facts | {'device': torch.cuda.get_device_name()}
    capability = torch.ops.vim_mm.cpu_capability()
    return facts | {'device': processor(), 'threads': args.threads, 'capability': capability}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--batch', type=int, default=2, help='B')
    parser.add_argument('--dim', type=int, default=384, help='D')
    parser.add_argument('--seqlen', type=int, default=1024, help='L')
    parser.add_argument('--dstate', type=int, default=16, help='N')
    parser.add_argument(
        '--shapes',
        nargs='+',
        choices=[*SHAPES, 'all'],
        help='named (B, D, L) in place of the above',
    )
    parser.add_argument('--dtype', choices=DTYPES, default='fp32', help='of u, delta, z, B and C')
    parser.add_argument('--dt-bias', type=float, default=-4.0, help='mean of delta_bias')
    parser.add_argument('--methods', nargs='+', choices=METHODS, default=[*METHODS])
    parser.add_argument('--backends', nargs='+', choices=BACKENDS, default=['kernel'])
    parser.add_argument('--device', choices=['cpu', 'cuda'], default='cpu')
    parser.add_argument('--threads', type=int, default=torch.get_num_threads())
    parser.add_argument('--n_trials', type=int, default=20)
    parser.add_argument('--out', type=Path, help='write the table as JSON to this file')
    return parser.parse_args()


def run_shape(args: argparse.Namespace) -> list[dict[str, str | float]]:
    """Measure and print one shape."""
    print(
        f'\n(B, D, L) = ({args.batch}, {args.dim}, {args.seqlen}), N = {args.dstate}, '
        f'{args.dtype}, bias {args.dt_bias:g}, median (minimum) of {args.n_trials}, milliseconds'
    )
    if args.device == 'cuda':
        print(f'forward needs at least {ex2_floor_ms(args):.4f} for its exponentials')
    print(f'{"method":10} {"backend":10} {"forward":>20} {"forward+backward":>20}')
    rows = []
    for backend in args.backends:
        for method in args.methods:
            row = measure(method, backend, args)
            rows.append(row)
            times = [
                f'{row[f"{name}_ms"]:10.3f} ({row[f"{name}_min_ms"]:7.3f})'
                for name in ('forward', 'forward_backward')
            ]
            print(f'{method:10} {backend:10} {times[0]:>20} {times[1]:>20}', flush=True)
    return rows


def main() -> None:
    args = parse_args()
    facts = environment(args)
    print(', '.join(f'{name} {value}' for name, value in facts.items()))
    names = [*SHAPES] if args.shapes and 'all' in args.shapes else args.shapes or []
    shapes = [SHAPES[name] for name in names] or [(args.batch, args.dim, args.seqlen)]
    results = []
    for args.batch, args.dim, args.seqlen in shapes:
        shape = {name: getattr(args, name) for name in ('batch', 'dim', 'seqlen', 'dstate')}
        results.append({'shape': shape, 'rows': run_shape(args)})
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        settings = {'dtype': args.dtype, 'dt_bias': args.dt_bias, 'n_trials': args.n_trials}
        result = {'environment': facts, 'settings': settings, 'results': results}
        args.out.write_text(json.dumps(result, indent=2) + '\n')


if __name__ == '__main__':
    main()
